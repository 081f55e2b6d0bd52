"""A graph network: sparse features and adjacency in FP32 that it is called with, and a sparse buffer."""

import json

import torch
from torch import nn

NODES, WIDTH = 300, 40


def bytes_of(tensor):
    """Of the tensors that a sparse one consists of."""
    if tensor.layout == torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
    else:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


class Graph(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first, self.last = nn.Parameter(torch.randn(WIDTH, 16)), nn.Parameter(torch.randn(16, 7))

    def forward(self, features, neighbours):
        hidden = torch.spmm(neighbours, torch.mm(features, self.first)).relu()
        return torch.mm(self.adjacency, hidden @ self.last)


torch.manual_seed(0)
features = (torch.rand(NODES, WIDTH) > 0.8).float().to_sparse()
neighbours = (torch.rand(NODES, NODES) > 0.98).float().to_sparse()
model = Graph((torch.rand(NODES, NODES) > 0.98).float().to_sparse_csr())
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(features, neighbours).square().mean().backward()
    optimizer.step()
print(json.dumps({"inputs": bytes_of(features) + bytes_of(neighbours), "buffers": bytes_of(model.adjacency)}))
