"""Convolutions on a simulated GPU: the memory format of what they return, and workspaces that were measured."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ampmem.allocator.gpus import find_gpu
from ampmem.analysis.estimate import Fit, prediction_of
from ampmem.names import CUDNN_TRIALS
from ampmem.simulator import extras
from ampmem.simulator.scratch.convolutions import SCHEMA, read_table
from ampmem.simulator.start import Simulation

pytestmark = pytest.mark.slow

GPU = find_gpu("h100")


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    started = Simulation(GPU)
    yield started
    started.end()


@pytest.mark.parametrize("groups", [1, 8])
def test_channels_last_stays_channels_last(simulation: Simulation, groups: int) -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=groups).cuda()
    images = torch.randn(2, 8, 6, 6).cuda().requires_grad_()
    made = layer(images.to(memory_format=torch.channels_last))
    assert made.is_contiguous(memory_format=torch.channels_last)
    made.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.is_contiguous()  # as the weight is
    assert layer(images).is_contiguous()


def test_a_depthwise_convolution_assumes_nothing(simulation: Simulation) -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=8).cuda()
    layer(torch.randn(2, 8, 6, 6).cuda()).sum().backward()
    found = simulation.device.prediction()
    assert dict(found.bounds) == {}
    assert found.least_reserved is found.likely_reserved is None


@pytest.mark.parametrize("benchmark", [False, True])
def test_the_trials_of_a_benchmark_may_take_what_is_free(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, benchmark: bool
) -> None:
    """At the first call of each convolution, after which PyTorch empties the cache."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    layer, device = nn.Conv2d(8, 4, 3, padding=1).cuda(), simulation.device
    images = torch.randn(2, 8, 6, 6).cuda()

    def cached_after(batch: torch.Tensor) -> int:
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # dies at once
        with torch.no_grad():
            layer(batch)
        counters = device.allocator.counters
        return (counters.reserved - counters.allocated) >> 20

    first, again, other = cached_after(images), cached_after(images), cached_after(torch.cat([images, images]))
    assert [first >= 64, again >= 64, other >= 64] == [not benchmark, True, not benchmark]
    found = device.prediction()
    assert (CUDNN_TRIALS in found.bounds) is benchmark
    if benchmark:
        assert found.highest_allocated == found.highest_reserved == found.total - found.outside_at_most
        assert (found.unfilled_allocated or 0) <= (found.unfilled_reserved or 0) < 200 << 20
    assert (found.least_reserved or 0) < 200 << 20
    assert prediction_of(found).fit is Fit.FITS


def test_a_measured_workspace_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("batch", "channels", "out", "image", "kernel", "stride", "padding", "groups", "channels_last")
    shape = dict(zip(names, (2, 8, 4, 6, 3, 1, 1, 1, 0), strict=True))
    row = {"kind": "convolution", "pass": "forward", "dtype": "tf32", "benchmark": False, "shape": shape}
    row |= {"temporary": 50 << 20, "kept": 0, "error": None}
    machine = {"gpu": GPU.name, "torch": torch.__version__, "cudnn": 91002}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"schema": SCHEMA, "machine": machine, "rows": [row]}), encoding="utf-8")
    table = read_table(path)
    monkeypatch.setattr(extras, "table_for", lambda gpu: table)
    started = Simulation(GPU)
    try:
        layer = nn.Conv2d(8, 4, 3, padding=1).cuda()
        with torch.no_grad():
            layer(torch.randn(2, 8, 6, 6).cuda())
        found = started.device.prediction()
        assert found.allocated.scratch == {"aten.convolution.default": 50 << 20}
        assert dict(found.bounds) == {}
        assert any(note.endswith(table.source) for note in started.device.assumptions)
    finally:
        started.end()
