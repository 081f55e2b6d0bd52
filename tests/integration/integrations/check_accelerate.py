"""What is to hold of the example for accelerate; run by test_trainers.py."""

import runpy
from pathlib import Path

import pytest
import torch
import train_accelerate
from accelerate import Accelerator
from support import read_back

from ampmem import patching
from ampmem.integrations.accelerate import AmpmemTracker, record
from ampmem.recording.watched_file import read_watched


def all_trackers() -> None:
    """wandb and MLflow get the bytes, and the tracker's own files are written beside."""
    accelerator = Accelerator(cpu=True, log_with=["wandb", "mlflow"], project_dir="two")
    accelerator.init_trackers("training", init_kwargs={"wandb": {"dir": "two"}})
    model = loop(accelerator, 6)
    accelerator.end_training()
    parameters = sum(each.nbytes for each in model.parameters())
    by_mlflow, artifacts = read_back.mlflow()
    assert by_mlflow["ampmem/peak/parameters"] == dict.fromkeys((2, 3, 4), parameters)
    read_back.wandb_later("two", "ampmem/step", "ampmem/peak/parameters", {2: parameters})
    assert "memory-step2.html" in artifacts


def loop(accelerator: Accelerator, steps: int, *, recorded: bool = True) -> torch.nn.Module:
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if recorded:
        with record(accelerator):
            return steps_of(accelerator, model, optimizer, steps)
    return steps_of(accelerator, model, optimizer, steps)


def steps_of(accelerator: Accelerator, model: torch.nn.Module, optimizer: object, steps: int) -> torch.nn.Module:
    for _ in range(steps):
        accelerator.backward(model(torch.randn(4, 8)).sum())
        optimizer.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]
    return model


def tracker() -> None:
    """A tracker records between the two calls that it hears of."""
    accelerator = Accelerator(cpu=True, log_with=[AmpmemTracker("tracked", skip=1, steps=2)])
    accelerator.init_trackers("training")
    loop(accelerator, 4, recorded=False)
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    summary = read_back.recorded("tracked/memory-step1.ampmem")
    assert [step.index for step in summary.steps] == [1, 2]


def watched() -> None:
    """The whole loop is kept, by ``record`` and by a tracker."""
    accelerator = Accelerator(cpu=True, log_with=[AmpmemTracker("tracked", watch=True)], project_dir="watched")
    accelerator.init_trackers("training")
    loop(accelerator, 6, recorded=False)
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, project_dir="watched")
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with record(accelerator, watch=True):
        steps_of(accelerator, model, optimizer, 7)
    for folder, steps in (("tracked", 6), ("watched", 7)):
        rows = read_watched(Path(folder, "memory-watch.ampmem")).rows
        assert [row.step for row in rows] == list(range(steps))


if __name__ == "__main__":
    runpy.run_path("train_accelerate.py", run_name="__main__")
    random = torch.get_rng_state()
    values = read_back.tensorboard(Path("out/training"))
    assert values["ampmem/peak/total"].keys() == {2, 3, 4}
    assert Path("out/memory-step2.html").exists()
    train_accelerate.record = lambda accelerator: accelerator.autocast()  # nothing that matters in full precision
    plain = train_accelerate.train("plain")
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_accelerate, "record", record)
        again = train_accelerate.train("again")
    assert all(map(torch.equal, again.parameters(), plain.parameters()))
    all_trackers()
    tracker()
    watched()
    assert patching.in_place() == []
