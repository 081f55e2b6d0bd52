"""Layers are cut from a list of all: the others, which would run on other ranks, stay on the CPU."""

import json

import torch
from torch import nn

layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
mine = nn.Sequential(*layers[:2]).to("cuda")
optimizer = torch.optim.AdamW(mine.parameters())
for _ in range(3):
    optimizer.zero_grad()
    mine(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
print(json.dumps({"parameters": 4 * 65 * 64 * 2}))
