"""The table of measured peaks beside simulated ones: rows, errors, and what they come to."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import results
from measured.ways import Peaks

SCHEMA = "ampmem.truth/1"
_MIB = 1 << 20
_HEADS = (
    *("case", "precision"),
    *("allocated: real", "recorded", "simulated", "up to", "off by"),
    *("reserved: real", "recorded", "simulated", "up to", "off by"),
    *("outside: real", "assumed", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRow:
    """One training run, three ways."""

    case: str
    precision: str
    plain: Peaks
    recorded: Peaks
    simulated: Peaks

    @property
    def allocated_error(self) -> float | None:
        """(simulated - real) / real of the peak of allocated memory; ``None`` where either is not of a whole run."""
        return self._error(lambda peaks: peaks.allocated)

    @property
    def reserved_error(self) -> float | None:
        """The same of reserved memory."""
        return self._error(lambda peaks: peaks.reserved)

    @property
    def inside(self) -> bool | None:
        """Whether what is real lies between the simulation's peak and its "up to"; ``None`` where it has none."""
        real, low, high = self.plain.allocated, self.simulated.allocated, self.simulated.most_allocated
        if real is None or low is None or high is None or self.plain.why or self.simulated.why:
            return None
        return low <= real <= high

    @property
    def recorder_differs(self) -> int | None:
        """Bytes that ampmem's own peak of allocated memory is off by; 0 is what it should be."""
        if self.recorded.allocated is None or self.plain.allocated is None or self.plain.why or self.recorded.why:
            return None
        return self.recorded.allocated - self.plain.allocated

    @property
    def remark(self) -> str:
        """What is to be said of the row beside its figures."""
        words = [
            f"{name}: {peaks.why}"
            for name, peaks in (("real", self.plain), ("recorded", self.recorded), ("simulated", self.simulated))
            if peaks.why
        ]
        if self.inside is not None:
            words.append("within its interval" if self.inside else "outside of its interval")
        if self.recorder_differs:
            words.append(f"the recording is off by {self.recorder_differs:,} B")
        return "; ".join(words)

    def _error(self, of: Callable[[Peaks], int | None]) -> float | None:
        real, simulated = of(self.plain), of(self.simulated)
        if not real or simulated is None or self.plain.why or self.simulated.why:
            return None
        return (simulated - real) / real


def text(rows: Sequence[TruthRow], heading: str) -> str:
    """The table, in MiB, and the errors' median and worst."""
    lines = [list(_HEADS), *([*_cells(row)] for row in rows)]
    return "\n".join([heading, "", results.table(lines), "", *summary(rows)]) + "\n"


def _cells(row: TruthRow) -> list[str]:
    plain, recorded, simulated = row.plain, row.recorded, row.simulated
    return [
        *(row.case, row.precision),
        *map(_mib, (plain.allocated, recorded.allocated, simulated.allocated, simulated.most_allocated)),
        _percent(row.allocated_error),
        *map(_mib, (plain.reserved, recorded.reserved, simulated.reserved, simulated.most_reserved)),
        _percent(row.reserved_error),
        *map(_mib, (plain.outside, simulated.outside)),
        row.remark,
    ]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.1f}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.2f} %"


def summary(rows: Sequence[TruthRow]) -> list[str]:
    """Median and worst error of allocated and reserved memory, by precision and of all; and what has no error."""
    lines = []
    for precision in (*dict.fromkeys(row.precision for row in rows), "all"):
        mine = [row for row in rows if precision in (row.precision, "all")]
        parts = [
            f"{name} {_spread([error for row in mine if (error := of(row)) is not None])}"
            for name, of in (
                ("allocated", lambda row: row.allocated_error),
                ("reserved", lambda row: row.reserved_error),
            )
        ]
        lines.append(f"{precision}: {'; '.join(parts)}")
    without = [row for row in rows if row.allocated_error is None]
    if without:
        lines.append(f"without an error: {len(without)} of {len(rows)} rows, each with why")
    differing = [row for row in rows if row.recorder_differs]
    checked = [row for row in rows if row.recorder_differs is not None]
    lines.append(f"the recording's own peak is PyTorch's in {len(checked) - len(differing)} of {len(checked)} rows")
    return lines


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return "nothing to compare"
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    return (
        f"off by {100 * statistics.median(sizes):.2f} % in the median, {100 * worst:+.2f} % at worst, of {len(errors)}"
    )


def document(rows: Sequence[TruthRow], machine: dict[str, results.Fact]) -> dict[str, object]:
    """As JSON: the machine, and of each row its figures in bytes and its errors as fractions."""
    return {
        "schema": SCHEMA,
        "machine": machine,
        "rows": [
            asdict(row)
            | {
                "allocated_error": row.allocated_error,
                "reserved_error": row.reserved_error,
                "inside": row.inside,
                "remark": row.remark,
            }
            for row in rows
        ],
        "summary": summary(rows),
    }


def row_of(data: dict[str, object]) -> TruthRow:
    """A row of a :func:`document`; raises ``KeyError`` or ``TypeError`` for what is none."""
    ways = {name: Peaks(**data[name]) for name in ("plain", "recorded", "simulated")}  # type: ignore[arg-type]
    return TruthRow(case=str(data["case"]), precision=str(data["precision"]), **ways)
