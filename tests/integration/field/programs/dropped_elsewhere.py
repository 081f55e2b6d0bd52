"""Tensors of the training thread that another thread drops, as a thread does that saves or logs them."""

import json
import queue
import threading

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logged: queue.Queue = queue.Queue()


def drop() -> None:
    while (tensor := logged.get()) is not None:
        del tensor
        logged.task_done()


logger = threading.Thread(target=drop)
logger.start()
for step in range(6):
    batch = torch.randn(64, 100)
    output = model(batch)
    loss = output.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logged.put([torch.zeros((3 + step) * 300_000), torch.zeros((2 + step) * 500_000)])
    logged.join()
logged.put(None)
logger.join()
kept = [batch, output, loss, *model.parameters(), *(p.grad for p in model.parameters())]
print(json.dumps({"alive": sum(tensor.untyped_storage().nbytes() for tensor in kept)}))
