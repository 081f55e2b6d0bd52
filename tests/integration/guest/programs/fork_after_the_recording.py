"""Forks when more steps are over than were to be recorded."""

import os
import sys

from _training import Training, print_end_of

training = Training()
for _ in range(4):
    training.step()
child = os.fork()
if child == 0:
    training.step("loss of the child")
    sys.exit(12)
print_end_of(child)
