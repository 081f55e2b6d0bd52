"""Which blocks are the parameters, and which the states of their optimizer."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ampmem.events import Phase
from ampmem.importer.claims import Parameter
from ampmem.importer.replay import ALIVE
from ampmem.importer.trace import Trace
from ampmem.names import LEFT_OVER, TAKEN_FOR_PARAMETERS
from ampmem.units import format_bytes

_MOST_STATES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The parameters, largest first, and the states from before the first update; both as allocations."""

    parameters: tuple[Parameter, ...]
    states: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """The blocks of one size, the rather a parameter the earlier, but for those ``made`` by an optimizer's own code.

    ``earlier`` are those from before the trace, ``trained`` is how many gradients of the size there are at once.
    """

    size: int
    blocks: tuple[int, ...]
    made: tuple[int, ...]
    earlier: frozenset[int]
    count: int
    trained: int | None


def parameters_of(trace: Trace, gradients: Sequence[int], casts: Sequence[int], known: Set[int]) -> Found:
    """As many blocks of each size as there are gradients of it at once; without gradients, those of a cast's size.

    Of what is ``known`` to be something else, such as workspaces, none is a parameter.
    """
    standing = {size: [index for index in blocks if index not in known] for size, blocks in trace.standing.items()}
    trained = trace.most_at_once(gradients)
    cast = {2 * size: count for size, count in trace.most_in_a_step(casts).items()}
    sizes = sorted((size for size in {*trained, *cast} if standing.get(size)), reverse=True)
    if not sizes:
        return _without_evidence(trace, standing)
    heirs = _Heirs(trace)
    found = [_candidates(trace, heirs, standing[size], size, trained.get(size), cast.get(size, 0)) for size in sizes]
    states = [index for each in found for index in each.made]
    copies = 0 if states else _copies_of_each(trace, found)
    optimized = trace.optimized()
    parameters: list[Parameter] = []
    unclear = False
    for each in found:
        # Without gradients to count, one that no op cast (an embedding) is told by its size alone.
        most = len(each.blocks) if each.trained is None else each.trained
        count = min(max(len(each.blocks) // (1 + copies), 1), most)
        for number, index in enumerate(each.blocks[:count], start=1):
            updated = not trained or number <= (each.trained or 0)
            parameters.append(Parameter(heirs.line(index), _name(each.size, number), each.size, updated))
        rest = each.blocks[count:]
        # Without an optimizer, what is as large as the parameters may be a frozen twin.
        kept = [index for index in rest if index in each.earlier][: count * copies] if optimized else []
        unclear |= bool(kept)
        states += {*kept, *(index for index in rest if trace.replaced(trace.allocations[index]))}
    taken = {*chain.from_iterable(parameter.blocks for parameter in parameters), *states}
    notes = [*([_which_is_which(copies)] if unclear else []), *_left_over(trace, standing, taken)]
    return Found(parameters=tuple(parameters), states=tuple(sorted(states)), notes=tuple(notes))


def _candidates(
    trace: Trace, heirs: _Heirs, standing: Sequence[int], size: int, trained: int | None, cast: int
) -> _Candidates:
    ordered = sorted(standing, key=lambda index: _doubts(trace, heirs, index))
    count = trained or cast
    # What is called "optim" need not be an optimizer: there are as many parameters as gradients.
    own = max(sum(not trace.made_by_optimizer(trace.allocations[index]) for index in ordered), count)
    return _Candidates(
        size=size,
        blocks=tuple(ordered[:own]),
        made=tuple(ordered[own:]),
        earlier=frozenset(index for index in ordered[:own] if trace.step_of(index) < 0),
        count=count,
        trained=trained,
    )


def new_states(trace: Trace, parameters: Sequence[Parameter]) -> list[int]:
    """What an update made and left behind, but for the parameters that it made anew."""
    taken = set(chain.from_iterable(parameter.blocks for parameter in parameters))
    return [index for index in _left_by_updates(trace) if index not in taken]


def _left_by_updates(trace: Trace) -> list[int]:
    return [index for index, allocation in trace.born_in(Phase.OPTIMIZER) if trace.leaves(allocation, Phase.OPTIMIZER)]


def _doubts(trace: Trace, heirs: _Heirs, index: int) -> tuple[bool, bool, bool, int]:
    """The smaller, the rather is it a parameter: one is rarely replaced, and then at once by what it is set to."""
    allocation = trace.allocations[index]
    replaced = trace.replaced(allocation)
    return trace.made_by_optimizer(allocation), replaced and heirs.of(index) is None, replaced, index


class _Heirs:
    """Which block an update has put in the place of another.

    ``p.data = new`` frees the old block right where the new one, of the same size, was asked for.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._born: dict[tuple[int, int], list[int]] = {}
        for index, allocation in trace.born_in(Phase.OPTIMIZER):
            self._born.setdefault((trace.step_of(index), allocation.bytes), []).append(index)

    def of(self, index: int) -> int | None:
        """The heir of an allocation that an update freed."""
        trace, old = self._trace, self._trace.allocations[index]
        place = trace.death(old).text
        born = self._born.get((trace.course.step[old.died], old.bytes), [])
        for heir in reversed(born[: bisect_left(born, old.died, key=lambda each: trace.allocations[each].born)]):
            new = trace.allocations[heir]
            if heir > index and (new.died == ALIVE or new.died >= old.died):
                return heir if trace.birth(new).text == place else None
        return None

    def line(self, index: int) -> tuple[int, ...]:
        """An allocation, its heir, that one's, and so on."""
        blocks = [index]
        while self._trace.replaced(self._trace.allocations[blocks[-1]]):
            heir = self.of(blocks[-1])
            if heir is None:
                break
            blocks.append(heir)
        return tuple(blocks)


def _copies_of_each(trace: Trace, candidates: Sequence[_Candidates]) -> int:
    """How many blocks from before the trace there are beside each parameter, by what most bytes say.

    None where an update of the trace made as much state as there are parameters.
    """
    made = sum(trace.allocations[index].bytes for index in _left_by_updates(trace))
    if 2 * made >= sum(each.size * each.count for each in candidates):
        return 0
    votes: Counter[int] = Counter()
    for each in candidates:
        votes[min(max(len(each.earlier) // each.count - 1, 0), _MOST_STATES)] += each.size * each.count
    return votes.most_common(1)[0][0]


def _without_evidence(trace: Trace, standing: Mapping[int, Sequence[int]]) -> Found:
    """Where there is a forward and no backward and no cast to go by, all that is always there."""
    phases = set(trace.course.phase)
    if Phase.FORWARD not in phases or Phase.BACKWARD in phases or not any(standing.values()):
        note = "nothing in the trace tells the parameters from other blocks: those alive throughout are in other"
        return Found(parameters=(), states=(), notes=(note,))
    parameters = tuple(
        Parameter((index,), _name(size, number), size, True)
        for size in sorted(standing, reverse=True)
        for number, index in enumerate(standing[size], start=1)
    )
    note = f"the trace has neither gradients nor casts: all {len(parameters)} blocks {TAKEN_FOR_PARAMETERS}"
    return Found(parameters=parameters, states=(), notes=(note,))


def _which_is_which(copies: int) -> str:
    return (
        f"the optimizer's state was made before the trace: which {copies + 1} of the equal blocks belong together, "
        "and which of them is the parameter, is not known; their sums are"
    )


def _left_over(trace: Trace, standing: Mapping[int, Sequence[int]], taken: set[int]) -> list[str]:
    """Blocks that are always there and that nothing is known of."""
    left = [
        index
        for blocks in standing.values()
        for index in blocks
        if index not in taken and not trace.replaced(trace.allocations[index])
    ]
    if not left:
        return []
    total = format_bytes(sum(trace.allocations[index].bytes for index in left))
    return [f"{len(left)} blocks of {total} {LEFT_OVER}"]


def _name(size: int, number: int) -> str:
    # Neither a dot nor " of ", which elsewhere part modules and the states of an optimizer from parameters.
    return f"parameter {size} B #{number}"
