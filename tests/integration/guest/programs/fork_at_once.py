"""Forks; the child leaves by ``os._exit``, past everything."""

import os

from _training import Training, print_end_of

training = Training()
training.step()
child = os.fork()
if child == 0:
    training.step("loss of the child")
    os._exit(4)
print_end_of(child)
training.step()
training.step()
