"""A forked worker of a DataLoader inherits every hook of a session, and forgets them."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ampmem
from ampmem import patching
from ampmem.recorder import session as session_module


class Transformed(Dataset[Any]):
    """Runs a module on each item, as torchvision's transforms do; tells whether a session is there."""

    def __init__(self) -> None:
        self.transform = nn.Linear(3, 3)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        noted = session_module.active() is not None or len(patching.in_place()) > 0
        with torch.no_grad():
            self.transform(torch.ones(3))
        return torch.tensor([float(noted), float(os.getpid())])


def test_modules_that_run_in_a_worker_are_none_of_the_scripts() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    noted, workers = 0.0, set()
    with ampmem.profile(model, device="cpu"):
        for batch in DataLoader(Transformed(), num_workers=1, multiprocessing_context="fork"):
            noted += float(batch[:, 0].sum())
            workers.add(int(batch[0, 1]))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert workers and os.getpid() not in workers
    assert noted == 0
