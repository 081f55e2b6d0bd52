"""What the CPU's events come to when the profiler sees one thread and its total counts all."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ampmem.events import OTHER_THREADS, UNKNOWN, Action  # noqa: E402
from ampmem.names import MAPPED  # noqa: E402
from ampmem.recorder.facts.addresses import AliveBlocks  # noqa: E402
from ampmem.recorder.sources.base import RawEvents  # noqa: E402
from ampmem.recorder.sources.ledger import (  # noqa: E402
    ELSEWHERE,
    Ledger,
    Profiled,
    proven_dead,
    told_by_size,
)
from ampmem.recorder.sources.storages import Died, SeenStorage, Storages  # noqa: E402


class Tensors(Storages):
    """Storages of a script that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0

    def saw(self, address: int, size: int, *, resizable: bool = True, kept: bool = True) -> None:
        self._seen.append(SeenStorage(self.now, address, size, resizable, kept))

    def lost(self, address: int) -> None:
        self._died.append(Died(self.now, address))


class Process:
    """A process with a recorded thread and others, and the total that its allocator keeps."""

    def __init__(self) -> None:
        self.tensors = Tensors()
        self.ledger = Ledger(self.tensors)
        self.events: list[tuple[int, ...]] = []
        self.alive: dict[int, int] = {}
        self._next = 0x1000

    @property
    def total(self) -> int:
        return sum(self.alive.values())

    def allocate(self, size: int, *, elsewhere: bool = False, at: int | None = None) -> int:
        address = self._next if at is None else at
        self._next += 0x1000
        self.alive[address] = size
        if not elsewhere:
            self._event(address, size, self.total)
        return address

    def free(self, address: int, *, elsewhere: bool = False) -> None:
        size = self.alive.pop(address)
        if not elsewhere:
            self._event(address, -size, self.total)

    def map(self, address: int, size: int) -> None:
        self._event(address, size, 0)

    def _event(self, address: int, size: int, total: int) -> None:
        self.tensors.now += 10
        self.events.append((self.tensors.now, address, size, total, 0, -1))
        self.tensors.now += 10

    def settle(self) -> RawEvents:
        rows, self.events = self.events, []
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(Profiled._fields)).T
        return self.ledger.settle(Profiled(*columns), {"": 0})


def left(raw: RawEvents) -> dict[int, int]:
    """Address and bytes of what the events leave alive; each address must be taken and given back in turn."""
    alive: dict[int, int] = {}
    for action, address, size in zip(raw.action, raw.address, raw.bytes, strict=True):
        if action == Action.FREE:
            assert alive.pop(int(address)) == size
        else:
            assert int(address) not in alive
            alive[int(address)] = int(size)
    return alive


def test_what_other_threads_hold_is_one_block() -> None:
    process = Process()
    own = process.allocate(100)
    process.allocate(5000, elsewhere=True)
    process.free(process.allocate(7))
    raw = process.settle()
    assert left(raw) == {own: 100, OTHER_THREADS: 5000}
    assert raw.ops[raw.op[raw.address == OTHER_THREADS][0]] == ELSEWHERE
    assert raw.allocated[-1] == 5100


def test_a_block_of_another_thread_that_the_recorded_one_frees_was_theirs() -> None:
    process = Process()
    process.allocate(1)
    theirs = process.allocate(5000, elsewhere=True)
    process.allocate(2)
    process.free(theirs)
    assert OTHER_THREADS not in left(process.settle())


def test_a_storage_that_is_seen_is_no_longer_theirs() -> None:
    process = Process()
    process.allocate(1)
    weight = process.allocate(4000, elsewhere=True)
    process.allocate(1000, elsewhere=True)
    process.allocate(2)
    process.tensors.saw(weight, 4000)
    raw = process.settle()
    assert {size for address, size in left(raw).items() if address in (weight, OTHER_THREADS)} == {4000, 1000}
    process.free(weight)
    raw = process.settle()
    assert raw.address.tolist() == [weight]
    assert raw.allocated[-1] == 1003


@pytest.mark.parametrize("sizes", [[300], [300, 300, 300], [300, 7, 41]])
def test_what_another_thread_frees_dies(sizes: list[int]) -> None:
    process = Process()
    kept = process.allocate(64)
    blocks = [process.allocate(size) for size in sizes]
    for block in blocks:
        process.free(block, elsewhere=True)
    last = process.allocate(9)
    raw = process.settle()
    assert left(raw) == {kept: 64, last: 9}
    assert raw.allocated[-1] == 73
    assert process.ledger.told_by_size == sum(sizes)


def test_a_storage_that_is_known_to_be_dead_goes_first() -> None:
    process = Process()
    first, second = process.allocate(300), process.allocate(300)
    process.tensors.lost(second)
    process.free(second, elsewhere=True)
    last = process.allocate(9)
    assert left(process.settle()) == {first: 300, last: 9}
    assert process.ledger.told_by_size == 0


def test_what_is_lacking_beside_the_dead_is_told_by_size() -> None:
    process = Process()
    dead, freed, kept = (process.allocate(size) for size in (300, 500, 1100))
    process.tensors.lost(dead)
    for block in (dead, freed):
        process.free(block, elsewhere=True)
    last = process.allocate(9)
    assert left(process.settle()) == {kept: 1100, last: 9}
    assert process.ledger.told_by_size == 500


