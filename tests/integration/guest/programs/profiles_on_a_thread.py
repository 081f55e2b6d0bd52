"""Another thread starts and stops ``torch.profiler`` beside the one that trains, again and again."""

import os
import threading

from _seen import print_left_in_torch
from _training import PATIENCE_S, Training
from torch import ones
from torch.profiler import ProfilerActivity, profile

os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # kineto says there which threads it is called on
training = Training()
started, trained = threading.Event(), threading.Event()


def profile_beside(waits: bool) -> None:
    """Print what was profiled; ``waits`` for a step that the other thread makes meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        ones(3).add(1)
        started.set()
        if waits:
            trained.wait(PATIENCE_S)
    print({event.key: event.count for event in prof.key_averages() if event.key.startswith("aten::add")}, flush=True)


training.step()
for waits in (False, True, False):
    started.clear()
    thread = threading.Thread(target=profile_beside, args=(waits,))
    thread.start()
    started.wait(PATIENCE_S)
    if waits:
        training.step("beside")
        trained.set()
    thread.join(PATIENCE_S)
    training.step()
with profile(activities=[ProfilerActivity.CPU]) as prof:
    ones(3).add(1)
print({event.key: event.count for event in prof.key_averages() if event.key.startswith("aten::add")})
print_left_in_torch(training.model)
