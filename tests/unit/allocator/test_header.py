"""How the caching allocator was set and used: in the file, the JSON, and the header of tables and page."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.build import small_run, write

from ampmem.allocator.settings import MIB
from ampmem.analysis.summary import summarize, summary_schema
from ampmem.events import AllocatorRecord, LayersRecord
from ampmem.recording import read
from ampmem.reporters.html.run import said_of
from ampmem.reporters.text.run import describe_allocator, describe_devices
from ampmem.reporters.text.table import render

PLAIN = AllocatorRecord(
    variable="", settings="", expandable_segments=False, streams=1, private_pools=0, device=0, peaks=(MIB,)
)
BUSY = AllocatorRecord(
    variable="PYTORCH_ALLOC_CONF",
    settings="expandable_segments:True",
    expandable_segments=True,
    streams=3,
    private_pools=1,
    device=1,
    peaks=(MIB, 3 * MIB, 0),
)


@pytest.mark.parametrize(
    ("allocator", "words", "devices"),
    [
        (PLAIN, "default settings, allocated on 1 stream", ""),
        (replace(PLAIN, peaks=()), "default settings, allocated on 1 stream", ""),
        (replace(PLAIN, peaks=(), device=2), "default settings, allocated on 1 stream", "2 (recorded)"),
        (
            BUSY,
            "PYTORCH_ALLOC_CONF=expandable_segments:True, allocated on 3 streams, 1 private pool",
            "0 peak 1.0 MiB; 1 (recorded) peak 3.0 MiB",
        ),
        (replace(PLAIN, settings="max_split_size:64"), "max_split_size:64, allocated on 1 stream", ""),
        (replace(PLAIN, expandable_segments=True), "default settings, expandable segments, allocated on 1 stream", ""),
    ],
)
def test_it_is_told_in_words(allocator: AllocatorRecord, words: str, devices: str) -> None:
    assert describe_allocator(allocator) == words
    assert describe_devices(allocator) == devices


def test_it_survives_the_file_and_shows_in_every_header(tmp_path: Path) -> None:
    recording = read(write(tmp_path / "run.ampmem", replace(small_run().recording(), allocator=BUSY)))
    assert recording.allocator == BUSY
    summary = summarize(recording)
    found = json.loads(summary.to_json())
    jsonschema.validate(found, summary_schema())
    assert found["caching_allocator"]["peaks"] == [MIB, 3 * MIB, 0]
    header = render(summary, ()).splitlines()
    assert f"allocator   {describe_allocator(BUSY)}" in header
    assert f"devices     {describe_devices(BUSY)}" in header
    assert f"allocator: {describe_allocator(BUSY)}" in said_of(summary, ()).facts


def test_a_run_without_one_has_no_such_rows() -> None:
    summary = summarize(small_run().recording())
    assert json.loads(summary.to_json())["caching_allocator"] is None
    assert "\nallocator " not in render(summary, ())


def test_what_is_outside_is_split_where_the_driver_tells() -> None:
    recording = small_run().recording()
    step = max(recording.steps, key=lambda each: each.index).index
    layers = LayersRecord(
        step=step,
        mark="after_optimizer",
        requested=1,
        allocated=1,
        active=1,
        reserved=20 * MIB,
        device_used=320 * MIB,
        process_used=120 * MIB,
    )
    steps = range(step + 1)
    summary = summarize(replace(recording, layers=tuple(replace(layers, step=each) for each in steps)))
    assert (summary.allocator.outside, summary.allocator.outside_process) == (300 * MIB, 100 * MIB)
    silent = tuple(replace(layers, step=each, process_used=None) for each in steps)
    assert summarize(replace(recording, layers=silent)).allocator.outside_process is None
