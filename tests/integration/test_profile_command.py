"""``ampmem profile`` on scripts that end well, fail, are interrupted or killed: the script is a guest."""

import fcntl
import os
import pickle
import pty
import re
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest
import torch
from support.command_line import refused
from support.commands import ampmem, python
from support.ready_python import ready_python

from ampmem import profile
from ampmem.analysis.summary import summarize
from ampmem.errors import UsageError
from ampmem.recording import read
from ampmem.units import format_bytes

TRAINING = """
import os, signal, sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1]))
    optimizer.zero_grad()
    loss.backward()
    if step == 2:
        {in_third_step}
    optimizer.step()
    print(step, loss.item(), torch.rand(1).item(), flush=True)
print("end of script")
"""


def write_training(folder: Path, in_third_step: str = "pass") -> Path:
    script = folder / "train.py"
    script.write_text(TRAINING.format(in_third_step=in_third_step))
    return script


def test_an_allocator_that_torch_refuses_says_what_to_do(tmp_path: Path) -> None:
    error = (
        "config[i] == get()->name() INTERNAL ASSERT FAILED. Allocator backend parsed at runtime != allocator backend "
    )
    (tmp_path / "train.py").write_text(
        f"raise RuntimeError({error + 'parsed at load time, cudaMallocAsync != native'!r})\n"
    )
    done = ampmem(tmp_path, "profile", "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ampmem: the script failed before a step had finished: nothing was recorded; the script sets an allocator "
        "backend (PYTORCH_CUDA_ALLOC_CONF) after ampmem has imported torch, and only PyTorch's own allocator can be "
        "recorded: remove the backend from the script's settings"
    )


def test_stops_after_the_steps_asked_for_and_names_the_recording(tmp_path: Path) -> None:
    write_training(tmp_path)
    plain = python(tmp_path, "train.py")
    done = ampmem(tmp_path, "profile", "--steps", "2", "--html", "train.html", "--snapshot", "run.pickle", "train.py")
    assert done.returncode == 0
    size = format_bytes((tmp_path / "train.ampmem").stat().st_size)
    assert f"ampmem: recorded 2 steps in train.ampmem, {size}, and stopped the script" in done.stderr
    page_size = format_bytes((tmp_path / "train.html").stat().st_size)
    snapshot_size = format_bytes((tmp_path / "run.pickle").stat().st_size)
    assert done.stderr.splitlines()[-2:] == [
        f"ampmem: wrote train.html, {page_size}",
        f"ampmem: wrote run.pickle, {snapshot_size}",
    ]
    said = {
        row.get("user_metadata") for row in pickle.loads((tmp_path / "run.pickle").read_bytes())["device_traces"][0]
    }
    assert "parameters: 0.weight" in said
    assert "conservation: " in done.stderr and ", residual 0 B" in done.stderr
    assert "step 1 of 2" not in done.stderr  # progress is for terminals
    assert (tmp_path / "train.html").read_text().startswith("<!DOCTYPE html>")
    assert [step.index for step in read(tmp_path / "train.ampmem").steps] == [0, 1]
    # The stop comes with the second update: what the script printed until then is bit-identical.
    assert done.stdout.splitlines() == plain.stdout.splitlines()[:1]


