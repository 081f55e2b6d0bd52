"""Batches that come from a worker process, in memory that it shares; with ``keep`` the script keeps them."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(48, 500), torch.randint(0, 10, (48,)))
    model = nn.Linear(500, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for batch, target in DataLoader(data, batch_size=16, num_workers=1):
        if "keep" in sys.argv:
            kept.append(batch)
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loaded = sum(tensor.untyped_storage().nbytes() for tensor in data.tensors)
    print(json.dumps({"loaded": loaded, "input": batch.nbytes, "batch": batch.nbytes + target.nbytes}))


if __name__ == "__main__":
    main()
