"""What a table of published runs comes to: medians, worst, and how other predictors did on the same runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LARGE = 0.01
"""From which error on a miss is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of some rows. ``held`` of ``ranges`` had the truth inside; ``right`` of ``verdicts`` were not false."""

    family: str
    precision: str
    count: int
    median: float | None
    worst: float | None
    ranges: int
    held: int
    verdicts: int
    right: int


def summaries(rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """All together, and without those whose script was written from a recording; then by family and precision, the
    largest groups first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["family"], kind_of(row["precision"])), []).append(row)
    parts = sorted(groups.items(), key=lambda item: -len(item[1]))
    unseen = [row for row in rows if not row["snapshot"]]
    return [
        _summary("all", "all", rows),
        *([_summary("all but the recordings", "all", unseen)] if len(unseen) < len(rows) else []),
        *(_summary(family, kind, part) for (family, kind), part in parts),
    ]


def is_verdict(row: dict[str, Any]) -> bool:
    """Whether it is known of this row that it ran, or that memory ran out."""
    return row["fitted"] is not None and row["reason_known"]


def kind_of(precision: str) -> str:
    """``amp``, or what the weights are."""
    return "amp" if precision.startswith("amp") else precision


def _summary(family: str, precision: str, rows: Sequence[dict[str, Any]]) -> Summary:
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    ranges = [row for row in rows if row["error"] is not None and row["held"] is not None]
    verdicts = [row for row in rows if is_verdict(row)]
    return Summary(
        family=family,
        precision=precision,
        count=len(errors),
        median=median(errors) if errors else None,
        worst=max(errors) if errors else None,
        ranges=len(ranges),
        held=sum(row["held"] for row in ranges),
        verdicts=len(verdicts),
        right=sum(row["held"] for row in verdicts),
    )


def others_beside(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Summary, Summary]]:
    """Each predictor's name, its errors, and ampmem's on the runs that it spoke of."""
    for name in dict.fromkeys(name for row in rows for name in row["others"]):
        both = [row for row in rows if name in row["others"] and row["error"] is not None]
        if both:
            theirs = [row | {"error": row["others"][name] / row["real"] - 1} for row in both]
            yield name, _summary(name, "all", theirs), _summary("ampmem", "all", both)


def larger_misses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest first; false verdicts after them."""
    wide = [row for row in rows if row["error"] is not None and abs(row["error"]) > LARGE]
    false = [row for row in rows if is_verdict(row) and row["held"] is False]
    return sorted(wide, key=lambda row: -abs(row["error"])) + false


def networks_of_xmem(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, float, float]]:
    """Of xMem's convolutional networks: those of the models that the range was chosen with, and the others. What they
    are, how many are inside of the range, and the median and worst error of what is likely."""
    networks = [row for row in rows if row["key"].startswith("xmem/") and row["family"] == "cnn" and row["real"]]
    for tuned, what in ((True, "of the models that it was chosen with"), (False, "of other models")):
        part = [row for row in networks if row["tuned"] is tuned]
        errors = [abs(row["error"]) for row in part]
        if part:
            yield f"{len(part)} {what}", sum(row["held"] is not False for row in part), median(errors), max(errors)


def below_the_least(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where less was allocated than the least of what was predicted."""
    return [
        row
        for row in rows
        if row["what"] == "allocated"
        and row["predicted"]["least"] < row["predicted"]["most"]
        and row["real"] + row["resolution"] // 2 < row["predicted"]["least"]
    ]
