"""The sparse tensors of a graph network: the indices and the values are memory like any other."""

from pathlib import Path

from support import field


def test_sparse_inputs_and_buffers_are_what_they_consist_of(tmp_path: Path) -> None:
    ran = field.record(tmp_path, "graph")
    for mark in ran.last.values():
        assert mark["inputs"] == ran.counted["inputs"]
        assert mark["buffers"] == ran.counted["buffers"]
        assert mark["other"] == 0