@pytest.mark.parametrize(
    ("missing", "dead", "expected"),
    [(500, "ab", "a"), (600, "ab", "ab"), (299, "ab", ""), (500, "cab", "a"), (900, "cab", "c"), (300, "ba", "b")],
)
def test_of_the_dead_those_count_that_fit_into_what_is_lacking(missing: int, dead: str, expected: str) -> None:
    sizes = {ord("a"): 300, ord("b"): 300, ord("c"): 900}
    assert "".join(map(chr, proven_dead(missing, sizes, map(ord, dead)))) == expected


def test_what_died_at_an_address_says_nothing_of_what_is_there_next() -> None:
    process = Process()
    first = process.allocate(300)
    process.tensors.lost(first)
    process.tensors.now += 10
    process.allocate(1)
    process.free(first)
    again = process.allocate(300, at=first)
    freed = process.allocate(500)
    process.free(freed, elsewhere=True)
    process.allocate(9)
    alive = left(process.settle())
    assert alive[again] == 300 and freed not in alive


def test_what_is_seen_and_dies_before_the_next_settlement_is_gone() -> None:
    process = Process()
    process.tensors.saw(0x90000, 40, resizable=False)
    process.tensors.now += 10
    process.tensors.lost(0x90000)
    process.tensors.now += 10
    process.tensors.saw(0xA0000, 30, resizable=False)
    raw = process.settle()
    assert left(raw) == {0xA0000: 30}
    assert raw.bytes.tolist() == [40, 40, 30]


def test_an_event_of_no_bytes_changes_nothing() -> None:
    process = Process()
    own = process.allocate(100)
    process._event(own, 0, process.total)
    last = process.allocate(9)
    raw = process.settle()
    assert left(raw) == {own: 100, last: 9}
    assert raw.allocated.tolist() == [100, 109]


def test_what_is_alive_is_what_was_there_before_and_what_came() -> None:
    process = Process()
    process.ledger.add_baseline({0x5000000: 50})
    own, gone = process.allocate(100), process.allocate(7)
    process.free(gone)
    process.settle()
    assert process.ledger.blocks() == AliveBlocks({0x5000000: 50, own: 100}, 150)


@pytest.mark.parametrize("known", [True, False])
def test_the_recorded_thread_frees_what_an_earlier_profile_counted(known: bool) -> None:
    """It is in the total from the start; among the blocks only where it was known then."""
    process = Process()
    process.alive[0x5000000] = 50
    if known:
        process.ledger.add_baseline({0x5000000: 50})
    own = process.allocate(100)
    process.free(0x5000000)
    last = process.allocate(9)
    raw = process.settle()
    assert left(raw) == {own: 100, last: 9}
    assert raw.allocated[raw.address == own].tolist() == [150 if known else 100]
    assert raw.allocated[-1] == 109


def test_what_the_recorded_thread_frees_is_not_freed_elsewhere_too() -> None:
    process = Process()
    own, theirs = process.allocate(300), process.allocate(500)
    process.tensors.lost(own)
    process.free(theirs, elsewhere=True)
    process.free(own)
    assert left(process.settle()) == {}


def test_an_address_that_is_handed_out_again_was_free() -> None:
    process = Process()
    first, second = process.allocate(300), process.allocate(300)
    process.free(second, elsewhere=True)
    process.allocate(9)
    process.allocate(20, at=second)
    alive = left(process.settle())
    assert (alive[first], alive[second]) == (300, 20)


def test_frees_that_nobody_can_tell_stay_a_difference() -> None:
    process = Process()
    blocks = [process.allocate(size) for size in (100, 30, 7)]
    process.free(blocks[0], elsewhere=True)
    process.free(blocks[2], elsewhere=True)  # 107 bytes: no block, and none in a row
    process.allocate(9)
    raw = process.settle()
    assert sum(left(raw).values()) - raw.allocated[-1] == 107


def test_a_mapping_is_divided_into_the_storages_in_it() -> None:
    process = Process()
    process.map(0x90000, 1000)
    process.tensors.saw(0x90040, 400, resizable=False)
    process.tensors.saw(0x90240, 300, resizable=False)
    raw = process.settle()
    assert left(raw) == {0x90000: 300, 0x90040: 400, 0x90240: 300}
    assert {raw.ops[op] for op in raw.op} == {MAPPED}
    process.map(0x90000, -1000)
    raw = process.settle()
    assert raw.action.tolist() == [Action.FREE] * 3
    assert dict(zip(raw.address.tolist(), raw.bytes.tolist(), strict=True)) == {
        0x90000: 300,
        0x90040: 400,
        0x90240: 300,
    }


def test_a_storage_that_is_seen_in_a_mapping_of_before_divides_it() -> None:
    process = Process()
    process.map(0x90000, 1000)
    assert left(process.settle()) == {0x90000: 1000}
    process.tensors.saw(0x90040, 400, resizable=False)
    raw = process.settle()
    assert raw.action.tolist() == [Action.FREE, Action.ALLOC, Action.ALLOC]
    assert raw.bytes.tolist() == [1000, 600, 400]


