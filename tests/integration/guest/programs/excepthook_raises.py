"""An excepthook that raises: Python shows both."""

from __future__ import annotations

import sys

from _training import train_alone


def hook(*_: object) -> None:
    raise RuntimeError("in the hook")


sys.excepthook = hook
train_alone(1)
raise ValueError("mine")
