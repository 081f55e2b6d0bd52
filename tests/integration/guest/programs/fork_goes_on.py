"""Forks before the first step; the child and the parent both train, and both come to the end of the program."""

import os
import random

from _seen import print_left_in_torch, print_random_state
from _training import Training, print_end_of

training = Training()
child = os.fork()
random.seed(1 if child else 2)  # Python's own begin anew in a child
if child:
    print_end_of(child)
for _ in range(3):
    training.step("loss of the parent" if child else "loss of the child")
print_random_state()
print_left_in_torch(training.model)
