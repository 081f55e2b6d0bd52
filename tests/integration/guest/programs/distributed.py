"""DistributedDataParallel in one process, with gloo."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _training import small_model, train
from torch.nn.parallel import DistributedDataParallel

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
    model = DistributedDataParallel(small_model())
    train(model)
    with model.no_sync():
        train(model)
    print([name for name, _ in model.named_parameters()])
    print(torch.equal(model.module[0].weight.grad, model.module[0].weight.grad))
    dist.destroy_process_group()
