"""Closes its standard error, which ampmem speaks on too."""

from __future__ import annotations

import sys

from _training import train_alone

train_alone(1)
sys.stderr.close()
train_alone(2)
