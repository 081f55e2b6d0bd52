"""Jobs of several ranks for tests: a recording for each, as its launcher would leave them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ampmem.analysis.ranks.jobs import RankRun, rank_run_of
from ampmem.errors import RecordingError
from ampmem.events import Fact, MeshAxis, OptimizerRecord, Phase, PrecisionRecord, Recording
from support.build import AMP, FP32, RUN, Story

KIB = 1024


def rank_recording(
    rank: int,
    of: int,
    *,
    precision: PrecisionRecord = FP32,
    weights: int = 256,
    activations: int = 800,
    copies: int = 0,
    state: bool = True,
    steps: int = 2,
    mesh: Sequence[MeshAxis] = (),
    script: str = "train.py",
    arguments: tuple[str, ...] = (),
    torch: str = RUN.torch,
) -> Recording:
    """One rank: so many KiB of weights, of activations and of cast copies; a gradient and an update in each step."""
    story = Story()
    story.parameter(0x1000, "layers.0.weight", weights * KIB // 4)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        if copies:
            story.tensor(
                Fact.CAST_COPY, 0x2000, copies * KIB, "layers.0.weight", module="layers.0", op="aten::_to_copy"
            )
        story.tensor(Fact.SAVED, 0x3000, activations * KIB, "MmBackward0", module="layers.0", op="aten::mm")
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x4000, weights * KIB, "layers.0.weight", op="aten::mm")
        story.free(0x3000, *([0x2000] * bool(copies)))
        story.enter(Phase.OPTIMIZER)
        if state and step == 0:
            story.tensor(Fact.OPTIMIZER_STATE, 0x6000, weights * KIB, "momentum_buffer of layers.0.weight")
        story.end(loss=2.0 - step)
        story.enter(Phase.BETWEEN)
        story.free(0x4000)
    run = replace(RUN, rank=rank, world_size=of, local_rank=rank, script=script, arguments=arguments, torch=torch)
    optimizers = (OptimizerRecord(class_name="SGD", implementation="foreach"),)
    return replace(story.recording(run=run, precision=precision), mesh=tuple(mesh), optimizers=optimizers)


def run_of(recording: Recording, job: str = "train") -> RankRun:
    """``recording`` as one of a job's."""
    run = recording.run
    return rank_run_of(recording, Path(f"{job}.rank{run.rank}-of-{run.world_size}.ampmem"))


def runs_of(count: int, *, job: str = "train", each: Mapping[int, Mapping[str, int]] | None = None) -> list[RankRun]:
    """``count`` ranks that are equal, but for what ``each`` says of some."""
    return [run_of(rank_recording(rank, count, **(each or {}).get(rank, {})), job) for rank in range(count)]


def pipeline() -> list[RankRun]:
    """Four stages of two ranks each: the first holds most activations, the last most weights."""
    runs = []
    for rank in range(8):
        stage, replica = divmod(rank, 2)
        mesh = [MeshAxis(name="pp", size=4, coordinate=stage), MeshAxis(name="dp", size=2, coordinate=replica)]
        one = rank_recording(rank, 8, mesh=mesh, activations=1600 - 400 * stage, weights=200 + 10 * stage)
        runs.append(run_of(one))
    return runs


def with_missing() -> list[RankRun]:
    """Of five ranks one has no file, one cannot be read, and one ended a step less than the others."""
    damaged = Path("train.rank3-of-5.ampmem")
    problem = RecordingError(f"{damaged} is not an ampmem recording, or it is damaged (it is empty)")
    return [
        run_of(rank_recording(0, 5)),
        run_of(rank_recording(2, 5, steps=1)),
        RankRun(path=damaged, rank=3, world_size=5, problem=problem),
        run_of(rank_recording(4, 5, activations=900)),
    ]


def precisions() -> list[RankRun]:
    """Two ranks in fp32 and under autocast, of which the second needs more."""
    runs = []
    for precision, activations, copies in ((FP32, 800, 0), (AMP, 500, 128)):
        for rank in range(2):
            one = rank_recording(rank, 2, precision=precision, activations=activations + 100 * rank, copies=copies)
            runs.append(run_of(one, f"train.{precision.name}"))
    return runs


JOBS = ("ranks-equal", "ranks-pipeline", "ranks-missing", "ranks-precisions")
"""The names of :func:`jobs`, for tests that are collected before anything is worked out."""


@cache
def jobs() -> dict[str, list[RankRun]]:
    """Each with its name; seventy ranks are worked out once."""
    return {
        "ranks-equal": runs_of(64),
        "ranks-pipeline": pipeline(),
        "ranks-missing": with_missing(),
        "ranks-precisions": precisions(),
    }
