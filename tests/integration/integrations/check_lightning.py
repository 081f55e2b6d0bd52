"""What is to hold of the example for Lightning; run by test_trainers.py."""

import csv
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from support import read_back
from train_lightning import fit

from ampmem import patching
from ampmem.integrations.lightning import AmpmemCallback
from ampmem.recording.watched_file import read_watched


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("boom")


def same_training() -> None:
    """Losses, random numbers and checkpoints are those without the callback, and every logger has the bytes."""
    _, plain = fit("plain", logger=False, enable_checkpointing=True)
    random = torch.get_rng_state()
    loggers = [CSVLogger("same"), WandbLogger(save_dir="same"), MLFlowLogger()]
    trainer, model = fit("same", AmpmemCallback(), logger=loggers)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    (mine,), (theirs,) = (list(Path(name).rglob("*.ckpt")) for name in ("same", "plain"))
    mine, theirs = (torch.load(file, weights_only=False) for file in (mine, theirs))
    assert mine["callbacks"].keys() == theirs["callbacks"].keys()
    assert mine["loops"] == theirs["loops"]

    parameters = sum(each.nbytes for each in model.parameters())
    state = sum(each.nbytes for part in trainer.optimizers[0].state.values() for each in part.values())
    by_mlflow, artifacts = read_back.mlflow()
    expected = dict.fromkeys((2, 3, 4), parameters)
    assert by_mlflow["ampmem/peak/parameters"] == expected
    assert by_mlflow["ampmem/peak/optimizer_state"] == dict.fromkeys((2, 3, 4), state)
    read_back.wandb_later("same", "trainer/global_step", "ampmem/peak/parameters", expected)
    assert "memory-step2.html" in artifacts
    (folder,) = Path("same/lightning_logs").iterdir()
    summary = read_back.recorded(folder / "memory-step2.ampmem")
    assert [step.index for step in summary.steps] == [2, 3, 4]
    assert [step.backwards for step in summary.steps] == [2, 2, 2]
    logged = by_mlflow["train_loss"]
    # backward begins at the loss of a micro-batch over their number
    assert [2 * step.loss for step in summary.steps] == pytest.approx([logged[step] for step in (2, 3, 4)])


def ends() -> None:
    """A failure keeps what ended and leaves nothing; a second fit is recorded; it can be pickled."""
    with pytest.raises(RuntimeError, match="boom"):
        fit("fails", AmpmemCallback(page=False), Fails(), logger=False)
    assert patching.in_place() == []
    callback = pickle.loads(pickle.dumps(AmpmemCallback(skip=0, steps=1, page=False)))
    trainer, model = fit("again", callback, logger=False, max_steps=2)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=4))
    assert {file.name for file in Path("again").glob("*.ampmem")} == {"memory-step0.ampmem", "memory-step2.ampmem"}


def watched() -> None:
    """The whole training is kept, and the Trainer's loggers get each step; a failure is the end of the file."""
    logger = CSVLogger("watched")
    fit("watched", AmpmemCallback(watch=True), logger=logger)
    rows = read_watched(Path(logger.log_dir, "memory-watch.ampmem")).rows
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as stream:
        logged = [each for each in csv.DictReader(stream) if each["ampmem/watch/peak"]]
    values = [(int(each["step"]), float(each["ampmem/watch/peak"])) for each in logged]
    assert values == [(row.step, row.peak) for row in rows]
    assert [row.step for row in rows] == list(range(len(rows)))
    assert Path(logger.log_dir, "memory-watch.html").exists()
    with pytest.raises(RuntimeError, match="boom"):
        fit("watched-fails", AmpmemCallback(watch=True, page=False), Fails(), logger=False)
    ending = read_watched(Path("watched-fails/memory-watch.ampmem")).ending
    assert ending is not None and ending.failure is not None and ending.failure.line == "RuntimeError: boom"


if __name__ == "__main__":
    runpy.run_path("train_lightning.py", run_name="__main__")
    (folder,) = Path("out/lightning_logs").iterdir()
    values = read_back.tensorboard(folder)
    assert values["ampmem/peak/total"].keys() == {2, 3, 4}
    assert values["train_loss"].keys() >= {2, 3, 4}
    assert (folder / "memory-step2.html").exists()
    same_training()
    ends()
    watched()
    assert patching.in_place() == []
