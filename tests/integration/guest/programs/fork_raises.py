"""Forks; the child ends by an exception that nobody catches."""

import os
import sys

from _training import Training, print_end_of

training = Training()
training.step()
child = os.fork()
if child == 0:
    sys.tracebacklimit = 0  # its frames depend on how this program was started
    raise ValueError("of the child")
print_end_of(child)
training.step()
training.step()
