"""Forks while a module runs; the child comes back from forward, goes through backward and ends."""

import os
import sys

import torch
from _seen import print_left_in_torch
from _training import Training, print_end_of
from torch import nn


class Forks(nn.Module):
    """Passes on what it is given; forks when it runs for the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.child = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == 2:
            self.child = os.fork()
            if self.child:
                print_end_of(self.child)
        return inputs * 2


training = Training()
forks = Forks()
training.model.insert(1, forks)
training.step()
training.step("loss")
if forks.child == 0:
    print_left_in_torch(training.model)
    training.step("loss of the child")
    sys.exit(0)
training.step()
