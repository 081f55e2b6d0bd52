"""``breakpoint()``, and commands for the debugger."""

import io
import sys

from _training import train_alone

sys.stdin = io.StringIO("p steps\nlist .\nnext\np steps\ncontinue\n")
steps = 1
breakpoint()
steps = 2
train_alone(steps)
