"""``ampmem.log_to`` around a loop that is written by hand."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ampmem
from ampmem.errors import UsageError
from ampmem.integrations.loggers import PEAK


class Writer:
    """As much of a SummaryWriter as is needed."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name, step] = value


def train(steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_the_loop_is_what_it_is_without(tmp_path: Path) -> None:
    plain = train(6)
    plain_random, python_random = torch.get_rng_state(), random.getstate()
    writer = Writer()
    with ampmem.log_to(writer, folder=tmp_path, first_step=100):
        model, losses = train(6)
    assert losses == plain[1]
    assert all(map(torch.equal, model.parameters(), plain[0].parameters()))
    assert torch.equal(torch.get_rng_state(), plain_random)
    assert random.getstate() == python_random
    assert sorted({step for _, step in writer.values}) == [102, 103, 104]
    assert writer.values["ampmem/peak/parameters", 102] == sum(each.nbytes for each in model.parameters())
    assert {file.name for file in tmp_path.iterdir()} == {"memory-step102.ampmem", "memory-step102.html"}
    summary = ampmem.load(tmp_path / "memory-step102.ampmem")
    assert [step.index for step in summary.steps] == [102, 103, 104]


def test_an_exception_is_the_loops_own_and_what_ended_is_logged(tmp_path: Path) -> None:
    writer = Writer()
    with pytest.raises(ZeroDivisionError), ampmem.log_to(writer, folder=tmp_path, skip=0, steps=9, page=False):
        train(2)
        raise ZeroDivisionError
    assert [step for name, step in writer.values if name == PEAK] == [0, 1]


def test_a_loop_that_is_too_short_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ampmem.log_to(Writer(), folder=tmp_path):
        train(1)
    assert capfd.readouterr().err == (
        "ampmem: no step was recorded: the script made 1 step and skip is 2; use a smaller skip\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_the_next_its_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    writer = Writer()
    with ampmem.log_to(SimpleNamespace(add_scalar=fails), writer, folder=tmp_path, page=False):
        train(5)
    assert "OSError: disk full" in capfd.readouterr().err
    assert len({step for _, step in writer.values}) == 3


def test_no_logger_is_refused_before_the_loop(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a logger"), ampmem.log_to(3, folder=tmp_path):
        pytest.fail("the loop ran")
