"""Training under torch.compile: what Inductor's graphs allocate has its module, line, op and type.

On the CPU, and on CUDA where that is there; the emulated CUDA runtime will do. Each program is run without ampmem and
with it, and prints how much dynamo compiled, and why it broke graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import ampmem, python

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.summary import summarize
from ampmem.events import Action, Column, Fact, Phase
from ampmem.recording import read

pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch._dynamo.utils import counters

how, precision, device = sys.argv[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        inner = self.up(self.norm(x))
        if how == "break":
            torch._dynamo.graph_break()
        return x + self.down(torch.relu(inner))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if how == "checkpoint" else block(x)
        return x.float().square().mean()


def step(x):
    with torch.autocast(device, torch.bfloat16, enabled=precision == "amp"):
        loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters())
if how == "blocks":
    for block in model.blocks:
        block.compile()
elif how == "in_place":
    model.compile()
elif how == "step":
    step = torch.compile(step)
else:
    model = torch.compile(model)
for _ in range(3):
    step(torch.randn(16, 32, device=device))
print(dict(counters["stats"]), sum(counters["graph_break"].values()))
frames = dict(counters["frames"])
if how == "step":
    del frames["ok"]  # in place of a part of Optimizer.step dynamo tries one of Python's functions, in vain
print(frames)
"""
WEIGHTS = {f"blocks.{number}.{name}.weight" for number in (0, 1) for name in ("up", "down")}
BIASES = {"blocks.0.up.bias", "blocks.1.up.bias"}
COPIES = 4 * 32 * 64 * 2
"""Bytes of the copies in bfloat16 of the four weights; those of the biases end in forward."""
PARAMETERS = 2 * (32 + 32 + 32 * 64 + 64 + 64 * 32)


@dataclass(frozen=True)
class Ran:
    """A recording, and its summary as JSON."""

    analysis: Analysis
    summary: Any

    def texts(self, ids: Column) -> set[str]:
        return {self.analysis.recording.texts[each].replace("_orig_mod.", "") for each in np.unique(ids).tolist()}

    def mark(self, name: str) -> Any:
        """The bytes of each category at a mark of the last step."""
        return self.summary["steps"][-1]["marks"][name]


def ran(folder: Path, how: str, *, beside: bool) -> Ran:
    """A program's recording; if ``beside``, it compiles as much, and breaks as many graphs, as without ampmem."""
    (folder / "program.py").write_text(PROGRAM)
    program = ("program.py", how, "amp", DEVICE)
    under = ampmem(folder, "profile", "--device", DEVICE, "--run-to-end", "--quiet", *program)
    plain = python(folder, *program) if beside else under
    assert (under.returncode, plain.returncode) == (0, 0), under.stderr + plain.stderr
    assert under.stdout == plain.stdout
    recording = read(folder / "program.ampmem")
    run = Ran(analyse(recording), json.loads(summarize(recording).to_json()))
    assert run.summary["conservation"]["residual_bytes"] == 0
    assert {note for note in run.analysis.recording.notes if "inspect" in note} == set()
    return run


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of Inductor that are empty at first: the second run of a program finds the graphs of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes does not survive a fork
        yield


HOWS = ("model", "model", "checkpoint", "blocks", "break", "in_place", "step") if CUDA else ("model", "break")


@pytest.mark.parametrize("how", [pytest.param(how, id=f"{number}-{how}") for number, how in enumerate(HOWS)])
def test_compiled_training_in_16_bit(how: str, tmp_path: Path) -> None:
    run = ran(tmp_path, how, beside=how != "blocks")
    assert (run.summary["arm"]["name"], run.summary["arm"]["dtype"]) == ("amp", "bfloat16")
    facts = run.analysis.facts
    assert run.texts(facts.name[facts.fact == Fact.CAST_COPY]) == WEIGHTS | BIASES
    assert run.summary["parameters"]["cast_eligible"] == COPIES // 2 + 2 * 64
    assert run.mark("after_backward")["gradients"] == 4 * PARAMETERS
    if how != "checkpoint":  # which makes them again in backward
        assert run.mark("after_forward")["cast_copies"] == COPIES
    # A compiled backward has lines of its own, not that of the first matrix product of forward.
    events = run.analysis.recording.events
    backward = (events.action == Action.ALLOC) & (events.phase == Phase.BACKWARD) & (events.step > 0)
    assert not [stack for stack in run.texts(events.stack[backward]) if "inductor" in stack]
    if CUDA:
        everything_is_named(run, how)


