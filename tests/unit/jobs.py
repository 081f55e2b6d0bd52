"""Jobs of several ranks for tests: a recording for each, as its launcher would leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from build import FP32, RUN, Story

from ampmem.analysis.ranks.runs import RankRun, rank_run_of
from ampmem.events import ArmRecord, Fact, MeshAxis, OptimizerRecord, Phase, Recording

KIB = 1024


def rank_recording(
    rank: int,
    of: int,
    *,
    arm: ArmRecord = FP32,
    weights: int = 256,
    activations: int = 800,
    state: bool = True,
    steps: int = 2,
    mesh: Sequence[MeshAxis] = (),
    script: str = "train.py",
    arguments: tuple[str, ...] = (),
    torch: str = RUN.torch,
) -> Recording:
    """One rank: so many KiB of weights and of activations, a gradient and an update in each step."""
    story = Story()
    story.parameter(0x1000, "layers.0.weight", weights * KIB // 4)
    for step in range(steps):
        story.begin(step)
        story.enter(Phase.FORWARD)
        story.alloc(0x3000, activations * KIB, op="aten::mm", module="layers.0")
        story.fact(Fact.SAVED, 0x3000, "MmBackward0", "layers.0")
        story.enter(Phase.BACKWARD)
        story.alloc(0x4000, weights * KIB, op="aten::mm")
        story.fact(Fact.GRADIENT, 0x4000, "layers.0.weight")
        story.free(0x3000)
        story.enter(Phase.OPTIMIZER)
        if state and step == 0:
            story.alloc(0x6000, weights * KIB)
            story.fact(Fact.OPTIMIZER_STATE, 0x6000, "momentum_buffer of layers.0.weight")
        story.end(loss=2.0 - step)
        story.enter(Phase.BETWEEN)
        story.free(0x4000)
    run = replace(RUN, rank=rank, world_size=of, local_rank=rank, script=script, arguments=arguments, torch=torch)
    optimizers = (OptimizerRecord(class_name="SGD", implementation="foreach"),)
    return replace(story.recording(run=run, arm=arm), mesh=tuple(mesh), optimizers=optimizers)


def run_of(recording: Recording, job: str = "train") -> RankRun:
    """``recording`` as one of a job's."""
    run = recording.run
    return rank_run_of(recording, Path(f"{job}.rank{run.rank}-of-{run.world_size}.ampmem"))


def runs_of(count: int, *, job: str = "train", each: Mapping[int, Mapping[str, int]] | None = None) -> list[RankRun]:
    """``count`` ranks that are equal, but for what ``each`` says of some."""
    return [run_of(rank_recording(rank, count, **(each or {}).get(rank, {})), job) for rank in range(count)]
