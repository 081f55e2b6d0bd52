import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.build import AMP, RUN, as_batches, small_run, write
from support.hostile.handmade import make
from support.hostile.seeds import on_cpu
from support.ready_python import ready_python

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    Action,
    Columns,
    EventColumns,
    Fact,
    FactColumns,
    MeshAxis,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    PrecisionRecord,
    Recording,
    RunRecord,
    SegmentAction,
    SegmentColumns,
    StepRecord,
)
from ampmem.failure import FailureKind, FailureRecord
from ampmem.names import NOT_ENDED, STILL_WRITTEN, shape_text
from ampmem.recording import Description, RecordingWriter, is_recording, read
from ampmem.recording.bounds import IMPLEMENTATIONS, integers_of
from ampmem.vocabulary import Precision, SourceKind

EVENT_VIEW = [
    *("id", "time_ns", "step", "phase", "action", "address"),
    *("bytes", "block_bytes", "stream", "op", "stack"),
]
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)
FLOAT = st.none() | st.floats(allow_nan=False)


def within(name: str) -> st.SearchStrategy[int]:
    """What a column or a field of that name may hold; of sizes as much as can be added up."""
    low, high = integers_of(name)
    return st.integers(low, high // 5 if name.endswith("bytes") else high)


def members(kind: type[Action | Phase | Fact | SegmentAction]) -> st.SearchStrategy[int]:
    return st.sampled_from([int(member) for member in kind])


@st.composite
def columns(draw: st.DrawFn, kind: type[Columns], texts: int, events: int = 0) -> Columns:
    actions = members(SegmentAction if kind is SegmentColumns else Action)
    strategies: dict[str, st.SearchStrategy[int]] = {"phase": members(Phase), "action": actions, "fact": members(Fact)}
    strategies |= {"position": st.integers(0, events)}
    strategies |= dict.fromkeys(("op", "module", "stack", "name", "dtype"), st.integers(0, texts - 1))
    strategies |= {"shape": st.sampled_from((0, texts, texts + 1))}  # see recordings()
    cells = st.tuples(*(strategies[name] if name in strategies else within(name) for name in kind.names()))
    rows = draw(st.lists(cells, max_size=5))
    by_name = list(zip(*rows, strict=True)) if rows else [()] * len(kind.names())
    arrays = (np.array(column, dtype=np.int64) for column in by_name)
    return kind(**dict(zip(kind.names(), arrays, strict=True)))


STEPS = st.builds(
    StepRecord,
    **{name: within(name) for name in ("index", "start_ns", "end_ns")},
    **dict.fromkeys(("skipped_update", "autocast_in_backward", "finished"), st.booleans()),
    **dict.fromkeys(("loss", "loss_scale"), FLOAT),
    batch_size=st.none() | within("batch_size"),
)
PARAMETERS = st.builds(
    ParameterRecord,
    **dict.fromkeys(("name", "dtype", "kind"), TEXT),
    elements=within("elements"),
    bytes=within("bytes"),
    trainable=st.booleans(),
    shape=st.lists(within("shape"), max_size=3).map(tuple),
    shares=st.none() | TEXT,
)
OPTIMIZERS = st.builds(
    OptimizerRecord,
    class_name=TEXT,
    implementation=st.sampled_from(IMPLEMENTATIONS),
    bases=st.lists(TEXT, max_size=2).map(tuple),
    settings=st.dictionaries(TEXT, FLOAT | st.booleans() | INT64 | TEXT, max_size=3),
)
RUNS = st.builds(
    RunRecord,
    **dict.fromkeys(("ampmem", "torch", "python", "device_type", "device_name", "script"), TEXT),
    source=st.sampled_from(SourceKind),
    rank=st.integers(0, 9),
    world_size=st.integers(10, 19),
    local_rank=st.none() | within("local_rank"),
    job=TEXT,
    arguments=st.lists(TEXT, max_size=3).map(tuple),
    failure=st.none() | st.builds(FailureRecord, kind=st.sampled_from(FailureKind), message=TEXT, error=TEXT),
)
AXES = st.builds(MeshAxis, name=TEXT, size=st.integers(10, 19), coordinate=st.integers(0, 9))
PRECISIONS = st.builds(
    PrecisionRecord,
    name=st.sampled_from(Precision),
    dtype=st.none() | TEXT,
    cache=st.none() | st.booleans(),
    **dict.fromkeys(("scaler", "forced", "wrapped"), st.booleans()),
)


def in_order(steps: list[StepRecord]) -> list[StepRecord]:
    return sorted(steps, key=lambda step: step.index)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    texts = ("", *draw(st.lists(TEXT, max_size=4)))
    events: EventColumns = draw(columns(EventColumns, len(texts)))  # type: ignore[assignment]
    shapes = draw(st.lists(st.lists(within("shape"), max_size=3).map(shape_text), min_size=2, max_size=2))
    return Recording(
        run=draw(RUNS),
        precision=draw(PRECISIONS),
        texts=(*texts, *shapes),
        events=events,
        facts=draw(columns(FactColumns, len(texts))),  # type: ignore[arg-type]
        phases=draw(columns(PhaseColumns, len(texts))),  # type: ignore[arg-type]
        segments=draw(columns(SegmentColumns, len(texts), len(events))),  # type: ignore[arg-type]
        steps=tuple(draw(st.lists(STEPS, max_size=3, unique_by=lambda step: step.index).map(in_order))),
        parameters=tuple(draw(st.lists(PARAMETERS, max_size=3))),
        optimizers=tuple(draw(st.lists(OPTIMIZERS, max_size=2))),
        notes=tuple(draw(st.lists(TEXT, max_size=2))),
        plain_step_ns=tuple(draw(st.lists(within("plain_step_ns"), max_size=3))),
        mesh=tuple(draw(st.lists(AXES, max_size=3))),
        ended=True,  # as every writer that is closed says
        stages=(stages := tuple(draw(st.lists(st.integers(0, 7), max_size=2)))),
        stage_count=8 if stages else 0,
    )


def assert_same(left: Recording, right: Recording) -> None:
    for field in fields(Recording):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, Columns):
            for name in one.names():
                assert getattr(one, name).dtype == np.int64
                assert getattr(one, name).tolist() == getattr(other, name).tolist(), (field.name, name)
        else:
            assert one == other, field.name


