"""Puts streams of its own in the place of standard output and error, and shows in the end what they got."""

import io
import sys

from _training import train_alone

sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
train_alone(3)
print("said", file=sys.stderr)
sys.__stdout__.write(f"{out.getvalue()!r}, {err.getvalue()!r}\n")
