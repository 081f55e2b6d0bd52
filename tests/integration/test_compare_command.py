"""``ampmem compare``: one script in three precisions, each in a process of its own, laid side by side."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import refused
from support.commands import ampmem
from support.ready_python import ready_python

from ampmem.recording import read
from ampmem.units import format_bytes

pytestmark = pytest.mark.slow

PRECISIONS = ("fp32", "amp", "amp-nocache")

TRAINING = """
import hashlib, os, random, signal, sys
import torch
from torch import nn

digest = hashlib.sha256()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    data, target = torch.randn(32, 8), torch.randint(4, (32,))
    digest.update(data.numpy().tobytes() + target.numpy().tobytes())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        amp = torch.is_autocast_enabled("cpu")
        loss = nn.functional.cross_entropy(model(data), target)
    {in_step}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    digest.update(repr((random.random(), hash("a text"))).encode())
    with open(sys.argv[1], "a") as out:
        print(step, amp, digest.hexdigest(), file=out)
    print("the script speaks", step, flush=True)
    print("and complains", step, file=sys.stderr, flush=True)
"""


WITHOUT_OPTIMIZER = """
import random, signal, sys
import torch
model = torch.nn.Linear(8, 4)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        amp, data = torch.is_autocast_enabled("cpu"), torch.randn(2, 8)
        loss = model(data).sum()
    {in_step}
    loss.backward()
    with open(sys.argv[1], "a") as out:
        print(step, amp, data.tolist(), random.random(), hash("a text"), file=out)
