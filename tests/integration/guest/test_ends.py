"""However a program ends, it ends so under ampmem too; its recording is closed, and what is said is true."""

from pathlib import Path

import pytest
from support.command_line import ampmem_here
from support.commands import ampmem
from support.guest import PROGRAMS, RECORDING, beside

from ampmem.failure import FailureKind
from ampmem.recording import read
from ampmem.units import format_bytes

pytestmark = pytest.mark.slow

STEP_KEPT = "ampmem: the script failed; 1 finished step is in run.ampmem, {} (ampmem show run.ampmem)"
INTERRUPTED = "ampmem: interrupted after 1 step; what was recorded is in run.ampmem, {} (ampmem show run.ampmem)"


@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        ("raises_without_words", FailureKind.RAISED, "Wordless: <exception str() failed>"),
        ("raises_surrogate", FailureKind.RAISED, "FileNotFoundError: there is no ?.bin"),
        ("raises_own_text", FailureKind.RAISED, "Odd: odd"),
        ("raises_odd_class", FailureKind.RAISED, "Odd: odd"),
        ("raises_much", FailureKind.RAISED, f"ValueError: {'x' * 10_000}"),
        ("raises_in_a_circle", FailureKind.RAISED, "ValueError: first"),
        ("raises_group", FailureKind.RAISED, "ExceptionGroup: both sizes (2 sub-exceptions)"),
        ("raises_long_chain", FailureKind.RAISED, "ValueError: number 399"),
        ("raises_exit_of_a_class", FailureKind.EXITED, "it exited with 'enough'"),
        ("exits_with_a_tensor", FailureKind.EXITED, "it exited with tensor(0)"),
        ("exits_with_many", FailureKind.EXITED, "it exited with tensor([0, 1])"),
        ("excepthook_raises", FailureKind.RAISED, "ValueError: mine"),
        ("excepthook_exits", FailureKind.RAISED, "ValueError: mine"),
        ("interrupted", FailureKind.RAISED, "KeyboardInterrupt"),
        ("looks_back", FailureKind.RAISED, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x9 and 8x2)"),
    ],
)
def test_a_failure_is_the_programs_own(tmp_path: Path, name: str, kind: FailureKind, line: str) -> None:
    both = beside(tmp_path, name)
    assert both.differences() == []
    assert both.plain.code != 0
    words = INTERRUPTED if name == "interrupted" else STEP_KEPT
    kept = words.format(format_bytes(both.recording.stat().st_size))
    assert both.recorded.said == ("ampmem: recording to run.ampmem", kept)
    recording = read(both.recording)
    assert [step.finished for step in recording.steps] == [True]
    failure = recording.run.failure
    assert failure is not None
    assert (failure.kind, failure.line) == (kind, line)


@pytest.mark.parametrize("name", ["closes_streams", "replaces_functions", "replaces_streams", "exits_at_the_end"])
def test_what_a_program_does_to_python_does_not_reach_the_recording(tmp_path: Path, name: str) -> None:
    both = beside(tmp_path, name, to_the_end=True)
    assert both.differences() == []
    assert [step.index for step in read(both.recording).steps] == [0, 1]
    if name in ("closes_streams", "replaces_streams"):  # what it reads of its streams is its own
        assert "ampmem" not in both.recorded.out + both.recorded.err


NO_MODEL = "no model was seen: ampmem follows torch.nn.Module forwards, and none with parameters ran"


def test_training_by_hand_to_its_end_is_no_failure(tmp_path: Path) -> None:
    both = beside(tmp_path, "trains_by_hand")
    assert both.differences() == []
    assert both.plain.code == 0
    assert both.recorded.said == ("ampmem: recording to run.ampmem", f"ampmem: {NO_MODEL}")
    assert not both.recording.exists()


def test_training_by_hand_is_a_failure_of_what_was_asked_for(tmp_path: Path) -> None:
    script = str(PROGRAMS / "trains_by_hand.py")
    done = ampmem(tmp_path, "profile", "-o", RECORDING, script)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"ampmem: {NO_MODEL}")
    assert list(tmp_path.iterdir()) == []
    done = ampmem(tmp_path, "compare", "--precision", "fp32,amp", "--no-times", script)
    assert done.returncode == 1
    assert f"fp32: failed: {NO_MODEL}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_told_and_no_failure_of_the_programs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((PROGRAMS / "_training.py").read_text() + "train_alone(3)\nimport os\nos.rmdir('pages')\n")
    for options, code in (((), 2), (("--run-to-end",), 0)):
        (tmp_path / "pages").mkdir()
        arguments = ("--steps", "4", "--force", "--quiet", "--html", "pages/page.html", *options, "train.py")
        done = ampmem(tmp_path, "profile", *arguments)
        assert done.returncode == code
        assert done.stderr.splitlines()[-1].startswith(f"ampmem: cannot write {tmp_path}/pages/page.html: ")
        assert len(read(tmp_path / "train.ampmem").steps) == 3


ESCAPES = "\x1b[2J\x07"


def test_no_line_of_ampmems_own_has_what_a_terminal_acts_on(tmp_path: Path) -> None:
    script = tmp_path / f"train{ESCAPES}\udcff.py"
    script.write_text(
        (PROGRAMS / "_training.py").read_text() + "import sys\ntrain_alone(2)\nsys.argv[1:] and sys.exit(sys.argv[1])\n"
    )
    done = ampmem(tmp_path, "profile", "--steps", "2", script.name)
    assert done.returncode == 0
    assert done.stderr.splitlines()[1].startswith("ampmem: recorded 2 steps in train?[2J??.ampmem")
    shown = done.stderr + ampmem(tmp_path, "compare", "--precision", "fp32", script.name, f"said{ESCAPES}").stderr
    assert "said?[2J?" in shown
    shown += ampmem_here(tmp_path, "show", f"missing{ESCAPES}")[2]
    shown += ampmem_here(tmp_path, "profile", f"missing{ESCAPES}.py")[2]
    shown += ampmem_here(tmp_path, "profile", "-m", f"missing{ESCAPES}")[2]
    shown += ampmem_here(tmp_path, "profile", f"--missing{ESCAPES}")[2]
    assert "missing?[2J?" in shown
    assert [character for character in shown if not character.isprintable() and character != "\n"] == []
