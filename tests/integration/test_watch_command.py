"""``ampmem watch``: a row for each step that equals independent sums, whatever the script does and however it ends."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import ampmem, python
from support.ready_python import ready_python

from ampmem.analysis.summary import summarize
from ampmem.analysis.watched import FullPart
from ampmem.recording import read
from ampmem.recording.watched import WatchedRun, Why
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.text.watched import growth_line
from ampmem.vocabulary import Mark

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to({device!r})
optimizer = torch.optim.Adam(model.parameters())
kept = []
for i in range({steps}):
    x = torch.randn({rows}, 256, device={device!r})
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {more}
print("trained")
{last}
"""
PARAMETERS = 4 * (256 * 256 + 256 + 256 * 10 + 10)
LEAK = "kept.append(torch.zeros(256))"


def script(
    folder: Path, *, device: str = "cpu", steps: int = 30, rows: str = "32", more: str = "", last: str = ""
) -> None:
    text = SCRIPT.format(device=device, steps=steps, rows=rows, more=more or "pass", last=last)
    (folder / "train.py").write_text(text)


def watched(folder: Path, *options: str, code: int = 0) -> tuple[WatchedRun, str, str]:
    done = ampmem(folder, "watch", *options, "train.py")
    assert done.returncode == code, done.stderr
    return read_watched(folder / "train-watch.ampmem"), done.stdout, done.stderr


