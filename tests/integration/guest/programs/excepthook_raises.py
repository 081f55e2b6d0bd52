"""An excepthook that raises: Python shows both."""

import sys

from _training import train_alone


def hook(*_: object) -> None:
    raise RuntimeError("in the hook")


sys.excepthook = hook
train_alone(1)
raise ValueError("mine")
