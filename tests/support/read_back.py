"""What loggers have stored, read with their own packages."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ampmem.analysis.summary import Summary, summarize
from ampmem.api import load

Values = dict[str, dict[int, float]]
"""Of each name the value at each step."""


def recorded(file: str | Path) -> Summary:
    return summarize(load(file))


def tensorboard(folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}


def mlflow() -> tuple[Values, list[str]]:
    """The values of the one run that there is, and its files."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    values = {
        name: {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    return values, [file.path for file in client.list_artifacts(run.info.run_id)]


def wandb(folder: Path, step: str) -> tuple[Values, list[str]]:
    """The values of the one offline run in ``folder``, by the value ``step`` of their rows, and its files."""
    (run,) = folder.glob("wandb/offline-run-*")
    values: Values = {}
    for row in _history(run):
        if step in row:
            for name, value in row.items():
                values.setdefault(name, {})[int(row[step])] = value
    return values, [file.name for file in (run / "files").iterdir()]


def wandb_later(folder: str, step: str, name: str, values: Mapping[int, float]) -> None:
    """What is to hold of the offline run in ``folder`` once this process has ended: it is written whole only then."""
    expected = {"folder": folder, "step": step, "name": name, "values": list(values.items())}
    Path("wandb.json").write_text(json.dumps(expected), encoding="utf-8")


def check_wandb(place: Path) -> None:
    expected = json.loads((place / "wandb.json").read_text(encoding="utf-8"))
    values, files = wandb(place / expected["folder"], expected["step"])
    assert list(values[expected["name"]].items()) == [tuple(pair) for pair in expected["values"]]
    assert [file for file in files if file.startswith("memory-step")]


def _history(run: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("*.wandb")
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


_BLOCK, _HEADER, _ENDS = 32768, 7, (1, 4)


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB writes it: blocks of parts, each a checksum, its size and which part it is."""
    record, place = b"", _HEADER  # the file begins with what it is
    while place + _HEADER <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER:  # no part begins so near the end of a block
            place += _BLOCK - place % _BLOCK
            continue
        _, size, part = struct.unpack_from("<IHB", data, place)
        record += data[place + _HEADER : place + _HEADER + size]
        place += _HEADER + size
        if part in _ENDS:
            yield record
            record = b""
