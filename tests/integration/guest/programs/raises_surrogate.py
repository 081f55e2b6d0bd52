"""A message that has no UTF-8: with a lone surrogate, as the name of a file may have one."""

from _training import train_alone

train_alone(1)
raise FileNotFoundError("there is no \udcff.bin")
