"""Closes its standard error, which ampmem speaks on too."""

import sys

from _training import train_alone

train_alone(1)
sys.stderr.close()
train_alone(2)
