"""An LSTM on the CPU: what the library keeps for backward are bytes of its own form, smaller in bfloat16."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.LSTM(64, 64, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = torch.randn(35, 20, 64)
    optimizer.zero_grad()
    model(batch)[0].float().square().mean().backward()
    optimizer.step()

kept: dict[int, int] = {}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.uint8:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
    output = model(batch)
print(json.dumps({"workspaces": sum(kept.values())}))