def test_blocks_of_before_are_freed_as_their_storages_die() -> None:
    process = Process()
    process.tensors.baseline[0x5000] = 50
    process.ledger.add_baseline(process.tensors.baseline)
    own = process.allocate(8)
    process.tensors.lost(0x5000)
    raw = process.settle()
    assert left(raw) == {own: 8}
    assert raw.allocated[raw.address == own].tolist() == [58]


@pytest.mark.parametrize(
    ("missing", "expected"), [(5, ["b"]), (6, ["d", "e"]), (19, ["b", "c", "d"]), (4, []), (0, [])]
)
def test_sizes_tell(missing: int, expected: list[str]) -> None:
    sizes = {"a": 20, "b": 5, "c": 11, "d": 3, "e": 3}
    numbers = {ord(name): size for name, size in sizes.items()}
    assert [chr(address) for address in told_by_size(missing, numbers)] == expected


ACTIONS = st.lists(
    st.tuples(st.sampled_from(("allocate", "free", "theirs", "they free theirs", "we free theirs")), st.integers(0, 9)),
    max_size=40,
)


@given(ACTIONS, st.lists(st.integers(1, 10**6), min_size=40, max_size=40))
def test_the_sum_is_the_processs_total_whatever_threads_do(actions: list[tuple[str, int]], sizes: list[int]) -> None:
    process = Process()
    own: list[int] = [process.allocate(1)]
    theirs: list[int] = []
    for (action, place), size in zip(actions, sizes, strict=False):
        if action == "allocate":
            own.append(process.allocate(size))
        elif action == "theirs":
            theirs.append(process.allocate(size, elsewhere=True))
        elif action == "free" and own:
            process.free(own.pop(place % len(own)))
        elif theirs and action != "free":
            process.free(theirs.pop(place % len(theirs)), elsewhere=action.startswith("they"))
    process.allocate(1)
    raw = process.settle()
    alive = left(raw)
    assert sum(alive.values()) == process.total
    assert all(alive[address] == process.alive[address] for address in own)
    running = 0
    for action, size, total in zip(raw.action, raw.bytes, raw.allocated, strict=True):
        running += -size if action == Action.FREE else size
        assert total in (UNKNOWN, running)


@given(
    st.lists(
        st.tuples(st.sampled_from(("allocate", "free", "theirs", "dies", "settle")), st.integers(0, 9)), max_size=40
    ),
    st.lists(st.integers(1, 10**6), min_size=40, max_size=40),
    st.integers(0, 10**6),
)
def test_what_is_alive_is_exact_beside_blocks_of_before(
    actions: list[tuple[str, int]], sizes: list[int], stale: int
) -> None:
    """Blocks of before are not in the total; what an earlier profile has counted is, and is not in the events."""
    process = Process()
    if stale:
        process.alive[0x10] = stale
    before = {0x500000 + 0x1000 * place: size for place, size in enumerate(sizes[:8])}
    process.tensors.baseline |= before
    process.ledger.add_baseline(before)
    own = [process.allocate(1)]
    raws = []
    for (action, place), size in zip(actions, sizes, strict=False):
        if action == "allocate":
            own.append(process.allocate(size))
        elif action == "theirs":
            process.allocate(size, elsewhere=True)
        elif action == "free" and own:
            process.free(own.pop(place % len(own)))
        elif action == "dies" and before:
            address = list(before)[place % len(before)]
            del before[address]
            process.tensors.lost(address)
        elif action == "settle":
            raws.append(process.settle())
    process.allocate(1)
    raws.append(process.settle())
    running = 0
    for raw in raws:
        rows = zip(raw.action, raw.bytes, raw.allocated, raw.op, raw.sequence, strict=True)
        for action, size, total, op, sequence in rows:
            running += -size if action == Action.FREE else size
            assert total in (UNKNOWN, running)
            assert sequence == -1
            assert op == 0 or (action == Action.ALLOC and raw.ops[op] == ELSEWHERE)
    assert running == process.total - stale + sum(before.values())


def test_a_storage_that_nothing_explains_is_memory_that_torch_did_not_allocate() -> None:
    process = Process()
    block = process.allocate(100)
    process.tensors.saw(0x90000, 40, resizable=False)
    process.tensors.saw(block + 8, 20, resizable=False)  # a part of a block that is known
    process.tensors.saw(0xA0000, 30, resizable=False, kept=False)  # one that is gone at once
    assert left(process.settle()) == {block: 100, 0x90000: 40}
    process.tensors.lost(0x90000)
    process.free(block)
    raw = process.settle()
    assert raw.action.tolist() == [Action.FREE] * 2
    assert raw.allocated.tolist() == [UNKNOWN, 0]


def test_a_storage_larger_than_what_others_hold_is_not_theirs() -> None:
    process = Process()
    process.allocate(1)
    process.allocate(50, elsewhere=True)
    process.allocate(2)
    process.tensors.saw(0x90000, 51, kept=False)
    assert 0x90000 not in left(process.settle())