def test_a_last_step_that_is_seen_at_the_scripts_end_stops_nothing(tmp_path: Path) -> None:
    """Gradients of torch.func end a step with the next forward, or with the script."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 4)\n"
        "params = {name: value.detach() for name, value in model.named_parameters()}\n"
        "def loss(params, x):\n"
        "    return torch.func.functional_call(model, params, (x,)).sum()\n"
        "for _ in range(3):\n"
        "    torch.func.grad(loss)(params, torch.randn(2, 8))\n"
    )
    done = ampmem(tmp_path, "profile", "train.py")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(read(tmp_path / "train.ampmem").steps) == 3


def test_run_to_end_leaves_output_losses_and_random_numbers_as_they_are(tmp_path: Path) -> None:
    write_training(tmp_path)
    plain = python(tmp_path, "train.py", to_the_end=True)
    done = ampmem(tmp_path, "profile", "--steps", "2", "--run-to-end", "train.py", to_the_end=True)
    flat = " ".join(done.stderr.split())
    assert "The peak of the recorded steps is" in flat
    assert "note: the script ran on after the recorded steps: what came then is in none of these numbers" in flat
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert len(read(tmp_path / "train.ampmem").steps) == 2


def test_progress_shows_on_a_terminal_and_leaves_the_scripts_lines_whole(tmp_path: Path) -> None:
    """The script leaves lines open on both streams, and draws a bar over itself, whenever ampmem has a line to say."""
    said = """print("whole", step, flush=True)
    for stream in (sys.stderr, sys.stdout)[:: 1 - 2 * (step % 2)]:
        print(f"\\r{stream.name} {step}", end="", file=stream, flush=True)"""
    script = write_training(tmp_path)
    text = script.read_text().replace("print(step, loss.item(), torch.rand(1).item(), flush=True)", said)
    script.write_text(text.replace('print("end of script")', 'print("end of script", end="")'))
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 80, 0, 0))
    command = [ready_python(), "-m", "ampmem", "profile", "--steps", "2", "--run-to-end", "train.py"]
    subprocess.run(command, cwd=tmp_path, stdout=terminal, stderr=terminal, timeout=120, check=True)
    os.close(terminal)
    picture = on_a_screen(os.read(reader, 1 << 20).decode(), columns=80, rows=6)
    os.close(reader)
    begun, ended = picture.index("ampmem: step 1 of 2"), picture.index("<stderr> 3end of script")
    assert picture[begun - 1 : ended] == [
        "ampmem: recording to train.ampmem",
        "ampmem: step 1 of 2",
        "whole 0",
        "ampmem: step 2 of 2",  # above the line that the script goes on with
        "<stdout> 0whole 1",  # over "<stderr> 0"
        "<stderr> 1whole 2",
        "<stdout> 2whole 3",
    ]
    assert picture[ended + 1].startswith("ampmem: recorded 2 steps in train.ampmem")


def on_a_screen(written: str, *, columns: int, rows: int) -> list[str]:
    """The lines that a terminal of this size shows at the end, and those that it has scrolled away; without styles."""
    lines, row, column, saved = [""], 0, 0, (0, 0)
    for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\x1b.|.|\n", written):
        if piece == "\n" or (len(piece) == 1 and piece != "\r" and column == columns):
            # The cursor waits behind a full line. A newline comes with a carriage return of the terminal's own.
            row, column = row + 1, column if piece == "\n" else 0
        elif piece == "\x1bD":
            row += 1
        elif piece == "\x1b7":
            saved = row, column
        elif piece == "\x1b8":
            row, column = saved
        elif found := re.fullmatch(r"\x1b\[(\d+)([ABL])", piece):
            count = int(found[1])
            row += {"A": -count, "B": count, "L": 0}[found[2]]
            if found[2] == "L":
                shown = max(len(lines) - rows, 0)
                lines[row:row] = [""] * count
                del lines[shown + rows :]
        lines += [""] * (row + 1 - len(lines))
        if piece == "\r":
            column = 0
        elif piece == "\x1b[K":
            lines[row] = lines[row][:column]
        elif len(piece) == 1 and piece != "\n":
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


TRAINS = """
import torch
device = {device}
model = torch.nn.Linear(8, 8).to(device)
for _ in range(3):
    model(torch.randn(4, 8, device=device)).sum().backward()
