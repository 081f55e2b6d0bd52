"""The allocations of a trace with what is known of their birth and their death."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

from ampmem.allocator.snapshot import ALLOC
from ampmem.events import Phase
from ampmem.importer.frames import Reading
from ampmem.importer.phases import Course
from ampmem.importer.replay import ALIVE, BEFORE, Allocation, TracedBlocks

_WORK: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Trace:
    """What the rules look at."""

    def __init__(self, replay: TracedBlocks, readings: Sequence[Reading], course: Course) -> None:
        self.allocations = replay.allocations
        self.course = course
        self._replay = replay
        self._readings = readings
        self.native = any(readings[event.stack].native for event in replay.events if event.action == ALLOC)
        """Whether any stack of an alloc has C++ frames."""
        self.autocast = any(readings[event.stack].autocast for event in replay.events)
        """Whether autocast's own Python code called any of it."""
        backward = [phase == Phase.BACKWARD for phase in course.phase]
        self._passes = list(accumulate(now != before for before, now in pairwise([False, *backward])))
        self.standing: dict[int, list[int]] = defaultdict(list)
        """By size, the blocks from before the first forward that nothing but an update ends, by address."""
        first = next((at for at, phase in enumerate(course.phase) if phase in _WORK), len(course.phase))
        for index, allocation in enumerate(replay.allocations):
            if allocation.born < first and (allocation.died == ALIVE or self.replaced(allocation)):
                self.standing[allocation.bytes].append(index)

    def optimized(self) -> bool:
        """Whether an optimizer was seen: an update, or its own code that allocates or frees."""
        course = self.course
        seen = bool(course.optimizer_names) or any(step.update for step in course.steps)
        return seen or any(self._readings[event.stack].optimizing for event in self._replay.events)

    def born_in(self, phase: Phase) -> Iterator[tuple[int, Allocation]]:
        """The allocations of the trace that were born in ``phase``."""
        for index, allocation in enumerate(self.allocations):
            if allocation.born != BEFORE and self.course.phase[allocation.born] == phase:
                yield index, allocation

    def birth(self, allocation: Allocation) -> Reading:
        """The stack that asked for it."""
        return self._readings[self._replay.events[allocation.born].stack]

    def death(self, allocation: Allocation) -> Reading:
        """The stack that freed it."""
        return self._readings[self._replay.events[allocation.died].stack]

    def zeroed(self, allocation: Allocation) -> bool:
        """Whether ``zero_grad`` freed it."""
        return allocation.died != ALIVE and self.death(allocation).zeroing

    def held_by_cache(self, allocation: Allocation) -> bool:
        """Whether leaving autocast freed it: its cache keeps copies of whole parameters that are trained alone."""
        return allocation.died != ALIVE and self.death(allocation).leaving_autocast

    def replaced(self, allocation: Allocation) -> bool:
        """Whether an update freed it."""
        return allocation.died != ALIVE and self.course.phase[allocation.died] == Phase.OPTIMIZER

    def made_by_optimizer(self, allocation: Allocation) -> bool:
        """Whether an optimizer's own code asked for it."""
        return allocation.born != BEFORE and self.birth(allocation).optimizing

    def step_of(self, index: int) -> int:
        """The step in which it was born; -1 for before the trace."""
        born = self.allocations[index].born
        return -1 if born == BEFORE else self.course.step[born]

    def pass_of(self, index: int) -> int:
        """The stretch without or with a backward in which it was born: several in a step that accumulates."""
        return self._passes[self.allocations[index].born]

    def leaves(self, allocation: Allocation, phase: Phase) -> bool:
        """Whether what was born in ``phase`` is alive when the script leaves it."""
        if allocation.died == ALIVE:
            return True
        course = self.course
        return course.phase[allocation.died] != phase or course.step[allocation.died] != course.step[allocation.born]

    def outlives_backward(self, index: int) -> bool:
        """Whether what a forward made is still there when the backward after it has ended."""
        died = self.allocations[index].died
        return self._passes[-1 if died == ALIVE else died] >= self.pass_of(index) + 2

    def given_up_by_script(self, allocation: Allocation) -> bool:
        """Whether a block from before the trace stays, or is freed by neither backward nor update nor zero_grad."""
        if allocation.died == ALIVE:
            return True
        return not self.zeroed(allocation) and self.course.phase[allocation.died] not in (
            Phase.BACKWARD,
            Phase.OPTIMIZER,
        )

    def freed_by_first_backward(self) -> Iterator[int]:
        """Blocks from before the trace that the first backward frees: a forward made them that the ring has lost."""
        course = self.course
        first = next((stretch.step for stretch in course.stretches if stretch.phase == Phase.BACKWARD), None)
        for index, allocation in enumerate(self.allocations):
            if allocation.born != BEFORE or allocation.died == ALIVE:
                continue
            if course.phase[allocation.died] == Phase.BACKWARD and course.step[allocation.died] == first:
                yield index

    def most_at_once(self, blocks: Iterable[int]) -> dict[int, int]:
        """The most of ``blocks`` of each size that are alive at one instant."""
        changes = []
        for index in blocks:
            allocation = self.allocations[index]
            changes.append((allocation.born, 1, allocation.bytes))
            if allocation.died != ALIVE:
                changes.append((allocation.died, -1, allocation.bytes))
        alive: Counter[int] = Counter()
        most: dict[int, int] = {}
        for _, change, size in sorted(changes):
            alive[size] += change
            most[size] = max(most.get(size, 0), alive[size])
        return most

    def most_in_a_step(self, blocks: Iterable[int]) -> dict[int, int]:
        """The most of ``blocks`` of each size that one step has made."""
        counts = Counter((self.step_of(index), self.allocations[index].bytes) for index in blocks)
        most: dict[int, int] = {}
        for (_, size), count in counts.items():
            most[size] = max(most.get(size, 0), count)
        return most
