"""A script with streams on a simulated device: where its blocks lie, and what is predicted of those that wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from commands import ampmem

from ampmem.analysis.allocator.addresses import address_map
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.events import Action
from ampmem.recording import read

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
