"""The summary of the atlas: each curve's savings and break-even, and one table about all curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from atlas_document import Document, Group, Point, curves_of, group_of, wanted_compiled
from atlas_search import BASE, break_even, differences_of, fitting
from atlas_train import ADAMW, AMP

NOTHING, LITTLE, HALF = 0.001, 0.1, 0.5
"""Shares of the peak; a change below the first counts as no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The saving of one precision against FP32 in one group.

    ``shares`` has the saved share of the peak for each batch that fits in both, negative if it costs. ``costs_at`` and
    ``saves_at`` are the batches around the break-even.
    """

    group: Group
    precision: str
    shares: Mapping[int, float]
    costs_at: int | None
    saves_at: int | None
    largest: int | None

    @property
    def searched(self) -> bool:
        """Whether ``largest`` is the largest that fits: only AMP with AdamW is run beyond FP32's largest batch."""
        return self.precision == AMP and self.group[1:] == (ADAMW, False)

    @property
    def at_first(self) -> float:
        """The share at the smallest batch."""
        return self.shares[min(self.shares)]

    @property
    def at_last(self) -> float:
        """The share at the largest batch that fits in both."""
        return self.shares[max(self.shares)]


def savings_of(points: Sequence[Point], precision: str) -> list[Saving]:
    """The savings of ``precision`` in every group in which something fits in both, in the order of ``points``."""
    groups = dict.fromkeys(group_of(point) for point in points)
    found = (_saving(points, group, precision) for group in groups)
    return [saving for saving in found if saving.shares]


def _saving(points: Iterable[Point], group: Group, precision: str) -> Saving:
    curves = curves_of(points, group)
    base, curve = curves[BASE], curves[precision]
    costs_at, saves_at = break_even(base, curve)
    return Saving(
        group=group,
        precision=precision,
        shares={batch: -more / base[batch].peak for batch, more in differences_of(base, curve).items()},
        costs_at=costs_at,
        saves_at=saves_at,
        largest=max(fitting(curve), default=None),
    )


def break_even_of(saving: Saving) -> str:
    """The batch sizes at which a curve saves, in words."""
    if saving.saves_at is None:
        return "at no size"
    if saving.costs_at is None:
        return "at every size"
    return f"from {saving.saves_at} on, not at {saving.costs_at}"


def setting_in_words(points: Sequence[Point], about: Mapping[str, Any]) -> str:
    """What was run, and what checkpointing changes."""
    savings = savings_of(points, AMP)
    if not savings:
        return "There is no point yet that AMP can be compared with FP32 at."
    models = len({saving.group[0] for saving in savings})
    return (
        f"{models} {_noun(models, 'model')} in {len(savings)} {_noun(len(savings), 'setting')}, trained for two steps "
        f"on a simulated {about['gpu']}.{_with_checkpointing(savings)}"
    )


def counts_of(savings: Sequence[Saving]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: at the largest batch size and at 1, how many settings save how much, and the median saving."""
    heads = ("AMP", "halves it", "saves 10 to 50 %", "saves 0.1 to 10 %", "no change", "costs memory", "median saving")
    sides = {
        "at the largest batch size that fits in FP32": [saving.at_last for saving in savings],
        "at batch size 1": [saving.at_first for saving in savings],
    }
    return heads, [(name, *_counted(shares)) for name, shares in sides.items() if shares]


def _with_checkpointing(savings: Sequence[Saving]) -> str:
    """The effect of checkpointing at the largest batch, for models that were run with and without."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for saving in savings:
        shares[saving.group[2]].append(saving.at_last)
    if not all(shares.values()):
        return ""
    plain, recomputed = (round(100 * median(shares[checkpointing])) for checkpointing in (False, True))
    return (
        f" The median saving at the largest batch is {plain} % without activation checkpointing and {recomputed} % "
        f"with it ({len(shares[True])} {_noun(len(shares[True]), 'setting')})."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRuns:
    """The peaks of one batch with AdamW in bytes, by precision: of the model as it is, and of the compiled model."""

    batch: int
    plain: Mapping[str, int]
    compiled: Mapping[str, int]

    @property
    def change(self) -> float:
        """The share by which compiling changes the peak under AMP; negative if it saves."""
        return self.compiled[AMP] / self.plain[AMP] - 1


def saved(peaks: Mapping[str, int]) -> float:
    """The share of FP32's peak that AMP saves."""
    return 1 - peaks[AMP] / peaks[BASE]


def compiled_runs(document: Document) -> dict[str, list[CompiledRuns]]:
    """The compiled runs of each model at both ends of FP32's curve; of models whose runs were all made and fit."""
    plain, compiled = (_peaks(document.get(name, ())) for name in ("points", "compiled"))
    found: dict[str, list[CompiledRuns]] = {}
    for model, batch in compiled:
        if not wanted_compiled(document, model):
            runs = CompiledRuns(batch=batch, plain=plain[model, batch], compiled=compiled[model, batch])
            found.setdefault(model, []).append(runs)
    refused = {point["model"] for point in document.get("compiled", ()) if "peak" not in point}
    return {model: runs for model, runs in found.items() if model not in refused}


def _peaks(points: Iterable[Point]) -> dict[tuple[str, int], dict[str, int]]:
    """The peaks with AdamW and without checkpointing, by model and batch, then by precision."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for point in points:
        if "peak" in point and group_of(point)[1:] == (ADAMW, False):
            found.setdefault((point["model"], point["batch"]), {})[point["precision"]] = point["peak"]
    return found


def compiled_in_words(document: Document) -> str:
    """The sentence about what compiling does to the peak under AMP, and to what AMP saves; empty without such runs."""
    models = compiled_runs(document).values()
    if not models:
        return ""
    small, large = [runs[0] for runs in models], [runs[-1] for runs in models]
    before, after = (
        round(100 * median(saved(peaks) for peaks in sides))
        for sides in ([run.plain for run in large], [run.compiled for run in large])
    )
    return (
        f" torch.compile, tried on {len(models)} {_noun(len(models), 'model')} with AdamW and without checkpointing, "
        f"changes AMP's peak by {_changes(small)} at batch size 1 and by {_changes(large)} at the largest batch; "
        f"there AMP saves {after} % of FP32's peak when both are compiled, {before} % when neither is (medians)."
    )


def _changes(runs: Sequence[CompiledRuns]) -> str:
    changes = sorted(run.change for run in runs)
    least, most, middle = (
        f"{whole:+d}" if (whole := round(100 * each)) else "0" for each in (changes[0], changes[-1], median(changes))
    )
    return f"{least} to {most} % (median {middle} %)"


def _counted(shares: Sequence[float]) -> tuple[str, ...]:
    """The number of settings by size of the saved share, from the largest down, and the median share."""
    bounds = (float("inf"), HALF, LITTLE, NOTHING)
    saving = [sum(low <= share < high for share in shares) for high, low in pairwise(bounds)]
    nothing, costs = sum(-NOTHING < share < NOTHING for share in shares), sum(share <= -NOTHING for share in shares)
    return (*map(str, (*saving, nothing, costs)), f"{round(100 * median(shares))} %")


def _noun(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