"""


EITHER = "'cuda' if torch.cuda.is_available() else 'cpu'"
ON_THE_CPU = "the memory is the CPU's, because torch sees no GPU: {command}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("'cuda'", "the script failed before a step had finished: nothing was recorded; torch sees no GPU: {command}"),
        (EITHER, ON_THE_CPU),
        ("'cpu'", "recording to train.ampmem"),
    ],
)
def test_a_script_for_a_gpu_that_is_not_there_gets_the_command_that_simulates_one(
    tmp_path: Path, device: str, told: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINS.format(device=device), encoding="utf-8")
    done = ampmem(tmp_path, "profile", "train.py", "--name", "two words")
    command = "ampmem profile --gpu 24GiB train.py --name 'two words' simulates one"
    assert f"ampmem: {told.format(command=command)}" in done.stderr.splitlines()
    assert ("simulates one" in done.stderr) == ("{command}" in told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "simulates"),
    [("watch", "profile"), ("check --budget peak=1GiB", "profile"), ("compare --precision fp32 --no-times", "compare")],
)
def test_each_command_says_once_and_first_that_it_records_the_cpu_for_want_of_a_gpu(
    tmp_path: Path, words: str, simulates: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINS.format(device=EITHER), encoding="utf-8")
    done = ampmem(tmp_path, *words.split(), "train.py", "--name", "two words")
    said = f"ampmem: {ON_THE_CPU}".format(
        command=f"ampmem {simulates} --gpu 24GiB train.py --name 'two words' simulates one"
    )
    lines = [line for line in done.stderr.splitlines() if "leave your files" not in line]
    assert (done.returncode, lines[0], done.stderr.count("simulates one")) == (0, said, 1)


def test_skip_passes_steps_before_recording(tmp_path: Path) -> None:
    write_training(tmp_path)
    done = ampmem(tmp_path, "profile", "--skip", "1", "--steps", "2", "train.py")
    assert done.returncode == 0
    assert [step.index for step in read(tmp_path / "train.ampmem").steps] == [1, 2]


@pytest.mark.parametrize(
    ("in_third_step", "code", "last_line"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(41)", 41, None),
        ("sys.exit('told so')", 1, "told so"),
    ],
    ids=["raises", "exits", "exits with a message"],
)
def test_a_failing_script_keeps_its_exit_code_and_its_steps(
    tmp_path: Path, in_third_step: str, code: int, last_line: str | None
) -> None:
    write_training(tmp_path, in_third_step)
    plain = python(tmp_path, "train.py")
    done = ampmem(tmp_path, "profile", "train.py")
    assert plain.returncode == done.returncode == code
    assert done.stdout == plain.stdout
    assert "2 finished steps are in train.ampmem" in done.stderr
    assert [step.index for step in read(tmp_path / "train.ampmem").steps] == [0, 1]
    if last_line is not None:
        assert last_line in done.stderr.splitlines()


def test_the_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    write_training(tmp_path, "model(torch.randn(2, 9))")
    done = ampmem(tmp_path, "profile", "train.py")
    trace = done.stderr[done.stderr.index("Traceback") : done.stderr.index("ampmem: the script failed")]
    assert f'File "{tmp_path / "train.py"}", line' in trace.splitlines()[1]
    # Torch 2.15 begins with the name of the op.
    said = r"^RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied \(2x9 and 8x16\)$"
    assert re.search(said, trace, re.MULTILINE)
    package = str(Path(__file__).parents[2] / "ampmem")
    assert package not in trace and "_ops.py" not in trace and "runpy" not in trace


def test_ctrl_c_ends_the_script_as_it_would(tmp_path: Path) -> None:
    write_training(tmp_path, "os.kill(os.getpid(), signal.SIGINT)")
    done = ampmem(tmp_path, "profile", "train.py")
    # What Python does with a KeyboardInterrupt that nobody caught: it dies of the signal itself.
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
    assert len(read(tmp_path / "train.ampmem").steps) == 2
    assert "\nthe peak by category: step " in done.stderr
    assert "\nampmem: interrupted after 2 steps; what was recorded is in train.ampmem, " in done.stderr


def test_sigkill_leaves_the_finished_steps(tmp_path: Path) -> None:
    write_training(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    done = ampmem(tmp_path, "profile", "train.py")
    assert done.returncode == -signal.SIGKILL
    assert "recording to train.ampmem" in done.stderr
    recording = read(tmp_path / "train.ampmem")
    assert [step.index for step in recording.steps] == [0, 1]
    assert ampmem(tmp_path, "show", "train.ampmem").returncode == 0


def test_runs_as_python_would(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("")
    (package / "main.py").write_text(
        "import sys, os\n"
        "print(__name__, sys.argv, sys.path[0], os.getcwd(), __file__, __package__, __spec__ and __spec__.name)\n"
        "print(sys.modules['__main__'].__dict__ is globals())\n"
    )
    for target in (["pkg/main.py", "-x", "--steps", "9"], ["-m", "pkg.main", "-x", "--steps", "9"]):
        plain = python(tmp_path, *target, fresh=True)
        done = ampmem(tmp_path, "profile", "-o", "out.ampmem", *target)
        assert done.stdout == plain.stdout
        assert done.returncode == 1  # it trains nothing, and says so
        assert "ampmem: no model was seen" in done.stderr
        assert not (tmp_path / "out.ampmem").exists()


NO_BACKWARD = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(1, 2))
"""
INFERENCE = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(64, 128, device=device)
batch, results = torch.ones(100, 64, device=device), []
for _ in range(5):
    with torch.no_grad():
        results.append(model(batch))