"""
"""For Pythons that start from nothing: torch imports half of itself for the first optimizer."""


def write_training(folder: Path, in_step: str = "pass") -> None:
    (folder / "train.py").write_text(TRAINING.format(in_step=in_step))


def rows(text: str, label: str) -> list[str]:
    """Every row of the tables that begins with ``label``, without it and with single spaces."""
    return [" ".join(line.split()).removeprefix(f"{label} ") for line in text.splitlines() if line.startswith(label)]


def test_three_precisions_of_one_script(tmp_path: Path) -> None:
    write_training(tmp_path)
    done = ampmem(tmp_path, "compare", "--files", "write", "--steps", "2", "--html", "page.html", "train.py", "seen")
    assert done.returncode == 0, done.stderr
    recordings = [read(tmp_path / f"train.{precision}.ampmem") for precision in PRECISIONS]
    assert [(recording.precision.name, recording.precision.forced) for recording in recordings] == [
        (precision, True) for precision in PRECISIONS
    ]
    assert [recording.precision.dtype for recording in recordings] == [None, "bfloat16", "bfloat16"]
    assert [recording.precision.cache for recording in recordings] == [None, True, False]
    assert all([step.index for step in recording.steps] == [0, 1] for recording in recordings)
    assert all(len(recording.plain_step_ns) == 2 and min(recording.plain_step_ns) > 0 for recording in recordings)
    # Each precision ran twice, recorded and timed; the stop comes with an update, before the script writes of that
    # step.
    lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(step, amp) for step, amp, _ in lines] == [("0", amp) for amp in ["False"] * 2 + ["True"] * 4]
    assert len({digest for _, _, digest in lines}) == 1
    assert "the script speaks" not in done.stdout + done.stderr
    assert "and complains" not in done.stdout + done.stderr
    *runs, written = done.stderr.splitlines()
    assert [line.split(": ")[:2] for line in runs] == [
        [f"{i} of 3", precision] for i, precision in enumerate(PRECISIONS, start=1)
    ]
    for line, precision in zip(runs, PRECISIONS, strict=True):
        size = format_bytes((tmp_path / f"train.{precision}.ampmem").stat().st_size)
        assert re.search(
            rf": 2 steps, peak .*, in train\.{precision}\.ampmem, {re.escape(size)}(, about \d+ \w+ left)?$", line
        )
    assert written == f"ampmem: wrote page.html, {format_bytes((tmp_path / 'page.html').stat().st_size)}"
    page = (tmp_path / "page.html").read_text()
    assert all(f"{precision}</" in page or f"{precision}, " in page for precision in PRECISIONS)


def test_every_precision_hashes_and_draws_alike(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_OPTIMIZER.format(in_step="pass"))
    done = ampmem(
        tmp_path, "compare", "--files", "write", "--no-times", "--precision", "fp32,amp", "train.py", "seen", fresh=True
    )
    assert done.returncode == 0, done.stderr
    seen = [line.split(maxsplit=2) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [amp for _, amp, _ in seen] == ["False"] * 3 + ["True"] * 3  # a step ends with the next forward
    drawn = [rest for _, _, rest in seen]
    assert drawn[:3] == drawn[3:]


def test_the_table_has_the_bytes_of_the_recordings(tmp_path: Path) -> None:
    workload = ("-m", "ampmem.workloads.reuse", "--preset", "tiny", "--width", "64")
    done = ampmem(tmp_path, "compare", "--files", "write", "-o", "run", "--no-times", *workload)
    assert done.returncode == 0, done.stderr
    files = [f"run.{precision}.ampmem" for precision in PRECISIONS]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    shown = ampmem(tmp_path, "show", *files)
    assert shown.stdout == done.stdout
    details = ampmem(tmp_path, "show", "--marks", *files).stdout
    summaries = json.loads(ampmem(tmp_path, "show", "--json", *files).stdout)
    assert [summary["arm"]["name"] for summary in summaries] == list(PRECISIONS)
    steps = [summary["steps"][-1] for summary in summaries]
    instants = [[*step["marks"].values(), step["peak"]["categories"]] for step in steps]
    for category in ("parameters", "optimizer_state", "activations", "inputs"):
        found = [row for row in rows(details, category) if row.count("B ") == 3]
        for number, row in zip((3, 0, 1, 2), found, strict=True):
            sizes = [marks[number][category] for marks in instants]
            assert row == " ".join(f"{format_bytes(size)} {size / 16384:.2f}" for size in sizes), category
    copies = [marks[0]["cast_copies"] for marks in instants]
    assert copies == [0, 4 * 64 * 64 * 2, 7 * 64 * 64 * 2]
    assert rows(done.stdout, "step time") == []  # they were not timed
    assert rows(done.stdout, "activations vs fp32") == ["1.00x 0.67x 0.67x"]
    assert rows(done.stdout, "rule of thumb:") == ["under autocast activations take 0.5x of fp32's"]
    assert done.stdout.count("events, residual 0 B") == 3


@pytest.mark.parametrize(
    ("in_step", "failure", "steps", "shown"),
    [
        ("assert not amp, 'no amp'", "AssertionError: no amp", 0, "AssertionError: no amp"),
        ("if amp and step == 1: os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 1, "and complains 0"),
        ("if amp and step == 1: raise MemoryError", "MemoryError", 1, "the script speaks 0"),
        ("if amp: print('told so', file=sys.stderr); sys.exit(3)", "exit code 3", 0, "told so"),
        ("if amp: sys.exit()", "no backward was seen: ", 0, ""),
    ],
    ids=["raises", "killed", "out of memory", "exits", "records nothing"],
)
def test_a_precision_that_fails_is_a_column(tmp_path: Path, in_step: str, failure: str, steps: int, shown: str) -> None:
    write_training(tmp_path, in_step)
    done = ampmem(tmp_path, "compare", "--files", "write", "--no-times", "--precision", "amp,fp32", "train.py", "seen")
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0].startswith(f"1 of 2: amp: failed: {failure}")
    assert shown in "\n".join(line for line in said[1:-1] if line.startswith("    "))
    assert len(said) <= 12
    assert said[-1].startswith("2 of 2: fp32: 3 steps, peak ")
    assert (tmp_path / "train.amp.ampmem").exists() == bool(steps)
    assert len(read(tmp_path / "train.fp32.ampmem").steps) == 3
    kept = "; it recorded 1 step" if steps else ""
    assert any(line.startswith(f"amp failed: {failure}") and line.endswith(kept) for line in done.stdout.splitlines())
    size = f"{format_bytes(212 * 4)} 4.00"
    assert rows(done.stdout, "parameters")[0] == (f"{size} {size}" if steps else f"- - {size}")


def test_every_precision_may_fail(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_module\n")
    done = ampmem(tmp_path, "compare", "--files", "write", "--precision", "fp32,amp", "--html", "page.html", "train.py")
    assert done.returncode == 1
    assert done.stdout.count("failed: ModuleNotFoundError: No module named 'no_such_module'") == 2
    assert "page.html was not written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_times_that_cannot_be_had_are_a_failure(tmp_path: Path) -> None:
    write_training(tmp_path, "if step == 0 and os.path.exists(sys.argv[1]): raise RuntimeError('was here before')")
    done = ampmem(tmp_path, "compare", "--files", "write", "--precision", "amp", "--steps", "2", "train.py", "seen")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("1 of 1: amp: 2 steps, peak ")
    assert "1 of 1: amp: the timing run failed: RuntimeError: was here before" in done.stderr.splitlines()
    assert rows(done.stdout, "step time") == []


def test_an_earlier_recording_is_not_taken_for_one_that_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_module\n")
    (tmp_path / "train.amp.ampmem").write_text("of another day")
    done = ampmem(tmp_path, "compare", "--files", "write", "--force", "--precision", "amp", "train.py")
    assert done.returncode == 1
    assert not (tmp_path / "train.amp.ampmem").exists()


def test_wrong_use_is_one_line_before_anything_runs(tmp_path: Path) -> None:
    write_training(tmp_path)
    (tmp_path / "train.amp.ampmem").write_text("precious")
    (tmp_path / "page.html").write_text("precious")
    cases = {
        ("-o", "train", "train.py", "seen"): "train.amp.ampmem exists already",
        ("-o", "x", "--html", "page.html", "train.py", "seen"): "page.html exists already",
        ("-o", "no/x", "train.py", "seen"): "no does not exist",
        ("--precision", "fp32,tf32", "train.py"): "unknown precision 'tf32'; choose from as-is, fp32, amp, amp-nocache",
        ("--precision", "", "train.py"): "unknown precision ''",
        ("--precision", "fp32,fp32", "train.py"): "fp32 is given twice",
        ("--precision", "fp32", "--dtype", "bf16", "train.py"): "--dtype is the type that autocast casts to",
        ("missing.py",): "script not found: missing.py",
        ("-m", "no.such.module"): "cannot find module no.such.module",
    }
    for arguments, message in cases.items():
        said = refused(tmp_path, "compare", "--files", "write", *arguments)
        assert message in said and len(said.splitlines()) == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train.amp.ampmem", "train.py"]
    assert (tmp_path / "train.amp.ampmem").read_text() == (tmp_path / "page.html").read_text() == "precious"


def test_the_dtype_and_the_seed_reach_the_precisions(tmp_path: Path) -> None:
    write_training(tmp_path)
    arguments = ("--no-times", "--steps", "1", "--skip", "1", "--precision", "as-is,amp", "--dtype", "fp16")
    done = ampmem(tmp_path, "compare", "--files", "write", *arguments, "--seed", "7", "train.py", "seen")
    assert done.returncode == 0, done.stderr
    as_is, amp = (read(tmp_path / f"train.{precision}.ampmem").precision for precision in ("as-is", "amp"))
    assert (as_is.name, as_is.forced, as_is.dtype) == ("fp32", False, None)
    assert (amp.name, amp.forced, amp.dtype) == ("amp", True, "float16")
    seven = (tmp_path / "seen").read_text().splitlines()
    done = ampmem(
        tmp_path, "compare", "--files", "write", *arguments, "--force", "--precision", "amp", "train.py", "seen"
    )
    zero = (tmp_path / "seen").read_text().splitlines()[2:]
    assert [line.split()[0] for line in seven + zero] == ["0"] * 3
    digests = [{line.split()[2] for line in lines} for lines in (seven, zero)]
    assert list(map(len, digests)) == [1, 1] and digests[0] != digests[1]


def test_progress_changes_in_place_on_a_terminal(tmp_path: Path) -> None:
    write_training(tmp_path)
    reader, terminal = pty.openpty()
    command = [
        ready_python(),
        "-m",
        "ampmem",
        "compare",
        "--files",
        "write",
        "--precision",
        "amp",
        "--steps",
        "2",
        "train.py",
        "seen",
    ]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, timeout=120, check=True)
    os.close(terminal)
    shown = os.read(reader, 1 << 20).decode()
    os.close(reader)
    parts = shown.split("\r\x1b[K")
    at = "1 of 1: amp: "
    assert parts[:5] == ["", f"{at}starting", f"{at}step 1 of 2", f"{at}step 2 of 2", f"{at}timing"]
    assert parts[5].startswith(f"{at}2 steps, peak ") and parts[5].endswith("KiB\r\n")
    assert parts[6:] == [""]


def test_ctrl_c_waits_for_the_precision_and_names_what_is_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reached")
    reached = os.open(tmp_path / "reached", os.O_RDONLY | os.O_NONBLOCK)
    in_step = "if amp and step == 1: print(file=open('reached', 'w'), flush=True); signal.pause()"
    (tmp_path / "train.py").write_text(WITHOUT_OPTIMIZER.format(in_step=in_step))
    command = [sys.executable, "-m", "ampmem", "compare", "--files", "write", "--no-times", "train.py", "seen"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    there, _, _ = select.select([reached], [], [], 120)
    os.close(reached)
    assert there
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-2:] == [
        "ampmem: recordings that exist: train.fp32.ampmem, train.amp.ampmem",
        "ampmem: interrupted",
    ]
    assert [len(read(tmp_path / f"train.{precision}.ampmem").steps) for precision in ("fp32", "amp")] == [3, 1]
    assert not (tmp_path / "train.amp-nocache.ampmem").exists()


def test_much_output_and_what_a_script_leaves_behind_block_nothing(tmp_path: Path) -> None:
    flood = (
        "if step == 0: import subprocess; open('left', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "    [print('x' * 1000, file=stream) for stream in (sys.stdout, sys.stderr) for _ in range(2000)]"
    )
    write_training(tmp_path, flood)
    done = ampmem(tmp_path, "compare", "--files", "write", "--no-times", "--precision", "fp32", "train.py", "seen")
    assert done.returncode == 0, done.stderr
    assert "x" * 100 not in done.stdout + done.stderr
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)  # not waited for, and still there


SHADOWING = """
import json, sys
import helper
with open("path.json", "w") as out:
    json.dump([sys.path, helper.__file__], out)
import torch
model = torch.nn.Linear(2, 2)
for _ in range(4):  # a step ends with the next forward
    model(torch.randn(1, 2)).sum().backward()
"""


@pytest.mark.parametrize("safe", [False, True])
def test_files_named_like_other_modules_disturb_nothing(tmp_path: Path, safe: bool) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(SHADOWING)
    (elsewhere / "helper.py").write_text("")
    for folder in (home, elsewhere):
        for name in ("random.py", "click.py", "logging.py", "ampmem.py"):
            (folder / name).write_text("raise ImportError('the wrong one')")
    command = tmp_path / "ampmem"  # what pip installs
    command.write_text("import sys\nfrom ampmem.cli.main import main\nsys.exit(main())\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1" * safe}
    arguments = ("compare", "--files", "write", "--no-times", "--precision", "fp32", "../elsewhere/train.py")
    done = subprocess.run(
        [sys.executable, command, *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, helper = json.loads((home / "path.json").read_text())
    assert helper == str(elsewhere / "helper.py")
    assert path[0] == str(elsewhere)
    assert str(home) not in path and "" not in path and os.devnull not in path
    assert set(filter(None, sys.path)) <= set(path)
