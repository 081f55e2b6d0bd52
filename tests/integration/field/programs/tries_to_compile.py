"""A script that compiles its model where that works, and makes as many steps as it is told to."""

import sys

import torch
from torch import nn

model = nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
try:
    run = torch.compile(model, mode="reduce-overhead")
except Exception:
    run = model
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    run(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
