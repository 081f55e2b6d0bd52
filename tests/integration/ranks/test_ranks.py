"""Several processes of one script, recorded: each for itself, and stopped together."""

import os
import subprocess
from pathlib import Path

import pytest
from support.ready_python import ready_python

from ampmem.analysis.analyse import analyse
from ampmem.events import MeshAxis, Recording
from ampmem.recording import read

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

TRAINING = """
import os, signal, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def train(rank, size, dies=None):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        model(torch.ones(4, 32)).square().mean().backward()
        if (rank, step) == (1, dies):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} of {rank}\\n", end="", flush=True)  # in one write: the ranks share the pipe
    dist.barrier()
    destroy_process_group()
    print("trained", flush=True)


def spawned(rank, size, store):
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    train(rank, size)


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(spawned, args=(2, os.path.abspath("store")), nprocs=2)
        print("all trained", flush=True)
    else:
        init_process_group("gloo")
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        train(dist.get_rank(), 2, int(sys.argv[1]))
"""
NEVER = "9"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``; nothing of a launcher that runs these tests is passed on."""
    (folder / "train.py").write_text(TRAINING)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [ready_python(), *arguments],
        cwd=folder,
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def said(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """What ampmem has said."""
    return [line.removeprefix("ampmem: ") for line in ran.stderr.splitlines() if line.startswith("ampmem: ")]


def ranks(folder: Path, name: str = "train") -> list[Recording]:
    return [read(folder / f"{name}.rank{rank}-of-2.ampmem") for rank in range(2)]


def test_under_torchrun(tmp_path: Path) -> None:
    # Alone, or it takes a port that another run of these tests may have taken.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    profile = ("-m", "ampmem", "profile", "--steps", "2", "train.py", NEVER)
    ran = run(tmp_path, *torchrun, *profile)
    assert ran.returncode == 0, ran.stderr
    greeting, recorded = said(ran)
    assert greeting == "recording to train.rank0-of-2.ampmem"
    assert recorded.startswith("recorded 2 steps in train.rank0-of-2.ampmem, ")
    assert recorded.endswith(
        ", and stopped the script (--run-to-end lets it finish); "
        "the files of all ranks: ampmem show train.rank*-of-2.ampmem"
    )
    assert "Error" not in ran.stderr and "Warning" not in ran.stderr and "peak" not in ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "step 0 of 0", "step 0 of 1"]  # the second update ended both
    for rank, recording in enumerate(ranks(tmp_path)):
        assert (recording.run.rank, recording.run.local_rank, recording.run.world_size) == (rank, rank, 2)
        assert recording.mesh == (
            MeshAxis(name="dp", size=2, coordinate=rank),
            MeshAxis(name="tp", size=1, coordinate=0),
        )
        assert [step.index for step in recording.steps] == [0, 1]
    assert len({recording.run.job for recording in ranks(tmp_path)} - {""}) == 1


def test_a_rank_that_is_killed_leaves_all_files_whole(tmp_path: Path) -> None:
    (tmp_path / "train.rank1-of-2.ampmem").write_text("of another run")
    ran = run(tmp_path, "-m", "ampmem", "profile", "--nproc-per-node", "2", "train.py", "1")
    assert ran.returncode == 1
    assert "train.py FAILED" in ran.stderr and "exitcode  : -9" in ran.stderr  # these are torchrun's
    assert said(ran)[0] == (
        "recording to train.2.rank0-of-2.ampmem; train.rank0-of-2.ampmem exists already (--force replaces it)"
    )
    assert said(ran)[-1] == "2 of 2 ranks: ampmem show train.2.rank*-of-2.ampmem"
    assert all(recording.steps for recording in ranks(tmp_path, "train.2"))
    assert ranks(tmp_path, "train.2")[1].ended is False
    assert (tmp_path / "train.rank1-of-2.ampmem").read_text() == "of another run"


def test_ranks_that_the_script_spawns(tmp_path: Path) -> None:
    ran = run(tmp_path, "-m", "ampmem", "profile", "--steps", "2", "-o", "run.ampmem", "train.py", "spawn")
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "trained" not in ran.stdout
    assert said(ran)[:2] == [
        "recording this process to run.ampmem if it trains, and the ranks that it spawns to a file each",
        "recording to run.rank0-of-2.ampmem",
    ]
    assert said(ran)[-1] == "2 of 2 ranks: ampmem show run.rank*-of-2.ampmem"
    assert not (tmp_path / "run.ampmem").exists()
    for rank, recording in enumerate(ranks(tmp_path, "run")):
        assert (recording.run.rank, recording.run.world_size, len(recording.steps)) == (rank, 2, 2)
        assert [record.name for record in recording.parameters] == ["module.weight", "module.bias"]


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(3)])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for block in model:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    model(torch.randn(8, 256)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_what_threads_of_the_engine_allocate_stands_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    ran = run(tmp_path, "-m", "ampmem", "profile", "--nproc-per-node", "2", "sharded.py")
    assert ran.returncode == 0, ran.stderr
    for recording in ranks(tmp_path, "sharded"):
        assert (recording.events.time_ns[1:] >= recording.events.time_ns[:-1]).all()
        assert analyse(recording).conservation.residual_bytes == 0
