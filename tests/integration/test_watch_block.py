"""``with ampmem.watch()``, and trainers' ``watch=True``: what is told of each step, and nothing that is left behind."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measure import gradients, parameters, state
from torch import nn

import ampmem
from ampmem.errors import UsageError
from ampmem.integrations.training import FewStepsCallback
from ampmem.patching import in_place
from ampmem.recorder.process import active
from ampmem.recorder.sources.cpu import FLAG
from ampmem.recorder.sources.torch_flags import torch_flag
from ampmem.recording.watched import Why
from ampmem.recording.watched_file import read_watched

Step = Callable[[], None]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    import ctypes

    random = torch.get_rng_state()
    yield
    assert in_place() == [] and active() is None
    flag = torch_flag(FLAG, ctypes.c_bool)
    assert flag is None or not flag.value
    assert random.shape == torch.get_rng_state().shape


def parts(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.randn(16, width)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def test_what_is_allocated_at_the_end_of_a_step_is_what_the_tensors_have(tmp_path: Path) -> None:
    gc.collect()
    model, optimizer, step = parts()
    step()
    with ampmem.watch(output=tmp_path / "run.ampmem", device="cpu") as watch:
        for _ in range(6):
            step()
        first = read_watched(watch.path).rows
        kept = [torch.zeros(1000) for _ in range(3)]
        for _ in range(4):
            step()
    rows = read_watched(watch.path).rows
    assert rows[:6] == first
    assert {row.alive - first[0].alive for row in rows[6:]} == {sum(each.nbytes for each in kept)}
    own = parameters(model) + gradients(model) + state(optimizer)
    assert first[0].alive >= own
    batch = 16 * 64 * 4
    assert all(row.peak >= row.alive for row in rows)
    # The step's own batch is there in forward, and gone after it.
    assert {row.peak - row.alive >= batch for row in rows} == {True}


def test_an_update_that_is_made_of_several_backwards_is_one_step(tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    with ampmem.watch(output=tmp_path / "run.ampmem", device="cpu") as watch:
        for _ in range(5):
            for _ in range(3):
                model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
    assert watch.summary().steps == 5


def test_steps_that_the_block_names(tmp_path: Path) -> None:
    """Updates end steps until the first call: two in the first round."""
    _, _, step = parts()
    with ampmem.watch(output=tmp_path / "run.ampmem", device="cpu") as watch:
        for _ in range(5):
            step()
            step()
            watch.step()
    found = watch.summary()
    assert found.steps == 2 + 5
    assert found.full[0].first == 0 and found.full[0].last == 2
    with pytest.raises(UsageError, match="after the with block"):
        watch.step()


def test_inference_has_steps_where_it_is_said(tmp_path: Path) -> None:
    model, _, _ = parts()
    with ampmem.watch(output=tmp_path / "run.ampmem", device="cpu", step_on="forward") as watch, torch.no_grad():
        for _ in range(7):
            model(torch.randn(4, 64))
    rows = read_watched(watch.path).rows
    assert ([row.step for row in rows], {row.phase for row in rows}) == (list(range(7)), {"evaluation"})


def test_on_a_simulated_gpu(tmp_path: Path) -> None:
    with ampmem.watch(output=tmp_path / "run.ampmem", gpu="h100") as watch:
        model = nn.Linear(1000, 1000, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        peaks = []
        for rows in (10, 1000, 10, 20):
            model(torch.randn(rows, 1000, device="cuda")).sum().backward()
            optimizer.step()
            peaks.append(torch.cuda.max_memory_allocated())
    found = [row.peak for row in read_watched(watch.path).rows]
    assert found[:2] == peaks[:2]
    assert found[2] < found[1] and peaks[1:] == [peaks[1]] * 3, "the script's own peak is never reset"


def test_an_error_in_the_block_is_the_end(tmp_path: Path) -> None:
    _, _, step = parts()
    with (
        pytest.raises(ValueError, match="bad"),
        ampmem.watch(output=tmp_path / "run.ampmem", device="cpu") as watch,
    ):
        step()
        raise ValueError("bad")
    ending = watch.summary().ending
    assert ending is not None and ending.failure is not None and ending.failure.line == "ValueError: bad"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"every": 3}, "every must be a whole number of at least 10"),
        ({"every": "often"}, "every must be a whole number"),
        ({"keep": 0}, "keep must be a whole number from 1 to 100"),
        ({"keep": 101}, "keep must be a whole number from 1 to 100"),
        ({"device": "tpu"}, "unknown device"),
        ({"step_on": "sometimes"}, "step_on="),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ampmem.watch(**arguments)


def test_one_at_a_time(tmp_path: Path) -> None:
    with ampmem.watch(output=tmp_path / "a.ampmem", device="cpu"):
        with pytest.raises(UsageError), ampmem.watch(output=tmp_path / "b.ampmem", device="cpu"):
            pass
        with pytest.raises(UsageError), ampmem.profile(output=tmp_path / "c.ampmem", device="cpu"):
            pass
    with ampmem.profile(device="cpu"), pytest.raises(UsageError), ampmem.watch(output=tmp_path / "d.ampmem"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ampmem"]


def test_a_script_that_records_by_itself_goes_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A profiler of the script's ends the full recording, and the rows go on."""
    _, _, step = parts()
    with ampmem.watch(output=tmp_path / "run.ampmem", device="cpu", every=10) as watch:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            for _ in range(15):
                step()
        for _ in range(15):
            step()
    run = read_watched(watch.path)
    assert len(run.rows) == 30
    assert [each.first for each in run.full if each.why is Why.EVERY] == [20]
    assert "no steps are recorded in full from step 10 on" in capfd.readouterr().err