def shown(folder: Path, *arguments: str) -> str:
    done = ampmem(folder, "show", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_step_has_a_row_and_the_script_runs_to_its_end(tmp_path: Path) -> None:
    script(tmp_path, steps=40)
    run, output, said = watched(tmp_path, "--every", "15", "--keep", "1")
    assert output == "trained\n"
    assert [row.step for row in run.rows] == list(range(40))
    assert {row.batch for row in run.rows} == {"32x256 float32"}
    # At the end of an update: the parameters, their gradients, two states and a step each, the batch and the loss.
    assert {row.alive for row in run.rows} == {4 * PARAMETERS + 4 * 4 + 32 * 256 * 4 + 4}
    assert [row.step for row in run.rows if row.full] == [0, 1, 2, 15, 16, 17, 30, 31, 32]
    assert [(each.why, each.first, each.last) for each in run.full] == [(Why.START, 0, 2), (Why.EVERY, 30, 32)]
    assert run.ending is not None and run.ending.failure is None
    assert "40 steps, ended" in said and "\nNo growth seen" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-watch.ampmem", "train.py"]


def test_on_a_simulated_gpu_the_peaks_are_those_of_profile(tmp_path: Path) -> None:
    script(tmp_path, device="cuda", steps=8)
    run, _, _ = watched(tmp_path, "--gpu", "h100")
    assert ampmem(tmp_path, "profile", "--gpu", "h100", "--steps", "8", "train.py").returncode == 0
    recording = read(tmp_path / "train.ampmem")
    summary = summarize(recording)
    assert [row.peak for row in run.rows] == [step.peak.said for step in summary.steps]
    assert [row.phase for row in run.rows] == [step.peak.phase for step in summary.steps]
    reserved = [layers.reserved for layers in recording.layers if layers.mark == Mark.AFTER_OPTIMIZER]
    assert {row.reserved for row in run.rows[1:]} == set(reserved[1:])
    assert run.header.device == "NVIDIA H100 80GB HBM3" and run.header.limit
    assert not run.header.sampled


def test_a_leak_of_one_kibibyte_a_step_is_found_and_named(tmp_path: Path) -> None:
    script(tmp_path, steps=60, more=LEAK)
    _, _, said = watched(tmp_path)
    text = " ".join(said.split())
    assert "Memory grows: the memory allocated at the end of each step rises by 1.0 KiB per step" in text
    assert "10.0 KiB in 10 by kept[*]" in text


def test_a_longer_batch_runs_out_of_simulated_memory(tmp_path: Path) -> None:
    script(tmp_path, device="cuda", steps=80, rows="32 if i < 70 else 90_000_000")
    run, _, said = watched(tmp_path, "--gpu", "24GiB", code=1)
    ending = run.ending
    assert ending is not None and ending.out_of_memory
    assert (ending.step, ending.phase, ending.batch) == (70, "between", "32x256 float32"), "the batch was to be made"
    assert ending.asked == 90_000_000 * 256 * 4
    assert ending.line.endswith("train.py:9")
    held = {each.what: each.bytes for each in ending.held}
    assert held["parameters"] == sum(-(-size // 512) * 512 for size in (256 * 256 * 4, 1024, 10240, 40))
    assert "85.8 GiB requested at" in said and "ampmem advise --gpu 24GiB" in said
    assert len(run.rows) == 70


def test_the_batch_that_does_not_fit_is_named_beside_the_usual_one(tmp_path: Path) -> None:
    script(tmp_path, device="cuda", steps=40, rows="32 if i < 30 else 9_000_000")
    run, _, said = watched(tmp_path, "--gpu", "24GiB", code=1)
    assert run.ending is not None
    assert (run.ending.step, run.ending.phase, run.ending.batch) == (30, "forward", "9000000x256 float32")
    text = " ".join(said.split())
    assert "the batch was 9000000x256 float32; in most steps before it was 32x256 float32" in text
    assert "ampmem profile --skip 30 --steps 1 train.py" in text
    found = json.loads(shown(tmp_path, "--json", "train-watch.ampmem"))
    assert found["format"] == "ampmem.watch/1"
    assert sum(each["then"] for each in found["shortage"]["held"]) == sum(each.bytes for each in run.ending.held)


def test_what_is_new_when_memory_runs_out_is_named(tmp_path: Path) -> None:
    """Tensors that the loop keeps from step 30 on are nothing that the recorder knows by identity."""
    script(tmp_path, device="cuda", steps=40, more="kept += [torch.zeros(1 << 28, device='cuda')] * (i >= 30)")
    _, _, said = watched(tmp_path, "--gpu", "4GiB", code=1)
    found = json.loads(shown(tmp_path, "--json", "train-watch.ampmem"))["shortage"]
    before = {each["what"]: (each["before"], each["then"]) for each in found["held"]}
    assert all(None not in each for each in before.values())
    (new,) = [what for what, (first, then) in before.items() if then - first > 1 << 30]
    assert f"{new} grew most: " in " ".join(said.split())
    assert "optimizer state grew most" not in said


def test_a_copy_of_the_weights_that_is_new_is_named(tmp_path: Path) -> None:
    """Memory is not near its end while the copies are made, so no lines are kept: modules and holders have names."""
    more = "import copy; kept += [copy.deepcopy(model)] * (i == 9); ema = {'a': [torch.zeros(1 << 20, device='cuda')]}"
    script(tmp_path, device="cuda", steps=12, rows="32 if i < 10 else 90_000_000", more=more)
    run, _, said = watched(tmp_path, "--gpu", "24GiB", code=1)
    assert run.ending is not None
    held = {each.what: each.bytes for each in run.ending.held}
    assert held["parameters of idle modules"] == held["parameters"]
    assert held["ema"] == 4 << 20
    assert "parameters of idle modules grew most: 267.5 KiB, compared with 0 B" in " ".join(said.split())


@pytest.mark.parametrize(("why", "story"), [("growth", "memory grew until step 40"), ("start", "no growth seen")])
def test_of_growth_one_story_is_told(why: str, story: str) -> None:
    part = FullPart(number=1, why=Why(why), first=40, last=42, peak=None, categories={}, lines={})
    assert growth_line(SimpleNamespace(growth=None, full=(part,), steps=120)).startswith(story)  # type: ignore[arg-type]


def test_memory_that_runs_out_while_steps_are_recorded_in_full(tmp_path: Path) -> None:
    """As most do, in the first steps: then all is said that the full recording knows."""
    script(tmp_path, device="cuda", steps=3, rows="32 if i < 1 else 9_000_000")
    run, _, said = watched(tmp_path, "--gpu", "24GiB", code=1)
    assert run.ending is not None and run.ending.asked is None
    found = json.loads(shown(tmp_path, "--json", "train-watch.ampmem"))["shortage"]
    full = json.loads(shown(tmp_path, "--json", "train-watch.ampmem", "--full", "0"))["out_of_memory"]
    assert (found["asked"], found["free"], found["total"]) == (full["asked"], full["device_free"], full["device_total"])
    assert sum(each["then"] for each in found["held"]) == sum(full["alive"].values())
    assert found["line"].endswith("train.py:10")
    assert "the batch was 9000000x256 float32; in most steps before it was 32x256 float32" in " ".join(said.split())


def test_memory_that_ran_out_and_was_caught_is_noted(tmp_path: Path) -> None:
    caught = """
    if i == 9:
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError:
            pass
"""
    script(tmp_path, device="cuda", steps=12, more=caught.strip())
    run, _, _ = watched(tmp_path, "--gpu", "h100")
    assert [note.partition(" at ")[0] for note in run.notes] == ["memory ran out in step 10"]
    assert run.ending is not None and not run.ending.out_of_memory


NO_STEP = "no step ended: no backward ran and no optimizer made an update; for inference, use --step-on forward"


@pytest.mark.parametrize("options", [(), ("--quiet",)])
@pytest.mark.parametrize(
    ("last", "code", "why"),
    [
        ("", 0, NO_STEP),
        ("raise SystemExit", 0, NO_STEP),
        ("raise SystemExit(3)", 3, "no step ended before the script failed or was interrupted"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "no step ended before the script failed or was interrupted"),
    ],
)
def test_a_script_that_never_steps_is_told_why(
    tmp_path: Path, options: tuple[str, ...], last: str, code: int, why: str
) -> None:
    (tmp_path / "train.py").write_text(f"import torch\ntorch.nn.Linear(3, 3)(torch.ones(2, 3))\n{last}\n")
    run, _, said = watched(tmp_path, *options, code=code)
    assert run.rows == () and said.count(f"ampmem: {why}\n") == 1
    assert run.notes == ((NO_STEP,) if why == NO_STEP else ())


@pytest.mark.parametrize(
    ("last", "code", "line"),
    [
        ("raise ValueError('too bad')", 1, "ValueError: too bad"),
        ("sys.exit(7)", 7, "it exited with 7"),
        ("", 0, None),
    ],
)
def test_the_end_is_the_scripts_own(tmp_path: Path, last: str, code: int, line: str | None) -> None:
    script(tmp_path, steps=5, last=last)
    run, output, _ = watched(tmp_path, "--quiet", code=code)
    assert output == "trained\n" and run.ending is not None
    assert (None if run.ending.failure is None else run.ending.failure.line) == line
    assert len(run.rows) == 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_a_run_that_is_killed_has_every_row_that_was_told(tmp_path: Path, how: signal.Signals, steps: int) -> None:
    """The script tells each step after it; by then its row is in the file."""
    script(tmp_path, steps=10**6, more="import os; print(i, os.getpid(), flush=True)")
    command = [ready_python(), "-m", "ampmem", "watch", "--quiet", "--every", "20", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            step, number = map(int, told.split())
            if step == steps:
                os.kill(number, how)
                break
        process.stdout.read()
    assert process.returncode == -how
    run = read_watched(tmp_path / "train-watch.ampmem")
    assert [row.step for row in run.rows][: steps + 1] == list(range(steps + 1))
    text = shown(tmp_path, "train-watch.ampmem")
    assert "no end written" in text and "it was killed" in text.replace("the run was killed", "it was killed")


def test_an_interrupt_ends_the_process_as_python_does_and_the_file_says_so(tmp_path: Path) -> None:
    script(tmp_path, steps=10**6, more="print(i, flush=True)")
    command = [ready_python(to_the_end=True), "-m", "ampmem", "watch", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if int(told) == 25:
                process.send_signal(signal.SIGINT)
                break
        _, said = process.communicate()
    assert process.returncode == -signal.SIGINT
    steps = len(read_watched(tmp_path / "train-watch.ampmem").rows)
    assert steps >= 25 and f"ampmem: interrupted after {steps} steps in train-watch.ampmem" in said
    assert f"\n{steps} steps, interrupted\n" in said and "the script failed" not in said
    ending = read_watched(tmp_path / "train-watch.ampmem").ending
    assert ending is not None and ending.failure is not None and ending.failure.line.startswith("KeyboardInterrupt")


def test_the_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    script(tmp_path, steps=10**6, more="print(i, flush=True)")
    command = [ready_python(), "-m", "ampmem", "watch", "--quiet", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if int(told) == 30:
                break
        text = ampmem(tmp_path, "top", "--once", "train-watch.ampmem").stdout
        process.kill()
        process.stdout.read()
    assert "running" in text and "steps/s" in text and "optimizer state" in text


def test_top_ends_with_the_run(tmp_path: Path) -> None:
    script(tmp_path, steps=5)
    watched(tmp_path, "--quiet")
    done = ampmem(tmp_path, "top", "train-watch.ampmem", "--interval", "0.1")
    assert done.returncode == 0 and "step 4" in done.stdout and "\x1b" not in done.stdout


def test_a_full_recording_is_a_recording_like_any_other(tmp_path: Path) -> None:
    script(tmp_path, steps=5)
    run, _, _ = watched(tmp_path, "--quiet")
    assert len(run.full) == 1
    found = json.loads(shown(tmp_path, "--json", "train-watch.ampmem", "--full", "0"))
    assert [step["index"] for step in found["steps"]] == [0, 1, 2]
    assert found["conservation"]["residual_bytes"] == 0
    assert found["parameters"]["count"] * 4 == PARAMETERS
    done = ampmem(tmp_path, "show", "train-watch.ampmem", "--full", "5")
    assert done.returncode == 2 and "no full recording 5; it has: 0" in done.stderr


def test_the_page_and_the_pages_of_full_recordings(tmp_path: Path) -> None:
    script(tmp_path, steps=5)
    watched(tmp_path, "--quiet")
    done = ampmem(tmp_path, "report", "train-watch.ampmem")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.html")} == {"train-watch.html", "train-watch.full-0.html"}


def test_files_that_are_taken_for_each_other(tmp_path: Path) -> None:
    script(tmp_path, steps=4)
    watched(tmp_path, "--quiet")
    assert ampmem(tmp_path, "profile", "--quiet", "train.py").returncode == 0
    for command, why in {
        ("diff", "train.ampmem", "train-watch.ampmem"): "is a watched run",
        ("show", "train.ampmem", "train-watch.ampmem"): "show them separately",
        ("show", "train.ampmem", "--full", "0"): "--full needs one watched run",
        ("top", "train.ampmem"): "is not a watched run",
        ("watch", "train-watch.ampmem"): "is a watched run, not a script",
        ("watch", "--every", "3", "train.py"): "--every",
        ("watch", "nothing.py"): "script not found",
        ("watch", "-o", "train.ampmem", "train.py"): "exists already",
    }.items():
        done = ampmem(tmp_path, *command)
        assert done.returncode != 0 and why in done.stderr, (command, done.stderr)
        assert "Traceback" not in done.stderr


def test_the_second_run_takes_the_next_name(tmp_path: Path) -> None:
    script(tmp_path, steps=4)
    watched(tmp_path, "--quiet")
    done = ampmem(tmp_path, "watch", "--quiet", "train.py")
    assert "recording to train-watch.2.ampmem" in done.stderr
    assert len(read_watched(tmp_path / "train-watch.2.ampmem").rows) == 4


def test_ranks_of_a_launcher_have_a_file_each(tmp_path: Path) -> None:
    script(tmp_path, steps=4)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = python(tmp_path, *launch, "-m", "ampmem", "watch", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.glob("*.ampmem"))
    assert files == [f"train-watch.rank{rank}-of-2.ampmem" for rank in (0, 1)]
    text = shown(tmp_path, *files)
    assert "the highest peak came first on rank" in text
    found: list[dict[str, Any]] = json.loads(shown(tmp_path, "--json", *files))
    assert [each["run"]["rank"] for each in found] == [0, 1]


def test_a_full_disk_ends_the_recording_and_not_the_script(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs the right to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        script(tmp_path, steps=400)
        done = ampmem(tmp_path, "watch", "--quiet", "-o", "small/run.ampmem", "train.py")
        assert done.returncode == 0 and done.stdout == "trained\n"
        assert "could not be written from step" in done.stderr
        run = read_watched(small / "run.ampmem")
        last = f"watched 400 steps, of which the first {len(run.rows)} are kept in small/run.ampmem"
        assert last in done.stderr and 0 < len(run.rows) < 400
        assert [row.step for row in run.rows] == list(range(len(run.rows)))
        assert run.ending is not None and run.ending.failure is None
        assert "could not be written from step" in run.notes[-1]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    fork = """
    if i == 3:
        import os
        child = os.fork()
        if child == 0:
            for _ in range(5):
                model(torch.randn(8, 256)).mean().backward(); optimizer.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""
    script(tmp_path, steps=6, more=fork.strip())
    run, _, _ = watched(tmp_path, "--quiet")
    assert [row.step for row in run.rows] == list(range(6))
    assert time.time_ns() > run.rows[-1].time_ns
