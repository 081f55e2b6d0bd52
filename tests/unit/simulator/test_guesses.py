"""What is taken for granted of numbers that nobody computed, and how it is told."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.settings import Settings  # noqa: E402
from ampmem.simulator import values  # noqa: E402
from ampmem.simulator.device import SimulatedDevice  # noqa: E402
from ampmem.simulator.extras import Extras  # noqa: E402


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Notes a guess on each of the lines; the notes that are left."""

    def note(*lines: int) -> list[str]:
        device = SimulatedDevice(find_gpu("h100"), Settings())
        guesses = values.Guesses(device)
        at = iter(lines)
        monkeypatch.setattr(values, "script_line", lambda: f"train.py:{next(at)}")
        for _ in lines:
            guesses.note("it was taken as 1.0")
        return list(device.assumptions)

    return note


def test_each_line_is_named_once_in_one_note(told: Callable[..., list[str]]) -> None:
    assert told(7, 7, 9, 7) == ["it was taken as 1.0 at train.py:7, train.py:9"]


def test_more_than_five_lines_are_counted(told: Callable[..., list[str]]) -> None:
    five = "it was taken as 1.0 at train.py:0, train.py:1, train.py:2, train.py:3, train.py:4"
    assert told(*range(5)) == [five]
    assert told(*range(6)) == [f"{five} and at 1 more line"]
    assert told(*range(8), 2) == [f"{five} and at 3 more lines"]


def test_lines_beyond_those_with_a_warning_are_counted_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(find_gpu("h100"), Settings())
    guesses = values.Guesses(device)

    def last(line: int) -> str:
        monkeypatch.setattr(values, "script_line", lambda: f"train.py:{line}")
        guesses.note_integer("it was taken as 1")
        return list(device.warnings)[-1]

    told = [last(line) for line in (*range(7), 6, 7)]
    assert all(f"train.py:{line}: it was taken as 1" in told[line] for line in range(5))
    assert told[5].startswith("warning: and 1 more line on which an integer")
    assert [text.split(" on ")[0] for text in told[6:]] == [f"warning: and {count} more lines" for count in (2, 2, 3)]
    assert len(device.warnings) == 6


def test_a_line_that_asks_for_ever_is_told_of_once(
    told: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    told(*[3] * (values.Guesses.MANY - 1))
    assert not capsys.readouterr().err
    told(*[3] * (values.Guesses.MANY * 2))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ampmem: train.py:3 has asked 10000 times so far: it was taken as 1.0.")


@pytest.mark.parametrize(
    ("dtype", "number"), [("float32", 1.0), ("bfloat16", 1.0), ("complex64", 1.0), ("int64", 1), ("bool", False)]
)
def test_a_guess_has_the_kind_of_its_tensor(dtype: str, number: Any) -> None:
    found = values.guess(getattr(torch, dtype))
    assert found == number and type(found) is type(number)


def test_what_is_assumed_of_cublas_is_told_as_a_size() -> None:
    device = SimulatedDevice(find_gpu("24GiB"), Settings())
    Extras(device)._blas(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}, torch.ones(2, 2))
    assert list(device.assumptions) == ["cuBLAS workspaces of 8.1 MiB: the GPU's architecture is not known"]
