"""Batches that come from a worker process, in memory that it shares."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(48, 500), torch.randint(0, 10, (48,)))
    model = nn.Linear(500, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, target in DataLoader(data, batch_size=16, num_workers=1):
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loaded = sum(tensor.untyped_storage().nbytes() for tensor in data.tensors)
    print(json.dumps({"loaded": loaded, "batch": batch.nbytes + target.nbytes}))


if __name__ == "__main__":
    main()
