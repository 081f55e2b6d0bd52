"""Two sizes that differ must read differently, with no more digits than that takes."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampmem.units import (
    format_alike,
    format_apart,
    format_bytes,
    format_close,
    format_peak,
    parse_bytes,
    peaks_apart,
    peaks_close,
)

GIB = 1024**3
SIZES = st.one_of(
    st.integers(min_value=-(2**62), max_value=2**62),
    st.integers(min_value=0, max_value=4096),
    st.sampled_from([1024**power for power in range(7)]),
)


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (10 * GIB, 12 * GIB, ("10.0 GiB", "12.0 GiB")),
        (round(1.98 * GIB), 2 * GIB, ("1.98 GiB", "2.00 GiB")),
        (2 * GIB, round(1.98 * GIB), ("2.00 GiB", "1.98 GiB")),
        (2 * GIB - 2 * 1024**2, 2 * GIB, ("1.998 GiB", "2.000 GiB")),
        (2 * GIB, 2 * GIB, ("2.0 GiB", "2.0 GiB")),
        (2 * GIB, 2 * GIB + 1, ("2,147,483,648 B", "2,147,483,649 B")),
        (1024, 1025, ("1.000 KiB", "1.001 KiB")),
        (0, 1, ("0 B", "1 B")),
        (-GIB, GIB, ("-1.0 GiB", "1.0 GiB")),
        (1023, 1024, ("1023 B", "1.0 KiB")),
    ],
)
def test_the_fewest_digits_that_tell_two_sizes_apart(first: int, second: int, texts: tuple[str, str]) -> None:
    assert format_apart(first, second) == texts


@given(SIZES, SIZES, st.booleans())
def test_unequal_sizes_read_unequal_and_equal_ones_equal(first: int, other: int, near: bool) -> None:
    second = first + other % 4096 if near else other
    one, two = format_apart(first, second)
    assert (one == two) == (first == second)
    assert (two, one) == format_apart(second, first)
    if format_bytes(first) != format_bytes(second):
        assert (one, two) == (format_bytes(first), format_bytes(second))


@given(SIZES, SIZES)
def test_each_text_is_its_size_rounded_to_the_digits_that_it_shows(first: int, second: int) -> None:
    for size, text in zip((first, second), format_apart(first, second), strict=True):
        digits, unit = text.replace(",", "").split(" ")
        scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
        places = len(digits.partition(".")[2])
        assert abs(Decimal(digits) * scale - size) <= Decimal(scale) / 2 / 10**places + Decimal(abs(size)) / 2**52


def test_sizes_that_hardly_differ_have_two_decimals_at_most() -> None:
    assert format_close(10_000_000, 10_000_002) == ("9.5 MiB", "9.5 MiB")
    assert format_close(10_000_000, 10_010_000) == ("9.54 MiB", "9.55 MiB")
    assert format_close(10_000_000, 10_100_000) == ("9.5 MiB", "9.6 MiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), (" 1.5 mib ", 3 << 19), ("80GB", 80 * 10**9), ("0 B", 0), ("1073741824", GIB), ("2t", None)],
)
def test_a_size_is_read(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


@given(st.integers(min_value=0, max_value=2**62))
def test_whole_bytes_are_read_as_they_are_written(size: int) -> None:
    assert parse_bytes(f"{size} B") == size
    if size == 0 or size >= 1024**2:
        assert parse_bytes(str(size)) == size
    else:
        with pytest.raises(ValueError, match=f"{size} has no unit; write {size}GiB, {size}MiB or {size}B"):
            parse_bytes(str(size))


@pytest.mark.parametrize(
    ("pairs", "texts"),
    [
        (
            [(500 * 1024**2, 512 * 1024**2), (70 * 1024**3, 71 * 1024**3)],
            ["0.49 GiB", "0.50 GiB", "70.00 GiB", "71.00 GiB"],
        ),
        ([(10 * 1024, 20 * 1024**2)], ["0.01 MiB", "20.00 MiB"]),
        ([(1, 1024**4)], ["0.000 TiB", "1.000 TiB"]),
        ([(0, 3 * 1024**2)], ["0.0 MiB", "3.0 MiB"]),
        ([(5, 900)], ["5 B", "900 B"]),
    ],
)
def test_sizes_of_one_column_have_one_unit(pairs: list[tuple[int, int]], texts: list[str]) -> None:
    shown = format_alike(pairs)
    assert [shown(size) for pair in pairs for size in pair] == texts


def test_a_column_without_sizes() -> None:
    assert format_alike([])(0) == "0 B"


def test_peaks_have_three_decimals_from_a_gib_on() -> None:
    assert [format_peak(size) for size in (700, 10 << 20, 1023 << 20, GIB, 7180 << 20)] == [
        *("700 B", "10.0 MiB", "1023.0 MiB", "1.000 GiB", "7.012 GiB"),
    ]
    assert peaks_apart(2 * GIB, 3 * GIB // 2) == ("2.000 GiB", "1.500 GiB")
    assert peaks_apart(2 * GIB, 700 << 20) == ("2.000 GiB", "700.0 MiB")
    assert peaks_apart(2 * GIB, 2 * GIB + 1000) == ("2.000000 GiB", "2.000001 GiB")
    assert peaks_apart(2 * GIB, 2 * GIB) == ("2.000 GiB", "2.000 GiB")
    assert peaks_apart(20 << 20, 30 << 20) == ("20.0 MiB", "30.0 MiB")
    assert peaks_close(2 * GIB, 2 * GIB + 1000) == ("2.000 GiB", "2.000 GiB")
