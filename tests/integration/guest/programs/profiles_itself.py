"""Starts ``torch.profiler`` itself, in the middle of training."""

import os

from _seen import print_left_in_torch
from _training import Training
from torch.profiler import ProfilerActivity, profile

os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler says on stderr when it starts, at what time
training = Training()
training.step()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
    training.step()
print({event.key: event.count for event in prof.key_averages() if event.key.startswith("aten::add")})
training.step()
print_left_in_torch(training.model)
