"""The table as JSON, from which the page is made."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ampmem.version import __version__
from published.runs import PublishedRun, Row
from published.sources import every_run
from published.together import LeftOut

SCHEMA = "ampmem.published/1"


def document_of(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """All that a page or a test needs; bytes."""
    return {
        "schema": SCHEMA,
        "ampmem": __version__,
        "torch": torch.__version__,
        "rows": [_row(row) for row in rows],
        "left_out": [asdict(each) for each in left_out],
    }


def _row(row: Row) -> dict[str, Any]:
    simulated = asdict(row.simulated)
    del simulated["sizes"], simulated["seconds"]
    return {
        **asdict(row.run),
        "simulated": simulated,
        "day": row.day,
        "predicted": asdict(row.predicted),
        "error": row.error,
        "fits": row.simulated.fits,
        "held": row.held,
        "sequence": None if row.sequence is None else asdict(row.sequence),
    }


def joined(old: dict[str, Any], new: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """``new`` with those rows of ``old`` that it has not, for the runs of ``order`` and in that order."""
    merged = dict(new)
    here = {each["key"] for kind in ("rows", "left_out") for each in new[kind]}
    for kind in ("rows", "left_out"):
        rows = new[kind] + [each for each in old[kind] if each["key"] not in here and each["key"] in order]
        merged[kind] = sorted(rows, key=lambda row: order.index(row["key"]))
    return merged


def older(runs: Iterable[PublishedRun], document: dict[str, Any], day: str) -> list[PublishedRun]:
    """Those of ``runs`` that ``document`` has no row of, or one that was simulated before ``day``."""
    days = {row["key"]: row.get("day", "") for row in document["rows"]}
    return [run for run in runs if days.get(run.key, "") < day]


def read_document(path: Path) -> dict[str, Any]:
    """What :func:`write_document` wrote, with what is known of each run as its source has it now."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = _known()
    return found | {"rows": [row | known.get(row["key"], {}) for row in found["rows"]]}


@cache
def _known() -> dict[str, dict[str, Any]]:
    """The published part of each row, by key."""
    return {run.key: json.loads(json.dumps(asdict(run))) for run in every_run()}


def write_document(document: dict[str, Any], path: Path) -> None:
    """The same bytes for the same table."""
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
