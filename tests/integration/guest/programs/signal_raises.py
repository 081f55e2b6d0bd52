"""A handler that raises, in forward, in backward and in the update; the program catches it and goes on."""

import signal
from types import FrameType

import torch
from _seen import print_left_in_torch
from _training import Training


class Timeout(Exception):
    """What the handler raises."""


def handle(number: int, frame: FrameType | None) -> None:
    """Says where it came."""
    raise Timeout(number, frame.f_code.co_name if frame is not None else "")


def send(*_: object) -> None:
    """A hook: sends the signal once."""
    if places:
        places.pop().remove()
        signal.raise_signal(signal.SIGALRM)


def attempt() -> None:
    """One step, which may be cut short."""
    try:
        training.step()
    except Timeout as timeout:
        print("timed out", timeout.args)
        training.optimizer.zero_grad()


signal.signal(signal.SIGALRM, handle)
training = Training()
model, optimizer = training.model, training.optimizer
places: list[torch.utils.hooks.RemovableHandle] = []
attempt()
for register in (model[1].register_forward_hook, model[0].weight.register_hook, optimizer.register_step_pre_hook):
    places.append(register(send))
    attempt()
attempt()
print_left_in_torch(model)
