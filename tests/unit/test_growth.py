"""Growth is told where it is, and nowhere else: of any size above a block, under any noise that is smaller than it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampmem.growth import LEAST_STEPS, Growth, growth_of

MIB = 1 << 20


def told(alive: list[int]) -> Growth | None:
    return growth_of(range(len(alive)), alive)


def test_a_leak_of_one_kibibyte_a_step_beside_a_gibibyte() -> None:
    found = told([1024 * MIB + 1024 * step for step in range(100)])
    assert (found.per_step, found.total, found.noise) == (1024.0, 89 * 1024, 0)
    assert (found.first, found.last) == (10, 99), "the first tenth is left out"


@pytest.mark.parametrize(
    "alive",
    [
        [5 * MIB] * 100,
        [min(step, 40) * MIB for step in range(100)],
        [100 * MIB - step * 1024 for step in range(100)],
        [5 * MIB + (step % 7) * MIB for step in range(100)],
        [step * MIB for step in range(2)] + [2 * MIB] * 98,
        [5 * MIB + step * 100 for step in range(100)],
    ],
    ids=["flat", "settles", "falls", "a saw", "states of an optimizer", "less than a block"],
)
def test_what_does_not_grow(alive: list[int]) -> None:
    assert told(alive) is None


@pytest.mark.parametrize("steps", [LEAST_STEPS - 1, LEAST_STEPS])
def test_a_verdict_takes_twenty_steps(steps: int) -> None:
    found = told([step * MIB for step in range(steps)])
    assert (found is not None) == (steps == LEAST_STEPS)


@given(
    st.integers(min_value=20, max_value=400),
    st.integers(min_value=1024, max_value=64 * MIB),
    st.integers(min_value=0, max_value=1 << 40),
)
def test_every_steady_rise_is_found_with_its_slope(steps: int, each: int, base: int) -> None:
    found = told([base + each * step for step in range(steps)])
    assert found.per_step == each
    assert found.noise == 0


@given(st.lists(st.integers(min_value=0, max_value=MIB), min_size=20, max_size=300))
def test_a_rise_is_three_times_its_noise(alive: list[int]) -> None:
    found = told(alive)
    if found is not None:
        skip = max(2, len(alive) // 10)
        assert found.per_step * (len(alive) - skip) >= 3 * found.noise
