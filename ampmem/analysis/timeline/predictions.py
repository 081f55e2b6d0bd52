"""The results that an evaluation keeps: a list, or a concatenated tensor, that is larger before each of its batches."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.lifetimes import JoinedFacts, Lifetimes, Mask
from ampmem.events import Action, Fact, Phase, Recording
from ampmem.vocabulary import OF_INFERENCE

_ITEM = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPredictions:
    """The ``allocations`` (a mask) that the variable ``name`` of the script keeps of earlier batches.

    ``place`` is ``FILE:LINE FUNCTION`` of its assignment; ``grown`` is the bytes by which it grew last.
    """

    name: str
    place: str
    grown: int
    allocations: Mask


def kept_predictions(lifetimes: Lifetimes, facts: JoinedFacts, recording: Recording) -> tuple[KeptPredictions, ...]:
    """What each variable keeps of earlier batches, in evaluations or in inference.

    The recorder looks at the script's variables before each forward there. Of a tensor that is replaced each time, as
    by ``torch.cat``, only equal growth counts: targets may be larger, too, if batches are ordered by their length.
    What a module replaces in its own forward is a cache that later forwards read, such as keys and values.
    """
    phases, texts = recording.phases, recording.texts
    evaluated = Phase.FORWARD if recording.run.step_on in OF_INFERENCE else Phase.EVALUATION
    first = phases.time_ns[phases.phase == evaluated][:1]
    if not len(first):
        return ()
    rows = np.flatnonzero(facts.fact == Fact.VARIABLE)
    following = np.append(phases.phase, -1)[np.searchsorted(phases.time_ns, facts.time_ns[rows], side="right")]
    rows = rows[following == evaluated]
    looks, look = np.unique(facts.time_ns[rows], return_inverse=True)
    made = (lifetimes.born_ns > first[0]) & (recording.events.action[lifetimes.born] == Action.ALLOC)
    made[facts.allocation[facts.fact == Fact.INPUT]] = False
    results = np.zeros_like(made)
    results[facts.allocation[facts.fact == Fact.OUTPUT]] = True
    held: dict[tuple[str, str], list[set[int]]] = {}
    mine = made[facts.allocation[rows]]
    columns = (facts.name[rows], facts.module[rows], look, facts.allocation[rows])
    for name, place, index, allocation in zip(*(column[mine].tolist() for column in columns), strict=True):
        held.setdefault((_ITEM.sub("[*]", texts[name]).removesuffix("[*]"), texts[place]), [set() for _ in looks])[
            index
        ].add(allocation)
    in_module = lifetimes.module != 0
    found = ((key, _kept(lifetimes, in_module, sets)) for key, sets in held.items())
    return tuple(
        KeptPredictions(name=name, place=place, grown=grown, allocations=_all_of(lifetimes, results, kept))
        for (name, place), (kept, grown) in found
        if kept
    )


def _kept(lifetimes: Lifetimes, in_module: Mask, sets: Sequence[Set[int]]) -> tuple[list[int], int]:
    """The allocations in ``sets``, one for each look at a variable, if they grow, and the bytes of the last growth."""
    sizes = [0, *(int(lifetimes.bytes[list(each)].sum()) for each in sets)]
    grown = 0
    for before, now, size, earlier, earliest in zip(sets, sets[1:], sizes[2:], sizes[1:], sizes, strict=False):
        keeps = before and before < now
        replaced = before and not before & now and not in_module[list(now)].any()
        if keeps or (replaced and size - earlier == earlier - earliest > 0):
            grown = size - earlier
    return (sorted(set().union(*sets)), grown) if grown else ([], 0)


def _all_of(lifetimes: Lifetimes, results: Mask, kept: Sequence[int]) -> Mask:
    """``kept``, and ``results`` of the same ops that live as long: a list's last item, and those after all looks."""
    mask: Mask = np.zeros(len(lifetimes), dtype=np.bool_)
    mask[kept] = True
    known = mask & results
    if known.any():
        place = np.stack([lifetimes.op, lifetimes.module, lifetimes.phase, lifetimes.stack])
        line = np.unique(place, axis=1, return_inverse=True)[1].reshape(-1)
        lasts = lifetimes.died_ns >= lifetimes.died_ns[known].min()
        mask |= results & np.isin(line, line[known]) & lasts & (lifetimes.born_ns >= lifetimes.born_ns[known].min())
    return mask
