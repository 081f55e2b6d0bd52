"""Closes its standard error, which ampmem speaks on too."""

from __future__ import annotations

import sys

from _training import train

train(1)
sys.stderr.close()
train(2)
