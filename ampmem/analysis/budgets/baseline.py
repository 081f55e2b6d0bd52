"""The run that another one is compared with: whether the two can be compared, and whether they are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampmem.analysis.budgets.measures import OF_SUMMARY, of_summary
from ampmem.analysis.difference.conditions import conditions_of
from ampmem.analysis.difference.difference import difference
from ampmem.analysis.difference.reading import is_json
from ampmem.analysis.difference.reading import read_side as read_baseline
from ampmem.analysis.difference.side import Side
from ampmem.analysis.json.from_json import NotOfThisKind, parsed
from ampmem.analysis.summary import SCHEMA, Summary
from ampmem.errors import UsageError
from ampmem.recording import is_recording
from ampmem.vocabulary import SourceKind

__all__ = ["RunsOn", "is_same", "read_baseline", "require_comparable", "require_replaceable", "runs_on"]

_NO_NAME = "a CUDA device"
"""What a recording says of a GPU whose name could not be asked for."""
_ANY_VERSION = f"{SCHEMA.rpartition('/')[0]}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOn:
    """The device of a run. ``name`` is empty where it is not known, and of CPUs, which are not told apart."""

    source: SourceKind
    name: str = ""

    def __str__(self) -> str:
        if self.source is SourceKind.CPU:
            return "the CPU"
        if self.source is SourceKind.SIMULATED:
            return f"a simulated {self.name or 'GPU'}"
        return f"the GPU {self.name}" if self.name else "a GPU"

    def is_comparable(self, other: RunsOn) -> bool:
        """Whether both are the same device, as far as that is known."""
        return self.source is other.source and (self.name == other.name or not self.name or not other.name)


def runs_on(summary: Summary) -> RunsOn:
    """The device of the run. A snapshot is of a GPU and does not name it."""
    if summary.source is SourceKind.CPU:
        return RunsOn(source=SourceKind.CPU)
    if summary.source is SourceKind.SNAPSHOT:
        return RunsOn(source=SourceKind.CUDA)
    return RunsOn(source=summary.source, name="" if summary.device.name == _NO_NAME else summary.device.name)


def require_comparable(before: Side, device: RunsOn, label: str) -> None:
    """Raise :class:`UsageError` where ``before`` is of another device than ``device``, that of the run ``label``."""
    found = runs_on(before.summary)
    if not found.is_comparable(device):
        raise UsageError(
            f"the baseline {before.label} is of {found}, and {label} of {device}: devices allocate differently, "
            "whatever the code is; make a baseline on the same device"
        )


def is_same(before: Side, after: Side) -> bool:
    """Whether ``after`` would be no other baseline than ``before``: the same sizes and groups, and the same conditions.

    A summary is none that is as good as a recording, and the other way round.
    """
    sizes = [[of_summary(side.summary, key) for key in OF_SUMMARY] for side in (before, after)]
    return sizes[0] == sizes[1] and not conditions_of(before, after) and not difference(before, after).changes


def require_replaceable(path: Path) -> None:
    """Raise :class:`UsageError` where a baseline may not be written to ``path``, as what is there is none.

    A recording or a summary, of whatever version, may be replaced, and so may an empty file.
    """
    if not path.is_file() or not path.stat().st_size or is_recording(path) or (is_json(path) and _is_summary(path)):
        return
    raise UsageError(
        f"{path} is neither a recording nor a summary of ampmem's, so no baseline is written over it; give another "
        "name, or remove it first"
    )


def _is_summary(path: Path) -> bool:
    try:
        value = parsed(path.read_text(encoding="utf-8-sig"))
    except (NotOfThisKind, UnicodeDecodeError, OSError):
        return False
    found = value[0] if isinstance(value, list) and value else value
    return isinstance(found, dict) and str(found.get("schema", "")).startswith(_ANY_VERSION)
