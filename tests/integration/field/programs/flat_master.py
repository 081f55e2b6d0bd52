"""Half weights and one flat FP32 copy of all of them, padded, as DeepSpeed and Apex keep it."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).to(torch.bfloat16)
weights = list(model.parameters())
count = sum(weight.numel() for weight in weights)
master = torch.zeros(-(-count // 16) * 16)
torch.cat([weight.detach().float().flatten() for weight in weights], out=master[:count])
optimizer = torch.optim.Adam([master], lr=1e-3, foreach=False)
for _ in range(3):
    loss = model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean()
    loss.backward()
    master.grad = torch.zeros_like(master)
    torch.cat([weight.grad.float().flatten() for weight in weights], out=master.grad[:count])
    model.zero_grad()
    optimizer.step()
    with torch.no_grad():
        for weight, new in zip(weights, master[:count].split([weight.numel() for weight in weights]), strict=True):
            weight.copy_(new.view_as(weight))
state = optimizer.state[master]
counted = {
    "parameters": 2 * count,
    "master_copies": master.nbytes,
    "gradients": master.grad.nbytes,
    "optimizer_state": sum(tensor.nbytes for tensor in state.values()),
}
print(json.dumps(counted))