class Logger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))


def test_a_loops_logger_gets_each_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger, (_, _, step) = Logger(), parts()
    with ampmem.log_to(logger, folder=tmp_path, watch=True, device="cpu", first_step=7):
        for _ in range(4):
            step()
    rows = read_watched(tmp_path / "memory-watch.ampmem").rows
    assert [number for number, _ in logger.rows] == [7, 8, 9, 10] == [row.step for row in rows]
    for (_, values), row in zip(logger.rows, rows, strict=True):
        assert values == {
            "ampmem/watch/peak": row.peak,
            "ampmem/watch/allocated": row.alive,
            "ampmem/watch/host": row.host,
        }
    assert "watched 4 steps" in capfd.readouterr().err
    assert (tmp_path / "memory-watch.html").exists()


class Callback(FewStepsCallback):
    """A host's callback, with what it was given."""

    def _start_over(self) -> None:
        super()._start_over()
        self.logged: list[int] = []
        self.pages: list[Path] = []

    def _log_to_host(self, rows: Any) -> None:
        self.logged += [row.step for row in rows]

    def _keep_with_host(self, page: Path) -> None:
        self.pages.append(page)


def test_a_trainers_callback_watches_the_whole_training(tmp_path: Path) -> None:
    callback, (_, _, step) = Callback(watch=True, device="cpu", every=10), parts()
    callback.few_steps.training_begins(tmp_path, 0)
    for number in range(1, 31):
        callback.few_steps.step_begins(number - 1, number)
        step()
        callback.few_steps.step_ends(number, number)
    callback.few_steps.training_ends()
    run = read_watched(tmp_path / "memory-watch.ampmem")
    assert [row.step for row in run.rows] == list(range(1, 31)) == callback.logged
    assert callback.pages == [tmp_path / "memory-watch.html"]
    assert {each.why for each in run.full} == {Why.START, Why.EVERY}


def test_a_logger_that_fails_does_not_end_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(Logger):
        def log_metrics(self, values: dict[str, float], step: int) -> None:
            raise OSError("no route to host")

    _, _, step = parts()
    with ampmem.log_to(Broken(), folder=tmp_path, watch=True, page=False, device="cpu"):
        for _ in range(3):
            step()
    assert len(read_watched(tmp_path / "memory-watch.ampmem").rows) == 3
    assert capfd.readouterr().err.count("no route to host") == 1, "told once, and not at each step"
