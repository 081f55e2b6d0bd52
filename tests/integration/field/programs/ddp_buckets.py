"""DistributedDataParallel in one process: its buckets are float32, and alive from forward on."""

import json
import os
import socket

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 64)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
print(json.dumps({"parameters": sum(4 * p.numel() for p in model.parameters())}))
