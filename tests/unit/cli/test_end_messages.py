"""What is said once a script has ended."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from ampmem.cli.processes.end_messages import _RATIOS, _cheaper, left_by_failure
from ampmem.vocabulary import SourceKind


@pytest.mark.parametrize("unfinished", [None, object()])
def test_a_command_with_a_path_can_be_copied(unfinished: object, tmp_path: Path) -> None:
    path = tmp_path / "my run.rank1-of-2.ampmem"
    path.touch()
    outcome = SimpleNamespace(unfinished=unfinished, recorded=1, failure=None, interrupted=False)
    session = cast(Any, SimpleNamespace(outcome=outcome, options=SimpleNamespace(path=path)))
    said = left_by_failure(session, path, cast(Any, SimpleNamespace(caught=0)))
    assert said.endswith(f"(ampmem show '{path}')")


@pytest.mark.parametrize(
    ("events", "source", "missing", "said"),
    [
        (6000, SourceKind.CPU, True, "2.2 to 8.8"),
        (6000, SourceKind.CUDA, True, "5.4 to 9.0"),
        (5999, SourceKind.CPU, True, ""),
        (6000, SourceKind.CPU, False, ""),
        (6000, SourceKind.SIMULATED, True, ""),
    ],
)
def test_many_events_without_the_extension_name_it(
    events: int, source: SourceKind, missing: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampmem.recorder.sources.extension.is_missing", lambda: missing)
    summary = SimpleNamespace(source=source, steps=(1, 2), conservation=SimpleNamespace(events=events))
    text = _cheaper(cast(Any, summary))
    assert said in text and bool(text) == bool(said)
    measured = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    assert not said or all(ratio in measured for ratio in _RATIOS[source])
