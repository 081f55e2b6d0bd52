"""emulation.py and run.py, where no environment is there: these run everywhere."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import steps  # noqa: E402


def said(*arguments: str, folder: Path) -> tuple[int, str]:
    variables = {"AMPMEM_EMULATED": str(folder), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-IS", *arguments], env=variables, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_without_an_environment_run_says_how_to_make_it(tmp_path: Path) -> None:
    code, text = said(str(HERE / "run.py"), "--torch", "2.14.1", folder=tmp_path)
    assert code == 1
    assert text == (
        f"{tmp_path}/torch-2.14.1 is not there; python tests/emulated/emulation.py --torch 2.14.1 --install makes it\n"
    )


def test_without_a_cuda_build_of_torch_build_says_so(tmp_path: Path) -> None:
    code, text = said(str(HERE / "emulation.py"), str(tmp_path), folder=tmp_path)
    assert code == 1
    assert text.startswith(f"{tmp_path} has no CUDA build of torch; --install makes it")


def test_what_cannot_be_installed_is_to_be_skipped(tmp_path: Path) -> None:
    """``.ci/run emulated`` passes then."""
    code, text = said(str(HERE / "emulation.py"), "--install", folder=tmp_path)
    assert (code, text) == (77, "skipped: PyTorch's CUDA build without a GPU: not installed: gcc, nm\n")


def test_the_report_needs_a_torch(tmp_path: Path) -> None:
    code, text = said(str(HERE / "all.py"), "--only", "recorder", folder=tmp_path)
    assert (code, text) == (1, "no torch is installed: python tests/emulated/emulation.py --install\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--set", "LATE"), "--set needs NAME=VALUE, not 'LATE'"), (("--torch",), "--torch needs a value")],
)
def test_what_cannot_be_asked_for_is_said(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, text = said(str(HERE / "run.py"), *arguments, folder=tmp_path)
    assert code == 1
    assert text.startswith(message)


def side(allocated: int, reserved: int, **categories: int) -> steps.Side:
    alive = [((name, "op", size), 1) for name, size in categories.items()]
    return steps.Side(allocated=allocated, reserved=reserved, categories=categories, alive=alive, sizes=[], ops=[])


def test_the_table_of_steps_says_what_differs_between_its_marks() -> None:
    same = steps.Row(program="gpt", precision="fp32", real=side(1024, 2048, other=1024), simulated=side(1024, 2048))
    more = steps.Row(
        program="gpt", precision="amp", real=side(512, 4 << 20, other=512), simulated=side(1024, 2 << 20, other=1024)
    )
    assert [steps.cell(row) for row in (same, more)] == ["equal", "+512 (other); reserved -2 MiB"]
    made = steps.short([same, more], "2.14.1", "h100")
    assert "equal to the byte in 1 of 2 runs, what is reserved in 1." in made
    assert made.endswith("| gpt | 0.0 | equal | +512 (other); reserved -2 MiB |  |  |")
    document = steps.DOCUMENT.read_text(encoding="utf-8")
    again = steps.written(document, made)
    assert made in again
    assert steps.written(again, made) == again
    with pytest.raises(ValueError, match="has no"):
        steps.written("", made)


def test_the_report_reads_what_steps_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("all")
    written = json.loads((HERE.parents[1] / "reports/steps.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(report, "script", lambda name, *arguments: written)
    found = report.steps(written["torch"])
    assert found["gpu"] == written["gpu"] and len(found["rows"]) == len(written["rows"]) == 56
    row = {"program": "p", "precision": "amp", "failed": "", "allocated": [2000, 2010]}
    assert report._step(row) == ("p", "amp", "2,000", "2,010", "+10 (+0.50 %)")
    assert report._step(row | {"allocated": [2000, 2000]})[-1] == "equal"
    assert report._step(row | {"failed": "out of memory"}) == ("p", "amp", "", "", "out of memory")
