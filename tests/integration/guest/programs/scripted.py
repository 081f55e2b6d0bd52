"""Modules that torch.jit traced or scripted, alone and inside another."""

import gc
import warnings

import torch
from _training import small_model, train
from torch import nn

warnings.simplefilter("ignore", DeprecationWarning)
traced = torch.jit.trace(small_model(), torch.ones(4, 8))
gc.collect()  # the module that was traced is part of a cycle; while it lives, it is the first model
train(traced)
scripted = torch.jit.script(small_model())
train(scripted)
train(nn.Sequential(small_model(), torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Tanh(), torch.ones(4, 4))))
print(torch.jit.trace(small_model(), torch.ones(4, 8)).code)
model = small_model()
model(torch.ones(4, 8))  # without a backward
print(torch.jit.trace(model, torch.ones(4, 8)).code)
train(model)
