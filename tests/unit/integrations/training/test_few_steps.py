"""A few steps of a training that others run: when they are recorded, what is said, and that nothing ends it."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import ampmem
from ampmem import patching
from ampmem.analysis.summary import summarize
from ampmem.errors import UsageError
from ampmem.integrations import training as few_steps
from ampmem.integrations.loggers import PEAK, LoggedRow
from ampmem.integrations.training import FewSteps, wanted_of

Rows = Sequence[LoggedRow]

WANTED = wanted_of(skip=2, steps=2, page=False)


class Host:
    """A trainer that accumulates over two micro-batches and says what callbacks are told."""

    def __init__(self, few: FewSteps, *, updates: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.few, self.updates = few, updates
        self.recorded_in: list[int] = []

    def step(self, *, fails: bool = False) -> None:
        self.few.step_begins(self.updates, self.updates + 1)
        if self.few.recording:
            self.recorded_in.append(self.updates + 1)
        self.update(fails=fails)
        self.few.step_ends(self.updates, self.updates)

    def update(self, *, fails: bool = False) -> None:
        for _ in range(2):
            self.model(torch.randn(4, 8)).sum().backward()
        if fails:
            raise KeyboardInterrupt
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1

    def train(self, folder: Path, steps: int) -> None:
        self.few.training_begins(folder, self.updates)
        for _ in range(steps):
            self.step()
        self.few.training_ends()


def test_steps_after_the_warm_up_are_recorded_under_the_hosts_numbers(tmp_path: Path) -> None:
    before, found = patching.in_place(), list[Rows]()
    host = Host(FewSteps(WANTED, found.append, pytest.fail), updates=10)
    host.few.training_begins(tmp_path, 10)
    for _ in range(4):
        host.step()
    assert patching.in_place() == before  # nothing is left although the training goes on
    host.step()
    host.few.training_ends()
    (rows,) = found
    summary = summarize(ampmem.load(tmp_path / "memory-step13.ampmem"))
    assert host.recorded_in == [13, 14]
    assert [row.step for row in rows] == [13, 14]
    assert [step.index for step in summary.steps] == [13, 14]
    assert [step.backwards for step in summary.steps] == [2, 2]
    elements = sum(each.numel() for each in host.model.parameters())
    state = [tensor for each in host.optimizer.state.values() for tensor in each.values()]
    for row in rows:
        assert row.values["ampmem/peak/parameters"] == 4 * elements
        assert row.values["ampmem/peak/optimizer_state"] == sum(each.nbytes for each in state)
        assert row.values[PEAK] == sum(value for name, value in row.values.items() if "/peak/" in name and name != PEAK)


def test_a_step_of_several_updates_is_one_that_passes_too(tmp_path: Path) -> None:
    few = FewSteps(WANTED, lambda _: None, pytest.fail)
    few.training_begins(tmp_path, 10)
    recording = []
    for updates in (10, 12, 14, 16):
        few.step_begins(updates, updates)
        recording.append(few.recording)
        few.step_ends(updates + 2, updates)
    assert recording == [False, False, True, True]
    assert not few.recording


def test_where_the_host_counts_otherwise_the_line_says_which_step_is_which(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(FewSteps(wanted_of(skip=0, steps=2, page=False), lambda _: None, pytest.fail))
    host.few.training_begins(tmp_path, 0)
    for number in (4, 6):
        host.few.step_begins(host.updates, number)
        host.update()
        host.few.step_ends(host.updates, number)
    assert capfd.readouterr().err.endswith("; its steps 4, 5 are steps 4, 6 of the training\n")


def test_each_training_is_recorded(tmp_path: Path) -> None:
    found: list[Rows] = []
    host = Host(FewSteps(WANTED, found.append, pytest.fail))
    host.train(tmp_path, 4)
    host.train(tmp_path, 5)
    assert [[row.step for row in rows] for rows in found] == [[3, 4], [7, 8]]
    assert {file.name for file in tmp_path.iterdir()} == {"memory-step3.ampmem", "memory-step7.ampmem"}


@pytest.mark.parametrize(("steps", "made"), [(1, "1 step"), (2, "2 steps")])
def test_a_training_shorter_than_the_warm_up_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int, made: str
) -> None:
    Host(FewSteps(WANTED, pytest.fail, pytest.fail)).train(tmp_path, steps)
    said = f"ampmem: nothing was recorded: the training ended after {made}, and skip=2 skips the first 2\n"
    assert capfd.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


def test_fewer_steps_than_asked_for_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found: list[Rows] = []
    Host(FewSteps(WANTED, found.append, pytest.fail)).train(tmp_path, 3)
    assert "ampmem: recorded 1 step of 2, " in capfd.readouterr().err
    assert [row.step for row in found[0]] == [3]


def test_what_ended_is_kept_when_the_training_fails(tmp_path: Path) -> None:
    before, found = patching.in_place(), list[Rows]()
    host = Host(FewSteps(wanted_of(skip=1, steps=5, page=False), found.append, pytest.fail))
    host.few.training_begins(tmp_path, 0)
    for _ in range(3):
        host.step()
    with pytest.raises(KeyboardInterrupt) as caught:
        host.step(fails=True)
    host.few.training_ends(caught.value)
    host.few.training_ends()
    assert [row.step for row in found[0]] == [2, 3]
    assert patching.in_place() == before


def test_a_training_that_is_recorded_already_is_not_recorded_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(FewSteps(WANTED, pytest.fail, pytest.fail))
    with ampmem.profile(output=tmp_path / "outer.ampmem") as outer:
        host.train(tmp_path, 5)
    said = "ampmem: this process is already being recorded, so these steps are not recorded again\n"
    assert capfd.readouterr().err == said
    assert len(outer.summary().steps) == 5


@pytest.mark.parametrize("error", [RuntimeError("boom"), UsageError("boom")])
def test_what_fails_of_ours_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    before = patching.in_place()
    monkeypatch.setattr(few_steps, "rank_file", fails)
    monkeypatch.setattr(few_steps, "summarize", fails)
    host = Host(FewSteps(WANTED, pytest.fail, pytest.fail))
    host.train(tmp_path, 6)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ampmem: ")
    assert line.endswith("boom")
    assert host.updates == 6
    assert patching.in_place() == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    host = Host(FewSteps(WANTED, pytest.fail, pytest.fail))
    host.train(tmp_path / "file" / "folder", 4)
    assert capfd.readouterr().err.startswith(
        "ampmem: this failed, and the training continues without it: NotADirectory"
    )


def test_a_rank_writes_its_own_file_and_only_the_first_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, told in ((1, 0), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        found: list[Rows] = []
        pages: list[Path] = []
        Host(FewSteps(wanted_of(skip=2, steps=1), found.append, pages.append)).train(tmp_path, 4)
        assert len(found) == len(pages) == told
        assert ("recorded" in capfd.readouterr().err) == bool(told)
    files = sorted(tmp_path.glob("memory-step3.rank*"))
    assert [file.name for file in files] == ["memory-step3.rank0-of-2.ampmem", "memory-step3.rank1-of-2.ampmem"]
    assert len(ampmem.ranks(*files).ranks) == 2
    assert {file.name for file in tmp_path.iterdir()} - {file.name for file in files} == {"memory-step3.html"}


@pytest.mark.parametrize(("skip", "steps"), [(-1, 3), (0, 0)])
def test_what_makes_no_sense_is_refused(skip: int, steps: int) -> None:
    with pytest.raises(UsageError, match=r"^s(kip|teps) must be a whole number of at least [01], not (-1|0)$"):
        wanted_of(skip=skip, steps=steps)


def test_wrong_arguments_are_refused_before_the_training() -> None:
    with pytest.raises(UsageError, match="steps must be a whole number of at least 1, not '3'"):
        wanted_of(steps="3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown device 'gpu'; choose from auto, "):
        wanted_of(device="gpu")


def test_options_of_the_command_line_are_told_as_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    few_steps.say("torch sees none; record on the CPU with --device cpu (device='cpu' in Python), and --skip less")
    said = "ampmem: torch sees none; record on the CPU with device='cpu', and skip less\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("host", "install"),
    [("accelerate", "accelerate"), ("lightning", "lightning"), ("transformers", "transformers accelerate")],
)
def test_a_host_that_is_missing_is_named_with_what_installs_it(
    host: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"ampmem.integrations.{host}", raising=False)
    for name in (host, f"{host}.tracking", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as raised:
        import_module(f"ampmem.integrations.{host}")
    assert str(raised.value) == f"the package {host} is not installed: pip install {install}"
