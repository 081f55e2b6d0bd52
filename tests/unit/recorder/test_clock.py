"""The profiler's times on the clock of ``time.time_ns``: as exact as the markers at both ends of a window allow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ampmem.recorder.sources.window import MARKERS, ClockMark, Span, shift_between

HOUR_NS = 3_600_000_000_000
LONG, SHORT = 100_000, 300
"""What lies between two times of a marker: much in the first one of a process, little in most."""

gaps = st.lists(st.tuples(*[st.integers(1, LONG)] * 4), min_size=MARKERS, max_size=MARKERS)
short = st.tuples(*[st.integers(1, SHORT)] * 4)


def burst(start: int, offset: int, sizes: list[tuple[int, ...]]) -> tuple[list[Span], list[ClockMark]]:
    """Markers from ``start`` on, ``sizes`` apart: as the profiler has them, ``offset`` behind, and as we have."""
    spans, marks = [], []
    for to_start, to_within, to_end, to_after in sizes:
        began = start + to_start
        within = began + to_within
        ended = within + to_end
        spans.append((began - offset, ended - offset))
        marks.append(ClockMark(start, within, ended + to_after))
        start = ended + to_after
    return spans, marks


@given(gaps, gaps, short, short, st.integers(-HOUR_NS, HOUR_NS), st.integers(-50_000, 50_000))
def test_one_short_marker_at_each_end_is_enough(
    first: list[tuple[int, ...]],
    last: list[tuple[int, ...]],
    first_short: tuple[int, ...],
    last_short: tuple[int, ...],
    offset: int,
    drift: int,
) -> None:
    begin, end = (
        burst(HOUR_NS, offset, [*first[1:], first_short]),
        burst(2 * HOUR_NS, offset + drift, [*last[1:], last_short]),
    )
    shift = shift_between([*begin[0], *end[0]], (begin[1], end[1]))
    true = np.array([HOUR_NS, 3 * HOUR_NS // 2, 2 * HOUR_NS])
    profilers = true - offset - np.array([0, drift // 2, drift])
    assert np.abs(shift(profilers) - true).max() <= SHORT + 2


def test_a_marker_that_was_interrupted_says_no_less() -> None:
    plain = burst(HOUR_NS, 0, [(100, 100, 100, 100)] * MARKERS)
    late = burst(HOUR_NS, 0, [(100, 90_000, 100, 100), *[(100, 100, 100, 100)] * (MARKERS - 1)])
    for spans, marks in (plain, late):
        assert shift_between([*spans, *spans], (marks, marks))(np.array([HOUR_NS])).tolist() == [HOUR_NS]
