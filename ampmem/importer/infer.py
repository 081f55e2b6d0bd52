"""What the blocks are: seen in C++ frames where they say so, else concluded from frames, sizes and lifetimes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ampmem.events import Fact, Phase
from ampmem.importer.frames import Purpose, Reading
from ampmem.importer.phases import Course
from ampmem.importer.replay import ALIVE, BEFORE, Allocation, TracedBlocks
from ampmem.names import LEFT_OVER, TAKEN_FOR_PARAMETERS, StateName
from ampmem.units import format_bytes

CUBLAS_WORKSPACE: Final = 8_519_680
"""What cuBLAS asks for by default on GPUs older than sm_90; nothing else happens to have this size."""

_MOST_STATES: Final = 3
_STATE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact about an allocation; ``seen`` when a frame says it and nothing had to be concluded."""

    allocation: int
    fact: Fact
    name: str
    seen: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A block that is taken for a parameter."""

    allocation: int
    name: str
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """All claims, and the parameters. ``half`` says that half-size casts show the parameters to be float32."""

    claims: tuple[Claim, ...]
    parameters: tuple[Parameter, ...]
    notes: tuple[str, ...]
    half: bool


def conclude(replay: TracedBlocks, readings: Sequence[Reading], course: Course) -> Conclusions:
    """Say of every block what can be said of it."""
    trace = _Trace(replay, readings, course)
    gradients, casts = list(_gradients(trace)), list(_casts(trace))
    parameters, old_states, notes = _parameters(trace, gradients, casts)
    names = _names(parameters)
    claims = [
        *(Claim(item.allocation, Fact.PARAMETER, item.name, False) for item in parameters),
        *_name_each(trace, gradients, Fact.GRADIENT, names, 1),
        *_cast_claims(trace, casts, names),
        *_state_claims(trace, old_states, names),
        *_workspaces(trace),
    ]
    settled = {claim.allocation for claim in claims if claim.fact != Fact.OTHER_CAST}
    claims += _outputs(trace, settled)
    half = any(claim.fact == Fact.CAST_COPY for claim in claims)
    return Conclusions(claims=tuple(claims), parameters=tuple(parameters), notes=tuple(notes), half=half)


class _Trace:
    """The allocations with what is known of their birth and their death."""

    def __init__(self, replay: TracedBlocks, readings: Sequence[Reading], course: Course) -> None:
        self.allocations = replay.allocations
        self.course = course
        self._replay = replay
        self._readings = readings
        self.throughout: dict[int, list[int]] = defaultdict(list)
        """By size, the blocks that were there before the trace and are there after it, by address."""
        for index, allocation in enumerate(replay.allocations):
            if allocation.throughout and allocation.bytes != CUBLAS_WORKSPACE:
                self.throughout[allocation.bytes].append(index)

    def born_in(self, phase: Phase) -> Iterator[tuple[int, Allocation]]:
        """The allocations of the trace that were born in ``phase``."""
        for index, allocation in enumerate(self.allocations):
            if allocation.born != BEFORE and self.course.phase[allocation.born] == phase:
                yield index, allocation

    def birth(self, allocation: Allocation) -> Reading:
        """The stack that asked for it."""
        return self._readings[self._replay.events[allocation.born].stack]

    def zeroed(self, allocation: Allocation) -> bool:
        """Whether ``zero_grad`` freed it."""
        return allocation.died != ALIVE and self._readings[self._replay.events[allocation.died].stack].zeroing

    def step_of(self, index: int) -> int:
        """The step in which it was born; -1 for before the trace."""
        born = self.allocations[index].born
        return -1 if born == BEFORE else self.course.step[born]

    def leaves(self, allocation: Allocation, phase: Phase) -> bool:
        """Whether what was born in ``phase`` is alive when the script leaves it."""
        if allocation.died == ALIVE:
            return True
        course = self.course
        return course.phase[allocation.died] != phase or course.step[allocation.died] != course.step[allocation.born]


def _gradients(trace: _Trace) -> Iterator[int]:
    """Born in backward, as large as a block that is always there, and left by it; or freed by ``zero_grad``."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and allocation.bytes in trace.throughout and trace.zeroed(allocation):
            yield index
    for index, allocation in trace.born_in(Phase.BACKWARD):
        purpose = trace.birth(allocation).purpose
        if purpose is Purpose.WORKSPACE or not trace.leaves(allocation, Phase.BACKWARD):
            continue
        if purpose is Purpose.GRADIENT or allocation.bytes in trace.throughout:
            yield index


