"""A CUDA script that runs out of memory on a simulated GPU: what is kept, wherever it strikes."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.commands import ampmem

from ampmem.analysis.out_of_memory import FailedRequest, ToCome
from ampmem.analysis.summary import Summary, summarize
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Recording
from ampmem.recording import read

pytestmark = pytest.mark.slow

BATCH, WIDE, MANY = 64, 512, 1024
"""The model is a layer from WIDE to MANY and one back."""

SCRIPT = f"""
import sys, torch
from torch import nn

mode = sys.argv[1]
step = None

def boom(where):
    if mode == where:
        torch.empty(1 << (33 if mode == "limit" else 32), dtype=torch.uint8, device="cuda")

class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        boom(f"backward {{step}}")
        return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({WIDE}, {MANY}), nn.Linear({MANY}, {WIDE})

    def forward(self, x):
        x = Boom.apply(self.up(x))
        boom(f"forward {{step}}")
        return self.down(x)

def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()

if mode == "limit":
    torch.cuda.set_per_process_memory_fraction(0.25)
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
boom("setup")
boom("limit")
if mode == "optimizer":
    big = nn.Linear(8192, 8192, bias=False)  # 256 MiB: its gradient still fits, its state does not
    model.down, model.up = nn.Identity(), nn.Sequential(model.up, nn.Linear({MANY}, 8192), big).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(3):
    x = torch.randn({BATCH}, {WIDE}).cuda()
    try:
        train(model, optimizer, x)
    except torch.OutOfMemoryError:
        if "--exit" in sys.argv:
            sys.exit(3)
        if "--catch" not in sys.argv:
            raise
        mode = "none"
        train(model, optimizer, x)
    print("step", step)
x = optimizer = None
with torch.no_grad():
    made = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    boom("later")
"""
MOVED = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(40))).cuda()
"""
PARAMETERS = 4 * (2 * WIDE * MANY + WIDE + MANY)
INPUTS = 4 * BATCH * WIDE


def run(folder: Path, *arguments: str, gpu: str = "592MiB", options: tuple[str, ...] = ()) -> CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return ampmem(folder, "profile", "--device", "sim", "--gpu", gpu, *options, "train.py", *arguments)


def failed(folder: Path, *arguments: str, gpu: str = "592MiB") -> tuple[Recording, Summary, FailedRequest]:
    """What is told of a run that dies."""
    done = run(folder, *arguments, gpu=gpu)
    assert done.returncode == 1, done.stderr
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    said = (
        r"script failed: out of memory; .*what was recorded until then,? (is|are) in train\.ampmem, [0-9.]+ [KM]iB \("
    )
    assert re.search(said, done.stderr)
    recording = read(folder / "train.ampmem")
    summary = summarize(recording)
    assert summary.out_of_memory is not None
    assert summary.out_of_memory.residual_bytes == summary.conservation.residual_bytes == 0
    assert summary.out_of_memory.ended_the_run
    assert not summary.steps[-1].finished
    return recording, summary, summary.out_of_memory


def alive(oom: FailedRequest) -> dict[Category, int]:
    """What was alive, but for cuBLAS's workspaces, which differ between GPUs."""
    assert sum(oom.alive.values()) <= oom.reserved
    assert oom.device_total == oom.device_free + oom.reserved + (oom.outside or 0)
    return {category: oom.alive[category] for category in CATEGORIES if oom.alive[category] and category != "workspace"}


def line(text: str) -> int:
    """The number of the script's line that begins so."""
    lines = SCRIPT.splitlines()
    return next(number for number, each in enumerate(lines, start=1) if each.strip().startswith(text))


def test_in_setup_there_is_a_step_that_never_began(tmp_path: Path) -> None:
    _, summary, oom = failed(tmp_path, "setup")
    assert alive(oom) == {"parameters": PARAMETERS}
    assert (oom.where, oom.step, oom.module) == ("setup", 0, None)
    assert oom.stack[-1] == f"{tmp_path / 'train.py'}:{line('torch.empty')} boom"
    assert (oom.asked, oom.reason) == (1 << 32, "exhausted")
    assert oom.lacking == (1 << 32) - oom.device_free
    assert oom.to_come == ToCome(
        gradients=PARAMETERS, parameters=4, optimizer_state=2 * PARAMETERS, optimizers=("Adam",)
    )
    assert (summary.steps[0].peak.bytes, summary.steps[0].peak.phase) == (PARAMETERS, "setup")
    assert summary.static_recipe is None and summary.parameters.bytes == PARAMETERS
    assert [finding.code for finding in summary.findings] == ["out-of-memory"]


def test_a_limit_of_the_process_is_told_apart_from_the_device(tmp_path: Path) -> None:
    done = run(tmp_path, "limit", gpu="32GiB")
    assert done.returncode == 1, done.stderr
    oom = summarize(read(tmp_path / "train.ampmem")).out_of_memory
    assert oom is not None
    assert (oom.device_total, oom.allowed, oom.reason) == (32 << 30, 8 << 30, "limited")
    assert oom.lacking == oom.reserved  # all of the limit was asked for
    text = " ".join(done.stderr.split())
    assert "0 B" not in text.partition("missing")[2].partition(" by ")[0] and "that this process may use" in text
    assert alive(oom) == {"parameters": PARAMETERS}


