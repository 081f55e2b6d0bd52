"""The page's tables about all models: the rule of thumb, published figures, the emulated runtime."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from atlas_document import SETTING, Document, Point, group_of
from atlas_models import PUBLISHED
from atlas_summary import compiled_runs, saved
from atlas_train import ADAMW, AMP, BF16, FP32, SGD

from ampmem.units import format_bytes

Row: TypeAlias = list[str]
RULES = {
    (FP32, ADAMW): 4 + 4 + 8,
    (AMP, ADAMW): 4 + 4 + 8,
    (BF16, ADAMW): 2 + 2 + 4,
    (FP32, SGD): 4 + 4 + 4,
    (AMP, SGD): 4 + 4 + 4,
}
"""Bytes per parameter: weights, gradients and optimizer states."""
NEAR = 0.1
"""A peak is near the rule of thumb if it is less than this share above it."""
REASONS = {
    "BERT base": "transformers drops a padding mask of ones, which it reads from the device. Kernels do nothing on the "
    "emulated runtime, so the mask is kept, and each layer saves it for backward. Without the mask among the inputs "
    "the peaks are equal but for the 64 KiB of the mask itself.",
    "GPT-2": "transformers reads from the device whether several texts are packed into one sequence. Kernels do "
    "nothing on the emulated runtime, so it makes a mask, and each layer saves it for backward.",
}
"""Why a peak on the emulated runtime differs from the simulation's."""


def rules_of(points: Sequence[Point]) -> list[Row]:
    """The rule of thumb of each recipe, and the measured peaks in bytes per parameter."""
    rows = []
    for (precision, optimizer), rule in RULES.items():
        found = [
            point
            for point in points
            if (point["precision"], point["optimizer"], point["checkpointing"]) == (precision, optimizer, False)
            and "peak" in point
        ]
        if found:
            smallest, largest = _at(found, min), _at(found, max)
            near = sum(each < (1 + NEAR) * rule for each in smallest)
            counted = f"{near} of {len(smallest)}"
            rows.append([optimizer, precision, str(rule), _range(smallest), _range(largest), counted])
    return rows


def _at(points: Iterable[Point], which: Callable[[Iterable[int]], int]) -> list[float]:
    """The peak of each group in bytes per parameter, at its smallest or largest batch."""
    groups: dict[Any, dict[int, Point]] = {}
    for point in points:
        groups.setdefault(group_of(point), {})[point["batch"]] = point
    chosen = [group[which(group)] for group in groups.values()]
    return [point["peak"] / point["parameters"] for point in chosen]


def _range(sizes: Sequence[float]) -> str:
    """The smallest, the median and the largest of ``sizes``, in words."""
    return " / ".join(
        f"{each:,.0f}" if each >= 100 else f"{each:.1f}" for each in (min(sizes), median(sizes), max(sizes))
    )


def published_of(path: Path) -> list[Row]:
    """Runs of these models that others published, beside ampmem's predictions."""
    if not path.exists():
        return []
    runs = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [_run(name, run) for name, keys in PUBLISHED.items() for run in runs if run["key"].startswith(keys)]


def _run(model: str, run: Mapping[str, Any]) -> Row:
    predicted = run["predicted"]["likely"]
    if not run["real"]:
        real, error = "fits" if run["fits"] else "does not fit", ""
    else:
        real, error = format_bytes(run["real"]), signed(predicted / run["real"] - 1)
    return [
        model,
        run["key"].partition("/")[2],
        run["gpu"],
        run["precision"],
        run["what"],
        real,
        format_bytes(predicted),
        error,
    ]


def signed(share: float) -> str:
    """A share in percent with its sign; 0 has no sign."""
    tenths = round(1000 * share)
    return f"{tenths / 10:+.1f} %" if tenths else "0.0 %"


def emulated_of(document: Document) -> list[Row]:
    """The peaks on the emulated runtime beside the simulation's, and why they differ."""
    simulated = {tuple(point[name] for name in SETTING): point for point in document["points"]}
    rows = []
    for point in document.get("emulated", ()):
        found = simulated.get(tuple(point[name] for name in SETTING))
        if found is not None:
            difference = point["peak"] - found["peak"]
            said = "0" if not difference else f"{'+' if difference > 0 else '-'}{format_bytes(abs(difference))}"
            why = REASONS.get(point["model"], "not explained") if difference else ""
            peaks = [format_bytes(found["peak"]), format_bytes(point["peak"])]
            rows.append([point["model"], point["precision"], str(point["batch"]), *peaks, said, why])
    return rows


def compiled_of(document: Document) -> list[Row]:
    """What compiling does to each model that was compiled, then the models that cannot be, with the reason."""
    rows = []
    for model, runs in compiled_runs(document).items():
        small, large = runs[0], runs[-1]
        peaks = [format_bytes(peak) for run in (small, large) for peak in (run.plain[AMP], run.compiled[AMP])]
        changes, savings = map(signed, (small.change, large.change)), [saved(large.plain), saved(large.compiled)]
        first, last = changes
        rows.append([model, *peaks[:2], first, str(large.batch), *peaks[2:], last, *map(_percent, savings), ""])
    refused = {point["model"]: point["refused"] for point in document.get("compiled", ()) if "refused" in point}
    return rows + [[model, *[""] * 9, reason] for model, reason in refused.items()]


def _percent(share: float) -> str:
    return signed(share).removeprefix("+")


def findings_of(points: Iterable[Point]) -> list[Row]:
    """The number of runs with each of ampmem's findings."""
    counted = Counter(code for point in points for code in point.get("findings", ()))
    return [[code, str(count)] for code, count in counted.most_common()]
