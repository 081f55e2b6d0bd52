"""Forks; the child dies of a signal."""

import os
import signal

from _training import Training, print_end_of

training = Training()
training.step()
child = os.fork()
if child == 0:
    training.step("loss of the child")
    signal.raise_signal(signal.SIGTERM)
print_end_of(child)
training.step()
training.step()
