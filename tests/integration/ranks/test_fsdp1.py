"""torch's older FullyShardedDataParallel, which runs on GPUs only: that is said, and nothing is claimed."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest
import torch
from torch import nn

import ampmem
from ampmem.recorder.hooks.modules import NOT_SHOWN

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
    assert said[-1].startswith("ampmem: the script failed before a step had ended: nothing was recorded; ")
    assert said[-1].endswith("needs a GPU, and torch's fully_shard (FSDP2) trains on a CPU, too")
    assert not list(tmp_path.glob("*.ampmem"))


def test_where_it_runs_the_recording_is_marked() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """One that runs on a CPU."""

    model = FullyShardedDataParallel(nn.Linear(4, 4))
    with ampmem.profile(step_on="backward") as prof:
        model(torch.ones(2, 4)).sum().backward()
    assert NOT_SHOWN in prof.recording().remarks
