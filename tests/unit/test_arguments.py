"""What the functions of ``import ampmem`` say of arguments that cannot be meant: at once, in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampmem
from ampmem.errors import UsageError

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, or None for all, not 0"),
        ({"steps": -1}, "steps must be a whole number of at least 1, or None for all, not -1"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, or None for all, not 2.5"),
        ({"steps": "3"}, "steps must be a whole number of at least 1, or None for all, not '3'"),
        ({"steps": True}, "steps must be a whole number of at least 1, or None for all, not True"),
        ({"skip": -1}, "skip must be a whole number of at least 0, not -1"),
        ({"skip": "1"}, "skip must be a whole number of at least 0, not '1'"),
        ({"skip": None}, "skip must be a whole number of at least 0, not NoneType"),
        ({"model": OPTIMIZER}, "model must be a torch.nn.Module, not SGD"),
        ({"model": [MODEL]}, "model must be a torch.nn.Module, not list"),
        ({"optimizer": MODEL}, "optimizer must be a torch.optim.Optimizer, not Linear"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, not 3"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose from auto, cpu, cuda, sim"),
        ({"device": None}, "device must be one of auto, cpu, cuda, sim, not NoneType"),
        ({"device": "sim", "gpu": 24}, "gpu must be a string such as 'h100' or '24GiB', not 24"),
        ({"gpu": "h1000"}, "unknown GPU 'h1000'; did you mean h100, a100-80 or a100-40?"),
        ({"device": "sim", "gpu": ""}, "gpu= is empty; give one of b300, b200, "),
        (
            {"device": "cpu", "gpu": "h100"},
            "gpu= simulates a GPU, and device='cpu' records a real device: leave one of them out",
        ),
        (
            {"device": "cuda", "gpu": "h100"},
            "gpu= simulates a GPU, and device='cuda' records a real device: leave one of them out",
        ),
        ({"device": "cpu", "assume": ["nonzero=0.5"]}, "assume= is for a simulated GPU only: give device='sim' or "),
        ({"assume": ["nonzero=0.5"]}, "assume= is for a simulated GPU only: give device='sim' or gpu=, too"),
        ({"step_on": 5}, "step_on must be a string such as 'backward' or 'train.py:train_step', not 5"),
        (
            {"step_on": "train.py"},
            "step_on=train.py: give backward, optimizer, forward, or a function as FILE.py:FUNCTION or MODULE.FUNCTION",
        ),
        ({"assume": 3}, "assume must be a list of strings such as 'nonzero=0.5', not 3"),
        ({"assume": [3]}, "assume must be a list of strings such as 'nonzero=0.5', not list"),
        ({"assume": ["nonzero=2"]}, "assume=nonzero=2: give a fraction of the elements, from 0 to 1, such as "),
        ({"precision": "half"}, "unknown precision 'half'; choose from as-is, fp32, amp, amp-nocache"),
        ({"precision": "amp", "dtype": "fp8"}, "unknown dtype 'fp8'; choose from bf16, fp16"),
        (
            {"dtype": "fp16"},
            "dtype is the type that autocast casts to: give precision='amp' or 'amp-nocache', not as-is",
        ),
        ({"seed": "0"}, "seed must be a whole number, not '0'"),
        ({"output": 7}, "output must be a path, not 7"),
        ({"output": "x" * 300}, f"output cannot be the name of a file (File name too long): '{'x' * 40}'"),
        ({"output": "a\0b"}, "output cannot be the name of a file ("),
    ],
)
def test_profile_checks_its_arguments_when_it_is_called(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}") as raised:
        ampmem.profile(**given)
    assert "\n" not in str(raised.value)
    assert "--" not in str(raised.value)


def test_a_file_that_exists_is_refused_in_words_of_python(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    path.write_text("")
    with pytest.raises(UsageError) as raised:
        ampmem.profile(output=path).__enter__()
    assert str(raised.value) == (f"{path} exists already; give another name with output=, or force=True to replace it")


def step(prof: ampmem.Profile) -> None:
    MODEL(torch.ones(1, 2)).sum().backward()
    prof.step()


def test_a_profile_makes_one_recording_and_says_so(tmp_path: Path) -> None:
    prof = ampmem.profile(MODEL, OPTIMIZER, output=tmp_path / "run.ampmem")
    with pytest.raises(UsageError, match=r"^nothing has been recorded yet: train inside the with block"):
        prof.summary()
    with prof:
        step(prof)
        with pytest.raises(UsageError, match=r"^this profile is already recording: "):
            prof.__enter__()
        assert len(prof.summary().steps) == 1
    with pytest.raises(UsageError, match=r"^prof.step\(\) was called after the with block; "):
        prof.step()
    with pytest.raises(UsageError, match=r"^this profile has already recorded: call ampmem.profile\(\) again"), prof:
        raise AssertionError("not entered")
    with pytest.raises(UsageError, match=r"exists already; give another name with path=, or force=True"):
        prof.report(prof.path)
    assert len(prof.summary().steps) == 1


def test_a_profile_forces_a_precision_and_seeds_as_the_command_does() -> None:
    drawn, types = set(), set()
    for _ in range(2):
        with ampmem.profile(MODEL, precision="amp", dtype="bf16", seed=3) as prof:
            drawn.add(torch.rand(1).item())
            result = MODEL(torch.ones(1, 2))
            types.add(result.dtype)
            result.sum().backward()
            prof.step()
    arm = prof.recording().arm
    assert (arm.name, arm.dtype, types, len(drawn)) == ("amp", "bfloat16", {torch.bfloat16}, 1)


def test_a_profile_is_taken_where_a_recording_is() -> None:
    with ampmem.profile(MODEL) as prof:
        step(prof)
    recording = prof.recording()
    for given in (prof, prof.path, recording):
        peaks = [column.peak for column in ampmem.compare(given, prof).columns]
        assert peaks == [column.peak for column in ampmem.compare(recording, recording).columns]
        assert ampmem.diff(given, prof).categories_before == ampmem.diff(recording, recording).categories_after
        assert ampmem.check(given, baseline=prof, allow="1%").ok
    with pytest.raises(UsageError, match=r"^these are not ranks|one job|rank"):
        ampmem.ranks(prof, prof)


@pytest.mark.parametrize("function", [ampmem.load, ampmem.compare, ampmem.ranks])
@pytest.mark.parametrize("given", [5, None, MODEL])
def test_what_is_no_recording_is_named(function: Any, given: object) -> None:
    message = f"^give a recording, or the path of a file that holds one, not {type(given).__name__}$"
    with pytest.raises(UsageError, match=message):
        function(given)


def test_check_names_its_arguments_in_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^allow needs baseline$"):
        ampmem.check(tmp_path / "none.ampmem", allow="1%")
    with pytest.raises(UsageError, match=r"^allow: '0.01' is neither"):
        ampmem.check(tmp_path / "none.ampmem", allow="0.01")
