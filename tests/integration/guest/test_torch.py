"""What is recorded of programs that use torch in uncommon ways, or whose objects let nobody look."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest import beside

from ampmem.analysis.analyse import analyse
from ampmem.events import Fact, Phase, Recording
from ampmem.recording import read


def recorded(folder: Path, name: str) -> Recording:
    """What is recorded of the program, which ends as without ampmem."""
    both = beside(folder, name)
    assert both.differences() == []
    return read(both.recording)


LAYERS = {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("hostile_modules", {f"body.{name}" for name in LAYERS} | {f"Sequential.{name}" for name in LAYERS}),
        ("hostile_objects", LAYERS),
        ("hostile_tensors", {f"body.{name}" for name in LAYERS} | {"weight"}),
        ("lazy_modules", {"norm.weight", "norm.bias", *(f"body.{name}" for name in LAYERS)}),
        ("scripted", LAYERS | {"Linear.weight"}),
        ("tensor_kinds", {f"body.{name}" for name in LAYERS}),
    ],
)
def test_their_parameters_have_names_and_every_byte_is_told(tmp_path: Path, name: str, parameters: set[str]) -> None:
    analysis = analyse(recorded(tmp_path, name))
    assert {parameter.name for parameter in analysis.recording.parameters} >= parameters
    assert analysis.conservation.residual_bytes == 0
    assert analysis.recording.notes == ()


def test_what_fails_when_it_is_looked_at_is_named_in_the_recording(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "hostile_optimizers")
    (note,) = recording.notes
    assert note.startswith("warning: something in the script could not be looked at, and is not in this recording: ")
    assert "ZeroDivisionError at optimizers.py" in note
    assert "hostile_optimizers.py" in note


@pytest.mark.parametrize(
    ("name", "savers"),
    [
        ("main_grad", {"Accumulating", "aten::exp"}),
        ("saved_tensors", {"aten::exp", "aten::sin", "aten::mul", "aten::addmm", "aten::tanh"}),
        ("custom_ops", {"Inner", "GeneratedBackwardFor_guest_doubled_default", "aten::tanh"}),
    ],
)
def test_what_autograd_keeps_itself_is_recorded_with_who_saved_it(tmp_path: Path, name: str, savers: set[str]) -> None:
    analysis = analyse(recorded(tmp_path, name))
    assert analysis.recording.notes == ()
    facts, texts = analysis.facts, analysis.recording.texts
    assert {texts[name] for name in facts.name[facts.fact == Fact.SAVED].tolist()} >= savers


def test_what_a_gradient_of_a_gradient_saves_is_recorded(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "double_backward"))
    saved = analysis.facts.fact == Fact.SAVED
    phases = analysis.lifetimes.phase[analysis.facts.allocation[saved]]
    assert Phase.BACKWARD in phases.tolist()


def test_what_is_swapped_is_recorded(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "swaps"))
    assert analysis.recording.notes == ()
    assert analysis.conservation.residual_bytes == 0
    assert Fact.MASTER_COPY in analysis.facts.fact.tolist()


def test_a_profiler_on_another_thread_ends_the_recording(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "profiles_on_a_thread"))
    assert len(analysis.recording.steps) == 1
    assert analysis.conservation.residual_bytes == 0
