"""When steps of a watched run are recorded in full, what is remembered of it, and whose tensors grow."""

import ctypes
from itertools import pairwise

import torch

from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.holders import Variables
from ampmem.recorder.watch.gauges import CpuGauge, Reading
from ampmem.recorder.watch.watcher import FullRecordings, GrowthLook, Series
from ampmem.recording.watched import Row, Why


def row(step: int, peak: int) -> Row:
    return Row(step, 0, peak, "forward", 0, 0, 0, 0, 0, "", False)


def asked(plans: FullRecordings, peaks: list[int], *, recorded: int = 3, grows: bool = False) -> dict[int, Why]:
    """After which steps some are to be recorded, of which the first ``recorded`` were."""
    found = {}
    for step, peak in enumerate(peaks):
        if step < recorded:
            plans.note(row(step, peak))
        elif (why := plans.wanted(row(step, peak), grows=lambda: grows)) is not None:
            found[step] = why
    return found


def test_a_reading_is_within_what_a_file_may_hold() -> None:
    """Else a run would leave a file that nobody reads: memory that no tensor held at the start is freed later."""
    gauge = CpuGauge()
    gauge._before, gauge._total = -10, ctypes.c_size_t(3)
    assert gauge.take() == Reading(0, 0)
    gauge._total.value = 14
    assert gauge.take() == Reading(4, 4)


def test_every_so_many_steps() -> None:
    assert asked(FullRecordings(100), [5] * 350) == {99: Why.EVERY, 199: Why.EVERY, 299: Why.EVERY}


def test_a_peak_that_is_higher_by_a_twentieth_is_new() -> None:
    peaks = [1000] * 10 + [1050] + [1000] * 10 + [1051] + [1000] * 10
    assert asked(FullRecordings(10_000), peaks) == {21: Why.HIGHEST}


def test_peaks_that_are_never_met_again_are_tried_less_and_less_often() -> None:
    found = asked(FullRecordings(10_000), [100] * 3 + [200] * 500)
    assert set(found.values()) == {Why.HIGHEST}
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert all(later > earlier for earlier, later in pairwise(gaps))
    assert len(found) < 10


def test_growth_is_asked_for_at_twenty_steps_and_at_each_doubling() -> None:
    assert asked(FullRecordings(10_000), [5] * 350, grows=True) == dict.fromkeys((19, 39, 79, 159, 319), Why.GROWTH)


def test_a_series_of_any_length_is_a_few_thousand_even_steps() -> None:
    series = Series()
    for step in range(100_000):
        series.add(step, 3 * step)
    assert 1000 < len(series.steps) <= 2049
    assert {later - earlier for earlier, later in pairwise(series.steps)} == {64}
    assert series.alive == [3 * step for step in series.steps]


class Cache:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_what_came_between_two_looks_is_named_by_its_holder() -> None:
    before = [torch.zeros(100), torch.nn.Parameter(torch.zeros(100))]
    cache = Cache()
    look = GrowthLook(100)
    for _ in range(10):
        cache.kept.append(torch.zeros(256))
    found = look.end(110, lambda address: "", Variables(Log(RealAddresses())))
    assert (found.step, found.steps) == (110, 10)
    assert [(each.what, each.bytes, each.count) for each in found.held] == [("cache.kept[*]", 10 * 1024, 10)]
    del before
