"""FSDP2 in a world of one process: parameters, gradients and optimizer state are DTensors."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 16))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for _ in range(2):
    loss = model(torch.randn(8, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def local(tensors: object) -> int:
    storages = [tensor.to_local().untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
counters = sum(state["step"].untyped_storage().nbytes() for state in optimizer.state.values())
counted = {
    "parameters": local(model.parameters()),
    "gradients": local(p.grad for p in model.parameters()),
    "optimizer_state": local(states) + counters,
}
print(json.dumps(counted))
dist.destroy_process_group()
