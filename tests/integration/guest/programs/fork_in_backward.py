"""Forks while backward runs; the child goes on with it, makes another step and ends."""

import os
import sys

import torch
from _training import Training, print_end_of

training = Training()
child = -1


def fork(gradient: torch.Tensor) -> None:
    """A hook of a parameter."""
    global child
    hook.remove()
    child = os.fork()
    if child:
        print_end_of(child)


training.step()
hook = training.model[0].weight.register_hook(fork)
training.step("loss")
if child == 0:
    training.step("loss of the child")
    sys.exit(7)
training.step()
