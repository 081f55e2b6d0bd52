"""A parameter that wraps two tensors, as quantized weights do."""

import json

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

torch.manual_seed(0)
model = nn.Linear(64, 32)
model.weight = nn.Parameter(TwoTensor(torch.randn(32, 64), torch.randn(32, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
for _ in range(2):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def bytes_of(tensor: torch.Tensor) -> int:
    inner = (tensor.a, tensor.b) if isinstance(tensor, TwoTensor) else (tensor,)
    return sum(part.untyped_storage().nbytes() for part in inner)


counted = {
    "parameters": sum(bytes_of(p) for p in model.parameters()),
    "gradients": sum(bytes_of(p.grad) for p in model.parameters()),
    "optimizer_state": sum(bytes_of(s["momentum_buffer"]) for s in optimizer.state.values()),
}
print(json.dumps(counted))
