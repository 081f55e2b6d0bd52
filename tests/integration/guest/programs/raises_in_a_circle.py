"""Two exceptions, each the cause of the other."""

from _training import train_alone

train_alone(1)
first, second = ValueError("first"), KeyError("second")
first.__cause__, second.__cause__ = second, first
raise first