def _casts(trace: _Trace) -> Iterator[int]:
    """What autocast made, of whatever."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.CAST:
            yield index


def _parameters(
    trace: _Trace, gradients: Sequence[int], casts: Sequence[int]
) -> tuple[list[Parameter], list[tuple[int, int]], list[str]]:
    """The parameters, the states of an optimizer that ran before the trace as (allocation, size), and notes."""
    trained = _most_in_a_step(trace, [(index, trace.allocations[index].bytes) for index in gradients])
    cast = _most_in_a_step(trace, [(index, 2 * trace.allocations[index].bytes) for index in casts])
    evidence = {size: trained.get(size) or cast[size] for size in {*trained, *cast} if size in trace.throughout}
    notes: list[str] = []
    if not evidence:
        return _all_throughout(trace), [], _without_evidence(trace)
    copies = _copies_of_each(trace, evidence)
    parameters: list[Parameter] = []
    states: list[tuple[int, int]] = []
    for size in sorted(evidence, reverse=True):
        blocks = trace.throughout[size]
        # Without gradients to count, one that no op cast (an embedding) is told by its size alone.
        count = min(max(len(blocks) // (1 + copies), 1), trained.get(size, len(blocks)))
        for number, index in enumerate(blocks[:count], start=1):
            known = not trained or number <= trained.get(size, 0)
            parameters.append(Parameter(index, _name(size, number), size, known))
        states += [(index, size) for index in blocks[count : count * (1 + copies)]]
    if states:
        notes.append(
            f"the optimizer's state was made before the trace: which {copies + 1} of the equal blocks belong together, "
            "and which of them is the parameter, is not known; their sums are"
        )
    taken = {parameter.allocation for parameter in parameters} | {index for index, _ in states}
    notes += _left_over(trace, taken) + _too_many_casts(trace, casts, parameters)
    return parameters, states, notes


def _most_in_a_step(trace: _Trace, sized: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The most blocks of each size that one step has."""
    counts = Counter((trace.step_of(index), size) for index, size in sized)
    most: dict[int, int] = {}
    for (_, size), count in counts.items():
        most[size] = max(most.get(size, 0), count)
    return most


