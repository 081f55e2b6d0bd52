"""Real runs, exported as snapshots of PyTorch and imported again: everything that ``show`` says of them is the same."""

from pathlib import Path

import pytest
from support.command_line import ampmem_here
from support.commands import ampmem

from ampmem.recording import read

LINEAR = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
encoder, head = (torch.optim.AdamW(model[at].parameters()) for at in (0, 2))
for step in range(4):
    with torch.autocast(DEVICE, torch.bfloat16, enabled=AMP):
        loss = model(torch.randn(16, 64, device=DEVICE)).sum()
    loss.backward()
    for optimizer in (encoder, head):
        optimizer.step()
        optimizer.zero_grad()
"""
RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    model(torch.randn(4 * (1 + dist.get_rank()), 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def assert_comes_back(folder: Path, *names: str) -> None:
    """What is shown in a folder of the runs that came back is what is shown where they were recorded."""
    again = folder / "again"
    again.mkdir()
    for name in names:
        assert ampmem_here(folder, "export", name, "--format", "snapshot", "-o", f"{name}.pickle")[0] == 0
        assert ampmem_here(folder, "import", f"{name}.pickle", "-o", f"again/{name}")[0] == 0
    for option in ("--json", "--all"):
        before, after = (ampmem_here(place, "show", option, *names) for place in (folder, again))
        assert before[0] == 0 and after == before


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_comes_back_with_its_steps_and_categories(tmp_path: Path, device: str, amp: bool) -> None:
    """With two optimizers, on the CPU and on a simulated GPU."""
    (tmp_path / "train.py").write_text(f"DEVICE, AMP = {device!r}, {amp}\n{LINEAR}")
    simulated = ("--device", "sim", "--gpu", "h100") if device == "cuda" else ()
    done = ampmem(tmp_path, "profile", *simulated, "train.py")
    assert done.returncode == 0, done.stderr
    assert_comes_back(tmp_path, "train.ampmem")
    again = read(tmp_path / "again" / "train.ampmem")
    assert (len(again.steps), len(again.optimizers)) == (3, 2)
    assert {each.name for each in again.parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.slow
def test_the_ranks_of_a_job_come_back_as_one_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    done = ampmem(tmp_path, "profile", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.glob("*.ampmem"))
    assert len(names) == 2
    assert_comes_back(tmp_path, *names)
