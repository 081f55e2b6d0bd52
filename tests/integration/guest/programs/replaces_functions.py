"""Replaces functions of Python's that others use too, by some that fail."""

import builtins
import json
import os
import sys
import time
from typing import NoReturn

from _training import train_alone


def fails(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("not here")


train_alone(1)
say = print
os.getpid = lambda: 1
time.time = time.monotonic = lambda: 0.0
sys.exit = os.write = os.open = json.dumps = json.loads = builtins.print = builtins.open = fails  # type: ignore[assignment]
builtins.print = lambda *words, **_: say("printed", *words)
train_alone(2)
