"""Parameters that are the upper half, and the left half, of another's memory."""

import json

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(256, 64))
        self.upper = nn.Parameter(self.whole.detach()[:128])
        self.left = nn.Parameter(self.whole.detach()[:, :32])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.whole.T).sum() + (x @ self.upper.T).sum() + (x[:, :32] @ self.left.T).sum()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(8, 64)).backward()
    optimizer.step()


def distinct(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


counted = {"parameters": distinct(model.parameters()), "gradients": distinct(p.grad for p in model.parameters())}
print(json.dumps(counted))
