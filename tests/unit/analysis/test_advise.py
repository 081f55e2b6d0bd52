"""The search for changes over made-up peaks: what is run next, what is never run twice, and what comes first."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from ampmem.analysis.advise import (
    Blocks,
    Change,
    Script,
    Trial,
    advice,
    advise_schema,
    code_of,
    cost_of,
    next_forced,
    ranked,
)
from ampmem.analysis.fit import Memory
from ampmem.reporters.text.advise import headline, render
from ampmem.vocabulary import NOTHING_FORCED, Forced

SCRIPT = Script(blocks=Blocks(prefix="h", numbers=tuple(range(12))), optimizers=("AdamW",), updated=148)
ALL = frozenset(Change)
FUSED, FOREACH = Forced(fused=True), Forced(foreach=False)


def checkpointed(count: int, *, fused: bool = False) -> Forced:
    return Forced(checkpoint=SCRIPT.blocks.first(count) if SCRIPT.blocks else (), fused=fused)


def ran(forced: Forced, total: int, per_block: int = 10) -> Trial:
    """Each block saves ten, fused saves five; beyond ``total`` memory runs out."""
    size = 200 - per_block * len(forced.checkpoint) - 5 * forced.fused
    memory = Memory(allocated=size, reserved=size + 2, used=size + 4, highest=size + 5)
    return Trial(memory=memory if size + 5 <= total else None)


def search(
    budget: int | None, total: int = 1000, allowed: frozenset[Change] = ALL, **refused: str
) -> dict[Forced, Trial]:
    trials: dict[Forced, Trial] = {}
    forced: Forced | None = NOTHING_FORCED
    while forced is not None:
        assert forced not in trials
        failure = "torch does not" if "fused" in refused and forced.fused else None
        trials[forced] = Trial(memory=None, failure=failure) if failure else ran(forced, total)
        forced = next_forced(trials, SCRIPT, allowed, budget)
    return trials


def least(limit: int) -> int:
    """The fewest blocks alone that are enough."""
    return next(count for count in range(13) if 205 - 10 * count <= limit)


@pytest.mark.parametrize("limit", [196, 195, 194, 150, 86, 85])
@pytest.mark.parametrize("by_budget", [True, False])
def test_the_fewest_blocks_that_are_enough_are_found(limit: int, by_budget: bool) -> None:
    trials = search(limit) if by_budget else search(None, total=limit)
    order = ranked(trials, limit if by_budget else None)
    assert (checkpointed(least(limit)) in trials and checkpointed(least(limit) - 1) in trials) or least(limit) == 1
    assert order[0] == checkpointed(least(limit))
    assert len(trials) <= 4 + 4


def test_where_one_change_is_not_enough_two_are_run() -> None:
    trials = search(84)
    order = ranked(trials, 84)
    assert order[0] == checkpointed(12, fused=True)
    assert checkpointed(11, fused=True) in trials
    assert set(order[-2:]) == {NOTHING_FORCED, FOREACH}


def test_without_need_the_one_that_allocates_least_is_first() -> None:
    trials = search(None)
    assert ranked(trials, None)[0] == checkpointed(12, fused=True)
    assert set(trials) == {
        NOTHING_FORCED,
        FUSED,
        FOREACH,
        checkpointed(12),
        checkpointed(12, fused=True),
        checkpointed(6),
    }


def test_what_is_not_allowed_or_is_refused_is_not_run() -> None:
    assert set(search(100, allowed=frozenset({Change.FOREACH}))) == {NOTHING_FORCED, FOREACH}
    assert set(search(1000)) == {NOTHING_FORCED, FUSED, FOREACH, checkpointed(12)}
    trials = search(10, fused="refused")
    assert [forced for forced in trials if forced.fused] == [FUSED]
    assert Forced(foreach=False, checkpoint=checkpointed(12).checkpoint) in trials
    assert ranked(trials, 10)[-1] == FUSED


def test_the_document_fits_its_schema_and_says_what_it_saves() -> None:
    trials = search(84)
    found = advice(trials, SCRIPT, 84, title="train.py", steps=2, gpu="h100", total=1000)
    document = json.loads(found.to_json())
    jsonschema.Draft202012Validator(advise_schema()).validate(document)
    best = document["runs"][0]
    assert (best["saved_bytes"], best["meets"]) == (125, True)
    assert best["options"] == [*checkpointed(12).options(), "--force-fused"]
    rows = {run["change"]: run for run in document["runs"]}
    assert rows["foreach=False"]["saved_bytes"] == 0
    assert [run["meets"] for run in document["runs"]].count(True) == 1
    assert headline(found) == "With checkpoint 12 of 12 blocks, fused=True the script fits into 84 B of h100."
    text = render(found)
    assert "nothing" in text and "for block in model.h[:12]: block.forward = " in text
    assert "AdamW(..., fused=True)" in text


def test_where_nothing_is_enough_it_is_said_how_much_is_left() -> None:
    found = advice(search(50), SCRIPT, 50, title="train.py", steps=2, gpu="h100", total=1000)
    assert headline(found) == (
        "Nothing that was run surely fits into 50 B of h100; checkpoint 12 of 12 blocks, fused=True allocates least, "
        "and the device would need 30 B more at most."
    )
    nothing = advice(search(None, total=10), SCRIPT, None, title="train.py", steps=2, gpu="h100", total=10)
    assert headline(nothing) == "Nothing that was run fits into h100: memory runs out in each run."
    assert "out of memory" in render(nothing)
    surely = [cells for cells in render(found).splitlines() if cells.startswith("foreach=False")]
    assert "no" in surely[0].split() and "not surely" not in render(found)
    close = {NOTHING_FORCED: Trial(memory=Memory(allocated=90, reserved=95, used=99, highest=105))}
    assert "not surely" in render(advice(close, SCRIPT, 100, title="train.py", steps=2, gpu="h100", total=1000))
    refused = advice(search(84, fused="refused"), SCRIPT, 84, title="train.py", steps=2, gpu="h100", total=1000)
    assert "fused=True: torch does not" in render(refused)


def test_costs_and_code_are_of_this_script() -> None:
    unknown = Trial(memory=None)
    both = checkpointed(6, fused=True)
    assert cost_of(both, SCRIPT, unknown) == "forward of 6 of 12 blocks once more in a step; fewer kernels"
    counted = Trial(memory=None, flops=500, recomputed_flops=100)
    assert cost_of(both, SCRIPT, counted) == "recomputes 25.0 % of the step's FLOPs; fewer kernels"
    assert cost_of(FOREACH, SCRIPT, replace(counted, recomputed_flops=0)) == "kernels for each of 148 parameters"
    other = Script(blocks=Blocks(prefix="0.layers", numbers=(1, 2, 5)), optimizers=(), updated=0)
    (line,) = code_of(Forced(checkpoint=("0.layers.1", "0.layers.2")), other)
    assert line.startswith("for block in (model[0].layers[i] for i in (1, 2)): block.forward = ")
    assert code_of(FOREACH, other) == ("the optimizer(..., foreach=False)",)
