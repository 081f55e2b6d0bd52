"""Which of the copies that autocast made are copies of parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ampmem.events import Phase
from ampmem.importer.frames import Purpose
from ampmem.importer.replay import BEFORE
from ampmem.importer.trace import Trace
from ampmem.names import CASTS_OPEN
from ampmem.units import format_bytes, format_count

_CALL: Final = "_call_impl"
_CONCLUDED: Final = (
    "blocks of half a parameter's size that forwards make right before an op's result were taken for autocast's copies "
    "of parameters; copies of other tensors cannot be recognised without C++ frames"
)
_SIZES: Final = 2
_SHARE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """The copies of parameters, and of anything else, as allocations."""

    of_parameters: tuple[int, ...]
    others: tuple[int, ...]
    notes: tuple[str, ...]


def copies_in_low_precision(trace: Trace, there: Mapping[int, int]) -> list[int]:
    """What autocast made for the ops that run in low precision, of whatever.

    Without C++ frames to say so, what sizes show to be copies of parameters, of which ``there`` are so many of a size.
    """
    if not trace.native:
        return _by_their_sizes(trace, there)
    return [index for index in _made(trace) if trace.birth(trace.allocations[index]).purpose is Purpose.CAST]


def _by_their_sizes(trace: Trace, there: Mapping[int, int]) -> list[int]:
    """The blocks of forward that have half a parameter's size, where it is autocast that makes them.

    Autocast makes one copy of each weight in a pass, and then, for the same line of Python, the result of the op. A
    size fits where a pass makes no more such blocks than there are parameters, makes them for half of those at least,
    and each is followed by a result. Activations may do so by chance in one size, but hardly in two, with a quarter of
    the parameters' bytes. One size is enough where autocast's own code is in the stacks.
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


def _before_a_result(trace: Trace, index: int) -> bool:
    """Whether the same line allocates once more, right after this."""
    after = trace.allocations[index + 1 : index + 2]
    return bool(after) and after[0].born != BEFORE and _text(trace, index) == trace.birth(after[0]).text != ""


def _made(trace: Trace) -> Iterator[int]:
    """What C++ frames say that autocast made."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE and trace.birth(allocation).purpose in (Purpose.CAST, Purpose.PROMOTION):
            yield index


def casts_of(trace: Trace, low: Sequence[int], there: Mapping[int, int]) -> Casts:
    """Half-size copies are the parameters' where a pass has no more of a size than ``there`` are parameters.

    Where it has more, something else of that size was cast as well. Then the code counts: code that casts
    parameters of other sizes casts one in each call.
    """
    fitting = [index for index in low if 2 * trace.allocations[index].bytes in there]
    calls = list(_calls(trace, low))
    cached = {index for index in fitting if trace.held_by_cache(trace.allocations[index])}
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
    others = tuple(index for index in _made(trace) if index not in mine)
    mine.update(_earlier(trace, there))
    return Casts(of_parameters=tuple(sorted(mine)), others=others, notes=tuple(notes))


def _earlier(trace: Trace, there: Mapping[int, int]) -> Iterator[int]:
    """Copies from before the trace.

    Autocast's cache held them until a region was left, and holds nothing else. Or backward frees them, and makes as
    many gradients of twice their size in the backward of casts; one of those may lie before the trace, too.
    """
    for index, allocation in enumerate(trace.allocations):
        if allocation.born == BEFORE and 2 * allocation.bytes in there and trace.held_by_cache(allocation):
            yield index
    born = Counter(each.bytes for _, each in trace.born_in(Phase.BACKWARD) if trace.birth(each).casting_back)
    freed: dict[int, list[int]] = defaultdict(list)
    for index in trace.freed_by_first_backward():
        freed[2 * trace.allocations[index].bytes].append(index)
    for size, copies in freed.items():
        if size in there and size in born and len(copies) <= min(born[size] + 1, there[size]):
            yield from copies


def _in_each_pass(trace: Trace, casts: Sequence[int]) -> dict[int, Counter[int]]:
    """By size, how many of ``casts`` each pass has made."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for index in casts:
        counts[trace.allocations[index].bytes][trace.pass_of(index)] += 1
    return counts


def _cast_again(
    trace: Trace,
    calls: Sequence[Sequence[int]],
    counts: Mapping[int, Counter[int]],
    over: set[int],
    there: Mapping[int, int],
) -> bool:
    """Whether a pass casts all parameters as often, as several forwards do, and never two of a size in one call.

    One size alone may be as frequent by chance.
    """
    times = {divmod(count, there[2 * size]) for size in over for count in counts[size].values()}
    if len(over) < 2 or len(times) != 1 or any(rest for _, rest in times):
        return False
    return not any(sum(trace.allocations[index].bytes == size for index in call) > 1 for call in calls for size in over)


def _by_their_code(trace: Trace, calls: Sequence[Sequence[int]], settled: set[int], candidates: set[int]) -> set[int]:
    """Of the ``candidates``, those that are cast where the ``settled`` copies of parameters are, one in each call."""
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


def _calls(trace: Trace, low: Sequence[int]) -> Iterator[list[int]]:
    """The casts of one call of an op: nothing else was allocated between them, and the same code asked."""
    call: list[int] = []
    for index in low:
        if call and not (index == call[-1] + 1 and _text(trace, index) == _text(trace, call[-1])):
            yield call
            call = []
        call.append(index)
    if call:
        yield call


def _text(trace: Trace, index: int) -> str:
    return trace.birth(trace.allocations[index]).text


def _code(trace: Trace, index: int) -> str:
    """The innermost module's own lines, which all modules of its class share."""
    lines: list[str] = []
    for line in reversed(_text(trace, index).splitlines()):
        if line.endswith(_CALL):
            break
        lines.append(line)
    return "\n".join(lines)


def _over(trace: Trace, size: int, count: int, there: int, counted: int) -> str:
    """What is to be said where a pass has more casts of ``size`` than parameters twice as large."""
    what, made = ("casts", "cast") if trace.native else ("blocks", "made")
    told = (
        f"{format_count(count)} {what} of a pass have half the size of the {format_count(there)} parameters of "
        f"{format_bytes(2 * size)}, so other tensors of that size were {made} as well: by the code that asked, "
    )
    if counted == there:
        return f"{told}{format_count(counted)} are of parameters"
    which = f"{format_count(counted)} are" if counted else "none is surely"
    most = f"{format_count(there)} ({format_bytes(there * size)}), where each parameter is cast once"
    return f"{told}{which} of parameters; there may be up to {most}; {CASTS_OPEN}"


def names_in_turn(
    trace: Trace, blocks: Sequence[int], names: Mapping[int, Sequence[str]], scale: int
) -> Iterator[tuple[int, str]]:
    """Give the blocks of one size the names of the parameters ``scale`` times as large, in turn in each step."""
    turns: Counter[tuple[int, int]] = Counter()
    for index in blocks:
        size = trace.allocations[index].bytes
        known = names.get(scale * size, ())
        turn = (trace.step_of(index), size)
        yield index, known[turns[turn] % len(known)] if known else ""
        turns[turn] += 1
