"""Which parameters nothing trains, beside a model that is trained: averages of the weights, teachers, idle models.

Frozen parameters of a model that is trained are no such ones: gradients go through what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ampmem.events import Fact, ParameterRecord, Recording


def untrained(recording: Recording) -> frozenset[str]:
    """Names of the parameters of modules that nothing trains; none in a recording in which nothing is trained.

    A parameter is trained when an optimizer has it, or when a gradient of it was seen.
    """
    records = [record for record in recording.parameters if record.model]
    trained = trained_in(recording)
    if not records or not trained:
        return frozenset()
    models = {record.model for record in records if record.name in trained}
    outside = {record.name for record in records if record.model not in models}
    return frozenset(outside | _inside([record for record in records if record.model in models], trained))


def trained_in(recording: Recording) -> frozenset[str]:
    """Names of the parameters that an optimizer has, or of which a gradient was seen, and of those in their memory."""
    facts = recording.facts
    names = {recording.texts[name] for name in np.unique(facts.name[facts.fact == Fact.GRADIENT])}
    names &= {record.name for record in recording.parameters}  # inputs may have gradients, too
    names |= {record.name for record in recording.parameters if record.held or record.optimizer is not None}
    return frozenset(
        names | {record.shares for record in recording.parameters if record.name in names and record.shares}
    )


def _inside(records: Sequence[ParameterRecord], trained: frozenset[str]) -> set[str]:
    """Those below modules of a trained model that ran with gradients off only, or that are copies and never ran.

    Such a module consists of several: one alone may be a frozen layer that another module runs.
    """
    below: dict[str, list[ParameterRecord]] = {}
    for record in records:
        for path in _paths(record.name):
            below.setdefault(path, []).append(record)
    still = [path for path, mine in below.items() if not any(r.name in trained or r.in_graph for r in mine)]
    several = [path for path in still if len({record.name.rpartition(".")[0] for record in below[path]}) > 1]
    learned = {_shapes(path, mine) for path, mine in below.items() if any(r.name in trained for r in mine)}
    return {
        record.name
        for path in several
        if any(record.in_graph is False for record in below[path]) or _shapes(path, below[path]) in learned
        for record in below[path]
    }


def _paths(name: str) -> Iterator[str]:
    """The paths of the module that has the parameter, and of all above it."""
    path = name.rpartition(".")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _shapes(path: str, records: Sequence[ParameterRecord]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The parameters below ``path``, each with its name there and its shape."""
    return tuple((record.name.removeprefix(path), record.shape) for record in records)
