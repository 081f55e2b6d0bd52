"""torch's older FullyShardedDataParallel, which runs on GPUs only, real or simulated ones."""

from pathlib import Path

import pytest
import torch
from support import commands
from torch import nn

import ampmem
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.recorder.hooks.modules import WHOLE_GRADIENTS
from ampmem.recording import read

pytestmark = pytest.mark.slow
SCRIPT = """
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
FullyShardedDataParallel(nn.Linear(8, 8))
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch does not refuse it where there is a GPU")
def test_on_a_cpu_torch_refuses_it_and_what_works_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(store=tmp_path / "store"))
    done = commands.ampmem(tmp_path, "profile", "train.py")
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert "RuntimeError: FSDP needs a non-CPU accelerator device" in said[-2]
    assert said[-1].startswith("ampmem: the script failed before a step had finished: nothing was recorded; ")
    assert said[-1].endswith("needs a GPU; torch's fully_shard (FSDP2) also trains on a CPU")
    assert not list(tmp_path.glob("*.ampmem"))


def test_where_it_runs_the_recording_is_marked() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """One that runs on a CPU."""

    model = FullyShardedDataParallel(nn.Linear(4, 4))
    with ampmem.profile(step_on="backward") as prof:
        model(torch.ones(2, 4)).sum().backward()
    assert WHOLE_GRADIENTS in prof.recording().remarks


SIMULATED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
dist.init_process_group("nccl")
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), device_id=0, use_orig_params="orig" in sys.argv,
    sharding_strategy=ShardingStrategy.NO_SHARD if "whole" in sys.argv else None,
)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
WHOLE = 64 * 64 + 64 + 64 * 8 + 8


@pytest.mark.parametrize(("how", "on_all_ranks"), [("flat", WHOLE), ("orig", WHOLE), ("whole", None)])
def test_the_shards_of_a_rank_stand_beside_the_whole(tmp_path: Path, how: str, on_all_ranks: int | None) -> None:
    (tmp_path / "train.py").write_text(SIMULATED)
    options = ("--gpu", "h100", "--world-size", "4", "--quiet", "-o", "out.ampmem", "train.py", how)
    done = commands.ampmem(tmp_path, "profile", *options)
    assert done.returncode == 0, done.stderr
    found = summarize(read(next(tmp_path.glob("out*.ampmem"))))
    own = WHOLE if how == "whole" else WHOLE // 4
    assert (found.parameters.count, found.parameters.global_count) == (own, on_all_ranks)
    marks = found.steps[-1].marks
    assert marks.after_backward is not None and marks.after_optimizer is not None
    assert marks.after_backward[Category.GRADIENTS] == marks.after_backward[Category.PARAMETERS] == 4 * own
    assert marks.after_optimizer[Category.OPTIMIZER_STATE] == 8 * own
    assert not found.warnings
