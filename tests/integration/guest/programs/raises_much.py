"""A message of a million characters in one line."""

from __future__ import annotations

from _training import train_alone

train_alone(1)
raise ValueError("x" * 1_000_000)
