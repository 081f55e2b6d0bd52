"""Runs ops of torch's where Python lets it: in callbacks of the garbage collector, and in ``__del__``."""

import gc
import random
import weakref

import torch
from _seen import print_left_in_torch, print_random_state
from _training import Training


class Dies:
    """In a cycle, so that the garbage collector ends it; computes as it dies."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        deaths.append(float((torch.ones(4, requires_grad=True) * 2).sum()))


def collecting(phase: str, _: dict[str, int]) -> None:
    """A callback of the garbage collector."""
    if phase == "start":
        collections.append(float(torch.full((3,), 2.0, requires_grad=True).square().sum()))


deaths: list[float] = []
collections: list[float] = []
gone: list[str] = []
random.seed(0)
training = Training()
gc.callbacks.append(collecting)
gc.set_threshold(5)
for name in ("one", "two", "three"):
    dies = Dies()
    weakref.finalize(dies, gone.append, name)
    del dies
    training.step()
gc.callbacks.remove(collecting)
gc.set_threshold(700)
gc.collect()
print(deaths, gone, set(collections), gc.isenabled(), gc.get_threshold(), gc.callbacks)
print_random_state()
print_left_in_torch(training.model)
