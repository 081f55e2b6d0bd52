"""``os.forkpty``: the child gets a terminal of its own, and ends by itself."""

import os
import sys

from _training import Training, print_end_of

training = Training()
training.step()
child, terminal = os.forkpty()
if child == 0:
    sys.exit(9)
print_end_of(child)
os.close(terminal)
training.step()
training.step()
