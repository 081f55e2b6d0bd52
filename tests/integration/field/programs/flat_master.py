"""Half weights and one flat FP32 copy of all of them, padded, as DeepSpeed and Apex keep it.

With an argument the half weights are views of a flat buffer, and the optimizer has views of the FP32 copy.
"""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).to(torch.bfloat16)
weights = list(model.parameters())
sizes = [weight.numel() for weight in weights]
count = sum(sizes)
flat = len(sys.argv) > 1
if flat:
    half = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, half.split(sizes), strict=True):
        weight.data = part.view_as(weight)
master = torch.zeros(-(-count // 16) * 16)
torch.cat([weight.detach().float().flatten() for weight in weights], out=master[:count])
masters = list(master[:count].split(sizes)) if flat else [master]
optimizer = torch.optim.Adam(masters, lr=1e-3, foreach=False)
for _ in range(3):
    loss = model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean()
    loss.backward()
    gradient = torch.zeros_like(master)
    torch.cat([weight.grad.float().flatten() for weight in weights], out=gradient[:count])
    for each, part in zip(masters, gradient[:count].split(sizes) if flat else [gradient], strict=True):
        each.grad = part
    model.zero_grad()
    optimizer.step()
    with torch.no_grad():
        for weight, new in zip(weights, master[:count].split(sizes), strict=True):
            weight.copy_(new.view_as(weight))
counted = {
    "parameters": 2 * count,
    "master_copies": master.nbytes,
    "gradients": gradient.nbytes,
    "optimizer_state": sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values()),
}
print(json.dumps(counted))
