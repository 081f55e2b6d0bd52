"""What the end of a session says: a table of what the tests took, and what became of the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ampmem.integrations.pytest.baselines import Baselines
from ampmem.integrations.pytest.verdict import COMPARED, SAME, WRITTEN, Row
from ampmem.reporters.text.layout import NARROWEST, WIDEST, Layout, number, table, words
from ampmem.reporters.text.plain_text import ABSENT
from ampmem.reporters.text.words import signed
from ampmem.units import format_peak

NO_TESTS = (
    "no test was recorded: mark one with @pytest.mark.ampmem(peak='2 GiB'), or have it take the fixture ampmem and "
    "record a block"
)


def lines(rows: Sequence[Row], baselines: Baselines | None, width: int, *, all_tests: bool) -> Iterator[str]:
    """The table, if ``all_tests`` are to be listed, and a line on the baseline, if there is one."""
    if not rows:
        yield NO_TESTS
        return
    if all_tests:
        yield from _table(rows, Layout(width=min(max(width, NARROWEST), WIDEST))).split("\n")
    if baselines is not None:
        yield _of_baselines(rows, baselines)


def _table(rows: Sequence[Row], layout: Layout) -> str:
    compared = any(row["sizes"][0]["before"] is not None for row in rows)
    columns = [
        words("test", least=20),
        words("what", least=8),
        number("took"),
        number("limit"),
        *([number("since the\nbaseline", rank=1)] if compared else []),
        words("largest\nat the peak", rank=2),
    ]
    ordered = sorted(rows, key=lambda row: -(row["sizes"][0]["took"] or 0))
    return table(columns, [cells for row in ordered for cells in _lines_of(row, compared=compared)], layout)


def _lines_of(row: Row, *, compared: bool) -> Iterator[list[str]]:
    said = [f"block {row['block']}"] if row["block"] > 1 else []
    said += ["failed by itself"] if row["failed"] else []
    name = f"{row['test']} ({', '.join(said)})" if said else row["test"]
    for i, size in enumerate(row["sizes"]):
        took, before = size["took"], size["before"]
        change = [ABSENT if took is None or before is None else signed(took - before)] if compared else []
        first = (name, row["largest"] or ABSENT) if i == 0 else ("", "")
        yield [first[0], size["key"], _bytes(took), _bytes(size["limit"]), *change, first[1]]


def _bytes(size: int | None) -> str:
    return ABSENT if size is None else format_peak(size)


def _of_baselines(rows: Sequence[Row], baselines: Baselines) -> str:
    became = Counter(row["baseline"] for row in rows)
    named = baselines.named
    if baselines.update:
        return f"{named}: {became[WRITTEN]} written, {became[SAME]} as they were"
    return f"{named}: {became[COMPARED]} compared"
