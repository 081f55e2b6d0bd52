"""The command lines of launchers, taken apart; and what cannot be launched."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.command_line import refused

from ampmem.cli.processes.launcher import TORCHRUN, CommandLine, split
from ampmem.errors import UsageError


@pytest.mark.parametrize(
    ("given", "options", "script", "as_module", "arguments"),
    [
        ("--nproc-per-node 2 train.py --lr 1 -m x", "--nproc-per-node 2", "train.py", False, "--lr 1 -m x"),
        ("--nproc_per_node=2 -m pkg.train a", "--nproc_per_node=2", "pkg.train", True, "a"),
        ("--module --standalone pkg.train", "--standalone", "pkg.train", True, ""),
        (
            "--nnodes 2 --rdzv-endpoint host:1 -- train.py -- a",
            "--nnodes 2 --rdzv-endpoint host:1",
            "train.py",
            False,
            "-- a",
        ),
    ],
)
def test_a_command_line_of_torchruns(given: str, options: str, script: str, as_module: bool, arguments: str) -> None:
    assert split(TORCHRUN, given.split()) == CommandLine(
        options=tuple(options.split()), script=script, as_module=as_module, arguments=tuple(arguments.split())
    )


def test_any_program_cannot_be_recorded() -> None:
    with pytest.raises(UsageError, match="only Python scripts"):
        split(TORCHRUN, ["--no-python", "bash", "train.sh"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("profile --nproc-per-node 2 --device sim train.py", "--world-size"),
        ("compare --nproc-per-node 2 --device sim train.py", "--world-size"),
        ("profile --nproc-per-node 2 --html page.html train.py", "ampmem report"),
        ("profile --nproc-per-node 2 nothing.py", "script not found: nothing.py"),
        ("profile --nproc-per-node 2 -m torch.distributed.run train.py", "its own option --nproc-per-node"),
        ("profile torchrun --nproc-per-node 2 train.py", "torchrun … -m ampmem profile"),
        ("profile accelerate launch train.py", "-m accelerate.commands.launch"),
        ("compare -m torch.distributed.run --nproc-per-node 2 train.py", "compare --nproc-per-node N"),
    ],
)
def test_what_cannot_be_launched(given: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert said in refused(tmp_path, *given.split())


def test_a_rank_cannot_launch_nor_simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, said in (("--nproc-per-node 2", "already running under a launcher"), ("--device sim", "--world-size")):
        assert said in refused(tmp_path, "profile", *options.split(), "train.py")
    monkeypatch.setenv("RANK", "1")
    assert (
        refused(tmp_path, "profile", "--device", "sim", "train.py") != ""
    )  # nothing says that rank 0 is on this machine
