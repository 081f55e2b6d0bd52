"""An excepthook that raises: Python shows both."""

from __future__ import annotations

import sys

from _training import train


def hook(*_: object) -> None:
    raise RuntimeError("in the hook")


sys.excepthook = hook
train(1)
raise ValueError("mine")
