"""What a simulated device knows of the script's own data, on each thread; each script in a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ampmem

from ampmem.recording import read

pytestmark = pytest.mark.slow

HEAD = """
import json, torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = {}
"""
TAIL = """
model(torch.ones(4, 8, device="cuda")).sum().backward()
optimizer.step()
print(json.dumps(found))
"""
KNOWN = """
torch.manual_seed(1)
labels = torch.tensor([[3, 999, -100], [7, 0, 5]])
there = labels.cuda()
found["largest"] = there.max().item() + 1
found["row"] = there[1].tolist()
found["where"] = there.argmax(1).tolist()
found["as bytes"] = (there == -100).to(torch.uint8).cpu().sum().item()
mask = there != -100
found["all"], found["counted"] = bool(mask.all()), bool(mask.sum() == mask.numel() - 1)
found["rest"] = bool(mask[:, :2].all())
found["taken"] = list(torch.ones(2, 3, 4, device="cuda")[mask].shape)
found["indices"] = list(mask.nonzero().shape)
found["different"] = there.unique().tolist()
found["binned"] = (there + 100).flatten().bincount().shape[0]
found["repeated"] = torch.arange(3, device="cuda").repeat_interleave(torch.tensor([1, 0, 2]).cuda()).tolist()
found["counted on the device"] = torch.arange(5, device="cuda").max().item()
ones = torch.ones_like(there, dtype=torch.bool)
found["joined"] = bool(torch.cat([ones, ones]).all())
found["split"] = [part.max().item() for part in there.unbind()]
given = torch.tensor([3, 7]).cuda()
given.data = torch.tensor([30, 70]).cuda()
found["given other data"] = given.max().item()
found["half"] = torch.tensor(0.5).cuda().item()
found["mean"] = (mask.sum() / mask.numel()).item()
found["numbers"] = torch.randint(1000, (4,)).tolist()
"""
UNKNOWN = """
there = torch.tensor([3, 7]).cuda()
part = there[:1]
part += 4                                # a write through a view
found["written"] = there.max().item()
hidden = torch.tensor([3, 7]).cuda()
hidden.data.add_(4)                      # which leaves the version of the tensor as it is
found["written to its data"] = hidden.max().item()
drawn = torch.randint(50, 51, (4,), device="cuda")
found["drawn"] = drawn.max().item()
found["empty"] = torch.empty(4, dtype=torch.int64, device="cuda").max().item()
found["of numbers"] = (torch.tensor([2.0, 3.0]).cuda() > 5).any().item()
"""
GUESSED = """
loss = model(torch.ones(4, 8, device="cuda")).sum()
losses = torch.zeros(3)
losses[0] = loss.detach()
losses[1:].copy_(loss.detach())
found["copied"] = losses.tolist()
found["listed"] = torch.tensor([loss, loss]).tolist()
right = model.weight == model.weight
found["all"] = [right.all().item(), right.all().cpu().item(), right.all(0)[1].item(), right.all(0).cpu().all().item()]
"""
THREADS = """
def load(size):
    weight = torch.ones(size).to("cuda")
    return weight, str(weight.device), torch.ones(2).sum().item()

before = torch.cuda.memory_allocated()
with ThreadPoolExecutor(4) as pool:
    loaded = list(pool.map(load, [512, 1024, 2048] * 8))
found["bytes"] = torch.cuda.memory_allocated() - before
found["devices"] = sorted({device for _, device, _ in loaded})
found["on the cpu"] = sorted({number for _, _, number in loaded})
with ThreadPoolExecutor(1) as pool:
    pool.submit(loaded.clear).result()
