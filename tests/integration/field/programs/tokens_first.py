"""The model's input has one dimension, all tokens of all sequences: no dimension of it is the batch."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 100))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 100, (4 * 24,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps({"tokens": 4 * 24}))
