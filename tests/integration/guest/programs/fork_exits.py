"""Forks in the first step; the child leaves by ``sys.exit``, past what it has registered for its end."""

import atexit
import os
import sys

from _training import Training, print_end_of

training = Training()
training.step()
child = os.fork()
if child == 0:
    atexit.register(print, "the child is at its end", flush=True)
    training.step("loss of the child")
    sys.exit(3)
print_end_of(child)
training.step()
training.step()
