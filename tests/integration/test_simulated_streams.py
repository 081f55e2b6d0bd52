"""A script with streams on a simulated device: where its blocks lie, and what is predicted of those that wait."""

from collections import Counter
from pathlib import Path

import numpy as np
from support.commands import ampmem

from ampmem.analysis.analyse import analyse
from ampmem.analysis.layers import address_map
from ampmem.analysis.summary import summarize
from ampmem.events import Action
from ampmem.recording import read
from ampmem.simulator.communication.nccl import Communicator, Connections, most

SCRIPT = """
import torch
from torch import nn
device = torch.device("cuda")
main = torch.cuda.current_stream()
assert main == torch.cuda.default_stream() and main.stream_id == 0 and isinstance(main, torch.cuda.Stream)
side, other = torch.cuda.Stream(), torch.Stream(priority=-1)
assert len({main, side, other, torch.cuda.Stream()}) == 4
first, second = nn.Linear(512, 512, bias=False).to(device), nn.Linear(512, 512, bias=False).to(device)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

class Where(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        seen.append(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            seen.append(torch.cuda.current_stream())
        seen.append(torch.cuda.current_stream())
        return gradient * 1

for step in range(3):
    seen = []
    x = torch.randn(512, 512, device=device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == torch.accelerator.current_stream() == side
        with torch.cuda.stream(None), other:
            assert torch.cuda.current_stream() == other
        assert torch.cuda.current_stream() == side
        hidden = Where.apply(first(x))
        copied = torch.cuda.Event()
        copied.record()
    main.wait_event(copied)
    assert torch.cuda.current_stream() == main
    loss = second(hidden).sum()
    loss.backward()
    assert seen == [side, other, side], seen
    assert torch.cuda.current_stream() == main
    with torch.cuda.stream(other):
        batch = torch.empty(30 << 20, dtype=torch.uint8, device=device)
    batch.record_stream(main)
    del batch
    with torch.cuda.stream(other):
        batch = torch.empty(30 << 20, dtype=torch.uint8, device=device)
    del batch
    optimizer.step()
    optimizer.zero_grad()
    assert loss.item() == 1.0 and copied.query() and copied.elapsed_time(main.record_event()) >= 0
torch.cuda.set_stream(side)
assert torch.cuda.current_stream() == side
torch.cuda.synchronize()
"""
MIB = 1 << 20


def test_a_script_with_streams(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "a100-80", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "train.ampmem")
    analysis = analyse(recording)
    summary = summarize(recording)
    assert summary.conservation.residual_bytes == 0
    main, side, _ = np.unique(recording.events.stream).tolist()
    assert main == 0

    # Its op's result, and what backward makes of that op and of the weight in it, are of the stream of its forward.
    large = recording.events.bytes == 512 * 512 * 4
    made = (recording.events.action == Action.ALLOC) & large & (recording.events.stream == side)
    assert np.bincount(recording.events.step[made]).tolist() == [4, 4, 4]

    # Two matrix products in forward and three in backward, on two streams each: four workspaces.
    prediction = recording.prediction
    assert prediction is not None and prediction.allocated.workspaces == {"cuBLAS": 4 * 8_519_680}
    assert prediction.bounds == {"freed blocks that other streams may still use": 30 * MIB}
    assert summary.prediction is not None
    assert prediction.highest_reserved == summary.prediction.at_peak_reserved.reserved + 30 * MIB
    assert "gradients that wait for another stream in backward" in prediction.unmodelled
    assert recording.allocator is not None and recording.allocator.streams == 3

    # Blocks lie in segments of their own stream.
    stream_of = recording.events.stream[analysis.lifetimes.born]
    found = 0
    for position in range(0, len(recording.events), 7):
        for segment in address_map(analysis, position):
            mine = [piece.allocation for piece in segment.pieces if piece.allocation is not None]
            assert set(stream_of[mine].tolist()) <= {segment.extent.stream}
            found += len(mine)
    assert found > 100


SHARDED = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
dist.new_group(backend="nccl")  # one that nothing runs on
cpu = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(4), group=cpu)
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).cuda()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.send(torch.ones(4, device="cuda"), 1)
dist.destroy_process_group()
"""


def test_fsdp_gathers_and_reduces_on_streams_of_its_own_and_each_group_has_a_communicator(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED, encoding="utf-8")
    options = ("--gpu", "h100", "--world-size", "16", "--quiet", "--run-to-end")
    done = ampmem(tmp_path, "profile", "--device", "sim", *options, "train.py")
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "train.rank0-of-16.ampmem")
    assert summarize(recording).conservation.residual_bytes == 0
    events = recording.events
    born = events.action == Action.ALLOC
    _, gathering, reducing = np.unique(events.stream).tolist()
    whole = 512 * 512 * 4
    for step in range(2):
        aside = born & (events.step == step) & (events.stream != 0)
        made = zip(events.stream[aside].tolist(), events.bytes[aside].tolist(), strict=True)
        assert Counter(made) == {(gathering, whole): 2 * 3, (reducing, whole // 8): 3}

    prediction = recording.prediction
    assert prediction is not None and prediction.libraries == {"NCCL's buffers": 3 * 2 * MIB}
    groups = {
        "shard": (8, 8, 1, Connections.RING),
        "replicate": (2, 1, 2, Connections.TREE),
        "send": (2, 2, 1, Connections.SEND),
    }
    most_of_all = sum(
        most(Communicator(ranks=ranks, local=local, nodes=nodes, uses=frozenset({use})), (9, 0), {})
        for ranks, local, nodes, use in groups.values()
    )
    assert prediction.libraries_at_most == {"NCCL's buffers": most_of_all}
    (note,) = [note for note in recording.notes if "NCCL" in note]
    assert note.endswith("no GPU run has confirmed this")
