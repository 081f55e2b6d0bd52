"""An LSTM language model: the masks and other bytes that autograd keeps for it, counted in the first step."""

import json

import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 32), nn.LSTM(32, 48, num_layers=2)
        self.head = nn.Linear(48, 50)

    def forward(self, words):
        padded = (words == 0).unsqueeze(-1)
        return self.head(self.lstm(self.embed(words))[0]).masked_fill(padded, 0.0)


torch.manual_seed(0)
model = Words()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = {}


def keep(tensor):
    kept[tensor.untyped_storage().data_ptr()] = (tensor.dtype, tensor.untyped_storage().nbytes())
    return tensor


for step in range(3):
    words = torch.randint(50, (20, 4))
    optimizer.zero_grad()
    if step:
        out = model(words)
    else:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(words)
    out.square().mean().backward()
    optimizer.step()

types = (torch.uint8, torch.bool)
print(json.dumps({str(type): sum(size for kind, size in kept.values() if kind == type) for type in types}))