@settings(max_examples=40)
@given(recordings())
def test_what_is_written_is_read(recording: Recording) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_same(read(write(Path(folder) / "run.ampmem", recording)), recording)


def test_a_missing_column_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP VIEW storage_fact")
        database.execute("ALTER TABLE fact DROP COLUMN dtype")
    with pytest.raises(RecordingError, match="the table fact has no dtype"):
        read(path)


@pytest.mark.parametrize(
    "shape", ["[2, 3", "[-1]", "[2,3]", "8x128", "[4611686018427387905]", f"[{', '.join('1' * 65)}]"]
)
def test_a_shape_that_is_none_is_refused(shape: str, tmp_path: Path) -> None:
    story = small_run()
    story.fact(Fact.SAVED, 0x1000, dtype="float32", shape=shape)
    path = write(tmp_path / "run.ampmem", story.recording())
    with pytest.raises(RecordingError, match="invalid tensor shape"):
        read(path)


@pytest.mark.parametrize(
    ("recording", "said"),
    [
        (replace(small_run().recording(), run=replace(RUN, rank=2, world_size=2)), "rank is not in the job"),
        (
            replace(small_run().recording(), mesh=(MeshAxis(name="dp", size=2, coordinate=2),)),
            "place is not in its device mesh",
        ),
        (replace(small_run().recording(), stages=(0, 2), stage_count=2), "stage is not in the pipeline"),
    ],
)
def test_a_place_that_there_is_not_is_refused(recording: Recording, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", recording)
    with pytest.raises(RecordingError, match=said):
        read(path)


def test_what_is_known_of_no_place_is_not_in_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    with closing(sqlite3.connect(path)) as database:
        header = dict(database.execute("SELECT key, value FROM meta"))
    assert "mesh" not in header
    assert not json.loads(header["run"]).keys() & {"local_rank", "job"}


def test_describing_again_replaces(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    recording = small_run().recording()
    with closing(RecordingWriter(path, RUN)) as writer:
        for notes in (("first",), ("second", "third")):
            writer.describe(
                Description(
                    precision=AMP, parameters=recording.parameters, optimizers=recording.optimizers, notes=notes
                )
            )
    again = read(path)
    assert again.notes == ("second", "third")
    assert again.parameters == recording.parameters
    assert again.optimizers == recording.optimizers


def test_what_is_no_number_is_not_taken_for_unknown(tmp_path: Path) -> None:
    story = small_run()
    for step, number in ((2, math.nan), (3, math.inf), (4, None)):
        story.begin(step)
        story.end(loss=number, scale=number)
    steps = read(write(tmp_path / "run.ampmem", story.recording())).steps[2:]
    found = [(str(step.loss), str(step.loss_scale)) for step in steps]
    assert found == [("nan", "nan"), ("inf", "inf"), ("None", "None")]


def test_the_event_view_has_words_in_order(tmp_path: Path) -> None:
    recording = small_run().recording()
    path = write(tmp_path / "run.ampmem", recording)
    with closing(sqlite3.connect(path)) as database:
        cursor = database.execute("SELECT * FROM allocator_event")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
    assert names == EVENT_VIEW
    assert [row[0] for row in rows] == list(range(1, len(recording.events) + 1))
    assert [row[1] for row in rows] == recording.events.time_ns.tolist()
    assert [row[2] for row in rows] == [None if step == -1 else step for step in recording.events.step.tolist()]
    assert [row[3] for row in rows] == [Phase(phase).name.lower() for phase in recording.events.phase]
    assert [row[4] for row in rows] == [Action(action).name.lower() for action in recording.events.action]
    assert rows[0][9:] == (None, None)
    assert ("aten::_to_copy", "train.py:9 main\nnet.py:3 forward") in [row[9:] for row in rows]


def test_the_fact_view_has_words_in_order(tmp_path: Path) -> None:
    recording = small_run().recording()
    path = write(tmp_path / "run.ampmem", recording)
    with closing(sqlite3.connect(path)) as database:
        cursor = database.execute("SELECT * FROM storage_fact")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
    assert names == ["time_ns", "address", "fact", "name", "module", "dtype", "shape"]
    texts, facts = recording.texts, recording.facts
    assert rows == [
        (when, address, Fact(fact).name.lower(), *(texts[text] or None for text in words))
        for when, address, fact, *words in zip(
            *(getattr(facts, column).tolist() for column in facts.names()), strict=True
        )
    ]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(RecordingError, match=r"format 99.*version of ampmem that wrote it"):
        read(path)


def _other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (a)")


def _without_events(path: Path) -> None:
    write(path, small_run().recording())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE event")


def _change(path: Path, statement: str) -> None:
    write(path, small_run().recording())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"PK\x03\x04 something else" * 100),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("{}"),
        _other_database,
        _without_events,
        lambda path: _change(path, "UPDATE meta SET value = '{' WHERE key = 'run'"),
        lambda path: _change(path, "DELETE FROM meta WHERE key = 'run'"),
        lambda path: _change(path, "UPDATE event SET bytes = 'many' WHERE rowid = 1"),
        lambda path: _change(path, "UPDATE event SET action = 7 WHERE rowid = 1"),
        lambda path: _change(path, "UPDATE phase SET phase = 0 WHERE rowid = 1"),
        lambda path: _change(path, "UPDATE fact SET name = 123456 WHERE rowid = 1"),
        lambda path: _change(path, "UPDATE event SET stack = -1 WHERE rowid = 1"),
        lambda path: _change(path, "UPDATE fact SET fact = 400 WHERE rowid = 1"),
        lambda path: _change(path, "INSERT INTO segment VALUES (1, 0, 4, 4096, 512, 0, 0, 0)"),
        lambda path: _change(path, "INSERT INTO segment VALUES (1, 999, 2, 4096, 512, 0, 0, 0)"),
        lambda path: _change(path, "DROP TABLE segment"),
    ],
)
def test_what_is_no_recording_is_one_clear_error(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "run.ampmem"
    spoil(path)  # type: ignore[operator]
    with pytest.raises(RecordingError, match="is not an ampmem recording"):
        read(path)


def test_a_truncated_recording_is_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match="damaged"):
        read(path)


