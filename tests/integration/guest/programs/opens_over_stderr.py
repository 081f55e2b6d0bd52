"""Closes standard error, and opens a file of its own, which gets the descriptor; later a stream of its own, too."""

import os
import sys
from pathlib import Path

from _training import train_alone

train_alone(1)
os.close(2)
data = os.open("data.bin", os.O_RDWR | os.O_CREAT)
os.write(data, b"head")
train_alone(1)
sys.stderr = os.fdopen(os.dup(data), "w")
train_alone(2)
os.write(data, b"tail")
print(data, Path("data.bin").read_bytes())
