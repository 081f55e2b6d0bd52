"""A summary's JSON, read back: the same again, or one line that says what is wrong with it."""

import json
from typing import Any

import pytest
from support.build import gpu_run, small_run

from ampmem.analysis.jsonable import NotOfThisKind, from_json, parsed
from ampmem.analysis.summary import Summary, summarize
from ampmem.events import Recording

RUNS = {"small": small_run().recording(), "gpu": gpu_run().recording()}


@pytest.mark.parametrize("recording", RUNS.values(), ids=list(RUNS))
def test_what_was_written_is_read(recording: Recording) -> None:
    text = summarize(recording).to_json()
    assert from_json(Summary, parsed(text)).to_json() == text


def test_what_json_does_not_have_is_what_it_is_by_default() -> None:
    summary = from_json(Summary, parsed(summarize(RUNS["small"]).to_json()))
    assert summary.parameters.exact is True and summary.parameters.known_count == 150


def changed(path: str, value: Any) -> dict[str, Any]:
    """The JSON of a small run with ``value`` at ``path``; ``...`` takes it away."""
    document = json.loads(summarize(RUNS["small"]).to_json())
    *above, last = path.split(".")
    place: Any = document
    for key in above:
        place = place[int(key) if key.isdigit() else key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("schema", "ampmem.fit/1", "schema is not one of ampmem.summary/1"),
        ("peak", ..., "peak is missing"),
        ("peak.bytes", "many", "peak.bytes is not a whole number"),
        ("peak.bytes", -1, "peak.bytes is not a whole number, 0 or more"),
        ("world_size", 0, "world_size is not at least 1"),
        ("steps", [], "steps is not at least 1"),
        ("peak.bytes", True, "peak.bytes is not a whole number"),
        ("peak.categories.activations", None, "peak.categories.activations is not a whole number"),
        ("peak.categories.nonsense", 1, "peak.categories is not one of parameters, "),
        ("peak.categories.inputs", ..., "peak.categories is not an object with parameters, "),
        ("steps", {}, "steps is not an array"),
        ("steps.0.marks", [], "steps[0].marks is not an object"),
        ("arm.scaler", 0, "arm.scaler is not true or false"),
        ("arm.name", "half", "arm.name is not one of as-is, "),
    ],
)
def test_what_is_wrong_is_said_with_its_place(path: str, value: Any, said: str) -> None:
    with pytest.raises(NotOfThisKind) as error:
        from_json(Summary, changed(path, value))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_said(text: str) -> None:
    with pytest.raises(NotOfThisKind, match=r"^it is not JSON: "):
        parsed(text)


def test_what_a_later_version_has_beside_is_passed_over() -> None:
    assert from_json(Summary, changed("news", [1])).to_json() == summarize(RUNS["small"]).to_json()
