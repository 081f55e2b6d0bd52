"""What every later version must read: JSON and a recording of each version, in the folders of ``tests/data``."""

from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from ampmem.analysis.advise import AdviceDocument
from ampmem.analysis.budgets.check import CheckResult
from ampmem.analysis.difference.difference import Difference
from ampmem.analysis.fine_tuning import Estimate
from ampmem.analysis.fit import FitResult
from ampmem.analysis.jsonable import Json, NotOfThisKind, from_json, parsed, plain
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.summary import Summary, summarize
from ampmem.analysis.watched import WatchedSummary
from ampmem.recording import read
from ampmem.recording.database import opened

DATA = Path(__file__).resolve().parents[1] / "data"
VERSIONS = sorted(folder for folder in DATA.iterdir() if folder.name[0].isdigit())
KINDS: dict[str, type] = {
    "ampmem.advise/1": AdviceDocument,
    "ampmem.check/1": CheckResult,
    "ampmem.diff/1": Difference,
    "ampmem.estimate/1": Estimate,
    "ampmem.fit/1": FitResult,
    "ampmem.ranks/1": Ranks,
    "ampmem.summary/1": Summary,
    "ampmem.watch/1": WatchedSummary,
}
DOCUMENTS = [path for version in VERSIONS for path in sorted(version.glob("*.json"))]


def document(path: Path) -> tuple[type, dict[str, Json]]:
    """The JSON in ``path``, and the class of its schema."""
    found = parsed(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return KINDS[str(found.get("schema", found.get("format")))], found


def missing(old: Json, new: Json, where: str = "it") -> list[str]:
    """Where ``new`` lacks something of ``old``, or has another value."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [each for key in old for each in missing(old[key], new.get(key, "missing"), f"{where}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [each for i in range(len(old)) for each in missing(old[i], new[i], f"{where}[{i}]")]
    return [] if old == new else [where]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_every_schema_has_a_document(version: Path) -> None:
    assert {document(path)[0] for path in DOCUMENTS if path.parent == version} == set(KINDS.values())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_json_is_read_with_all_that_it_says(path: Path) -> None:
    kind, found = document(path)
    assert missing(found, plain(from_json(kind, found))) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_field_added_without_a_default_is_noticed(path: Path) -> None:
    kind, found = document(path)
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "slots": True}
    with pytest.raises(NotOfThisKind, match="news is missing"):
        from_json(make_dataclass("Later", [("news", int)], bases=(kind,), **options), found)
    added = from_json(make_dataclass("Later", [("news", int, 0)], bases=(kind,), **options), found)
    assert missing(found, plain(added)) == []


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_a_recording_is_read_and_gives_the_sizes_of_its_summary(version: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    path.write_bytes((version / "run.ampmem").read_bytes())
    recording = read(path)
    assert recording.ended is True and recording.notes and len(recording.segments)
    summary, before = summarize(recording), from_json(Summary, document(version / "summary.json")[1])
    assert (summary.whole, summary.most, summary.allocator) == (before.whole, before.most, before.allocator)
    assert [step.marks for step in summary.steps] == [step.marks for step in before.steps]
    with opened(path) as database:
        for view, columns in {
            "allocator_event": "id time_ns step phase action address bytes block_bytes stream op stack",
            "storage_fact": "time_ns address fact name module dtype shape",
        }.items():
            cursor = database._connection.execute(f"SELECT * FROM {view}")
            assert [column[0] for column in cursor.description][: len(columns.split())] == columns.split()
            assert len(cursor.fetchall()) == len(recording.events if view == "allocator_event" else recording.facts)