def test_a_missing_file_and_a_directory_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "none.ampmem")
    assert not (tmp_path / "none.ampmem").exists()
    with pytest.raises(UsageError, match="is a directory"):
        read(tmp_path)


def test_an_existing_file_is_replaced_only_when_forced(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--force"):
        RecordingWriter(path, RUN)
    assert path.read_bytes() == before
    RecordingWriter(path, replace(RUN, script="other.py"), force=True).close()
    assert read(path).run.script == "other.py"


def test_a_withdrawn_file_is_there_again_from_the_first_step_on(tmp_path: Path) -> None:
    path, recording = tmp_path / "run.ampmem", small_run().recording()
    writer = RecordingWriter(path, RUN)
    writer.withdraw()
    assert list(tmp_path.iterdir()) == []
    for batch in as_batches(recording, 2):
        writer.append(batch)
    writer.withdraw()  # which is too late
    writer.close()
    assert read(path).steps == recording.steps
    writer.discard()
    assert not path.exists()


def test_a_withdrawn_file_takes_nobodys_name(tmp_path: Path) -> None:
    path, recording = tmp_path / "run.ampmem", small_run().recording()
    writer = RecordingWriter(path, RUN, force=True)
    writer.withdraw()
    path.write_text("another's")
    writer.append(replace(as_batches(recording)[0], step=None, ooms=()))  # the end, without a step
    with pytest.raises(RecordingError, match="exists already"):
        writer.append(as_batches(recording)[0])
    writer.close()
    writer.discard()
    assert path.read_text() == "another's"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.build import RUN, as_batches, small_run
from ampmem.names import NOT_ENDED, STILL_WRITTEN
from ampmem.recording import RecordingWriter

first, second = as_batches(small_run().recording(), 2)
writer = RecordingWriter(Path({path!r}), RUN)
writer.append(first)
if {inside}:
    # In the middle of a transaction, with pages already spilled to the file.
    writer._database.execute("PRAGMA cache_size = 1")
    writer._database.execute("BEGIN")
    for _ in range(2000):
        writer._insert_columns("event", second.events)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("inside", [False, True])
def test_a_killed_run_keeps_the_steps_that_had_ended(tmp_path: Path, inside: bool) -> None:
    path = tmp_path / "run.ampmem"
    code = KILLED.format(tests=str(Path(__file__).parents[1]), path=str(path), inside=inside)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("run.ampmem-journal").exists() == inside
    first = as_batches(small_run().recording(), 2)[0]
    recording = read(path)
    assert recording.steps == (first.step,)
    assert recording.ended is False and NOT_ENDED in recording.notes
    assert recording.events.time_ns.tolist() == first.events.time_ns.tolist()
    assert len(recording.facts) == len(first.facts)


KILLED_AT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.build import RUN, as_batches, described, small_run
from ampmem.names import NOT_ENDED, STILL_WRITTEN
from ampmem.recording import RecordingWriter

recording = small_run().recording()
writer = RecordingWriter(Path({path!r}), RUN)
writer._database.execute("PRAGMA cache_size = 1")  # so that a transaction is in the file before it ends
left = {steps}

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

writer._database.set_progress_handler(count, 1)
for batch in as_batches(recording, 2):
    writer.append(batch, described(recording))
print(left)
"""


def test_wherever_a_run_is_killed_a_step_is_there_with_its_parameters_or_not_at_all(tmp_path: Path) -> None:
    tests, whole = str(Path(__file__).parents[1]), small_run().recording()
    path, enough = tmp_path / "run.ampmem", 10**9

    def run(steps: int) -> subprocess.CompletedProcess[str]:
        path.unlink(missing_ok=True)
        command = [ready_python(), "-c", KILLED_AT.format(tests=tests, path=str(path), steps=steps)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    total = enough - int(run(enough).stdout)
    found: set[int | str] = set()
    for steps in range(1, total, total // 24):
        assert run(steps).returncode == -signal.SIGKILL
        copied = shutil.copy(path, tmp_path / "copy.ampmem")
        recording = read(path)
        found.add(len(recording.steps))
        assert recording.parameters == (whole.parameters if recording.steps else ())
        found.add(_without_journal(copied, recording))
    assert found == {0, 1, "whole", "refused"}


def _without_journal(copied: Path, recording: Recording) -> str:
    """What comes of a copy that was made without its journal: what was there before the transaction, or one line."""
    try:
        again = read(copied)
    except RecordingError as error:
        assert "copy both" in str(error)
        return "refused"
    assert (again.steps, again.texts, again.parameters) == (recording.steps, recording.texts, recording.parameters)
    assert again.events.time_ns.tolist() == recording.events.time_ns.tolist()
    return "whole"


def test_after_a_write_that_failed_nothing_more_is_written(tmp_path: Path) -> None:
    path, story = tmp_path / "run.ampmem", small_run().recording()
    first, second = as_batches(story, 2)
    with closing(RecordingWriter(path, RUN)) as writer:
        writer.append(first)

        def interrupted() -> Iterator[str]:
            yield "half"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            writer.append(replace(second, texts=interrupted()))  # type: ignore[arg-type]
        with pytest.raises(RecordingError, match="an earlier write to it failed"):
            writer.append(second)
    assert read(path).steps == (first.step,)
    assert read(path).texts == ("", *first.texts)


def test_a_recording_that_is_being_written_is_refused_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    first, _ = as_batches(small_run().recording(), 2)
    with closing(RecordingWriter(path, RUN)) as writer:
        with pytest.raises(UsageError, match="another ampmem is writing it"):
            RecordingWriter(path, replace(RUN, script="other.py"), force=True)
        writer.append(first)
        assert read(path).steps == (first.step,)
    RecordingWriter(path, replace(RUN, script="other.py"), force=True).close()
    assert read(path).run.script == "other.py"


def test_rows_that_are_missing_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM fact WHERE rowid = 3")
    with pytest.raises(RecordingError, match=r"damaged.*-journal"):
        read(path)


def test_a_recording_says_whether_it_was_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    assert read(path).ended is True and NOT_ENDED not in read(path).notes
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM meta WHERE key = 'ended'")
    assert read(path).ended is None and NOT_ENDED not in read(path).notes


def test_a_recording_that_is_still_written_is_not_called_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    with closing(RecordingWriter(path, RUN)) as writer:
        writer.append(as_batches(small_run().recording())[0])
        assert read(path).ended is None and STILL_WRITTEN in read(path).notes


def test_whether_a_file_is_a_recording_is_found_out_in_time(tmp_path: Path) -> None:
    path = make("a view without an end for the header", write(tmp_path / "whole.ampmem", on_cpu()), tmp_path / "view")
    assert not is_recording(path)
    assert is_recording(tmp_path / "whole.ampmem")
