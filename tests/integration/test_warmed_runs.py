"""A run that is forked from a warmed process finds what a fresh one finds, records the same, and ends alike."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ready_python import ready_python

from ampmem.analysis.summary import summarize
from ampmem.cli.processes.children import ChildEnd, Children, run_child
from ampmem.cli.processes.starting import Running, Warmed
from ampmem.recording import read

pytestmark = pytest.mark.slow

EVENTS = ("step", "phase", "action", "address", "bytes", "block_bytes", "stream", "op", "module", "allocated")

LOOKS = """
import gc, json, os, random, signal, sys, threading, warnings
import numpy, torch
found = {
    "argv": sys.argv,
    "path": sys.path,
    "main": vars(sys.modules["__main__"]).keys().__len__(),
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "files": len(os.listdir("/proc/self/fd")),
    "given": sys.stdin.read(),
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "threads": threading.active_count(),
    "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
    "warnings": [str(each) for each in warnings.filters],
    "hash": hash("ampmem"),
    "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")],
    "GPU": [torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.initial_seed()],
    "draws": [random.random(), float(numpy.random.rand()), torch.initial_seed(), torch.rand(1).item()],
    "modules": [name for name in sys.modules if "workloads" in name],
}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""
TRAINS = """
import sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Dropout(), nn.GELU(), nn.Linear(256, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    # Without autocast: the order in which its cache frees copies depends on where tensors lie in the process.
    output = model(torch.randn(512, 64, device="cuda"))
    nn.functional.cross_entropy(output, torch.zeros(512, 8).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def warmed() -> Iterator[Warmed]:
    with Warmed() as process:
        yield process


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start in a Python that has torch imported: for tests that are about something else."""
    monkeypatch.setattr(sys, "executable", ready_python())


def simulated(folder: Path, code: str, *arguments: str, warmed: Warmed | None, **how: Any) -> ChildEnd:
    """Profile a script with ``code`` on a simulated GPU; the recording is ``folder / "run.ampmem"``."""
    script = folder / "train.py"
    script.write_text(code)
    options = ("--gpu", "h100", "--device", "sim", "--files", "write", "--force", "--quiet")
    output = ("-o", str(folder / "run.ampmem"))
    return run_child([*options, *output, "--", str(script), *arguments], warmed=warmed, **how)


def test_a_script_finds_what_it_finds_in_a_fresh_process(tmp_path: Path, warmed: Warmed) -> None:
    def found(by: Warmed | None) -> dict[str, Any]:
        there = tmp_path / "found.json"
        there.unlink(missing_ok=True)
        simulated(tmp_path, LOOKS, str(there), warmed=by)
        read_back: dict[str, Any] = json.loads(there.read_text())
        return read_back

    fresh, forked, again = found(None), found(warmed), found(warmed)
    drawn = [each.pop("draws") for each in (fresh, forked, again)]
    assert forked == fresh
    assert again == fresh
    assert len({number for numbers in drawn for number in numbers}) == 12  # in each process others


@pytest.mark.usefixtures("ready")
def test_a_run_records_the_same_to_the_byte(tmp_path: Path, warmed: Warmed) -> None:
    def recorded(by: Warmed | None) -> tuple[Any, ...]:
        assert simulated(tmp_path, TRAINS, warmed=by).code == 0
        recording = read(tmp_path / "run.ampmem")
        events = [np.asarray(getattr(recording.events, name)).tolist() for name in EVENTS]
        summary = summarize(recording)
        return events, summary.peak, summary.parameters, summary.prediction, summary.findings, recording.remarks

    fresh = recorded(None)
    assert recorded(warmed) == fresh
    assert len(fresh[0][0]) > 100


@pytest.mark.parametrize(
    ("last", "code", "failure"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", -15, "killed by SIGTERM"),
    ],
)
def test_an_end_is_known(tmp_path: Path, warmed: Warmed, last: str, code: int, failure: str) -> None:
    ended = simulated(tmp_path, f"import sys\nprint('its last line')\nsys.stdout.flush()\n{last}\n", warmed=warmed)
    assert (ended.code, ended.failure) == (code, failure)
    assert "its last line" in ended.tail


def test_at_its_end_threads_and_exit_handlers_run_and_output_is_written(tmp_path: Path, warmed: Warmed) -> None:
    code = """
import atexit, sys, threading
atexit.register(print, "handler")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("script")
"""
    simulated(tmp_path, code + "sys.exit(5)", warmed=warmed)
    ended = simulated(tmp_path, code + "sys.exit(5)", warmed=warmed)
    assert (ended.code, ended.tail[:3]) == (5, ("script", "thread", "handler"))


def ended_when(folder: Path, reached: Callable[[int], bool]) -> ChildEnd:
    """How a run ends that is interrupted as soon as ``reached`` says so of how many processes were started for it."""
    children, started, ends = Children(), list[Running](), list[ChildEnd]()
    interrupted = threading.Event()

    def on_start(child: Running) -> None:
        children.started(child)
        started.append(child)
        if reached(len(started)):
            interrupted.set()

    def run(process: Warmed) -> None:
        code = f"open({str(folder / 'runs')!r}, 'w').close()\nimport time\ntime.sleep(600)"
        ends.append(simulated(folder, code, warmed=process, on_start=on_start))

    with Warmed() as process:
        waits = threading.Thread(target=run, args=(process,))
        waits.start()
        assert interrupted.wait(120)
        children.end([])
        waits.join(120)
    return ends[0]


@pytest.mark.usefixtures("ready")
def test_a_run_is_ended_before_its_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs")

    def script_runs(processes: int) -> bool:
        return processes == 2 and (tmp_path / "runs").read_text() == ""  # which waits until the script opens it

    assert ended_when(tmp_path, script_runs).code != 0


def test_a_run_is_ended_while_the_process_it_is_to_be_forked_from_still_starts(tmp_path: Path) -> None:
    assert ended_when(tmp_path, lambda processes: processes == 1).code != 0
    assert not (tmp_path / "runs").exists()


def test_where_the_process_is_gone_a_run_is_a_fresh_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Warmed() as process, Path(os.devnull).open("r+b") as nowhere:
        assert simulated(tmp_path, TRAINS, warmed=process).code == 0
        assert process._process is not None
        monkeypatch.setattr(sys, "executable", ready_python())
        process._process.send_signal(signal.SIGKILL)
        process._process.wait()
        assert process.start([], (nowhere, nowhere, nowhere)) is None
        assert simulated(tmp_path, TRAINS, warmed=process).code == 0


@pytest.mark.usefixtures("ready")
def test_no_process_starts_before_the_first_run_or_stays_after_the_last() -> None:
    with Warmed() as process:
        assert process._process is None
    with Warmed() as process, Path(os.devnull).open("r+b") as nowhere:
        assert process.start(["--help"], (nowhere, nowhere, nowhere)) is not None
        served = process._process
    assert served is not None
    assert served.returncode == 0
