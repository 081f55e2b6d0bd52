"""What the functions of ``import ampmem`` say of arguments that cannot be meant: at once, in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_sections import Golden
from torch import nn

import ampmem
from ampmem.errors import UsageError

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


WRONG: list[dict[str, Any]] = [
    *({"steps": steps} for steps in (0, -1, 2.5, "3", True)),
    *({"skip": skip} for skip in (-1, "1", None)),
    *({"model": model} for model in (OPTIMIZER, [MODEL])),
    *({"optimizer": optimizer} for optimizer in (MODEL, 3)),
    *({"device": device} for device in ("tpu", None)),
    {"gpu": "h1000"},
    *({"device": "sim", "gpu": gpu} for gpu in (24, "")),
    *({"device": device, "gpu": "h100"} for device in ("cpu", "cuda")),
    {"device": "cpu", "assume": ["nonzero=0.5"]},
    *({"assume": assume} for assume in (["nonzero=0.5"], 3, [3], ["nonzero=2"])),
    *({"step_on": step_on} for step_on in (5, "train.py")),
    {"precision": "half"},
    {"precision": "amp", "dtype": "fp8"},
    {"dtype": "fp16"},
    {"seed": "0"},
    *({"output": output} for output in (7, "x" * 300)),
]


def test_profile_checks_its_arguments_when_it_is_called(golden: Golden) -> None:
    said = []
    for given in WRONG:
        with pytest.raises(UsageError) as raised:
            ampmem.profile(**given)
        said.append(str(raised.value))
    assert not any("\n" in message or "--" in message for message in said)
    golden("\n".join(said))
    with pytest.raises(UsageError, match=r"^output cannot be the name of a file \("):  # and why, in Python's words
        ampmem.profile(output="a\0b")


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
    precision = prof.recording().precision
    assert (precision.name, precision.dtype, types, len(drawn)) == ("amp", "bfloat16", {torch.bfloat16}, 1)


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