def everything_is_named(run: Ran, how: str) -> None:
    """Each allocation of a compiled graph has a module and the script's lines, in backward as well."""
    events = run.analysis.recording.events
    assert not [note for note in run.analysis.recording.notes if "compiled" in note]
    inside = (events.action == Action.ALLOC) & np.isin(events.phase, (Phase.FORWARD, Phase.BACKWARD))
    inside &= events.step > 0  # in the first step Inductor itself allocates, too
    stacks = run.texts(events.stack[inside])
    assert not [stack for stack in stacks if "inductor" in stack]
    parts = {f"blocks.{number}.{name}" for number in (0, 1) for name in ("norm", "up", "down")}
    assert run.texts(events.module[inside & (events.phase == Phase.BACKWARD)]) >= parts
    saved = run.analysis.facts
    ops = run.texts(saved.name[saved.fact == Fact.SAVED])
    assert "CompiledFunction" not in ops
    # Checkpoints save parameters, which backward casts again.
    assert ops >= ({"aten::_to_copy"} if how == "checkpoint" else {"aten::mm", "aten::native_layer_norm"})


OWN_DEVICE = """
import os
import torch
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
RANKS = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl" if device == "cuda" else "gloo")
if how == "ddp":
    dist._DEFAULT_FIRST_BUCKET_BYTES = 8192  # the graph is split between the buckets
    data_parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, init_sync=device == "cpu")
    model = torch.compile(data_parallel)
else:
    mesh = dist.device_mesh.init_device_mesh(device, (2,))
    for part in model.blocks:
        part.compile()
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    step(torch.randn(16, 32, device=device))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["ddp", "fsdp2"] if CUDA else ["ddp"])
def test_compiled_training_on_two_ranks(how: str, tmp_path: Path) -> None:
    beginning = PROGRAM.partition('if how == "blocks"')[0]
    (tmp_path / "program.py").write_text(OWN_DEVICE + beginning + RANKS)
    options = ("--device", DEVICE, "--quiet", "--nproc-per-node", "2", "program.py", how, "amp", DEVICE)
    under = ampmem(tmp_path, "profile", *options, fresh=CUDA)  # a fork of a process with CUDA cannot use it
    assert under.returncode == 0, under.stderr
    for rank in range(2):
        recording = read(tmp_path / f"program.rank{rank}-of-2.ampmem")
        run = Ran(analyse(recording), json.loads(summarize(recording).to_json()))
        assert run.summary["conservation"]["residual_bytes"] == 0
        facts, events = run.analysis.facts, recording.events
        copied = {name.removeprefix("module.") for name in run.texts(facts.name[facts.fact == Fact.CAST_COPY])}
        assert copied == WEIGHTS | BIASES
        allocated = (events.action == Action.ALLOC) & (events.step > 0)
        assert not [stack for stack in run.texts(events.stack[allocated]) if "<eval_with_key>" in stack]
        if CUDA:
            ops = run.texts(facts.name[facts.fact == Fact.SAVED])
            assert "CompiledFunction" not in ops
            assert ops >= {"aten::mm", "aten::native_layer_norm"}
            assert not [note for note in recording.notes if "compiled" in note]
            inside = run.texts(events.module[allocated & (events.phase == Phase.BACKWARD)])
            parts = {f"blocks.{number}.{name}" for number in (0, 1) for name in ("norm", "up", "down")}
            assert {name.removeprefix("module.") for name in inside} >= parts
