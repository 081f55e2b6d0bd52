"""What is shown only to those who ask for it."""

from __future__ import annotations

from enum import StrEnum


class Detail(StrEnum):
    """A part of what is said of one recording or of several; each is an option of ``ampmem show``."""

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
    Detail.CASTS: "the ledger of the copies that autocast makes",
    Detail.MODULES: "the modules with the most bytes",
    Detail.LARGEST: "the largest allocations at the peak, with the script's lines",
    Detail.LOSSES: "the loss of each step, of several recordings",
    Detail.EVIDENCE: "what shows each finding",
}

EVERYTHING: frozenset[Detail] = frozenset(Detail)
NOTHING: frozenset[Detail] = frozenset()
