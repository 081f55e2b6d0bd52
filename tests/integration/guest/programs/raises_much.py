"""A message of a million characters in one line."""

from _training import train_alone

train_alone(1)
raise ValueError("x" * 1_000_000)
