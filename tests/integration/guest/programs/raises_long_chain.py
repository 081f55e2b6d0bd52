"""Four hundred exceptions, each while the one before was handled; only the last is shown."""

from _training import train_alone

train_alone(1)
last: Exception = ValueError("first")
for number in range(400):
    following = ValueError(f"number {number}")
    following.__context__ = last
    last = following
last.__suppress_context__ = True
raise last
