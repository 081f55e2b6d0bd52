"""Infers what the blocks of a snapshot are: from C++ frames where these show it, else from frames, sizes, lifetimes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ampmem.events import Fact, Phase
from ampmem.importer.replay import ALIVE, BEFORE, TracedBlocks
from ampmem.importer.trace import BlockTrace, Course, Purpose, StackReading
from ampmem.names import CASTS_OPEN, LEFT_OVER, TAKEN_FOR_PARAMETERS, StateName
from ampmem.units import format_bytes, format_count


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact about an allocation; ``seen`` if a frame shows it and nothing was inferred.

    ``at_death`` says that it was seen when the allocation was freed, not when it was made.
    """

    allocation: int
    fact: Fact
    name: str
    seen: bool
    at_death: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that is inferred to be a parameter; an update may replace its block by a new one."""

    blocks: tuple[int, ...]
    name: str
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """All claims, and the parameters. ``half`` says that casts of half the size show that the parameters are float32.

    ``from_forward`` are allocations from before the trace that a forward made.
    """

    claims: tuple[Claim, ...]
    parameters: tuple[Parameter, ...]
    notes: tuple[str, ...]
    half: bool
    from_forward: frozenset[int]


_MOST_STATES: Final = 3
_INDISTINCT: Final = (
    "nothing in the trace distinguishes parameters from other blocks: blocks that are alive throughout count as other"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Allocations of parameters, largest first, and of optimizer states from before the first update."""

    parameters: tuple[Parameter, ...]
    states: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Blocks of ``size`` bytes that may be parameters, most likely first; an optimizer's own code allocated ``made``.

    ``earlier`` are the blocks from before the trace, ``count`` is the likely number of parameters, ``trained`` the
    number of gradients of this size alive at once.
    """

    size: int
    blocks: Sequence[int]
    made: Sequence[int]
    earlier: Set[int]
    count: int
    trained: int | None


def inferred_parameters(trace: BlockTrace, gradients: Sequence[int], casts: Sequence[int], known: Set[int]) -> Inferred:
    """Which blocks are parameters, and which are optimizer states from before the trace.

    Of each size there are as many parameters as gradients are alive at once; without gradients, as many as there are
    casts of half the size. Blocks ``known`` to be something else, such as workspaces, are left out.
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
        # Without gradients to count, a parameter that no op cast (an embedding) is identified by its size alone.
        most = len(each.blocks) if each.trained is None else each.trained
        count = min(max(len(each.blocks) // (1 + copies), 1), most)
        for number, index in enumerate(each.blocks[:count], start=1):
            updated = not trained or number <= (each.trained or 0)
            parameters.append(Parameter(heirs.successors(index), _name(each.size, number), each.size, updated))
        rest = each.blocks[count:]
        # Without an optimizer, blocks as large as the parameters may be a frozen copy of the model.
        kept = [index for index in rest if index in each.earlier][: count * copies] if optimized else []
        unclear |= bool(kept)
        states += {*kept, *(index for index in rest if trace.replaced(trace.allocations[index]))}
    taken = {*chain.from_iterable(parameter.blocks for parameter in parameters), *states}
    notes = [*([_which_is_which(copies)] if unclear else []), *_left_over(trace, standing, taken)]
    return Inferred(parameters=tuple(parameters), states=tuple(sorted(states)), notes=tuple(notes))


def _candidates(
    trace: BlockTrace, heirs: _Heirs, standing: Sequence[int], size: int, trained: int | None, cast: int
) -> _Candidates:
    ordered = sorted(standing, key=lambda index: _doubts(trace, heirs, index))
    count = trained or cast
    # Code called "optim" need not be an optimizer: there are as many parameters as gradients.
    own = max(sum(not trace.made_by_optimizer(trace.allocations[index]) for index in ordered), count)
    earlier = {index for index in ordered[:own] if trace.step_of(index) < 0}
    return _Candidates(size, ordered[:own], ordered[own:], earlier, count, trained)


def _left_by_updates(trace: BlockTrace) -> list[int]:
    """Allocations that an update made and that are alive after it."""
    return [index for index, allocation in trace.born_in(Phase.OPTIMIZER) if trace.leaves(allocation, Phase.OPTIMIZER)]


def _doubts(trace: BlockTrace, heirs: _Heirs, index: int) -> tuple[bool, bool, bool, int]:
    """Sort key, most likely parameters first: they are rarely replaced, and then at once by their new value."""
    allocation = trace.allocations[index]
    replaced = trace.replaced(allocation)
    return trace.made_by_optimizer(allocation), replaced and heirs.replacement(index) is None, replaced, index


class _Heirs:
    """Finds the block with which an update replaced another.

    ``p.data = new`` frees the old block on the line that allocated the new one of the same size.
    """

    def __init__(self, trace: BlockTrace) -> None:
        self._trace = trace
        self._born: dict[tuple[int, int], list[int]] = {}
        for index, allocation in trace.born_in(Phase.OPTIMIZER):
            self._born.setdefault((trace.step_of(index), allocation.bytes), []).append(index)

    def replacement(self, index: int) -> int | None:
        """The replacement of an allocation that an update freed."""
        trace, old = self._trace, self._trace.allocations[index]
        place = trace.death(old).text
        born = self._born.get((trace.course.step[old.died], old.bytes), [])
        for heir in reversed(born[: bisect_left(born, old.died, key=lambda each: trace.allocations[each].born)]):
            new = trace.allocations[heir]
            if heir > index and (new.died == ALIVE or new.died >= old.died):
                return heir if trace.birth(new).text == place else None
        return None

    def successors(self, index: int) -> tuple[int, ...]:
        """An allocation, its replacement, the replacement of that, and so on."""
        blocks = [index]
        while self._trace.replaced(self._trace.allocations[blocks[-1]]):
            heir = self.replacement(blocks[-1])
            if heir is None:
                break
            blocks.append(heir)
        return tuple(blocks)


def _copies_of_each(trace: BlockTrace, candidates: Sequence[_Candidates]) -> int:
    """Number of optimizer states per parameter that are from before the trace: each size votes with its bytes.

    0 if the updates in the trace made at least half as many bytes of state as there are parameters.
    """
    made = sum(trace.allocations[index].bytes for index in _left_by_updates(trace))
    if 2 * made >= sum(each.size * each.count for each in candidates):
        return 0
    votes: Counter[int] = Counter()
    for each in candidates:
        votes[min(max(len(each.earlier) // each.count - 1, 0), _MOST_STATES)] += each.size * each.count
    return votes.most_common(1)[0][0]


def _without_evidence(trace: BlockTrace, standing: Mapping[int, Sequence[int]]) -> Inferred:
    """The parameters of a trace without gradients and casts: all permanent blocks, if it has only forwards."""
    phases = set(trace.course.phase)
    if Phase.FORWARD not in phases or Phase.BACKWARD in phases or not any(standing.values()):
        return Inferred(parameters=(), states=(), notes=(_INDISTINCT,))
    parameters = tuple(
        Parameter((index,), _name(size, number), size, True)
        for size in sorted(standing, reverse=True)
        for number, index in enumerate(standing[size], start=1)
    )
    note = f"the trace has neither gradients nor casts: all {len(parameters)} blocks {TAKEN_FOR_PARAMETERS}"
    return Inferred(parameters=parameters, states=(), notes=(note,))


def _which_is_which(copies: int) -> str:
    return (
        f"the optimizer state was created before the trace: it is unknown which {copies + 1} of the equal blocks "
        "belong together, and which of them is the parameter; their sums are known"
    )


def _left_over(trace: BlockTrace, standing: Mapping[int, Sequence[int]], taken: set[int]) -> list[str]:
    """The note about permanent blocks that are neither parameters nor optimizer states, if there are any."""
    others = (trace.allocations[index] for blocks in standing.values() for index in blocks if index not in taken)
    left = [allocation.bytes for allocation in others if not trace.replaced(allocation)]
    return [f"{len(left)} blocks of {format_bytes(sum(left))} {LEFT_OVER}"] if left else []


def _name(size: int, number: int) -> str:
    # Neither a dot nor " of ", which separate modules, and optimizer states, from parameters in other names.
    return f"parameter {size} B #{number}"


_CALL: Final = "_call_impl"
_CONCLUDED: Final = (
    "blocks of half a parameter's size that forwards make right before an op's result were taken for autocast's "
    "copies of parameters; copies of other tensors cannot be recognized without C++ frames"
)
_SIZES: Final = 2
_SHARE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CastBlocks:
    """The casts of parameters, and of other tensors, as allocations."""

    of_parameters: tuple[int, ...]
    others: tuple[int, ...]
    notes: tuple[str, ...]


def copies_in_low_precision(trace: BlockTrace, there: Mapping[int, int]) -> list[int]:
    """Casts that autocast made for ops in low precision, of any tensor.

    Without C++ frames, only casts of parameters are found, by their sizes; ``there`` is the number of parameters by
    size.
    """
    if not trace.native:
        return _by_their_sizes(trace, there)
    return [index for index in _autocast_casts(trace) if trace.birth(trace.allocations[index]).purpose is Purpose.CAST]


def _by_their_sizes(trace: BlockTrace, there: Mapping[int, int]) -> list[int]:
    """The blocks of forward that have half a parameter's size, if autocast makes them.

    Autocast makes one cast of each weight in a pass and then, on the same line of Python, the result of the op. A size
    fits if a pass makes at most as many such blocks as there are parameters and at least half as many, each followed by
    a result. Activations may do so by chance in one size, but hardly in two with a quarter of the parameters' bytes.
    One size is enough if autocast's own code is in the stacks.
    """
    on_the_way: list[int] = []
    results: set[int] = set()
    for index, allocation in trace.born_in(Phase.FORWARD):
        if 2 * allocation.bytes in there:
            if _before_a_result(trace, index):
                on_the_way.append(index)
            else:
                results.add(allocation.bytes)
    fitting = {
        size
        for size, counts in _in_each_pass(trace, on_the_way).items()
        if size not in results and there[2 * size] <= 2 * max(counts.values()) <= 2 * there[2 * size]
    }
    fit = sum(2 * size * there[2 * size] for size in fitting)
    if len(fitting) < (1 if trace.autocast else _SIZES) or _SHARE * fit < sum(
        size * count for size, count in there.items()
    ):
        return []
    codes = {_code(trace, index) for index in on_the_way if trace.allocations[index].bytes in fitting}
    return [index for index in on_the_way if trace.allocations[index].bytes in fitting or _code(trace, index) in codes]


def _before_a_result(trace: BlockTrace, index: int) -> bool:
    """Whether the same line allocates once more right after this allocation."""
    after = trace.allocations[index + 1 : index + 2]
    return bool(after) and after[0].born != BEFORE and _text(trace, index) == trace.birth(after[0]).text != ""


def _autocast_casts(trace: BlockTrace) -> Iterator[int]:
    """The casts that C++ frames attribute to autocast."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE and trace.birth(allocation).purpose in (Purpose.CAST, Purpose.PROMOTION):
            yield index


def inferred_casts(trace: BlockTrace, low: Sequence[int], there: Mapping[int, int]) -> CastBlocks:
    """Which of the casts are of parameters; ``there`` is the number of parameters by size.

    Casts of half a parameter's size are, if a pass makes at most as many of them as there are parameters of that size.
    If it makes more, other tensors were cast, too. Then the allocating code decides: code that casts parameters of
    other sizes casts one in each call.
    """
    fitting = [index for index in low if 2 * trace.allocations[index].bytes in there]
    calls = list(_calls(trace, low))
    cached = {index for index in fitting if trace.is_cached(index)}
    counts = _in_each_pass(trace, fitting)
    over = {size for size in counts if counts[size].most_common(1)[0][1] > there[2 * size]}
    if _cast_again(trace, calls, counts, over, there):
        over = set()
    mine = cached | {index for index in fitting if trace.allocations[index].bytes not in over}
    notes = [_CONCLUDED] if low and not trace.native else []
    if over:
        chosen = cached | _by_their_code(trace, calls, mine, set(fitting) - mine)
        of_sizes = _in_each_pass(trace, sorted(chosen))
        for size in sorted(over, reverse=True):
            counted = of_sizes.get(size, Counter())
            which, count = counts[size].most_common(1)[0]
            if any(each > there[2 * size] for each in counted.values()):
                chosen = {index for index in chosen if trace.allocations[index].bytes != size or index in cached}
            sure = sum(trace.pass_of(index) == which and trace.allocations[index].bytes == size for index in chosen)
            notes.append(_over(trace, size, count, there[2 * size], sure))
        mine |= chosen
    others = tuple(index for index in _autocast_casts(trace) if index not in mine)
    mine.update(_earlier(trace, there))
    return CastBlocks(of_parameters=tuple(sorted(mine)), others=others, notes=tuple(notes))


def _earlier(trace: BlockTrace, there: Mapping[int, int]) -> Iterator[int]:
    """Casts from before the trace.

    Either autocast's cache held them until a region was left (it holds nothing else), or backward frees them and makes
    as many gradients of twice their size in the backward of casts; one of those may be before the trace, too.
    """
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and 2 * allocation.bytes in there and trace.is_cached(index):
            yield index
    born = Counter(each.bytes for _, each in trace.born_in(Phase.BACKWARD) if trace.birth(each).casting_back)
    freed: dict[int, list[int]] = defaultdict(list)
    for index in trace.freed_by_first_backward():
        freed[2 * trace.allocations[index].bytes].append(index)
    for size, copies in freed.items():
        if size in there and size in born and len(copies) <= min(born[size] + 1, there[size]):
            yield from copies


def _in_each_pass(trace: BlockTrace, casts: Sequence[int]) -> dict[int, Counter[int]]:
    """Number of ``casts`` that each pass made, by size."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for index in casts:
        counts[trace.allocations[index].bytes][trace.pass_of(index)] += 1
    return counts


def _cast_again(
    trace: BlockTrace,
    calls: Sequence[Sequence[int]],
    counts: Mapping[int, Counter[int]],
    over: set[int],
    there: Mapping[int, int],
) -> bool:
    """Whether a pass casts all parameters equally often, as several forwards do, and never two of a size in one call.

    A single size may be as frequent by chance.
    """
    times = {divmod(count, there[2 * size]) for size in over for count in counts[size].values()}
    if len(over) < 2 or len(times) != 1 or any(rest for _, rest in times):
        return False
    return not any(sum(trace.allocations[index].bytes == size for index in call) > 1 for call in calls for size in over)


def _by_their_code(
    trace: BlockTrace, calls: Sequence[Sequence[int]], settled: set[int], candidates: set[int]
) -> set[int]:
    """The ``candidates`` that are cast where the ``settled`` casts of parameters are, one in each call."""
    by_code: dict[str, list[Sequence[int]]] = defaultdict(list)
    for call in calls:
        by_code[_code(trace, call[0])].append(call)
    chosen: set[int] = set()
    for alike in by_code.values():
        known = [[index in settled for index in call] for call in alike]
        parameters = max(map(sum, known))
        last = sum(flags[-1] for flags in known if any(flags)) * 2 > sum(map(any, known))
        for call, flags in zip(alike, known, strict=True):
            left = [index for index in call if index in candidates]
            count = max(parameters - sum(flags), 0)
            chosen.update((left[::-1] if last else left)[:count])
    return chosen


def _calls(trace: BlockTrace, low: Sequence[int]) -> Iterator[list[int]]:
    """The casts of one call of an op: consecutive allocations by the same code."""
    call: list[int] = []
    for index in low:
        if call and not (index == call[-1] + 1 and _text(trace, index) == _text(trace, call[-1])):
            yield call
            call = []
        call.append(index)
    if call:
        yield call


def _text(trace: BlockTrace, index: int) -> str:
    return trace.birth(trace.allocations[index]).text


def _code(trace: BlockTrace, index: int) -> str:
    """The lines of the stack inside the innermost module: they are the same for all modules of its class."""
    lines: list[str] = []
    for line in reversed(_text(trace, index).splitlines()):
        if line.endswith(_CALL):
            break
        lines.append(line)
    return "\n".join(lines)


def _over(trace: BlockTrace, size: int, count: int, there: int, counted: int) -> str:
    """The note for a pass with more casts of ``size`` than parameters twice as large."""
    what, made = ("casts", "cast") if trace.native else ("blocks", "made")
    told = (
        f"{format_count(count)} {what} of a pass have half the size of the {format_count(there)} parameters of "
        f"{format_bytes(2 * size)}, so other tensors of that size were {made}, too: judged by the allocating code, "
    )
    if counted == there:
        return f"{told}{format_count(counted)} are of parameters"
    which = f"{format_count(counted)} are" if counted else "none is certainly"
    most = f"{format_count(there)} ({format_bytes(there * size)}), if each parameter is cast once"
    return f"{told}{which} of parameters; there may be up to {most}; {CASTS_OPEN}"


def names_in_turn(
    trace: BlockTrace, blocks: Sequence[int], names: Mapping[int, Sequence[str]], scale: int
) -> Iterator[tuple[int, str]]:
    """(block, name) for each of ``blocks``: names of parameters ``scale`` times as large, in turn in each step."""
    turns: Counter[tuple[int, int]] = Counter()
    for index in blocks:
        size = trace.allocations[index].bytes
        known = names.get(scale * size, ())
        turn = (trace.step_of(index), size)
        yield index, known[turns[turn] % len(known)] if known else ""
        turns[turn] += 1


CUBLAS_WORKSPACE: Final = 8_519_680
"""The default size of cuBLAS's workspace before sm_90 in bytes; no other block happens to have this size."""

LARGE_CUBLAS_WORKSPACE: Final = 33_554_432
"""The default size of cuBLAS's workspace from sm_90 on in bytes; a weight may have this size, too."""

_PRODUCTS: Final = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})


def earlier_workspaces(trace: BlockTrace, gradients: Sequence[int]) -> list[int]:
    """cuBLAS workspaces from before the trace: by their unique size, or because a matrix product needs one."""
    sure = _throughout(trace, CUBLAS_WORKSPACE)
    if sure:
        return sure
    blocks = _throughout(trace, LARGE_CUBLAS_WORKSPACE)
    # A block with a gradient is a parameter.
    spare = len(blocks) - trace.most_at_once(gradients).get(LARGE_CUBLAS_WORKSPACE, 0)
    missing = sum(_multiplies_with_an_earlier_one(trace, engine) for engine in (False, True))
    return blocks[len(blocks) - max(min(spare, missing), 0) :]


def workspaces_by_size(trace: BlockTrace) -> list[int]:
    """cuBLAS workspaces made in the trace, without C++ frames: each thread makes one, and keeps it."""
    if trace.native:
        return []
    kept = [index for index, each in enumerate(trace.allocations) if each.born != BEFORE and each.died == ALIVE]
    sure = [index for index in kept if trace.allocations[index].bytes == CUBLAS_WORKSPACE]
    if sure or LARGE_CUBLAS_WORKSPACE in trace.standing:
        return sure
    large = [index for index in kept if trace.allocations[index].bytes == LARGE_CUBLAS_WORKSPACE]
    phases = [trace.course.phase[trace.allocations[index].born] for index in large]
    # More than one per thread are something else.
    alone = len(set(phases)) == len(phases) and {*phases} <= {Phase.FORWARD, Phase.BACKWARD}
    return large if alone else []


def workspace_claims(trace: BlockTrace, concluded: Sequence[int]) -> Iterator[Claim]:
    """Claims for the workspaces that a frame names, and for the ``concluded`` ones."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.WORKSPACE:
            yield Claim(index, Fact.WORKSPACE, "", True)
    for index in concluded:
        yield Claim(index, Fact.WORKSPACE, "", False)


def _throughout(trace: BlockTrace, size: int) -> list[int]:
    return [index for index in trace.standing.get(size, ()) if trace.allocations[index].throughout]


def _multiplies_with_an_earlier_one(trace: BlockTrace, engine: bool) -> bool:
    """Whether a thread multiplies matrices without making its own workspace, so that one existed before."""
    multiplies = False
    for allocation in trace.allocations:
        if allocation.born == BEFORE or (trace.course.phase[allocation.born] == Phase.BACKWARD) != engine:
            continue
        birth = trace.birth(allocation)
        if birth.purpose is Purpose.WORKSPACE and allocation.died == ALIVE:
            return False
        multiplies |= birth.op in _PRODUCTS
    return multiplies


_STATE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}


def conclude(replay: TracedBlocks, readings: Sequence[StackReading], course: Course) -> Conclusions:
    """All claims about the blocks."""
    trace = BlockTrace(replay, readings, course)
    made = workspaces_by_size(trace)
    gradients = list(_gradients(trace, frozenset(made)))
    # Of each size there may be as many parameters as gradients, or as permanent blocks.
    there = trace.most_at_once(gradients) or {size: len(blocks) for size, blocks in trace.standing.items()}
    low = copies_in_low_precision(trace, there)
    workspaces = earlier_workspaces(trace, gradients)
    results = _earlier_results(trace, gradients, low)
    found = inferred_parameters(trace, gradients, low, {*workspaces, *results})
    names = _names(found.parameters)
    casts = inferred_casts(trace, low, {size: len(known) for size, known in names.items()})
    replaced = set(chain.from_iterable(parameter.blocks for parameter in found.parameters))
    new_states = [index for index in _left_by_updates(trace) if index not in replaced]
    claims = [
        *(Claim(block, Fact.PARAMETER, item.name, False) for item in found.parameters for block in item.blocks),
        *_gradient_claims(trace, gradients, names),
        *(Claim(at, Fact.CAST_COPY, name, False) for at, name in names_in_turn(trace, casts.of_parameters, names, 2)),
        *(Claim(at, Fact.CACHED, "", True, at_death=True) for at in casts.of_parameters if trace.is_cached(at)),
        *(Claim(at, Fact.OTHER_CAST, "", True) for at in casts.others),
        *_state_claims(trace, found.states, names),
        *_state_claims(trace, new_states, names),
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


def _gradients(trace: BlockTrace, workspaces: Set[int]) -> Iterator[int]:
    """Blocks made in backward, as large as a permanent block, and left by backward; or freed by ``zero_grad``."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and allocation.bytes in trace.standing and trace.zeroed(allocation):
            yield index
    for index, allocation in trace.born_in(Phase.BACKWARD):
        purpose = trace.birth(allocation).purpose
        if purpose is Purpose.WORKSPACE or index in workspaces or not trace.leaves(allocation, Phase.BACKWARD):
            continue
        if purpose is Purpose.GRADIENT or allocation.bytes in trace.standing:
            yield index


def _names(parameters: Sequence[Parameter]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for parameter in parameters:
        names[parameter.bytes].append(parameter.name)
    return names


def _gradient_claims(trace: BlockTrace, blocks: Sequence[int], names: Mapping[int, Sequence[str]]) -> Iterator[Claim]:
    for index, name in names_in_turn(trace, blocks, names, 1):
        allocation = trace.allocations[index]
        seen = allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.GRADIENT
        yield Claim(index, Fact.GRADIENT, name, seen)


def _state_claims(trace: BlockTrace, states: Sequence[int], names: Mapping[int, Sequence[str]]) -> Iterator[Claim]:
    """Claims for the ``states`` that each step made, given out in turn to the parameters of the same size."""
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


def _outputs(trace: BlockTrace, settled: set[int], from_forward: Sequence[int]) -> Iterator[Claim]:
    """Blocks that forward left behind: results of its ops, or saved for a backward if the trace ends before one."""
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


def _earlier_results(trace: BlockTrace, gradients: Sequence[int], low: Sequence[int]) -> list[int]:
    """Blocks from before the trace that an earlier forward returned, such as logits held by a variable.

    A forward in the trace makes a block of that size that outlives its backward. The script frees the older one when
    the variable is assigned again, or holds it to the end. A block of a parameter's size may be one.
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
    # The script frees older results first; blocks that stay may be something else of that size.
    dead_first = {
        size: sorted(blocks, key=lambda index: trace.allocations[index].throughout) for size, blocks in there.items()
    }
    return [index for size, blocks in dead_first.items() for index in blocks[: kept[size]]]