def _copies_of_each(trace: _Trace, evidence: Mapping[int, int]) -> int:
    """How many blocks of a parameter's size there are beside each, by what most bytes say.

    None where an update of the trace made as much state as there are parameters.
    """
    made = sum(trace.allocations[index].bytes for index in _new_states(trace))
    if 2 * made >= sum(size * count for size, count in evidence.items()):
        return 0
    votes: Counter[int] = Counter()
    for size, count in evidence.items():
        votes[min(max(len(trace.throughout[size]) // count - 1, 0), _MOST_STATES)] += size * count
    return votes.most_common(1)[0][0]


def _new_states(trace: _Trace) -> list[int]:
    """What an update made and left behind."""
    return [index for index, allocation in trace.born_in(Phase.OPTIMIZER) if trace.leaves(allocation, Phase.OPTIMIZER)]


def _all_throughout(trace: _Trace) -> list[Parameter]:
    """Where there is a forward and no backward and no cast to go by, all that is always there."""
    phases = set(trace.course.phase)
    if Phase.FORWARD not in phases or Phase.BACKWARD in phases:
        return []
    return [
        Parameter(index, _name(size, number), size, True)
        for size in sorted(trace.throughout, reverse=True)
        for number, index in enumerate(trace.throughout[size], start=1)
    ]


def _without_evidence(trace: _Trace) -> list[str]:
    if not _all_throughout(trace):
        return ["nothing in the trace tells the parameters from other blocks: those alive throughout are in other"]
    count = sum(len(blocks) for blocks in trace.throughout.values())
    return [f"the trace has neither gradients nor casts: all {count} blocks {TAKEN_FOR_PARAMETERS}"]


def _left_over(trace: _Trace, taken: set[int]) -> list[str]:
    """Blocks that are always there and that nothing is known of."""
    left = [index for blocks in trace.throughout.values() for index in blocks if index not in taken]
    if not left:
        return []
    total = format_bytes(sum(trace.allocations[index].bytes for index in left))
    return [f"{len(left)} blocks of {total} {LEFT_OVER}"]


def _too_many_casts(trace: _Trace, casts: Sequence[int], parameters: Sequence[Parameter]) -> list[str]:
    """Sizes of which a step has more casts than there are parameters: made again, or of something else."""
    most = _most_in_a_step(trace, [(index, 2 * trace.allocations[index].bytes) for index in casts])
    there = Counter(parameter.bytes for parameter in parameters)
    over = {size: count for size, count in most.items() if count > there.get(size, count)}
    return [
        f"{count} casts of a step have half the size of the {there[size]} parameters of {format_bytes(size)}: "
        "parameters cast more than once, or something else of that size"
        for size, count in sorted(over.items(), reverse=True)
    ]


def _name(size: int, number: int) -> str:
    # Neither a dot nor " of ", which elsewhere part modules and the states of an optimizer from parameters.
    return f"parameter {size} B #{number}"


def _names(parameters: Sequence[Parameter]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for parameter in parameters:
        names[parameter.bytes].append(parameter.name)
    return names


def _name_each(
    trace: _Trace, blocks: Sequence[int], fact: Fact, names: Mapping[int, Sequence[str]], scale: int
) -> Iterator[Claim]:
    """Give the blocks of one size the names of the parameters ``scale`` times as large, in turn in each step."""
    turns: Counter[tuple[int, int]] = Counter()
    for index in blocks:
        allocation = trace.allocations[index]
        known = names.get(scale * allocation.bytes, ())
        turn = (trace.step_of(index), allocation.bytes)
        name = known[turns[turn] % len(known)] if known else ""
        turns[turn] += 1
        seen = allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.GRADIENT
        yield Claim(index, fact, name, seen)


def _cast_claims(trace: _Trace, casts: Sequence[int], names: Mapping[int, Sequence[str]]) -> list[Claim]:
    """That autocast made them was seen; that half a parameter's size means a copy of one is concluded."""
    of_parameters = [index for index in casts if 2 * trace.allocations[index].bytes in names]
    others = set(casts).difference(of_parameters)
    return [
        *_name_each(trace, of_parameters, Fact.CAST_COPY, names, 2),
        *(Claim(index, Fact.OTHER_CAST, "", True) for index in sorted(others)),
    ]


def _state_claims(
    trace: _Trace, kept: Sequence[tuple[int, int]], names: Mapping[int, Sequence[str]]
) -> Iterator[Claim]:
    """Each parameter gets as many states of its own size as there are, in turn; an update may make them anew."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, size in kept:
        groups[-1, size].append(index)
    for index in (*_replaced_states(trace, names), *_new_states(trace)):
        groups[trace.step_of(index), trace.allocations[index].bytes].append(index)
    keys = _STATE_KEYS.get(trace.course.optimizer_names[0], ()) if len(trace.course.optimizer_names) == 1 else ()
    for (_, size), blocks in groups.items():
        known = names.get(size, ())
        for number, index in enumerate(blocks):
            turn, place = divmod(number, len(known) or 1)
            key = keys[turn] if turn < len(keys) and known else f"state {turn + 1}"
            name = StateName(state=key, parameter=known[place] if known else "")
            yield Claim(index, Fact.OPTIMIZER_STATE, str(name), False)


def _replaced_states(trace: _Trace, names: Mapping[int, Sequence[str]]) -> Iterator[int]:
    """As large as a parameter, from before the trace, and freed by an update: it has put another in its place."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE or allocation.died == ALIVE or allocation.bytes not in names:
            continue
        if trace.course.phase[allocation.died] == Phase.OPTIMIZER:
            yield index


def _workspaces(trace: _Trace) -> Iterator[Claim]:
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE:
            if trace.birth(allocation).purpose is Purpose.WORKSPACE:
                yield Claim(index, Fact.WORKSPACE, "", True)
        elif allocation.throughout and allocation.bytes == CUBLAS_WORKSPACE:
            yield Claim(index, Fact.WORKSPACE, "", False)


def _outputs(trace: _Trace, settled: set[int]) -> Iterator[Claim]:
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
    for index in from_forward(trace.allocations, trace.course):
        if index not in settled:
            yield Claim(index, Fact.SAVED, "", False)


def from_forward(allocations: Sequence[Allocation], course: Course) -> Iterator[int]:
    """Blocks from before the trace that the first backward frees: a forward made them that the ring has lost."""
    first = next((stretch.step for stretch in course.stretches if stretch.phase == Phase.BACKWARD), None)
    for index, allocation in enumerate(allocations):
        if allocation.born != BEFORE or allocation.died == ALIVE:
            continue
        if course.phase[allocation.died] == Phase.BACKWARD and course.step[allocation.died] == first:
            yield index
