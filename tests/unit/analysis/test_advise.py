"""The search for changes over made-up peaks: what is run next, what is never run twice, and what comes first."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest
from support.build import gpu_run, small_run

from ampmem.analysis.advise import (
    Proof,
    advice,
    advise_schema,
    blocks_of_ranks,
    changeable_script,
    code_of,
    cost_of,
    different_ranks,
    due,
    how_bad,
    incomparable,
    measured_memory,
    meets,
    most_left,
    name_of,
    next_forced,
    proof_base,
    ranked,
    step_time,
    to_prove,
    why_not_run,
    why_unproven,
)
from ampmem.analysis.analyse import analyse
from ampmem.analysis.blocks import Blocks
from ampmem.analysis.changes import CHANGES, Loop, Script, Trial
from ampmem.analysis.fit import Memory
from ampmem.analysis.suggested import Suggestion
from ampmem.events import LayersRecord, OptimizerRecord
from ampmem.reporters.text.advise import headline, proof_in_words, ranks_line, refused_lines, render_advice, rows_of
from ampmem.reporters.text.layout import Layout
from ampmem.results import Deviation
from ampmem.vocabulary import NOTHING_FORCED, Device, Forced

SCRIPT = Script(blocks=Blocks(names=tuple(f"h.{number}" for number in range(12))), optimizers=("AdamW",), updated=148)
THREE = frozenset({"checkpoint", "foreach", "fused"})
FUSED, FOREACH = Forced(fused=True), Forced(foreach=False)


def checkpointed(count: int, *, fused: bool = False) -> Forced:
    return Forced(checkpoint=SCRIPT.blocks.first(count) if SCRIPT.blocks else (), fused=fused)


def ran(forced: Forced, total: int, per_block: int = 10, loss: int = 0, compiled: int = 0) -> Trial:
    """Each block saves ten, fused five, offloading 15, bfloat16 30, half a batch twenty; beyond ``total`` none is left.

    Gradients freed after the update save seven, as does no cache; small workspaces nine, views of buckets eight,
    resharding 40, no prefetch twelve more, a policy 60, the loss in chunks ``loss``, compiling ``compiled``, compiled
    code that keeps nothing 40. The setting of the allocator takes one byte off what is reserved.
    """
    size = 200 - per_block * len(forced.checkpoint) - 5 * forced.fused - 30 * forced.bfloat16 - 15 * forced.offload
    size -= 8 * forced.bucket_view + 40 * forced.reshard + 12 * (forced.no_prefetch and forced.reshard)
    size -= 60 * forced.policy + loss * bool(forced.loss_chunks) + 7 * forced.free_gradients
    size -= 9 * bool(forced.workspace) + 7 * forced.no_cache
    size -= compiled * bool(forced.compile) + round(40 * (1 - (forced.activation_memory_budget or 1)))
    size -= 0 if forced.batch_size is None else 20 * (8 // forced.batch_size).bit_length() - 20
    idle = 2 - bool(forced.allocator)
    memory = Memory(allocated=size, reserved=size + idle, used=size + idle + 2, highest=size + idle + 3)
    return Trial(memory=memory if size + idle + 3 <= total else None)


def search(
    budget: int | None,
    total: int = 1000,
    allowed: frozenset[str] = THREE,
    script: Script = SCRIPT,
    per_block: int = 10,
    loss: int = 0,
    compiled: int = 0,
    **refused: str,
) -> dict[Forced, Trial]:
    trials: dict[Forced, Trial] = {}
    forced: Forced | None = NOTHING_FORCED
    while forced is not None:
        assert forced not in trials
        failure = "torch does not" if "fused" in refused and forced.fused else why_not_run(forced, script)
        trials[forced] = (
            Trial(memory=None, failure=failure) if failure else ran(forced, total, per_block, loss, compiled)
        )
        forced = next_forced(trials, script, allowed, budget)
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
    assert set(search(100, allowed=frozenset({"foreach"}))) == {NOTHING_FORCED, FOREACH}
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
    text = render_advice(found)
    assert "nothing" in text and "for block in model.h[:12]: block.forward = " in text
    assert "AdamW(..., fused=True)" in text


def test_where_nothing_is_enough_it_is_said_how_much_is_left() -> None:
    found = advice(search(50), SCRIPT, 50, title="train.py", steps=2, gpu="h100", total=1000)
    assert headline(found) == (
        "No run surely fits into 50 B of h100; checkpoint 12 of 12 blocks, fused=True allocates least, "
        "and the device would need up to 30 B more."
    )
    nothing = advice(search(None, total=10), SCRIPT, None, title="train.py", steps=2, gpu="h100", total=10)
    assert headline(nothing) == "No run fits into h100: memory runs out in each run."
    assert "out of memory" in render_advice(nothing)
    surely = [cells for cells in render_advice(found).splitlines() if cells.startswith("foreach=False")]
    assert "no" in surely[0].split() and "not surely" not in render_advice(found)
    close = {NOTHING_FORCED: Trial(memory=Memory(allocated=90, reserved=95, used=99, highest=105))}
    assert "not surely" in render_advice(advice(close, SCRIPT, 100, title="train.py", steps=2, gpu="h100", total=1000))
    refused = advice(search(84, fused="refused"), SCRIPT, 84, title="train.py", steps=2, gpu="h100", total=1000)
    assert "fused=True: torch does not" in render_advice(refused)


def test_costs_and_code_are_of_this_script() -> None:
    unknown = Trial(memory=None)
    both = checkpointed(6, fused=True)
    assert cost_of(both, SCRIPT, unknown) == "recomputes the forward of 6 of 12 blocks in each step; fewer kernels"
    counted = Trial(memory=None, flops=500, recomputed_flops=100)
    assert cost_of(both, SCRIPT, counted) == "recomputes 25.0 % of the step's FLOPs; fewer kernels"
    assert (
        cost_of(FOREACH, SCRIPT, replace(counted, recomputed_flops=0)) == "separate kernels for each of 148 parameters"
    )
    other = Script(blocks=Blocks(names=("0.layers.0", "0.layers.1", "0.layers.5")), optimizers=(), updated=0)
    (line,) = code_of(Forced(checkpoint=("0.layers.0", "0.layers.1")), other)
    assert line.startswith("for block in model[0].layers[:2]: block.forward = ")
    assert code_of(FOREACH, other) == ("the optimizer(..., foreach=False)",)


def test_what_is_to_be_proven_is_the_best_and_each_change_alone() -> None:
    trials = search(84)
    proven = to_prove(trials, 84)
    assert proven[0] == checkpointed(12, fused=True)
    assert set(proven[1:]) == {FUSED, FOREACH, checkpointed(12)}
    assert FUSED not in to_prove(search(84, fused="refused"), 84)
    assert [proof_base(each, SCRIPT) for each in (FUSED, FOREACH, checkpointed(1))] == [
        Forced(foreach=True),
        Forced(foreach=True),
        NOTHING_FORCED,
    ]


def test_a_script_that_is_too_large_for_the_cpu_is_not_run_there() -> None:
    small = Memory(allocated=1 << 20, reserved=1 << 21, used=1 << 22)
    fits = Trial(memory=small, flops=10**9)
    assert why_unproven({NOTHING_FORCED: fits}, SCRIPT) is None
    reasons = [
        why_unproven({NOTHING_FORCED: replace(fits, flops=10**13)}, SCRIPT),
        why_unproven({NOTHING_FORCED: fits}, replace(SCRIPT, trained_bytes=1 << 30)),
        why_unproven({NOTHING_FORCED: Trial(memory=replace(small, allocated=8 << 30))}, SCRIPT),
        why_unproven({NOTHING_FORCED: Trial(memory=None)}, SCRIPT),
    ]
    for reason, words in zip(
        reasons, ("1e+13 FLOPs", "1.0 GiB of parameters", "a peak of 8.0 GiB", "more memory than"), strict=True
    ):
        assert reason is not None and words in reason


def test_what_was_proven_is_said_and_fits_the_schema() -> None:
    same = Deviation(
        losses=3,
        gradients=9,
        equal=True,
        same_kind=True,
        loss_difference=0,
        gradient_difference=0,
        largest_loss=2,
        largest_gradient=1,
    )
    proofs = {
        checkpointed(12, fused=True): Proof(base="foreach=True", difference=None, failure="it is too large"),
        FUSED: Proof(base="foreach=True", difference=replace(same, equal=False, gradient_difference=1e-7)),
        FOREACH: Proof(base="foreach=True", difference=replace(same, equal=False, same_kind=False)),
        checkpointed(12): Proof(base="the script as it is", difference=same),
    }
    found = advice(search(84), SCRIPT, 84, title="train.py", steps=2, gpu="h100", total=1000, proofs=proofs)
    jsonschema.Draft202012Validator(advise_schema()).validate(json.loads(found.to_json()))
    lines = {run.change: proof_in_words(run.proof) for run in found.runs if run.proof is not None}
    assert lines == {
        "checkpoint 12 of 12 blocks, fused=True": "not compared: it is too large",
        "fused=True": "3 losses and 9 gradients differ from those of foreach=True: losses have equal values, gradients "
        "differ by up to 1e-07 (the largest is 1)",
        "foreach=False": "losses or gradients differ from those of foreach=True in number or shape",
        "checkpoint 12 of 12 blocks": "3 losses and 9 gradients equal those of the script as it is, bit for bit",
    }
    assert "losses and gradients of three steps on the CPU" in render_advice(found)


EVERY = frozenset(change.allow for change in CHANGES)
LOADED = replace(SCRIPT, batch=8)
OFFLOAD = Forced(offload=True)
SETTING, BFLOAT16, HALF = Forced(allocator="expandable_segments:True"), Forced(bfloat16=True), Forced(batch_size=4)


def test_changes_of_the_results_are_the_last_resort() -> None:
    # checkpointing and fused save 125 of 205, the allocator one, offloading 15, bfloat16 30, each halving of a batch 20
    kept = Forced(checkpoint=checkpointed(12).checkpoint, fused=True, allocator=SETTING.allocator)
    last = replace(kept, offload=True, bfloat16=True)
    for budget, best in (
        (80, replace(kept, allocator="")),
        (79, kept),
        (64, replace(kept, offload=True)),
        (34, last),
        (14, replace(last, batch_size=4)),
        (0, replace(last, batch_size=2)),
    ):
        trials = search(budget, allowed=EVERY, script=LOADED)
        assert ranked(trials, budget)[0] == best, budget
        assert {SETTING, BFLOAT16, HALF} < set(trials)
        assert any(each.batch_size for each in trials if len(each.kinds()) > 1) == (best.batch_size is not None)
    assert {each.batch_size for each in search(-99, allowed=EVERY, script=LOADED)} == {None, 1, 2, 4}


COMPILED = Forced(compile=True)
OF_THE_COMPILER = frozenset({"compile", "memory-budget", "offload"})


def keeps(share: float, base: Forced = NOTHING_FORCED) -> Forced:
    return replace(base, activation_memory_budget=share)


def test_a_script_that_compiles_nothing_is_compiled_and_keeps_less_if_that_helps() -> None:
    alone = {NOTHING_FORCED, COMPILED, OFFLOAD}
    assert set(search(1000, allowed=OF_THE_COMPILER)) == alone
    less = {keeps(share, COMPILED) for share in (0.75, 0.5, 0.25)}
    assert set(search(None, allowed=OF_THE_COMPILER, compiled=6)) == alone | less
    assert ranked(search(199, allowed=OF_THE_COMPILER, compiled=6), 199)[0] == COMPILED
    # compiling saves 6 of 205, what is kept 10, 20 and 30 more; the most that is enough comes first
    assert ranked(search(180, allowed=OF_THE_COMPILER, compiled=6), 180)[0] == keeps(0.5, COMPILED)
    # what compiled code saves is not offloaded
    assert not any(each.compile and each.offload for each in search(0, allowed=OF_THE_COMPILER, compiled=6))
    whole = replace(checkpointed(12), compile=True)
    trials = search(80, allowed=OF_THE_COMPILER | {"checkpoint"}, compiled=6)
    assert ranked(trials, 80)[0] == whole
    assert not any(each.checkpoint and each.activation_memory_budget for each in trials)


def test_a_script_that_compiles_is_not_compiled_and_keeps_less() -> None:
    compiles = replace(SCRIPT, compiles=True)
    trials = search(190, allowed=OF_THE_COMPILER, script=compiles)
    assert set(trials) == {NOTHING_FORCED, OFFLOAD, *map(keeps, (0.75, 0.5, 0.25))}
    assert ranked(trials, 190)[0] == keeps(0.5)


def test_runs_that_compute_less_else_beat_those_that_compute_more() -> None:
    trials = {each: ran(each, 1000) for each in (NOTHING_FORCED, BFLOAT16, replace(HALF, bfloat16=True), HALF)}
    found = advice(trials, LOADED, None, title="t", steps=2, gpu="g", total=1 << 30)
    assert all(run.unbeaten for run in found.runs)


FREED = Forced(free_gradients=True)
WITH_GRADIENTS = frozenset({"checkpoint", "gradients"})


def test_gradients_that_are_alive_in_forward_are_freed_in_combinations() -> None:
    idle = replace(SCRIPT, idle_gradients=True)
    assert ranked(search(198, allowed=WITH_GRADIENTS, script=idle), 198)[0] == FREED
    assert ranked(search(80, allowed=WITH_GRADIENTS, script=idle), 80)[0] == replace(
        checkpointed(12), free_gradients=True
    )
    assert not any(each.free_gradients for each in search(80, allowed=WITH_GRADIENTS))
    assert name_of(FREED, idle) == "gradients freed after the update"
    assert code_of(FREED, idle) == ("optimizer.zero_grad()  # right after optimizer.step()",)


SMALL, UNCACHED = Forced(workspace=":16:8"), Forced(no_cache=True)


def test_workspaces_and_the_cache_are_tried_where_they_are_seen() -> None:
    allowed = frozenset({"checkpoint", "cache", "workspace"})
    seen = replace(SCRIPT, workspaces=True, cached_casts=True)
    assert ranked(search(198, allowed=allowed, script=seen), 198)[0] in (SMALL, UNCACHED)
    best = ranked(search(76, allowed=allowed, script=seen), 76)[0]
    assert best == replace(checkpointed(12), workspace=":16:8", no_cache=True)
    assert set(search(198, allowed=allowed)) & {SMALL, UNCACHED} == set()
    assert name_of(replace(SMALL, no_cache=True), seen) == "autocast without its cache, small cuBLAS workspaces"
    assert cost_of(SMALL, seen, Trial(memory=None)) == "matrix products may take slower kernels"
    assert code_of(UNCACHED, seen) == ("torch.autocast(..., cache_enabled=False)",)
    assert (
        why_not_run(SMALL, replace(seen, device=Device.CPU))
        == "the setting is for cuBLAS's workspaces, which the CPU does not have"
    )
    assert incomparable(SMALL) == "a CPU does not have cuBLAS"


CHUNKS = Forced(loss_chunks=8)
WITH_LOSS = frozenset({"checkpoint", "loss"})


def test_the_loss_in_chunks_is_added_where_it_makes_blocks_superfluous() -> None:
    trials = search(150, allowed=WITH_LOSS, loss=23)  # 205 as it is: six blocks alone are enough, four with the loss
    assert ranked(trials, 150)[0] == replace(checkpointed(4), loss_chunks=8)
    assert {checkpointed(5), checkpointed(6), replace(checkpointed(3), loss_chunks=8)} < set(trials)
    assert not any(each.loss_chunks and len(each.checkpoint) > 6 for each in trials)
    assert ranked(search(185, allowed=WITH_LOSS, loss=23), 185)[0] == CHUNKS
    trials = search(150, allowed=WITH_LOSS)
    assert [each for each in trials if each.loss_chunks] == [CHUNKS], "what saves nothing is added to nothing"
    trials = search(80, allowed=WITH_LOSS, loss=23)  # all blocks are not enough without it
    assert ranked(trials, 80)[0] == replace(checkpointed(11), loss_chunks=8)
    assert replace(checkpointed(12), loss_chunks=8) in search(None, allowed=WITH_LOSS, loss=23)


def test_a_loss_that_allocates_less_and_reserves_more_is_tried_with_the_setting_of_the_allocator() -> None:
    def needs(allocated: int, used: int) -> Trial:
        return Trial(memory=Memory(allocated=allocated, reserved=used, used=used))

    whole = checkpointed(12)
    trials = {NOTHING_FORCED: needs(90, 95), whole: needs(80, 90), CHUNKS: needs(70, 97), SETTING: needs(90, 92)}
    allowed = WITH_LOSS | {"allocator"}
    both = replace(whole, loss_chunks=8)
    assert next_forced(trials, SCRIPT, allowed, 10) == both
    trials[both] = needs(60, 80)
    assert next_forced(trials, SCRIPT, allowed, 10) == replace(both, allocator=SETTING.allocator)
    trials[CHUNKS] = needs(90, 97)
    del trials[both]
    assert next_forced(trials, SCRIPT, allowed, 10) == replace(whole, allocator=SETTING.allocator)


@pytest.mark.parametrize(("classes", "name"), [(["Muon"], "Muon has"), (["Muon", "LBFGS"], "Muon and LBFGS have")])
def test_an_implementation_that_no_optimizer_has_is_not_tried(classes: list[str], name: str) -> None:
    plain = [OptimizerRecord(class_name=each, implementation="for-loop", settings={"lr": 0.1}) for each in classes]
    adam = OptimizerRecord(class_name="AdamW", implementation="foreach", settings={"foreach": None, "fused": None})

    def script(optimizers: list[OptimizerRecord]) -> Script:
        recording = replace(small_run().recording(), optimizers=tuple(optimizers))
        return replace(changeable_script(analyse(recording)), device=Device.CUDA)

    assert why_not_run(FUSED, script(plain)) == f"{name} no fused implementation"
    assert why_not_run(Forced(foreach=False), script(plain)) == f"{name} no foreach implementation"
    assert why_not_run(FUSED, script([*plain, adam])) is why_not_run(Forced(foreach=False), script([adam])) is None
    assert why_not_run(FUSED, script([])) is None


def test_a_script_without_a_cross_entropy_has_no_chunks() -> None:
    script = replace(SCRIPT, no_loss="no F.cross_entropy was seen")
    assert why_not_run(CHUNKS, script) == script.no_loss and why_not_run(CHUNKS, SCRIPT) is None
    assert [each for each in search(150, allowed=WITH_LOSS, script=script) if each.loss_chunks] == [CHUNKS]


def test_the_loss_in_chunks_has_words_a_cost_and_code() -> None:
    assert CHUNKS.options() == ["--force-chunked-loss", "8"] and CHUNKS.kinds() == ("loss_chunks",)
    assert name_of(replace(CHUNKS, fused=True), SCRIPT) == "fused=True, loss in 8 chunks"
    assert cost_of(CHUNKS, SCRIPT, Trial(memory=None)) == "recomputes the loss's log-softmax in each step"
    assert [line.partition(" = ")[0] for line in code_of(CHUNKS, SCRIPT)] == ["parts", "loss"]
    assert proof_base(CHUNKS, SCRIPT) == NOTHING_FORCED and incomparable(CHUNKS) is None


def test_no_run_beats_one_that_needs_less_or_costs_less() -> None:
    def needs(most: int, recomputed: int = 0, moved: int = 0) -> Trial:
        memory = Memory(allocated=most, reserved=most, used=most)
        return Trial(memory=memory, flops=100 + recomputed, recomputed_flops=recomputed, moved_bytes=moved)

    trials = {
        NOTHING_FORCED: needs(90),
        FUSED: needs(80),
        FOREACH: needs(80, recomputed=1),
        checkpointed(12): needs(50, recomputed=20),
        checkpointed(6): needs(85, recomputed=10),
        OFFLOAD: needs(40, moved=7),
        BFLOAT16: needs(30),
        HALF: Trial(memory=None),
    }
    found = advice(trials, LOADED, None, title="train.py", steps=2, gpu="h100", total=100)
    by_options = {run.options: run.unbeaten for run in found.runs}
    unbeaten = [forced for forced in trials if by_options[tuple(forced.options())]]
    assert unbeaten == [FUSED, checkpointed(12), OFFLOAD, BFLOAT16]
    timed = {
        NOTHING_FORCED: replace(needs(90), step_ns=5),
        FUSED: replace(needs(80), step_ns=4),
        checkpointed(12): replace(needs(50), step_ns=6),
    }
    found = advice(timed, replace(SCRIPT, device=Device.CUDA), None, title="t", steps=2, gpu="h100", total=None)
    assert [run.change for run in found.runs if not run.unbeaten] == ["the script as it is"]


def test_unequal_blocks_are_listed_and_suggestions_are_said_to_be_computed() -> None:
    blocks = Blocks(names=("h.0", "h.1"), saved_bytes=(1 << 20, 3 << 20), flops=(10**9, 10**9))
    script = replace(SCRIPT, blocks=blocks, suggestions=(Suggestion(change="del logits", saved_bytes=1 << 30),))
    trials = {NOTHING_FORCED: ran(NOTHING_FORCED, 1000), Forced(checkpoint=("h.1",)): ran(checkpointed(1), 1000)}
    found = advice(trials, script, None, title="train.py", steps=2, gpu="h100", total=1000)
    jsonschema.Draft202012Validator(advise_schema()).validate(json.loads(found.to_json()))
    assert [(block.name, block.saved_bytes) for block in found.blocks] == [("h.1", 3 << 20), ("h.0", 1 << 20)]
    text = render_advice(found)
    assert "    1  h.1     3.0 MiB     1e+09" in text and "del logits: 1.0 GiB computed" in text
    assert "map(model.get_submodule, ('h.1',))" in text
    alike = render_advice(advice(trials, SCRIPT, None, title="train.py", steps=2, gpu="h100", total=1000))
    assert "blocks, in the order" not in alike and "computed from its recording" not in alike


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_many_changes_together_are_broken_into_lines(width: int) -> None:
    trials = search(20, allowed=EVERY, script=LOADED)
    found = advice(trials, LOADED, 20, title="train.py", steps=2, gpu="h100", total=1000)
    assert max(len(run.change) for run in found.runs) > 100
    lines = render_advice(found, Layout(width=width)).partition("in code: ")[0].splitlines()
    assert max(map(len, lines)) <= width


def test_offloading_comes_after_all_that_does_without() -> None:
    trials = search(190, allowed=frozenset({"checkpoint", "offload"}))
    order = ranked(trials, 190)
    assert order[0] == checkpointed(2) and OFFLOAD in order
    assert meets(trials[OFFLOAD], 190) and order.index(OFFLOAD) > order.index(checkpointed(12))
    assert ranked(search(190, allowed=frozenset({"offload"})), 190)[0] == OFFLOAD
    moved = Trial(memory=None, moved_bytes=3 << 30)
    assert cost_of(OFFLOAD, SCRIPT, moved) == "3.0 GiB move between GPU and CPU in each step"
    assert code_of(OFFLOAD, SCRIPT)[0].startswith("with torch.autograd.graph.save_on_cpu():")
    assert name_of(OFFLOAD, SCRIPT) == "offload saved tensors"


def test_where_one_is_enough_alone_nothing_is_added_to_it() -> None:
    trials = search(175, allowed=frozenset({"precision", "batch"}), script=LOADED)
    assert set(trials) == {NOTHING_FORCED, BFLOAT16, HALF}
    assert ranked(trials, 175)[0] == BFLOAT16
    trials = search(175, allowed=EVERY - {"offload"}, script=LOADED, per_block=1)
    assert ranked(trials, 175)[0] == BFLOAT16
    assert not any(each.bfloat16 and each.checkpoint for each in trials)
    trials = search(None, allowed=EVERY, script=LOADED)
    assert ranked(trials, None)[0] == checkpointed(12, fused=True)  # not what changes the results
    assert ranked(trials, None)[-1] == HALF


def test_refused_settings_are_in_no_combination() -> None:
    script = replace(SCRIPT, no_precision="the script already uses autocast, with float16")
    trials = search(10, allowed=EVERY, script=script)
    assert [each for each in trials if each.bfloat16] == [BFLOAT16]
    assert trials[BFLOAT16].failure == "the script already uses autocast, with float16"
    assert [trials[each].failure for each in trials if each.batch_size is not None] == [
        "no DataLoader was seen making the script's batches"
    ]
    assert why_not_run(Forced(batch_size=1), replace(SCRIPT, batch=1)) == "the batch has only one sample"
    idle = [each for each in search(10, allowed=frozenset({"allocator", "checkpoint"})) if each.allocator]
    assert idle == [SETTING, Forced(checkpoint=checkpointed(12).checkpoint, allocator=SETTING.allocator)]


def test_settings_have_words_costs_and_code() -> None:
    forced = Forced(allocator=SETTING.allocator, bfloat16=True, batch_size=2)
    assert forced.kinds() == ("allocator", "batch_size", "bfloat16")
    assert forced.options() == [
        *("--force-allocator", "expandable_segments:True", "--force-batch-size", "2"),
        *("--precision", "amp", "--dtype", "bf16"),
    ]
    assert name_of(forced, LOADED) == "expandable_segments, autocast bfloat16, batch size 2 of 8"
    assert (
        cost_of(forced, LOADED, Trial(memory=None))
        == "rounds results to bfloat16; 4 steps for the same number of samples"
    )
    setting, region, loader = code_of(forced, LOADED)
    assert setting.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True") and "dtype=torch.bfloat16" in region
    assert loader.startswith("DataLoader(..., batch_size=2)")
    assert [incomparable(each) is None for each in (SETTING, HALF, BFLOAT16, checkpointed(3))] == [
        False,
        False,
        True,
        True,
    ]


def test_what_only_reserves_less_is_said_to() -> None:
    trials = search(190, allowed=frozenset({"allocator"}))
    found = advice(trials, SCRIPT, 190, title="train.py", steps=2, gpu="h100", total=1000)
    run = next(run for run in found.runs if run.options)
    assert (run.saved_bytes, run.saved_reserved_bytes) == (0, 1)
    assert "1 B reserved" in render_advice(found)


def test_changes_alone_are_run_at_the_same_time() -> None:
    trials = {NOTHING_FORCED: ran(NOTHING_FORCED, 1000)}
    alone = due(trials, SCRIPT, THREE, 84)
    assert alone == [checkpointed(12), FOREACH, FUSED]
    trials |= {forced: ran(forced, 1000) for forced in alone[:2]}
    assert due(trials, SCRIPT, THREE, 84) == [FUSED]
    trials[FUSED] = ran(FUSED, 1000)
    assert due(trials, SCRIPT, THREE, 84) == [checkpointed(12, fused=True)]
    assert due(search(84), SCRIPT, THREE, 84) == []


@pytest.mark.parametrize("loss", [0, 23])
@pytest.mark.parametrize("budget", [None, 1000, 150, 84, 10])
@pytest.mark.parametrize("allowed", [EVERY, WITH_LOSS])
def test_no_more_runs_are_made_than_are_said_to_be_left(budget: int | None, loss: int, allowed: frozenset[str]) -> None:
    made = search(budget, allowed=allowed, script=LOADED, loss=loss)
    trials: dict[Forced, Trial] = {}
    for number, (forced, trial) in enumerate(made.items(), 1):
        trials[forced] = trial
        assert len(made) - number <= most_left(trials, LOADED, allowed, budget)
    assert most_left(trials, LOADED, allowed, budget) == 0


def test_the_order_in_which_runs_end_does_not_matter() -> None:
    trials = search(84)
    assert ranked(dict(reversed(trials.items())), 84) == ranked(trials, 84)


def test_on_the_cpu_what_makes_no_sense_is_refused_with_a_reason() -> None:
    cpu = replace(SCRIPT, device=Device.CPU)
    for forced, reason in (
        (Forced(allocator="expandable_segments:True"), "the CPU does not have"),
        (OFFLOAD, "in the CPU's memory already"),
        (FOREACH, "only if the script asks for it"),
    ):
        assert reason in (why_not_run(forced, cpu) or "")
        assert why_not_run(forced, replace(cpu, device=Device.CUDA)) is None
    assert why_not_run(FUSED, cpu) is None
    assert proof_base(FUSED, cpu) == NOTHING_FORCED
    assert why_unproven({NOTHING_FORCED: Trial(memory=None)}, cpu) is None
    assert code_of(Forced(bfloat16=True), cpu)[0].startswith("with torch.autocast('cpu', dtype=torch.bfloat16):")


def test_on_a_real_device_a_step_is_timed_and_nothing_is_computed() -> None:
    memory = Memory(allocated=90, reserved=95, used=99)
    trials = {
        NOTHING_FORCED: Trial(memory=memory, step_ns=2_000_000),
        checkpointed(12): Trial(memory=replace(memory, allocated=50, reserved=60, used=64), step_ns=2_500_000),
    }
    cpu, cuda = (replace(SCRIPT, device=device) for device in (Device.CPU, Device.CUDA))
    on_cpu = advice(trials, cpu, 80, title="train.py", steps=2, gpu="CPU", total=None)
    on_gpu = advice(trials, cuda, 64, title="train.py", steps=2, gpu="NVIDIA H100", total=None)
    for found in (on_cpu, on_gpu):
        jsonschema.Draft202012Validator(advise_schema()).validate(json.loads(found.to_json()))
        assert (
            found.runs[0].cost
            == "a step takes 2.5 ms (+25.0 %); recomputes the forward of 12 of 12 blocks in each step"
        )
        assert found.runs[1].cost == "a step takes 2.0 ms"
        assert "cost (time measured)" in render_advice(found)
    assert headline(on_cpu) == "With checkpoint 12 of 12 blocks the script fits into 80 B of tensors."
    assert headline(on_gpu) == "With checkpoint 12 of 12 blocks the script fits into 64 B of NVIDIA H100."
    assert (on_cpu.runs[0].reserved_bytes, on_cpu.runs[0].device_used_bytes, on_cpu.runs[0].limited_bytes) == (
        None,
        None,
        50,
    )
    assert (on_gpu.runs[0].reserved_bytes, on_gpu.runs[0].limited_bytes) == (60, 64)
    nothing = advice(trials, cpu, 40, title="train.py", steps=2, gpu="CPU", total=None)
    assert headline(nothing) == (
        "No run fits into 40 B of tensors; checkpoint 12 of 12 blocks allocates least, and needs 10 B more."
    )
    free = advice(trials, cuda, None, title="train.py", steps=2, gpu="NVIDIA H100", total=None)
    assert headline(free) == "The script fits on NVIDIA H100 as it is; checkpoint 12 of 12 blocks allocates least."


def test_what_a_real_run_takes_is_what_was_measured() -> None:
    kept, step = 3 * 0x800 + 0x1000, 0x2000 + 3 * 0x1000
    allocated = 512 + 400 + 200 + 0x2000 + 0x2200
    run = gpu_run().recording()
    assert measured_memory(run) == Memory(allocated=allocated, reserved=kept + step, used=kept + step)
    row = LayersRecord(step=0, mark="peak", requested=1, allocated=2, active=2, reserved=1000, device_used=1700)
    others = replace(run, layers=(row, replace(row, step=1, device_used=1900)))
    found = measured_memory(others)
    assert found is not None and found.used == kept + step + 900, "most in any step"
    found = measured_memory(replace(run, layers=(row, replace(row, step=1, device_used=1900, process_used=1300))))
    assert found is not None and found.used == kept + step + 300, "other processes do not count where this one is known"
    cpu = measured_memory(small_run().recording())
    assert cpu is not None and cpu.allocated == cpu.reserved == cpu.used > 0


def test_the_first_step_is_not_what_a_step_takes() -> None:
    run = small_run().recording()
    assert step_time(run) is None
    assert step_time(replace(run, plain_step_ns=(90, 20, 40, 10))) == 20
    assert step_time(replace(run, plain_step_ns=(90,))) == 90


def of_rank(rank: int, allocated: int, *, surely: bool = True) -> Trial:
    memory = Memory(allocated=allocated, reserved=allocated, used=allocated, surely=surely)
    return Trial(memory=memory, rank=rank)


def test_the_worst_rank_is_the_one_that_does_not_fit_or_has_the_most_in_use() -> None:
    fits, larger, unsure = of_rank(0, 5), of_rank(1, 7), of_rank(2, 6, surely=False)
    out, failed = Trial(memory=None, rank=3), Trial(memory=None, failure="it ended", rank=4)
    assert sorted((failed, unsure, out, larger, fits), key=how_bad) == [fits, larger, unsure, out, failed]
    assert max((of_rank(0, 7), larger), key=how_bad).rank == 0, "of equal ones the first"


def test_ranks_that_are_equal_as_they_are_are_run_once_with_a_change() -> None:
    other = replace(SCRIPT, trained_bytes=1)
    ranks = [(of_rank(0, 5), SCRIPT), (of_rank(1, 7), SCRIPT), (of_rank(2, 5), SCRIPT), (of_rank(3, 5), other)]
    assert different_ranks(ranks) == (0, 1, 3)


def test_the_blocks_of_stages_are_those_of_all_ranks() -> None:
    first = Blocks(names=("h.0", "h.1"), saved_bytes=(1, 2), flops=(3, 4))
    second = Blocks(names=("h.1", "h.2"), saved_bytes=(5, 6), flops=(7, 8))
    assert blocks_of_ranks([None, first, second]) == Blocks(
        names=("h.0", "h.1", "h.2"), saved_bytes=(1, 2, 6), flops=(3, 4, 8)
    )
    unknown = Blocks(names=("h.3", "h.4"), saved_bytes=(9, 9))
    assert blocks_of_ranks([first, unknown]) == Blocks(names=("h.0", "h.1", "h.3", "h.4"), saved_bytes=(1, 2, 9, 9))
    assert blocks_of_ranks([None, None]) is None


def test_the_table_names_the_worst_rank_and_which_were_run() -> None:
    trials = {
        NOTHING_FORCED: of_rank(1, 9),
        FUSED: of_rank(0, 8),
        FOREACH: Trial(memory=None, failure="chosen", rank=2),
    }
    script = replace(SCRIPT, ranks=(0, 1))
    found = advice(trials, script, None, title="train.py", steps=2, gpu="h100", total=1000, world_size=4)
    assert [run.rank for run in found.runs] == [0, 1, 2]
    assert "as ranks 0, 1: each other rank has, as it is, the peaks and parameters of one of these" in ranks_line(found)
    assert ranks_line(found) in " ".join(render_advice(found).split())
    assert refused_lines(found) == ["foreach=False: rank 2: chosen"]
    (row,) = [line for line in render_advice(found).splitlines() if line.startswith("fused=True  ")]
    assert row.split()[:3] == ["fused=True", "0", "8"]
    alike = replace(found, ranks=(0,))
    assert "changes as rank 0: each other rank has, as it is, the peaks and parameters of this one" in ranks_line(alike)
    assert "as each of 4 ranks" in ranks_line(replace(found, ranks=(0, 1, 2, 3)))
    assert "Each run has 4 ranks" in ranks_line(replace(found, device=Device.CPU))
    jsonschema.validate(json.loads(found.to_json()), advise_schema())


EVERY = frozenset(change.allow for change in CHANGES)


def test_changes_of_how_ranks_train_are_tried_where_there_are_ranks() -> None:
    of_ranks = {Forced(bucket_view=True), Forced(reshard=True), Forced(no_prefetch=True), Forced(policy=True)}
    assert of_ranks & set(search(None, allowed=EVERY)) == set()
    replicated, sharded = replace(SCRIPT, replicated=True), replace(SCRIPT, sharded=True)
    assert of_ranks & set(search(None, allowed=EVERY, script=replicated)) == {Forced(bucket_view=True)}
    assert of_ranks & set(search(None, allowed=EVERY, script=sharded)) == of_ranks - {Forced(bucket_view=True)}
    unreduced = Forced(gradient_sync=True)
    assert unreduced in search(None, allowed=EVERY, script=replace(sharded, unreduced=True))
    assert unreduced not in search(None, allowed=EVERY, script=sharded)


def test_weights_in_bfloat16_are_tried_alone_also_under_autocast() -> None:
    autocast = replace(SCRIPT, no_precision="the script already uses autocast, with bfloat16")
    trials = search(10, allowed=EVERY, script=autocast)
    assert [forced for forced in trials if forced.low_weights] == [Forced(low_weights=True)]
    assert Forced(low_weights=True).options() == ["--precision", "bf16"]
    refused = replace(SCRIPT, no_low_weights="every run already has the precision amp")
    assert why_not_run(Forced(low_weights=True), refused) == refused.no_low_weights


def test_resharding_is_combined_with_no_prefetch_which_saves_nothing_alone() -> None:
    script = replace(SCRIPT, sharded=True, blocks=None)
    allowed = frozenset({"reshard", "prefetch", "policy"})
    assert ranked(search(166, allowed=allowed, script=script), 166)[0] == Forced(reshard=True)
    both = Forced(reshard=True, no_prefetch=True)
    trials = search(154, allowed=allowed, script=script)
    assert ranked(trials, 154)[0] == both, "a policy alone is enough, and changes the results"
    assert ranked(search(100, allowed=allowed, script=script), 100)[0] == replace(both, policy=True)


def test_a_policy_and_autocast_are_not_combined() -> None:
    script = replace(SCRIPT, sharded=True, blocks=None)
    trials = search(10, allowed=frozenset({"policy", "precision"}), script=script)
    assert not any(forced.policy and forced.bfloat16 for forced in trials)
    refused = replace(script, no_precision="the script already uses autocast, with bfloat16")
    assert why_not_run(Forced(policy=True), refused) == refused.no_precision


def test_changes_of_ranks_are_named_and_written() -> None:
    every = Forced(bucket_view=True, reshard=True, no_prefetch=True, policy=True)
    assert name_of(every, SCRIPT) == (
        "gradient_as_bucket_view=True, reshard after forward, no prefetch in backward, bfloat16 policy"
    )
    assert cost_of(every, SCRIPT, of_rank(0, 1)) == (
        "gathers parameters again for backward; backward waits for each all-gather; "
        "rounds parameters and results to bfloat16"
    )
    starts = (
        "DistributedDataParallel(..., gra",
        "fully_shard(..., resh",
        "each.set_modules_to",
        "fully_shard(..., mp_",
    )
    assert all(line.startswith(start) for line, start in zip(code_of(every, SCRIPT), starts, strict=True))
    assert " ".join(every.options()) == ("--force-bucket-view --force-reshard --force-policy --force-no-prefetch")


def test_what_is_saved_is_at_least_what_the_script_had_and_asked_for_when_memory_ran_out() -> None:
    trials = {
        NOTHING_FORCED: Trial(memory=None, needed=5 << 20),
        CHUNKS: Trial(memory=Memory(allocated=3 << 20, reserved=4 << 20, used=4 << 20)),
        FUSED: Trial(memory=Memory(allocated=6 << 20, reserved=6 << 20, used=6 << 20)),
        Forced(foreach=False): Trial(memory=None, needed=5 << 20),
    }
    script = replace(SCRIPT, profiled="--gpu 8MiB train.py")
    found = advice(trials, script, None, title="train.py", steps=2, gpu="h100", total=100 << 20)
    assert {run.change: run.saved_at_least_bytes for run in found.runs} == {
        "loss in 8 chunks": 2 << 20,
        "fused=True": 0,
        "foreach=False": None,
        "the script as it is": None,
    }
    jsonschema.Draft202012Validator(advise_schema()).validate(json.loads(found.to_json()))
    saved = [row[4] for row in rows_of(found)]
    assert saved == ["at least 2.0 MiB", "-", "-", "-"]
    text = render_advice(found)
    assert "ampmem profile --force-chunked-loss 8 --gpu 8MiB train.py" in text
    assert "--force-fused" not in text  # it saves nothing


ALL = Forced(checkpoint=SCRIPT.blocks.names if SCRIPT.blocks else ())


@pytest.mark.parametrize(
    ("loop", "forced", "first"),
    [
        (Loop.OF_TRANSFORMERS, ALL, "model.gradient_checkpointing_enable("),
        (Loop.OF_TRANSFORMERS, checkpointed(3), "for block in model.h[:3]: "),
        (Loop.OF_TRANSFORMERS, BFLOAT16, "with torch.autocast('cuda', dtype=torch.bfloat16):"),
        (Loop.TRAINER, ALL, "TrainingArguments(..., gradient_checkpointing=True, "),
        (Loop.TRAINER, BFLOAT16, "TrainingArguments(..., bf16=True)"),
        (Loop.TRAINER, replace(HALF, batch_size=3), "TrainingArguments(..., per_device_train_batch_size=3, "),
        (Loop.LIGHTNING, ALL, "for block in model.h[:12]: "),
        (Loop.LIGHTNING, BFLOAT16, "Trainer(..., precision='bf16-mixed')"),
        (Loop.LIGHTNING, replace(NOTHING_FORCED, low_weights=True), "Trainer(..., precision='bf16-true')"),
    ],
)
def test_a_change_is_written_in_the_words_of_the_scripts_training_loop(loop: Loop, forced: Forced, first: str) -> None:
    (line,) = code_of(forced, replace(LOADED, loop=loop))
    assert line.startswith(first)
    if forced.batch_size:
        assert line.endswith("gradient_accumulation_steps=3)")  # 8 samples, 3 at once


def test_the_loss_of_transformers_is_the_same_in_chunks() -> None:
    torch = pytest.importorskip("torch")
    (code,) = code_of(CHUNKS, replace(SCRIPT, loop=Loop.OF_TRANSFORMERS))
    model = SimpleNamespace(loss_function=None)
    exec(code, space := {"torch": torch, "F": torch.nn.functional, "model": model})
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 17, 11, requires_grad=True), torch.randint(0, 11, (3, 17))
    labels[:, :4] = -100
    alike = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss, count = space["model"].loss_function, int((labels[:, 1:] != -100).sum())
    assert loss(logits, labels, vocab_size=11).item() == pytest.approx(alike.item(), rel=1e-6)
    # With accumulated gradients the Trainer gives the number of labels of all micro-batches.
    of_all = loss(logits, labels, vocab_size=11, num_items_in_batch=2 * count).item()
    assert of_all == pytest.approx(alike.item() / 2, rel=1e-6)
