"""A model whose size is read from labels drawn on the GPU; its batches are cut to the length of the longest text."""

import json

import torch
from torch import nn

CLASSES, LONGEST = 1000, 48

labels = torch.randint(CLASSES, (4000,), device="cuda")
lengths = torch.randint(LONGEST, LONGEST + 1, (64,), device="cuda")
classes = labels.max().item() + 1
model = nn.Sequential(nn.Embedding(100, 64), nn.Flatten(0, 1), nn.Linear(64, classes)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    tokens = torch.zeros(64, 512, dtype=torch.int64).to("cuda")[:, : int(lengths.max())]
    out = model(tokens)
    optimizer.zero_grad()
    out.float().mean().backward()
    optimizer.step()
    right = (out.argmax(1) == 0).sum().item()
print(json.dumps({"classes": classes, "parameters": 4 * (100 * 64 + 65 * CLASSES), "outputs": 64 * LONGEST}))
