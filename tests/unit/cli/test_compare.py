"""``ampmem compare`` without a run: the names of its recordings, and what is said meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.build import AMP, small_run, write
from support.command_line import ampmem_here

from ampmem.cli.processes.children import ChildEnd
from ampmem.cli.processes.messages import StepEnded
from ampmem.units import format_bytes

FAILED = ChildEnd(code=3, said=None, tail=("its last line",))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script; what ``ampmem compare`` starts there only writes a recording, or fails for ``amp``."""

    def run(arguments: Sequence[str], on_step: Callable[[StepEnded], None], **_: object) -> ChildEnd:
        path, precision = Path(arguments[arguments.index("-o") + 1]), arguments[arguments.index("--precision") + 1]
        if path.exists():  # it was claimed, for this run to replace
            assert path.read_bytes() == b"" and "--force" in arguments
        if precision == "amp":
            return FAILED
        path.unlink(missing_ok=True)
        write(path, replace(small_run().recording(), precision=replace(AMP, name=precision)))
        on_step(StepEnded(done=1, wanted=1))
        return ChildEnd(code=0, said=None, tail=())

    monkeypatch.setattr("ampmem.cli.compare.run_child", run)
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    return tmp_path


def compare(folder: Path, *options: str) -> tuple[int, list[str]]:
    code, _, said = ampmem_here(folder, "compare", "--no-times", *options, "train.py")
    first, *lines = said.splitlines()
    assert first.startswith("ampmem: the runs leave your files as they are: what the script writes is gone")
    return code, lines


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"train.py"}


def test_one_number_for_all_recordings_of_a_comparison(here: Path) -> None:
    first = {"train.as-is.ampmem", "train.fp32.ampmem"}
    assert compare(here, "--precision", "as-is,fp32")[0] == 0
    assert names(here) == first
    (here / "train.2.amp-nocache.ampmem").write_text("of another day")
    code, said = compare(here, "--precision", "fp32,amp-nocache")
    second = {"train.3.fp32.ampmem", "train.3.amp-nocache.ampmem"}
    assert names(here) == first | second | {"train.2.amp-nocache.ampmem"}
    assert code == 0
    taken = "train.fp32.ampmem exists already (--force replaces it)"
    assert said[0] == f"ampmem: recording to train.3.fp32.ampmem, train.3.amp-nocache.ampmem; {taken}"
    size = format_bytes((here / "train.3.fp32.ampmem").stat().st_size)
    assert said[1].startswith("1 of 2: fp32: 2 steps, peak ") and f", in train.3.fp32.ampmem, {size}" in said[1]
    assert said[2].startswith("2 of 2: amp-nocache: 2 steps, peak ")
    assert len(said) == 3


def test_a_run_that_fails_leaves_no_empty_recording(here: Path) -> None:
    code, said = compare(here, "--precision", "amp,fp32")
    assert code == 1
    assert said[:2] == ["1 of 2: amp: failed: exit code 3", "    its last line"]
    assert names(here) == {"train.fp32.ampmem"}


def test_an_interrupted_comparison_leaves_no_empty_recording(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> ChildEnd:
        assert names(here) == {"train.fp32.ampmem", "train.amp.ampmem"}
        raise KeyboardInterrupt

    monkeypatch.setattr("ampmem.cli.compare.run_child", interrupted)
    code, said = compare(here, "--precision", "fp32,amp")
    assert (code, said) == (130, ["ampmem: recordings that exist: none", "ampmem: interrupted"])
    assert names(here) == set()


@pytest.mark.parametrize(
    ("command", "code", "last", "hint"),
    [
        (
            "compare --no-times train.py --precision fp32",
            2,
            "train.py: error: unrecognized arguments: --precision fp32",
            "--precision",
        ),
        ("fit train.py --vary -b=1:8 --points=0", 2, "Error: No such option: --points=0", "--points"),
        ("compare --no-times train.py --seed x", 2, "train.py: error: argument --seed: invalid int value: 'x'", None),
        ("compare --no-times train.py --precision 1 --x", 2, "train.py: error: unrecognized arguments: --x", None),
        ("compare --no-times train.py --precision fp32", 1, "ValueError: --precision it is", None),
    ],
)
def test_an_option_of_ampmems_among_the_scripts_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int, last: str, hint: str | None
) -> None:
    ended = ChildEnd(code=code, said=None, tail=("usage: train.py [--seed SEED]", last))
    monkeypatch.setattr(f"ampmem.cli.{command.partition(' ')[0]}.run_child", lambda *_, **__: ended)
    _, _, said = ampmem_here(here, *command.split())
    first = next(line for line in said.splitlines() if "failed" in line)
    assert f"failed: exit code {code}" in first
    end = f"exit code 2; {hint} is an option of ampmem: write it before train.py"
    assert first.partition(", about")[0].endswith(end) if hint else "an option" not in said


def test_force_takes_the_first_names(here: Path) -> None:
    for name in ("train.fp32.ampmem", "train.amp.ampmem", "train.2.fp32.ampmem"):
        (here / name).write_text("of another day")
    assert compare(here, "--precision", "fp32,amp", "--force")[0] == 1
    assert names(here) == {"train.fp32.ampmem", "train.2.fp32.ampmem"}
    assert (here / "train.fp32.ampmem").read_bytes().startswith(b"SQLite")
    assert (here / "train.2.fp32.ampmem").read_text() == "of another day"


def test_the_json_is_that_of_the_recordings_and_has_their_page(here: Path) -> None:
    code, text, _ = ampmem_here(here, "compare", "--no-times", "--json", "--precision", "fp32,amp-nocache", "train.py")
    files = ["train.fp32.ampmem", "train.amp-nocache.ampmem"]
    assert (code, text) == (0, ampmem_here(here, "show", "--json", *files)[1])
    (here / "comparison.json").write_text(text)
    assert ampmem_here(here, "report", "comparison.json")[0] == 0
    # Of the precision that leaves no recording there is nothing.
    code, text, _ = ampmem_here(
        here, "compare", "--no-times", "--json", "--precision", "fp32,amp", "--force", "train.py"
    )
    assert (code, text) == (1, ampmem_here(here, "show", "--json", files[0])[1])
    assert ampmem_here(here, "compare", "--no-times", "--json", "--precision", "amp", "--force", "train.py")[:2] == (
        1,
        "",
    )
