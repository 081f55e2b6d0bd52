"""%%ampmem in a shell of this process: what runs, what is shown, and what is left of it."""

import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.build import write
from support.checked import run as trained_recording

import ampmem
from ampmem.integrations.notebook import recorded
from ampmem.integrations.notebook.cells import REACHED
from ampmem.integrations.notebook.recorded import CellOptions
from ampmem.reporters.html.small_timeline import HEIGHT
from ampmem.vocabulary import FORCED_PRECISIONS

pytest.importorskip("IPython", reason="IPython is not installed")

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

MODEL = """
import torch
from torch import nn
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """
for number in range({steps}):
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a cell: ``value`` is that of its last expression, ``shown`` what was displayed under it."""

    success: bool
    value: Any
    stdout: str
    stderr: str
    shown: list[dict[str, str]]

    @property
    def text(self) -> str:
        """The text of the one thing that was displayed."""
        (bundle,) = self.shown
        return bundle["text/plain"]


class Notebook:
    """A shell with the magics, in which cells run."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def run(self, *lines: str) -> Ran:
        with capture_output() as captured:
            result = self.shell.run_cell("\n".join(lines), store_history=True)
        return Ran(
            success=result.success,
            value=result.result,
            stdout=re.sub(r"\x1b\[[0-9;]*m", "", captured.stdout),
            stderr=captured.stderr,
            shown=[each.data for each in captured.outputs],
        )

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    folder = str(tmp_path_factory.mktemp("ipython"))
    main, names = sys.modules["__main__"], set(vars(builtins))
    started = InteractiveShell.instance(config=config, ipython_dir=folder)
    yield started
    InteractiveShell.clear_instance()
    # A shell leaves a module of its own in place of pytest's, which a spawned process would look for.
    sys.modules["__main__"] = main
    for name in vars(builtins).keys() - names:
        delattr(builtins, name)


@pytest.fixture
def notebook(shell: InteractiveShell) -> Iterator[Notebook]:
    shell.reset()
    opened = Notebook(shell)
    assert opened.run("%load_ext ampmem").success
    assert opened.run(MODEL).success
    yield opened
    assert opened.run("%unload_ext ampmem").success


def train(steps: int = 2) -> str:
    return TRAIN.format(steps=steps)


