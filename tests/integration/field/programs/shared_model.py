"""A model whose weights were moved to shared memory, in both ways that torch has."""

import json

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
net[0].share_memory()
torch.multiprocessing.set_sharing_strategy("file_system")
net[2].share_memory()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(2):
    loss = net(torch.randn(8, 300)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps({"parameters": sum(p.untyped_storage().nbytes() for p in net.parameters())}))
