"""The trainers of docs/trainers.md with their real packages, one process for each; nothing goes to the network."""

from pathlib import Path

import pytest
from support import hosts, read_back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("transformers", ("transformers", "accelerate", "tensorboard", "wandb", "mlflow")),
        ("lightning", ("lightning", "tensorboard", "wandb", "mlflow")),
        ("accelerate", ("accelerate", "tensorboard", "wandb", "mlflow")),
        ("loop", ("tensorboard", "wandb", "mlflow")),
    ],
)
def test_the_example_and_what_is_to_hold_of_it(tmp_path: Path, name: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        pytest.importorskip(package) if package == name else None
    ended = hosts.check(tmp_path, name)
    assert ended.returncode == 0, ended.stderr
    assert "ampmem: recorded 3 steps, " in ended.stderr
    read_back.check_wandb(tmp_path)
