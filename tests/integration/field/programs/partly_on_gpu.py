"""A frozen encoder that stays on the CPU, and a head that is trained on the GPU."""

import json

import torch
from torch import nn

encoder = nn.Linear(64, 64).requires_grad_(False)
head = nn.Linear(64, 8).to("cuda")
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(3):
    features = encoder(torch.randn(4, 64)).to("cuda")
    optimizer.zero_grad()
    head(features).sum().backward()
    optimizer.step()
print(json.dumps({"parameters": 4 * 65 * 8}))