def test_within_the_limit_the_verdict_is_of_the_limit(tmp_path: Path) -> None:
    """The limit of a quarter leaves 8 GiB of the device, and the run needs 40 MiB."""
    script = SCRIPT.replace('boom("limit")', "")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "32GiB", "train.py", "limit")
    assert done.returncode == 0, done.stderr
    prediction = summarize(read(tmp_path / "train.ampmem")).prediction
    assert prediction is not None and prediction.allowed == 8 << 30 and prediction.limited
    assert prediction.margin == (8 << 30) - prediction.at_peak_reserved.reserved
    text = " ".join(done.stderr.split())
    assert "it fits, with 8.0 GiB to spare of the 8.0 GiB that this process may use" in text
    assert "the prediction for a GPU of 32.0 GiB, of which this process may use 8.0 GiB" in text


def test_while_the_model_is_moved_bytes_are_divided_by_what_is_there(tmp_path: Path) -> None:
    """Of 40 layers of 16 MiB each there is room for 16: 336 MiB less 80 MiB for the context."""
    (tmp_path / "train.py").write_text(MOVED, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "336MiB", "train.py")
    assert done.returncode == 1, done.stderr
    oom = summarize(read(tmp_path / "train.ampmem")).out_of_memory
    assert oom is not None
    assert (oom.parameters_there, oom.alive[Category.PARAMETERS], oom.where) == (16 << 22, 256 << 20, "setup")
    told = " ".join(done.stderr.split())
    assert f"{oom.parameters_there:,} of {40 << 22:,} were on the device by then" in told
    assert re.search(r"parameters [0-9.]+ MiB 100 % 4\.00", told)
    # As much of gradients, twice that of Adam's state, and its temporaries: 3.1 GiB; the rtx4060 has 8.
    assert "ampmem profile --device sim --gpu rtx4060 train.py" in told
    checked = ampmem(tmp_path, "check", "--budget", "peak=1TiB", "train.ampmem")
    assert checked.stdout.startswith("train.ampmem: not judged: memory ran out in setup: how much the run")
    assert "kept" not in checked.stdout


def test_after_the_recorded_steps_it_is_one_story(tmp_path: Path) -> None:
    done = run(tmp_path, "later", options=("--run-to-end", "--html", "page.html"))
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "page.html").exists()
    recording = read(tmp_path / "train.ampmem")
    summary = summarize(recording)
    oom = summary.out_of_memory
    assert oom is not None and oom.later and oom.ended_the_run and summary.ended_by is oom
    found = {category: size for category, size in oom.alive.items() if size and category != "workspace"}
    # The optimizer and the batch were let go, and 1 MiB was made; of both no event was recorded.
    assert found == {"parameters": PARAMETERS, "gradients": PARAMETERS, "other": 1 << 20}
    assert (oom.residual_bytes, oom.step, oom.to_come) == (0, None, None)
    assert oom.stack[-1] == f"{tmp_path / 'train.py'}:{line('torch.empty(1 << (33')} boom"
    text = " ".join(done.stderr.split())
    assert "out of memory in the run after the recorded steps: the run ended here" in text
    assert "the script failed after the recorded steps; 3 steps and the request that failed later are in" in text
    assert "--run-to-end train.py later" in text
    shown = " ".join(ampmem(tmp_path, "show", "train.ampmem").stdout.split())
    assert "in the run after the recorded steps" in shown and "for the whole run" not in shown
    assert "The whole run" not in shown and "Largest saving" not in shown
    checked = ampmem(tmp_path, "check", "--budget", "peak=1TiB", "train.ampmem")
    assert "memory ran out in the run after the recorded steps: how much the run" in checked.stdout


def test_in_forward_what_forward_made_are_activations(tmp_path: Path) -> None:
    _, summary, oom = failed(tmp_path, "forward 0")
    assert alive(oom) == {"parameters": PARAMETERS, "inputs": INPUTS, "activations": 4 * BATCH * MANY}
    assert (oom.where, oom.module, oom.op) == ("forward of step 0", "(model)", "aten::empty")
    assert oom.stack[-2].endswith("Net.forward")
    assert summary.steps[0].marks.after_forward is None
    assert {module.name: module.parameters for module in summary.modules}["(model)"] == PARAMETERS
    assert sum(group.bytes for group in summary.activations) == 4 * BATCH * MANY
    assert oom.to_come is not None
    assert (oom.to_come.gradients, oom.to_come.optimizer_state) == (PARAMETERS, 2 * PARAMETERS)
    sizes = [(item.bytes, item.dtype, item.shape) for item in oom.largest if item.category != "workspace"]
    assert sizes[:2] == [(4 * WIDE * MANY, "float32", (MANY, WIDE)), (4 * WIDE * MANY, "float32", (WIDE, MANY))]


