"""Reports, the details that can be asked for, and several documents as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.summary import Summary


class Detail(StrEnum):
    """A detail of one recording or several that can be shown; each is an option of ``ampmem show``."""

    MARKS = "marks"
    STATIC_MODEL = "static-model"
    ACTIVATIONS = "activations"
    CASTS = "casts"
    MODULES = "modules"
    LARGEST = "largest"
    LOSSES = "losses"
    EVIDENCE = "evidence"


WHAT = {
    Detail.MARKS: "the categories after forward, after backward and after the update",
    Detail.STATIC_MODEL: "the rule of thumb for static memory, and what explains the rest",
    Detail.ACTIVATIONS: "what activations under autocast were saved for, what made them, and their types",
    Detail.CASTS: "the copies that autocast makes, and who holds them",
    Detail.MODULES: "the modules with the most bytes",
    Detail.LARGEST: "the largest allocations at the peak, with the script's lines",
    Detail.LOSSES: "the loss of each step, for several recordings",
    Detail.EVIDENCE: "the evidence for each finding",
}

EVERYTHING: frozenset[Detail] = frozenset(Detail)
NOTHING: frozenset[Detail] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A recording to show. ``title`` is the script with its arguments, ``file`` the recording's file."""

    title: str
    summary: Summary
    notes: tuple[str, ...]
    file: str = ""


def object_or_array(texts: Sequence[str]) -> str:
    """One JSON object, or an array of them."""
    return texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
