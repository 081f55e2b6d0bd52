"""What the blocks are: seen in C++ frames where they say so, else concluded from frames, sizes and lifetimes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final

from ampmem.events import Fact, Phase
from ampmem.importer.casts import casts_of, copies_in_low_precision, names_in_turn
from ampmem.importer.claims import Claim, Conclusions, Parameter
from ampmem.importer.frames import Purpose, Reading
from ampmem.importer.parameters import new_states, parameters_of
from ampmem.importer.phases import Course
from ampmem.importer.replay import ALIVE, BEFORE, TracedBlocks
from ampmem.importer.trace import Trace
from ampmem.importer.workspaces import earlier_workspaces, workspace_claims, workspaces_by_size
from ampmem.names import StateName

_STATE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}


def conclude(replay: TracedBlocks, readings: Sequence[Reading], course: Course) -> Conclusions:
    """Say of every block what can be said of it."""
    trace = Trace(replay, readings, course)
    made = workspaces_by_size(trace)
    gradients = list(_gradients(trace, frozenset(made)))
    low = copies_in_low_precision(trace, _parameters_there(trace, gradients))
    workspaces = earlier_workspaces(trace, gradients)
    results = _earlier_results(trace, gradients, low)
    found = parameters_of(trace, gradients, low, {*workspaces, *results})
    names = _names(found.parameters)
    casts = casts_of(trace, low, {size: len(known) for size, known in names.items()})
    claims = [
        *(Claim(block, Fact.PARAMETER, item.name, False) for item in found.parameters for block in item.blocks),
        *_gradient_claims(trace, gradients, names),
        *(Claim(at, Fact.CAST_COPY, name, False) for at, name in names_in_turn(trace, casts.of_parameters, names, 2)),
        *(Claim(at, Fact.CACHED, "", True, at_death=True) for at in _held_by_cache(trace, casts.of_parameters)),
        *(Claim(at, Fact.OTHER_CAST, "", True) for at in casts.others),
        *_state_claims(trace, found.states, names),
        *_state_claims(trace, new_states(trace, found.parameters), names),
        *workspace_claims(trace, [*workspaces, *made]),
    ]
    settled = {claim.allocation for claim in claims if claim.fact != Fact.OTHER_CAST}
    from_forward = {*results, *trace.freed_by_first_backward()}
    claims += _outputs(trace, settled, sorted(from_forward))
    return Conclusions(
        claims=tuple(claims),
        parameters=found.parameters,
        notes=(*found.notes, *casts.notes),
        half=bool(casts.of_parameters),
        from_forward=frozenset(from_forward),
    )


def _gradients(trace: Trace, workspaces: Set[int]) -> Iterator[int]:
    """Born in backward, as large as a block that is always there, and left by it; or freed by ``zero_grad``."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and allocation.bytes in trace.standing and trace.zeroed(allocation):
            yield index
    for index, allocation in trace.born_in(Phase.BACKWARD):
        purpose = trace.birth(allocation).purpose
        if purpose is Purpose.WORKSPACE or index in workspaces or not trace.leaves(allocation, Phase.BACKWARD):
            continue
        if purpose is Purpose.GRADIENT or allocation.bytes in trace.standing:
            yield index


def _parameters_there(trace: Trace, gradients: Sequence[int]) -> Mapping[int, int]:
    """How many parameters of each size there may be: as many as gradients, or blocks that are always there."""
    return trace.most_at_once(gradients) or {size: len(blocks) for size, blocks in trace.standing.items()}


def _held_by_cache(trace: Trace, copies: Sequence[int]) -> Iterator[int]:
    return (index for index in copies if trace.held_by_cache(trace.allocations[index]))


def _names(parameters: Sequence[Parameter]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for parameter in parameters:
        names[parameter.bytes].append(parameter.name)
    return names


def _gradient_claims(trace: Trace, blocks: Sequence[int], names: Mapping[int, Sequence[str]]) -> Iterator[Claim]:
    for index, name in names_in_turn(trace, blocks, names, 1):
        allocation = trace.allocations[index]
        seen = allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.GRADIENT
        yield Claim(index, Fact.GRADIENT, name, seen)


def _state_claims(trace: Trace, states: Sequence[int], names: Mapping[int, Sequence[str]]) -> Iterator[Claim]:
    """Each parameter gets as many states of its own size as a step makes, in turn; an update may make them anew."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in states:
        groups[trace.step_of(index), trace.allocations[index].bytes].append(index)
    keys = _STATE_KEYS.get(trace.course.optimizer_names[0], ()) if len(trace.course.optimizer_names) == 1 else ()
    for (_, size), blocks in groups.items():
        known = names.get(size, ())
        for number, index in enumerate(blocks):
            turn, place = divmod(number, len(known) or 1)
            key = keys[turn] if turn < len(keys) and known else f"state {turn + 1}"
            name = StateName(state=key, parameter=known[place] if known else "")
            yield Claim(index, Fact.OPTIMIZER_STATE, str(name), False)


def _outputs(trace: Trace, settled: set[int], from_forward: Sequence[int]) -> Iterator[Claim]:
    """What forward left behind is what its ops returned; kept for a backward, where the trace ends before one."""
    backward = [at for at, phase in enumerate(trace.course.phase) if phase == Phase.BACKWARD]
    last = backward[-1] if backward else -1
    for index, allocation in trace.born_in(Phase.FORWARD):
        if index in settled or not trace.leaves(allocation, Phase.FORWARD):
            continue
        op = trace.birth(allocation).op
        if op:
            yield Claim(index, Fact.OUTPUT, op, True)
        if allocation.died == ALIVE and allocation.born > last:
            yield Claim(index, Fact.SAVED, op, False)
    for index in from_forward:
        if index not in settled:
            yield Claim(index, Fact.SAVED, "", False)


def _earlier_results(trace: Trace, gradients: Sequence[int], low: Sequence[int]) -> list[int]:
    """Blocks from before the trace that are what an earlier forward returned, such as logits that a variable holds.

    The trace's own forwards make a block of that size that outlives its backward. The script gives the older one up
    when the variable gets its next value, or holds it to the end. What has a parameter's size may be one.
    """
    taken = {*trace.most_at_once(gradients), *(2 * trace.allocations[index].bytes for index in low)}
    copies = set(low)
    kept = trace.most_in_a_step(
        index
        for index, allocation in trace.born_in(Phase.FORWARD)
        if index not in copies and allocation.bytes not in taken and trace.outlives_backward(index)
    )
    there: dict[int, list[int]] = defaultdict(list)
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and allocation.bytes in kept and trace.given_up_by_script(allocation):
            there[allocation.bytes].append(index)
    # The script gives up what is older first; what stays may be something else of that size.
    dead_first = {
        size: sorted(blocks, key=lambda index: trace.allocations[index].throughout) for size, blocks in there.items()
    }
    return [index for size, blocks in dead_first.items() for index in blocks[: kept[size]]]
