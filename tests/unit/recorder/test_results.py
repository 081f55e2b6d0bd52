"""The losses and gradients that are kept of a script's steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampmem.patching import in_place
from ampmem.recorder.comparable import Results


def kept(path: Path) -> list[tuple[str, list[float]]]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append((str(np.load(file)), np.load(file).ravel().tolist()))
            except EOFError:
                return found


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, list[list[float]]]:
    loss = checkpoint(model, torch.ones(2, 3, requires_grad=True), use_reentrant=True).square().mean()
    loss.backward()
    gradients = [each.grad.float().ravel().tolist() for each in model.parameters() if each.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_backward_and_each_update_is_kept_until_the_end(tmp_path: Path, dtype: torch.dtype) -> None:
    before = in_place()
    model = nn.Linear(3, 2).to(dtype)
    if dtype != torch.float32:
        model.forward = lambda x: nn.functional.linear(x.to(dtype), model.weight, model.bias)  # type: ignore[method-assign]
    frozen = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [frozen, model.bias]}], lr=0.5)
    results = Results(tmp_path / "results")
    undo = results.install()
    try:
        steps = [one_step(model, optimizer) for _ in range(2)]
        results.close()
        one_step(model, optimizer)
    finally:
        undo()
    expected: list[tuple[str, list[float]]] = []
    for loss, (weight, bias) in steps:  # what checkpointing runs in backward is no loss
        expected += [("loss", [loss]), ("gradient 0 0", weight), ("gradient 1 1", bias)]
    assert [what for what, _ in kept(tmp_path / "results")] == [what for what, _ in expected]
    for (_, values), (_, wanted) in zip(kept(tmp_path / "results"), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-6)
    assert in_place() == before


def test_sparse_gradients_are_kept_whole(tmp_path: Path) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    undo = Results(tmp_path / "results").install()
    try:
        table(torch.tensor([1, 1])).sum().backward()
        optimizer.step()
    finally:
        undo()
    assert kept(tmp_path / "results")[1] == ("gradient 0 0", [0, 0, 2, 2, 0, 0, 0, 0])
