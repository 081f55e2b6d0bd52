"""``ampmem advise`` of scripts with several ranks: the peaks are those of the worst one, as it is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import ampmem

from ampmem.analysis.fit import memory_of
from ampmem.analysis.summary import summarize
from ampmem.recording import read

pytestmark = pytest.mark.slow

BLOCK = """
import os
import torch
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))
"""
SCRIPT = (
    BLOCK
    + """
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(BACKEND)
device = DEVICE if DEVICE == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
model = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(2))).to(device))
optimizer = torch.optim.AdamW(model.parameters())
rows = 4096 if dist.get_rank() == 1 else 1024
for _ in range(3):
    model(torch.randn(rows, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
)


def script(backend: str, device: str) -> str:
    return SCRIPT.replace("BACKEND", repr(backend)).replace("DEVICE", repr(device))


def advised(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    done = ampmem(folder, "advise", "--json", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return json.loads(done.stdout), done.stderr


def profiled(folder: Path, *options: str) -> None:
    done = ampmem(
        folder, "profile", "--seed", "0", "--steps", "2", "--quiet", "--force", "-o", "one", *options, "train.py"
    )
    assert done.returncode == 0, done.stderr


def test_on_a_simulated_gpu_each_rank_that_differs_is_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script("nccl", "cuda"))
    found, said = advised(tmp_path, "--gpu", "h100", "--world-size", "3", "--allow", "checkpoint")
    assert (found["world_size"], found["ranks"]) == (3, [0, 1]), "rank 2 allocates what rank 0 does"
    runs = {run["change"]: run for run in found["runs"]}
    assert set(runs) == {"the script as it is", "checkpoint 2 of 2 blocks", "checkpoint 1 of 2 blocks"}
    for run in runs.values():
        peaks = []
        for rank in range(3):
            device = ("--device", "sim", "--gpu", "h100", "--world-size", "3", "--rank", str(rank))
            profiled(tmp_path, *device, *run["options"])
            memory = memory_of(read(tmp_path / f"one.rank{rank}-of-3.ampmem"))
            assert memory is not None
            peaks.append((memory.allocated, memory.reserved, memory.used, memory.most))
        assert run["rank"] == 1 and peaks[0] == peaks[2] < peaks[1]
        made = (run[name] for name in ("allocated_bytes", "reserved_bytes", "device_used_bytes"))
        assert (*made, run["highest_device_used_bytes"]) == peaks[1], run["change"]
    assert runs["checkpoint 2 of 2 blocks"]["saved_bytes"] > 0
    assert "the script as it is: peak on rank 1 " in said
    assert runs["checkpoint 2 of 2 blocks"]["code"][0].startswith("for block in model.module[:2]: ")


PIPELINE = (
    BLOCK
    + """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

class Stage(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in numbers})
    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
model = Stage([0, 1] if rank == 0 else [2, 3]).to(device)
stage = PipelineStage(model, rank, 2, device, input_args=(torch.empty(1024, 64, device=device),))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(4096, 64, device=device)
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_a_stage_of_a_pipeline_has_its_own_blocks_checkpointed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PIPELINE)
    found, _ = advised(tmp_path, "--gpu", "h100", "--world-size", "2", "--allow", "checkpoint")
    assert found["ranks"] == [0, 1] and len(found["runs"]) == 3
    for run in found["runs"]:
        assert run["failure"] is None
        _, names = run["options"] or ("", "")
        peaks = []
        for rank, stage in enumerate(({"blocks.0", "blocks.1"}, {"blocks.2", "blocks.3"})):
            of_rank = ",".join(sorted(stage & set(names.split(","))))
            options = ("--force-checkpoint", of_rank) if of_rank else ()
            profiled(tmp_path, "--device", "sim", "--gpu", "h100", "--world-size", "2", "--rank", str(rank), *options)
            memory = memory_of(read(tmp_path / f"one.rank{rank}-of-2.ampmem"))
            assert memory is not None
            peaks.append((memory.most, memory.allocated))
        assert run["allocated_bytes"] == max(peaks)[1] == peaks[run["rank"]][1], run["change"]


def test_on_a_real_device_all_ranks_run_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").write_text(script("gloo", "cpu"))
    # The Python of these tests starts ranks by a server, which is outside of the namespace that protects files.
    options = ("--files", "write", "--device", "cpu", "--nproc-per-node", "2", "--allow", "checkpoint")
    options += ("--resume", str(tmp_path / "runs"))
    found, said = advised(folder, *options)
    runs = {run["change"]: run for run in found["runs"]}
    for run in runs.values():
        profiled(folder, "--device", "cpu", "--nproc-per-node", "2", *run["options"])
        peaks = [summarize(read(folder / f"one.rank{rank}-of-2.ampmem")).whole.bytes for rank in range(2)]
        assert run["rank"] == 1 and run["allocated_bytes"] == peaks[1] > peaks[0]
        assert run["step_ns"] > 0
    assert runs["checkpoint 2 of 2 blocks"]["saved_bytes"] > 0
    assert "its peaks are those of the worst one" in ampmem(folder, "advise", *options, "train.py").stdout
    assert said.count(" on rank 1 ") == len(runs)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--nproc-per-node", "2", "train.py"), "a simulated GPU needs no other processes"),
        (("--device", "cpu", "--world-size", "2", "train.py"), "--world-size is for simulated ranks only"),
        (
            ("--device", "cpu", "-m", "torch.distributed.run", "train.py"),
            "use: ampmem advise --nproc-per-node N SCRIPT",
        ),
    ],
)
def test_ranks_that_cannot_be_run_are_refused(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    (tmp_path / "train.py").write_text("")
    done = ampmem(tmp_path, "advise", *options)
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