found["after"] = torch.cuda.memory_allocated() - before
"""
FAKE = """
import threading
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
weight = model.weight
found["simulated"] = isinstance(weight, torch._subclasses.FakeTensor) or isinstance(weight, FakeTensor)
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    traced = mode.from_tensor(torch.ones(2, 2))
found["traced"] = [isinstance(traced, torch._subclasses.FakeTensor), isinstance(traced, FakeTensor)]
found["stream"] = torch._C._cuda_getCurrentRawStream(0)
"""


def run(folder: Path, script: str, name: str = "train.py") -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the script found, and the notes of its recording."""
    (folder / name).write_text(HEAD + script + TAIL, encoding="utf-8")
    done = ampmem(folder, "profile", "--device", "sim", "--quiet", "--run-to-end", "-o", "out.ampmem", name)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, read(folder / "out.ampmem").notes


def test_numbers_of_the_scripts_own_data_are_what_they_are(tmp_path: Path) -> None:
    found, notes = run(tmp_path, KNOWN)
    numbers = found.pop("numbers")
    assert found == {
        "largest": 1000,
        "row": [7, 0, 5],
        "where": [1, 0],
        "as bytes": 1,
        "all": False,
        "counted": True,
        "rest": True,
        "taken": [5, 4],
        "indices": [5, 2],
        "different": [-100, 0, 3, 5, 7, 999],
        "binned": 1100,
        "repeated": [0, 2, 2],
        "counted on the device": 4,
        "joined": True,
        "split": [999, 7],
        "given other data": 70,
        "half": 0.5,
        "mean": (torch.tensor(5) / 6).item(),
    }
    assert not [note for note in notes if "was taken as" in note or "was answered" in note]
    # No random number was drawn on the way.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert numbers == torch.randint(1000, (4,)).tolist()


def test_what_was_written_on_the_device_or_drawn_there_is_not_known(tmp_path: Path) -> None:
    found, notes = run(tmp_path, UNKNOWN)
    guessed = dict.fromkeys(("written", "written to its data", "drawn", "empty"), 1)
    assert found == guessed | {"of numbers": True}
    assert sum("was taken as 1," in note for note in notes) == len(guessed)
    assert any("was answered yes" in note for note in notes)


def test_what_is_guessed_is_the_same_however_it_is_read(tmp_path: Path) -> None:
    found, notes = run(tmp_path, GUESSED)
    assert found == {"copied": [1.0, 1.0, 1.0], "listed": [1.0, 1.0], "all": [True] * 4}
    assert any("copied to the CPU were taken as 1.0 at " in note and note.endswith(":12") for note in notes), notes
    assert any("read from the device was taken as 1.0 at " in note and note.endswith(":14") for note in notes), notes
    assert any("copied to the CPU were taken as True" in note for note in notes)


def test_threads_that_the_script_starts_see_the_device(tmp_path: Path) -> None:
    found, _ = run(tmp_path, THREADS)
    assert found == {"bytes": 8 * 4 * (512 + 1024 + 2048), "devices": ["cuda:0"], "on the cpu": [2.0], "after": 0}


def test_a_tensor_on_the_device_is_no_fake_one_for_the_script(tmp_path: Path) -> None:
    found, _ = run(tmp_path, FAKE)
    assert found == {"simulated": False, "traced": [True, True], "stream": 0}


FAILS = """
import torch
count = torch.randint(9, (1,), device="cuda").item()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    if loss.item() > 0.5:
        {end}
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("print(loss.cpu().no_such)", True),
        ("torch.cuda.CUDAGraph()", False),  # has its own reason
    ],
)
def test_a_script_that_fails_is_told_which_numbers_were_made_up(tmp_path: Path, end: str, said: bool) -> None:
    (tmp_path / "train.py").write_text(FAILS.format(end=end))
    done = ampmem(tmp_path, "profile", "--gpu", "h100", "--quiet", "train.py")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "before it failed" in line]
    assert len(lines) == said
    if said:
        read = ", ".join(f"{number} at {tmp_path}/train.py:{line}" for number, line in ((1.0, 11), (1.0, 10), (1, 3)))
        assert f": {read}. " in lines[0]
        assert lines[0].endswith("--assume train.py:11=NUMBER")
        assert done.stderr.count("train.py:3") == 1  # the warning of that line would say the same again
