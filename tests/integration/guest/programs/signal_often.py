"""A timer whose handler raises, in the middle of anything, while 40 steps are tried."""

import contextlib
import signal
import sys

import torch
from _seen import print_left_in_torch
from torch import nn


class Timeout(Exception):
    """What the handler raises."""


def handle(*_: object) -> None:
    """A handler."""
    raise Timeout


def step() -> None:
    """One step."""
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


sys.unraisablehook = lambda _: None  # what a callback of a weak reference raises is lost, with a message
signal.signal(signal.SIGALRM, handle)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
step()
for attempt in range(40):
    with contextlib.suppress(Timeout):
        try:
            signal.setitimer(signal.ITIMER_REAL, attempt / 20_000 + 1e-5)
            step()
            step()
        finally:  # before the region is left, or the steps may be done just before the timer is
            signal.setitimer(signal.ITIMER_REAL, 0)
    torch.set_grad_enabled(True)  # an update that ends in the wrong place leaves it off, without ampmem too
for _ in range(3):
    step()
print(signal.getsignal(signal.SIGALRM) is handle, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print_left_in_torch(model)