def test_in_backward_the_gradients_that_are_there_count(tmp_path: Path) -> None:
    _, summary, oom = failed(tmp_path, "backward 0")
    found = alive(oom)
    assert found.pop(Category.ACTIVATIONS) == 4  # the loss; what the second layer saved is gone
    assert found == {
        "parameters": PARAMETERS,
        "inputs": INPUTS,
        "gradients": 4 * (WIDE * MANY + WIDE),
        "temporaries": 4 * BATCH * MANY + 4,  # what flows back, and the gradient of the loss itself
    }
    assert oom.temporaries_by_phase["backward"] == found[Category.TEMPORARIES]
    assert oom.to_come is not None
    assert (oom.to_come.gradients, oom.to_come.optimizer_state) == (4 * (WIDE * MANY + MANY), 2 * PARAMETERS)
    assert oom.op == "BoomBackward" and oom.where == "backward of step 0"
    assert summary.steps[0].marks.after_forward is not None
    assert summary.steps[0].marks.after_backward is None
    assert summary.static_recipe is None


def test_in_the_first_update_the_state_that_is_there_counts(tmp_path: Path) -> None:
    recording, summary, oom = failed(tmp_path, "optimizer", gpu="918MiB")
    first = 4 * (WIDE * MANY + MANY)
    middle = 4 * (MANY * 8192 + 8192)
    big = 4 * 8192 * 8192
    found = alive(oom)
    assert found.pop(Category.INPUTS) == INPUTS
    assert found.pop(Category.ACTIVATIONS) == 4
    assert found == {
        "parameters": first + middle + big,
        "gradients": first + middle + big,
        "optimizer_state": 2 * (first + middle),
    }
    assert oom.asked == big and oom.op == "Adam.step" and oom.where == "the optimizer's update of step 0"
    assert oom.to_come is not None
    assert (oom.to_come.gradients, oom.to_come.optimizer_state) == (0, 2 * big)
    assert [record.class_name for record in recording.optimizers] == ["Adam"]
    marks = summary.steps[0].marks
    assert marks.after_backward is not None and marks.after_optimizer is None
    assert {row.mark for row in summary.static_model} == {"after_forward", "after_backward"}


def test_in_a_later_step_the_steps_before_are_whole(tmp_path: Path) -> None:
    _, summary, oom = failed(tmp_path, "forward 1")
    assert [(step.index, step.finished) for step in summary.steps] == [(0, True), (1, False)]
    assert alive(oom) == {
        "parameters": PARAMETERS,
        "optimizer_state": 2 * PARAMETERS,
        "inputs": INPUTS,
        "activations": 4 * BATCH * MANY,
    }
    assert oom.step == 1
    assert oom.to_come is not None
    assert (oom.to_come.gradients, oom.to_come.optimizer_state) == (PARAMETERS, 0)
    assert summary.last_step.index == 0
    assert {row.mark for row in summary.static_model} == {"after_forward", "after_backward", "after_optimizer"}
    shown = ampmem(tmp_path, "show", "train.ampmem")
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 100
    assert "out of memory in forward of step 1: the run ended here" in shown.stdout
    assert shown.stdout.index("out of memory in forward") < shown.stdout.index("\nsteps\n")


def test_a_script_that_catches_it_and_goes_on_has_steps_as_ever(tmp_path: Path) -> None:
    done = run(tmp_path, "forward 1", "--catch")
    assert done.returncode == 0, done.stderr
    summary = summarize(read(tmp_path / "train.ampmem"))
    assert [step.finished for step in summary.steps] == [True, True, True]
    oom = summary.out_of_memory
    assert oom is not None and not oom.ended_the_run
    assert (oom.step, oom.phase, oom.residual_bytes) == (1, "forward", 0)
    assert "out of memory in forward of step 1: the script went on" in done.stderr


def test_a_script_that_catches_it_and_ends_keeps_its_exit_code(tmp_path: Path) -> None:
    done = run(tmp_path, "forward 0", "--exit", options=("--quiet", "--html", "page.html"))
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "page.html").exists()
    shown = ampmem(tmp_path, "show", "--json", "train.ampmem")
    value = json.loads(shown.stdout)
    assert value["out_of_memory"]["ended_the_run"]
    assert [step["finished"] for step in value["steps"]] == [False]


def test_a_precision_that_runs_out_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    options = ("--device", "sim", "--gpu", "592MiB", "--precision", "fp32")
    done = ampmem(tmp_path, "compare", *options, "train.py", "setup")
    assert done.returncode == 1
    assert "0 steps, peak 4.0 MiB, in train.fp32.ampmem" in done.stderr
    told = " ".join(done.stdout.split())
    assert "fp32 failed: torch.OutOfMemoryError: CUDA out of memory" in told
    assert "it recorded 0 finished steps" in told
    assert "fp32 ran out of memory in setup: a block of 4.0 GiB was requested at" in told
    assert "at the peak, step 0" in told and "after backward, step 0" not in told
