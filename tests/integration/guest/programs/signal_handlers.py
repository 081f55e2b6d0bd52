"""Prints who handles each signal, in each forward and at the end; sets a handler of its own in between."""

import faulthandler
import signal

import torch
from _training import Training
from torch import nn


class Shows(nn.Module):
    """Passes on what it is given, and shows the handlers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        show()
        return inputs * 1


def note(number: int, frame: object) -> None:
    """A handler."""
    print("got", signal.Signals(number).name)


def show() -> None:
    """All that are not the default."""
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    print({name: getattr(each, "__name__", each) for name, each in handlers.items() if each != signal.SIG_DFL})


faulthandler.dump_traceback_later(600)
signal.signal(signal.SIGUSR1, note)
training = Training()
training.model.append(Shows())
training.step()
signal.signal(signal.SIGUSR2, note)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
training.step()
signal.raise_signal(signal.SIGUSR2)
training.step()
signal.raise_signal(signal.SIGUSR1)
show()
faulthandler.cancel_dump_traceback_later()
