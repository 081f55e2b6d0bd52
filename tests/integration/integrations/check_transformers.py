"""What is to hold of the example for transformers; run by test_trainers.py."""

import gc
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import read_back
from train_transformers import make_trainer
from transformers import Trainer, TrainerCallback

from ampmem import patching
from ampmem.integrations.transformers import AmpmemCallback
from ampmem.recording.watched_file import read_watched

ALL = ["tensorboard", "wandb", "mlflow"]


class Fails(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


def same_training() -> None:
    """Losses, random numbers and checkpoints are those without the callback, and every logger has the bytes."""
    options = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 6}
    plain = make_trainer("plain", report_to=[], **options)
    plain.train()
    random = torch.get_rng_state()

    trainer = make_trainer("same", AmpmemCallback(), report_to=ALL, **options)
    trainer.train()
    assert torch.equal(torch.get_rng_state(), random)
    assert losses(trainer) == losses(plain)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        assert Path("same/checkpoint-6", name).read_bytes() == Path("plain/checkpoint-6", name).read_bytes()

    parameters = sum(each.nbytes for each in trainer.model.parameters())
    state = sum(tensor.nbytes for each in trainer.optimizer.state.values() for tensor in each.values())
    by_mlflow, artifacts = read_back.mlflow()
    (events,) = Path("same/runs").iterdir()
    by_tensorboard = read_back.tensorboard(events)
    expected = dict.fromkeys((3, 4, 5), parameters)
    read_back.wandb_later(".", "train/global_step", "train/ampmem/peak/parameters", expected)
    for values, lead in ((by_tensorboard, "train/"), (by_mlflow, "")):
        assert values[f"{lead}ampmem/peak/parameters"] == expected
        assert values[f"{lead}ampmem/peak/optimizer_state"] == dict.fromkeys((3, 4, 5), state)
        assert values[f"{lead}ampmem/static/total"].keys() == {5}
        parts = [each for name, each in values.items() if "/peak/" in name and not name.endswith("total")]
        for step, total in values[f"{lead}ampmem/peak/total"].items():
            assert total == sum(part[step] for part in parts)
    assert "memory-step3.html" in artifacts
    summary = read_back.recorded("same/memory-step3.ampmem")
    assert [step.index for step in summary.steps] == [3, 4, 5]
    assert [step.backwards for step in summary.steps] == [2, 2, 2]


def losses(trainer: Trainer) -> list[Any]:
    """What the Trainer has logged, but for what depends on the time."""
    timed = ("runtime", "second")
    history = trainer.state.log_history
    return [{name: value for name, value in row.items() if not name.endswith(timed)} for row in history]


def every_training() -> None:
    """Each train() is recorded, a resumed one too."""
    callback = AmpmemCallback(skip=1, steps=1, page=False)
    trainer = make_trainer("again", callback, max_steps=3, save_steps=3, report_to=[])
    trainer.train()
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    assert {file.name for file in Path("again").glob("*.ampmem")} == {"memory-step2.ampmem", "memory-step5.ampmem"}


def failure() -> None:
    """What ended is kept, and nothing is left in torch."""
    fails = make_trainer("fails", AmpmemCallback(page=False), Fails(), report_to=[])
    with pytest.raises(KeyboardInterrupt):
        fails.train()
    assert [entry.name for entry in patching.in_place()] == ["train"]
    assert len(read_back.recorded("fails/memory-step3.ampmem").steps) == 2


def ways_to_give_it() -> None:
    """As a class; two; pickled; and what the Trainer writes of its state."""
    trainer = make_trainer("given", AmpmemCallback, AmpmemCallback(skip=3, page=False), max_steps=4, report_to=[])
    trainer.train()
    assert {file.name for file in Path("given").glob("memory*")} == {"memory-step3.ampmem", "memory-step3.html"}
    trainer.state.save_to_json("state.json")
    again = pickle.loads(pickle.dumps(AmpmemCallback(skip=3)))
    make_trainer("pickled", again, max_steps=4, report_to=[]).train()
    assert Path("pickled/memory-step4.html").exists()


def watched() -> None:
    """The whole training is kept, and the Trainer's loggers get each step."""
    trainer = make_trainer("watched", AmpmemCallback(watch=True), report_to=["tensorboard"])
    trainer.train()
    rows = read_watched(Path("watched/memory-watch.ampmem")).rows
    assert [row.step for row in rows] == list(range(1, trainer.state.global_step + 1))
    (events,) = Path("watched/runs").iterdir()
    values = read_back.tensorboard(events)
    assert values["train/ampmem/watch/peak"] == {row.step: row.peak for row in rows}
    assert values["train/ampmem/watch/allocated"] == {row.step: row.alive for row in rows}
    assert Path("watched/memory-watch.html").exists()


if __name__ == "__main__":
    train = Trainer.train
    runpy.run_path("train_transformers.py", run_name="__main__")
    assert Path("out/memory-step3.html").exists()
    failure()
    same_training()
    every_training()
    ways_to_give_it()
    watched()
    gc.collect()
    assert Trainer.train is train
    assert patching.in_place() == []
