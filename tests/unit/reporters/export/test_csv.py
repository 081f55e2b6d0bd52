"""The table of allocations: what Python's csv reads of it, and what pandas does without any option."""

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.build import Story, gpu_run, later, small_run
from support.hostile.seeds import on_cpu, on_gpu

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.events import Action, Fact, Phase, Recording
from ampmem.reporters.export.csv import HEADER, LONGEST_STACK, write_csv

WHOLE = ("born_ns", "died_ns", "bytes", "block_bytes", "step", "address")
ODD = (
    *("nan", "NaN", "NA", "N/A", "null", "NULL", "None", "<NA>", "#N/A", "n/a", "-nan", "1.#IND", "-1.#QNAN", "inf"),
    *("True", "false", "0", "7", "1e5", " 12 ", ".5", "?", "'", "'quoted", "''", "-", "=1+1", "+1", "@x", "Infinity"),
    *('a,b "c"', "first\nsecond", "\n=1+1", '"', ",", ";", "#", " ", " lead", "é日本😀", "blocks.0.weight"),
)


def rows_of(tmp_path: Path, recording: Recording) -> list[dict[str, str]]:
    write_csv(analyse(recording), tmp_path / "table.csv", force=True)
    with (tmp_path / "table.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def text_in(cell: str) -> str:
    """The text that a cell stands for."""
    return "" if cell == "?" else cell.removeprefix("'")


def odd_run(texts: Sequence[str]) -> Recording:
    """Each text as a name, an op, a module and a stack's frame, each in an allocation of its own."""
    story = Story(begins=Phase.FORWARD)
    for number, text in enumerate(texts):
        address = 0x1000 + 0x100 * number
        story.alloc(address, 8, op=text, module=text, stack=f"a folder/{text}.py:{number + 1} main")
        story.fact(Fact.PARAMETER, address, text)
    story.end(Phase.BACKWARD)
    return story.recording()


def test_a_table_has_a_row_for_each_allocation(tmp_path: Path) -> None:
    recording = small_run().recording()
    rows = rows_of(tmp_path, recording)
    subject = analyse(recording)
    assert tuple(rows[0]) == HEADER
    births = recording.events.action != Action.FREE
    assert [int(row["bytes"]) for row in rows] == recording.events.bytes[births].tolist()
    assert [int(row["address"]) for row in rows] == recording.events.address[births].tolist()
    for category in CATEGORIES:
        total = sum(int(row["bytes"]) for row in rows if row["category"] == category)
        assert total == int(subject.lifetimes.bytes[subject.classes.of(category)].sum())
    cast = next(row for row in rows if row["category"] == "cast_copies")
    assert (cast["name"], cast["module"], cast["op"]) == ("layers.0.weight", "layers.0", "aten::_to_copy")
    assert (cast["step"], cast["phase"]) == ("0", "forward")
    assert (cast["line"], cast["stack"]) == ("net.py:3", "train.py:9 main\nnet.py:3 forward")
    first = {name: rows[0][name] for name in ("step", "phase", "died_ns", "name", "module", "op", "line", "stack")}
    unknown = dict.fromkeys(("name", "module", "op", "line", "stack"), "?")
    assert first == {"step": "-1", "phase": "setup", "died_ns": "-1", **unknown}


def test_the_table_has_types_and_shapes(tmp_path: Path) -> None:
    story = small_run()
    story.tensor(Fact.OUTPUT, 0x70000, 8, dtype="float32", shape="[1, 2]")
    first, *_, last = rows_of(tmp_path, story.recording())
    assert (first["dtype"], first["shape"], last["dtype"], last["shape"]) == ("?", "?", "float32", "[1, 2]")


def test_times_count_from_the_start_of_the_recording(tmp_path: Path) -> None:
    recording = small_run().recording()
    early = rows_of(tmp_path, recording)
    assert early[0]["born_ns"] == "0"
    events = recording.events
    born = events.time_ns[events.action != Action.FREE] - events.time_ns[0]
    assert [int(row["born_ns"]) for row in early] == born.tolist()
    freed = sorted(int(row["died_ns"]) for row in early if row["died_ns"] != "-1")
    assert freed == (events.time_ns[events.action == Action.FREE] - events.time_ns[0]).tolist()
    assert rows_of(tmp_path, later(recording, 1_700_000_000_000_000_001)) == early


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_of_the_table_is_a_formula(tmp_path: Path, start: str) -> None:
    story = small_run()
    story.alloc(0x70000, 8, op=f"{start}1+1", module=f"{start}cmd|' /C calc'!A0")
    story.fact(Fact.HELD, 0x70000, f"{start}HYPERLINK(0)")
    *_, row = rows_of(tmp_path, story.recording())
    shown = repr(start)[1:-1] if start in "\t\r" else f"'{start}"
    assert row["op"] == f"{shown}1+1"
    assert (row["name"], row["module"]) == (f"{shown}HYPERLINK(0)", f"{shown}cmd|' /C calc'!A0")


def test_a_cell_without_its_apostrophe_is_the_text(tmp_path: Path) -> None:
    for row, text in zip(rows_of(tmp_path, odd_run(ODD)), ODD, strict=True):
        assert [text_in(row[name]) for name in ("name", "op", "module")] == [text] * 3


def test_the_line_is_the_innermost_of_the_users_own(tmp_path: Path) -> None:
    story = Story()
    frames = ("/home/me/my runs/train.py:9 main", "/venv/site-packages/lib/x.py:3 run", "/venv/torch/nn/f.py:1 f")
    story.alloc(0x1000, 8, stack="\n".join(frames))
    story.alloc(0x2000, 8, stack="no frame")
    first, second = rows_of(tmp_path, story.recording())
    assert (first["line"], first["stack"]) == ("/home/me/my runs/train.py:9", "\n".join(frames))
    assert second["stack"] == "no frame"


def test_of_an_endless_stack_the_innermost_frames_are_there(tmp_path: Path) -> None:
    story = Story()
    frames = [f"train.py:{number} main" for number in range(10_000)]
    story.alloc(0x1000, 8, stack="\n".join(frames))
    (row,) = rows_of(tmp_path, story.recording())
    kept = row["stack"].split("\n")
    assert kept == frames[-len(kept) :]
    assert LONGEST_STACK - 20 < len(row["stack"]) <= LONGEST_STACK
    assert row["line"] == "train.py:9999"


# pandas


def in_pandas(tmp_path: Path, subject: Analysis) -> Any:
    """The table as ``pandas.read_csv`` has it, which has nothing to remark about it."""
    pandas = pytest.importorskip("pandas")
    write_csv(subject, tmp_path / "pandas.csv", force=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pandas.read_csv(tmp_path / "pandas.csv")


@pytest.mark.parametrize("recording", [on_cpu, on_gpu, lambda: gpu_run().recording(), lambda: odd_run(ODD)])
def test_pandas_has_whole_numbers_and_texts_and_nothing_missing(tmp_path: Path, recording: Any) -> None:
    table = in_pandas(tmp_path, analyse(recording()))
    assert tuple(table.columns) == HEADER
    assert {name for name in HEADER if table[name].dtype == np.int64} == set(WHOLE)
    assert not table.isna().any().any()
    assert all(type(cell) is str for name in set(HEADER) - set(WHOLE) for cell in table[name])


@pytest.mark.parametrize("text", ODD)
def test_pandas_has_an_odd_name_though_no_other_is_there(tmp_path: Path, text: str) -> None:
    table = in_pandas(tmp_path, analyse(odd_run([text])))
    assert [text_in(table[name][0]) for name in ("name", "op", "module")] == [text] * 3


def test_no_text_is_one_that_pandas_takes_for_a_missing_value(tmp_path: Path) -> None:
    missing = sorted(pytest.importorskip("pandas._libs.parsers").STR_NA_VALUES - {""})
    table = in_pandas(tmp_path, analyse(odd_run(missing)))
    assert [text_in(cell) for cell in table.name] == missing


def test_pandas_comes_to_the_bytes_of_the_events(tmp_path: Path) -> None:
    """Live bytes at every event: the events added up, and the rows of the table that are alive then."""
    recording = on_cpu()
    table = in_pandas(tmp_path, analyse(recording))
    events = recording.events
    signed = np.where(events.action == Action.FREE, -events.bytes, events.bytes)
    for index, when in enumerate((events.time_ns - events.time_ns[0]).tolist()):
        alive = table[(table.born_ns <= when) & ((table.died_ns == -1) | (table.died_ns > when))]
        assert alive.bytes.sum() == signed[: index + 1].sum()
    allocated = events.action == Action.ALLOC
    by_step = table[table.step >= 0].groupby("step").bytes.sum()
    for step in (0, 1):
        assert by_step[step] == events.bytes[allocated & (events.step == step)].sum()
    assert table.groupby("module").bytes.sum().sum() == events.bytes[events.action != Action.FREE].sum()


def test_pandas_has_the_categories_of_the_peak(tmp_path: Path) -> None:
    subject = analyse(on_cpu())
    table = in_pandas(tmp_path, subject)
    for position in subject.peaks:
        when = int(subject.timeline.time_ns[position - 1]) - int(subject.timeline.time_ns[0])
        alive = table[(table.born_ns <= when) & ((table.died_ns == -1) | (table.died_ns > when))]
        held = {name: size for name, size in subject.timeline.breakdown(position).items() if size}
        assert alive.groupby("category").bytes.sum().to_dict() == held


@pytest.mark.slow
def test_pandas_has_one_type_for_a_column_however_long_it_is(tmp_path: Path) -> None:
    """pandas reads a long file in parts of 256 KiB and guesses the types of each part."""
    story = Story(begins=Phase.FORWARD)
    for number in range(18_000):
        story.alloc(0x1000 + number, 8, op="" if number < 12_000 else "nan", module="" if number < 12_000 else "0")
    story.end()
    table = in_pandas(tmp_path, analyse(story.recording()))
    assert (tmp_path / "pandas.csv").stat().st_size > 2 << 18
    assert table.module.value_counts().to_dict() == {"?": 12_000, "'0": 6_000}
