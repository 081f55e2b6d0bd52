"""What needs a process of its own: out of memory, allocator settings, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampmem.recording import read

OUT_OF_MEMORY = """
import sys, torch
from torch import nn
torch.cuda.set_per_process_memory_fraction(0.02)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = 64
while True:
    loss = model(torch.randn(batch, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    batch *= 4 if {late} else 1 << 16  # 32 GiB, less than the device has and more than the process may use
"""

BROKEN = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.zeros(4, device="cuda")
for step in range(3):
    loss = model(torch.randn(4, 8, device="cuda")).sum()
    if step == 2:
        loss = loss + table[torch.full((1,), 10**6, device="cuda")].sum()
    loss.backward()
    optimizer.step()
    loss.item()
"""


def ampmem(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    variables = os.environ | {"PYTHONPATH": os.pathsep.join((root, *sys.path))} | environment
    command = [sys.executable, "-m", "ampmem", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


GPT = ("-m", "ampmem.workloads.gpt", "--preset", "tiny", "--precision", "amp")


@pytest.mark.parametrize("late", [True, False])
def test_out_of_memory_on_purpose(tmp_path: Path, late: bool) -> None:
    script = tmp_path / "oom.py"
    script.write_text(OUT_OF_MEMORY.format(late=late))
    done = ampmem(tmp_path, "profile", "--device", "cuda", "--steps", "30", "--quiet", "oom.py")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr
    recording = read(tmp_path / "oom.ampmem")
    assert recording.ooms
    assert recording.steps
    oom = recording.ooms[-1]
    assert oom.asked <= oom.segment and oom.total > 0
    assert "oom.py" in oom.stack
    shown = ampmem(tmp_path, "show", "oom.ampmem").stdout
    assert "out of memory in " in shown and "that this process may use" in " ".join(shown.split())
    assert not recording.steps[-1].finished


def test_out_of_memory_in_the_first_step_keeps_the_recording(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(OUT_OF_MEMORY.format(late=False).replace("batch = 64", "batch = 1 << 22"))
    done = ampmem(tmp_path, "profile", "--device", "cuda", "first.py")
    assert done.returncode == 1
    assert "the script failed: out of memory" in done.stderr
    assert [step.finished for step in read(tmp_path / "first.ampmem").steps] == [False]
    assert "out of memory in " in ampmem(tmp_path, "show", "first.ampmem").stdout


def test_expandable_segments(tmp_path: Path) -> None:
    done = ampmem(
        tmp_path, "profile", "--device", "cuda", "--quiet", *GPT, PYTORCH_ALLOC_CONF="expandable_segments:True"
    )
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "gpt.ampmem")
    assert recording.allocator is not None and recording.allocator.expandable_segments
    assert (recording.allocator.variable, recording.allocator.settings) == (
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
    )
    summary = json.loads(ampmem(tmp_path, "show", "--json", "gpt.ampmem").stdout)
    assert summary["conservation"]["residual_bytes"] == 0


def test_the_asynchronous_allocator_is_refused(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "cuda", *GPT, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert done.returncode == 2
    assert "cudaMallocAsync" in done.stderr
    assert not (tmp_path / "gpt.ampmem").exists()


def test_a_cache_that_is_turned_off_is_refused(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "cuda", *GPT, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert done.returncode == 2
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in done.stderr


@pytest.mark.parametrize("late", ["", "sync"])
def test_an_error_on_the_device_comes_out_as_the_scripts_own(tmp_path: Path, late: str) -> None:
    """Also where ampmem meets it first, at the end of the last step that it records."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    # The emulated runtime has no kernels that could fail by themselves; a GPU does not know the variables.
    third = {"EMULATED_CUDA_FAIL": "cudaLaunchKernel:index_elementwise@1=assert!", "EMULATED_CUDA_LATE": late}
    done = ampmem(tmp_path, "profile", "--device", "cuda", "broken.py", **third)
    assert done.returncode == 1
    assert "device-side assert" in done.stderr
    assert read(tmp_path / "broken.ampmem").steps


def test_visible_devices_that_the_script_sets_are_respected(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport torch\nprint(torch.cuda.is_available())\n"
    )
    done = ampmem(tmp_path, "profile", "train.py")
    assert done.stdout.strip() == "False"


def test_compare_runs_every_precision_on_the_gpu(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "compare", "--device", "cuda", "-m", "ampmem.workloads.gpt", "--preset", "tiny")
    assert done.returncode == 0, done.stderr
    for precision in ("fp32", "amp", "amp-nocache"):
        assert read(tmp_path / f"gpt.{precision}.ampmem").run.source == "cuda"