"""
EVALUATION = """
import torch
model = torch.nn.Linear(64, 128)
optimizer = torch.optim.Adam(model.parameters())
batch = torch.ones(100, 64)
def evaluate():
    results = []
    for _ in range(5):
        with torch.no_grad():
            results.append(model(batch))
for epoch in range(2):
    for _ in range(2):
        model(batch).sum().backward()
        optimizer.step()
    evaluate()
print("done")
"""
NO_STEP = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(1, 2)).sum().backward()
"""
OWN_PROFILER = """
import torch
with torch.profiler.profile():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
print("done")
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NO_BACKWARD, "no backward was seen"),
        (NO_STEP, "no step ended"),
        (OWN_PROFILER, "the script started torch.profiler"),
    ],
    ids=["no backward", "no step", "torch.profiler in the script"],
)
def test_nothing_to_show_is_an_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "script.py").write_text(source)
    done = ampmem(tmp_path, "profile", "script.py")
    assert done.returncode == 1
    assert done.stdout == python(tmp_path, "script.py").stdout
    assert [line for line in done.stderr.splitlines() if message in line]
    assert not (tmp_path / "script.ampmem").exists()


@pytest.mark.parametrize("gpu", [(), ("--gpu", "h100")], ids=["cpu", "simulated"])
def test_a_script_without_backward_is_recorded_as_inference(tmp_path: Path, gpu: tuple[str, ...]) -> None:
    (tmp_path / "infer.py").write_text(INFERENCE)
    done = ampmem(tmp_path, "profile", *gpu, "--steps", "4", "infer.py")
    assert done.returncode == 0, done.stderr
    assert "; then the script ended" in done.stderr and "stopped the script" not in done.stderr
    recording = read(tmp_path / "infer.ampmem")
    summary = summarize(recording)
    assert (recording.run.step_on, len(recording.steps)) == ("forward", 4)
    assert [step.batch_size for step in recording.steps] == [100] * 4
    assert [note for note in recording.notes if "no backward ran, so this is a recording of inference" in note]
    kept = [step.peak.categories["kept_predictions"] for step in summary.steps]
    assert kept == [each * 100 * 128 * 4 for each in range(1, 5)]  # its own result among them
    assert summary.conservation.residual_bytes == 0


def test_an_evaluation_alone_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATION)
    done = ampmem(tmp_path, "profile", "--phase", "evaluation", "--skip", "1", "--steps", "9", "train.py")
    assert (done.returncode, "done" in done.stdout) == (0, False)  # the training after it ends the recording
    assert "recorded 4 steps in " in done.stderr and "; then the evaluation was over" in done.stderr
    recording = read(tmp_path / "train.ampmem")
    summary = summarize(recording)
    assert (recording.run.step_on, len(recording.steps)) == ("evaluation", 4)
    result, weights = 100 * 128 * 4, (64 + 1) * 128 * 4
    (finding,) = [each for each in summary.findings if each.code == "predictions-kept"]
    assert (finding.bytes, finding.off_peak) == (3 * result, 3 * result)
    assert "the local variable `results` of evaluate (train.py:7)" in finding.message
    peak = summary.peak.categories
    assert (peak["kept_predictions"], peak["gradients"], peak["parameters"]) == (3 * result, weights, weights)


def test_a_phase_that_cannot_be_recorded_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown phase 'training'; the only one .* is evaluation"):
        profile(phase="training")


def test_a_script_without_an_evaluation_says_so(tmp_path: Path) -> None:
    write_training(tmp_path)
    done = ampmem(tmp_path, "profile", "--phase", "evaluation", "train.py")
    assert done.returncode == 1
    assert "no evaluation was seen: no model that is trained ran in eval mode, or with gradients off" in done.stderr


def test_wrong_use_is_one_line_before_anything_runs(tmp_path: Path) -> None:
    write_training(tmp_path)
    (tmp_path / "there.ampmem").write_text("precious")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    cases = {
        ("missing.py",): "script not found: missing.py",
        (".",): ". is a directory",
        ("data.bin",): "data.bin is not a Python script",
        ("-m", "no.such.module"): "cannot find module no.such.module",
        ("-o", "there.ampmem", "train.py"): "there.ampmem exists already",
        ("-o", "nowhere/x.ampmem", "train.py"): "nowhere does not exist",
        ("-o", ".", "train.py"): "it is a directory",
    }
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        cases[("-o", "closed/x.ampmem", "train.py")] = "no permission"
    for arguments, message in cases.items():
        said = refused(tmp_path, "profile", *arguments)
        assert message in said and len(said.splitlines()) == 1, said
    assert (tmp_path / "there.ampmem").read_text() == "precious"


def test_a_second_recording_takes_the_next_number(tmp_path: Path) -> None:
    write_training(tmp_path)
    (tmp_path / "train.ampmem").write_text("precious")
    command = [ready_python(), "-m", "ampmem", "profile", "--steps", "1", "train.py"]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    taken = "train.ampmem exists already (--force replaces it)"
    for name in ("train.2.ampmem", "train.3.ampmem"):
        assert len(read(tmp_path / name).steps) == 1
        assert sum(f"ampmem: recording to {name}; {taken}" in each.splitlines() for each in said) == 1
        assert sum(f"recorded 1 step in {name}, " in each for each in said) == 1
        assert sum(f"next: ampmem report {name} " in each for each in said) == 1
    assert (tmp_path / "train.ampmem").read_text() == "precious"
    done = ampmem(tmp_path, "profile", "--quiet", "--steps", "2", "--force", "train.py")
    assert done.stderr.splitlines()[0] == "ampmem: recording to train.ampmem"
    assert [len(read(path).steps) for path in sorted(tmp_path.glob("*.ampmem"))] == [1, 1, 2]


def test_what_is_not_recorded_leaves_no_file_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing')")
    (tmp_path / "train.ampmem").write_text("precious")
    for arguments in (["train.py"], ["--device", "cuda", "train.py"]):
        assert ampmem(tmp_path, "profile", *arguments).returncode != 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["train.ampmem", "train.py"]
    assert (tmp_path / "train.ampmem").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--steps", "5"), "; --steps is an option of ampmem: write it before train.py"),
        (("--gpu=h100",), "; --gpu is an option of ampmem: write it before train.py"),
        (("--bach-size", "5"), ""),
        (("--step", "5"), ""),
        (("--skip", "x"), ""),
    ],
    ids=" ".join,
)
def test_an_option_of_ampmems_after_the_script_is_told_where_the_script_refuses_it(
    tmp_path: Path, arguments: tuple[str, ...], hint: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int)\n"
        "parser.add_argument('--skip', type=int)\n"
        "parser.parse_args()\n"
    )
    done = ampmem(tmp_path, "profile", "train.py", *arguments)
    assert done.returncode == 2
    said = f"ampmem: the script failed before a step had finished: nothing was recorded{hint}"
    assert done.stderr.splitlines()[-1] == said
