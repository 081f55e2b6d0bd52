"""Forks a child that forks again; each trains and ends by ``sys.exit``."""

import os
import sys

from _training import Training, print_end_of

training = Training()
training.step()
child = os.fork()
if child == 0:
    training.step("loss of the child")
    grandchild = os.fork()
    if grandchild == 0:
        training.step("loss of the grandchild")
        sys.exit(5)
    print_end_of(grandchild)
    training.step("loss of the child")
    sys.exit(6)
print_end_of(child)
training.step()
training.step()