def test_a_cell_runs_as_ever_and_its_page_is_shown_under_it(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", train(), "number + 40")
    assert (ran.success, ran.value, notebook["number"]) == (True, 41, 1)
    assert ran.stdout == "Out[3]: 41\n"
    assert ran.text.startswith("ampmem: All 2 steps of In [3] were recorded.")
    assert ran.shown[0]["text/html"].count("<iframe ") == 1
    assert isinstance(notebook["_ampmem"], ampmem.Profile)
    assert len(notebook["_ampmem"].summary().steps) == 2


def test_of_a_long_cell_the_first_steps_are_recorded_and_the_rest_runs_on(notebook: Notebook) -> None:
    assert notebook.run("%%ampmem", train(6)).text.startswith("ampmem: The first 3 steps of In [3] were recorded")
    assert notebook["number"] == 5
    ran = notebook.run("%%ampmem --skip 2 --steps 9", train(6))
    assert ran.text.startswith("ampmem: All 4 steps of In [4], after the first 2, were recorded.")


def test_a_cell_that_fails_has_its_own_traceback_and_the_steps_that_had_ended(notebook: Notebook) -> None:
    plain = notebook.run("# as it is", train(), "1 / 0")
    ran = notebook.run("%%ampmem", train(), "1 / 0")
    assert not ran.success
    assert _frames(ran.stdout) == _frames(plain.stdout)
    assert ran.stdout.count("ZeroDivisionError: division by zero") == 1
    assert ran.text.startswith("ampmem: 2 steps of In [4] had finished when it failed, and were recorded.")


def _frames(traceback: str) -> list[str]:
    """The lines of a traceback but for the numbers of cells and what stands in the cell's first line."""
    return [re.sub(r"In\[\d+\]", "In", line) for line in traceback.splitlines() if not re.match(r" +1 ", line)]


def test_ctrl_c_in_a_cell_is_the_cells(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", train(), "raise KeyboardInterrupt")
    assert not ran.success
    assert "KeyboardInterrupt" in ran.stdout
    assert ran.text.startswith("ampmem: 2 steps of In [3] had finished when it was stopped, and were recorded.")


def test_a_cell_may_await(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", "import asyncio", "await asyncio.sleep(0)", train(), "number")
    assert (ran.success, ran.value) == (True, 1)
    assert "All 2 steps" in ran.text


def test_a_cell_inside_of_a_cell_does_not_end_the_recording(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", train(1), "get_ipython().run_cell('inner = 1')", train(1))
    assert notebook["inner"] == 1
    assert "All 2 steps" in ran.text


def test_what_another_magic_captures_is_captured(notebook: Notebook) -> None:
    ran = notebook.run("%%capture taken", "%%ampmem", train())
    assert ran.shown == []
    (kept,) = notebook["taken"].outputs
    assert "All 2 steps" in kept.data["text/plain"]


def test_as_a_line_it_records_what_follows(notebook: Notebook) -> None:
    ran = notebook.run(train(2), "%ampmem", train(1))
    assert ran.text.startswith("ampmem: All 1 step of In [3] was recorded.")


def test_the_last_recording_can_be_shown_again(notebook: Notebook) -> None:
    early = notebook.run("%ampmem --last")
    assert not early.success
    assert early.stderr == (
        "UsageError: nothing has been recorded yet: write %%ampmem as the first line of a cell that trains\n"
    )
    first = notebook.run("%%ampmem", train())
    assert notebook.run("%ampmem --last").shown == notebook.run("%%ampmem --last").shown == first.shown


def test_a_cell_that_does_not_train_leaves_the_last_recording(notebook: Notebook) -> None:
    first = notebook.run("%%ampmem", train())
    recorded = notebook["_ampmem"]
    assert "no model was seen" in notebook.run("%%ampmem", "1 + 1").stderr
    assert notebook.run("%ampmem --last").shown == first.shown
    assert notebook["_ampmem"] is recorded


def test_after_a_comparison_that_is_the_last(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%%ampmem", train())

    def run(options: CellOptions, script: str, prefix: str, folder: Path, name: str) -> str:
        for precision in FORCED_PRECISIONS:
            recorded = trained_recording()
            write(
                Path(f"{prefix}.{precision}.ampmem"),
                replace(recorded, precision=replace(recorded.precision, name=precision)),
            )
        Path(f"{folder}{REACHED}").write_text("0")
        return ""

    monkeypatch.setattr(recorded, "_run_compare", run)
    shown = notebook.run("%%ampmem --compare", "pass").shown
    assert isinstance(notebook["_ampmem"], ampmem.Comparison)
    assert "Each precision ran" in shown[0]["text/plain"]
    assert notebook.run("%ampmem --last").shown == shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%%ampmem --stepz 3", "unrecognized arguments: --stepz 3"),
        ("%%ampmem --gpu h100 --device cpu", "--gpu simulates a GPU, and --device cpu records a real device"),
        ("%%ampmem -o /nowhere/a.ampmem", "the directory /nowhere does not exist"),
        ("%%ampmem --html /nowhere/a.html", "the directory /nowhere does not exist"),
        ("%ampmem --compare", "--compare is for a whole cell"),
    ],
)
def test_what_is_wrong_is_one_line_and_the_cell_does_not_run(notebook: Notebook, line: str, said: str) -> None:
    ran = notebook.run(line, "touched = True")
    assert not ran.success
    assert ran.stderr.startswith("UsageError: ")
    assert ran.stderr.count("\n") == 1
    assert said in ran.stderr
    assert ran.stdout == ""
    assert "touched" not in notebook.shell.user_ns


def test_help_does_not_run_the_cell(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem --help", "touched = True")
    assert ran.success
    assert "--compare" in ran.stdout
    assert "touched" not in notebook.shell.user_ns


def test_a_cell_that_does_not_train_says_so_in_one_line(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", "1 + 1")
    assert (ran.success, ran.value, ran.shown) == (True, 2, [])
    assert ran.stderr.startswith("ampmem: no model was seen")
    assert ran.stderr.count("\n") == 1


def test_a_cell_that_trains_on_another_thread_says_where(notebook: Notebook) -> None:
    train_there = "import threading; thread = threading.Thread(target=go); thread.start(); thread.join()"
    ran = notebook.run(
        "%%ampmem", "def go():", "    model(torch.ones(1, 16)).sum().backward(); optimizer.step()", train_there
    )
    assert ran.success
    assert "Linear ran forward on another thread" in ran.stderr


def test_a_precision_can_be_forced_and_is_said(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem --precision amp", train())
    assert "ampmem forced the precision amp on the cell." in ran.text
    assert notebook["_ampmem"].summary().precision.name == "amp"
    assert notebook.run("torch.is_autocast_enabled('cpu')").value is False


def test_a_gpu_can_be_simulated_for_a_cell(notebook: Notebook) -> None:
    there = train().replace("8, 16)", "8, 16, device='cuda')")
    moved = "model = nn.Linear(16, 4).cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    ran = notebook.run("%%ampmem --device sim --gpu h100", moved, there)
    assert ran.success, ran.stdout
    assert "The GPU was simulated: tensors that the cell left on it have no values" in ran.text
    assert notebook["_ampmem"].summary().source == "simulated"
    assert notebook.run("torch.cuda.is_available()").value is False


def test_files_are_written_where_they_are_asked_for(notebook: Notebook, tmp_path: Path) -> None:
    recording, page = tmp_path / "a.ampmem", tmp_path / "a.html"
    ran = notebook.run(f"%%ampmem -o {recording} --html {page}", train())
    assert f"The recording is {recording}, " in ran.text
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert len(ampmem.load(recording).steps) == 2
    for options, there, option in (
        (f"-o {recording} --html {page}", recording, "-o"),
        (f"--html {page}", page, "--html"),
    ):
        again = notebook.run(f"%%ampmem {options}", train())
        assert f"{there} exists already; give another name with {option}, or --force" in again.stderr


def test_what_ends_a_step_can_be_named(notebook: Notebook) -> None:
    assert notebook.run("def evaluate(): return model(torch.ones(1, 16))").success
    ran = notebook.run("%%ampmem --step-on __main__.evaluate", "evaluate()", "evaluate();")
    assert ran.text.startswith("ampmem: All 2 steps of In [4]")


def test_the_light_form_is_a_picture_and_the_table(notebook: Notebook) -> None:
    (shown,) = notebook.run("%%ampmem --light", train()).shown
    page = shown["text/html"]
    assert "<iframe" not in page and "<script" not in page and "<table" in page
    assert len(page.encode()) < 60_000
    outlines = dict(re.findall(r'points="([^"]*)"><title>([^<]*)</title>', page))
    tops = {name: min(float(point.split(",")[1]) for point in drawn.split()) for drawn, name in outlines.items()}
    summary = notebook["_ampmem"].summary()
    # The highest edge is the peak's, at the upper border; that of the parameters alone is below in proportion.
    peak, parameters = summary.peak.bytes, summary.peak.categories["parameters"]
    assert min(tops.values()) == 0.0
    assert tops["Parameters"] == pytest.approx(HEIGHT * (1 - parameters / peak), abs=0.1)


def test_a_page_that_is_too_large_is_a_table_and_says_so(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampmem.integrations.notebook.recorded.frame", lambda *_: None)
    (shown,) = notebook.run("%%ampmem", train()).shown
    assert "<iframe" not in shown["text/html"]
    assert "The page is larger than" in shown["text/html"]
    assert "<table" in shown["text/html"]
    assert recorded.MOST == 2_000_000


def test_unloading_in_a_recorded_cell_ends_the_recording(notebook: Notebook) -> None:
    ran = notebook.run("%%ampmem", train(1), "%unload_ext ampmem", train(1))
    assert "All 1 step " in ran.text
    assert "ampmem" not in notebook.shell.magics_manager.magics["cell"]
    assert "not found" in notebook.run("%%ampmem", "1").stderr
    assert notebook.run("%load_ext ampmem").success


def test_a_comparison_of_what_no_script_can_run_is_refused(notebook: Notebook) -> None:
    for lines, said in (
        (["await go()"], "as a script, but the cell is not a valid script: 'await' outside function"),
        (["%time x = 1"], "where magics do not work"),
        (["for"], "not a valid script: invalid syntax"),
    ):
        ran = notebook.run("%%ampmem --compare", *lines)
        assert said in ran.stderr
        assert ran.stderr.count("\n") == 1
    notebook.shell.user_ns["pushed"] = 1
    assert "no cell's code defines pushed" in notebook.run("%%ampmem --compare", "print(pushed)").stderr
    assert "there is no In [99]" in notebook.run("%%ampmem --compare --cells 99", "1").stderr
