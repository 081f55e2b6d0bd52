"""What is to hold of the example of a loop of one's own; run by test_trainers.py."""

from pathlib import Path

import mlflow
import torch
import train_loop
import wandb
from support import read_back

import ampmem
from ampmem import patching


def train_with(run: wandb.Run) -> torch.nn.Module:
    """The script logs to the run with steps of its own, which stay as they are."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in range(2):
        with ampmem.log_to(run, mlflow, folder="files", skip=0, steps=2, first_step=4 * part, page=part == 0):
            for step in range(4):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"loss": 1.0}, step=4 * part + step)
    return model


if __name__ == "__main__":
    model = train_loop.train("out")
    values = read_back.tensorboard(Path("out"))
    assert values["ampmem/peak/parameters"] == dict.fromkeys((2, 3, 4), sum(each.nbytes for each in model.parameters()))
    assert Path("out/memory-step2.html").exists()

    with mlflow.start_run(), wandb.init(project="training", dir=".") as run:
        parameters = sum(each.nbytes for each in train_with(run).parameters())
    by_mlflow, artifacts = read_back.mlflow()
    read_back.wandb_later(".", "_step", "ampmem/peak/parameters", {3: parameters, 7: parameters})
    assert by_mlflow["ampmem/peak/parameters"] == dict.fromkeys((0, 1, 4, 5), parameters)
    assert artifacts == ["memory-step0.html"]
    assert patching.in_place() == []
