"""Weights that are views of one mapped file, as safetensors and torch.load(mmap=True) give them."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 10))


def bytes_of(tensors: object) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "weights.pt"
    torch.save(model().state_dict(), file)
    net = model()
    net.load_state_dict(torch.load(file, mmap=True), assign=True)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        loss = net(torch.randn(8, 300)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(json.dumps({"parameters": bytes_of(net.parameters()), "buffers": bytes_of(net.buffers())}))
