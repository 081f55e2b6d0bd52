"""A file that was taken for another is named as what it is, with the command that takes it."""

import pickle
from pathlib import Path

import pytest
from support.build import small_run, write
from support.command_line import ampmem_here


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "command",
    [
        ["show", "FILE"],
        ["show", "--json", "FILE"],
        ["show", "--what-if", "expandable_segments", "FILE"],
        ["report", "FILE"],
        ["export", "FILE", "--format", "csv", "-o", "x"],
        ["compare", "FILE"],
        ["profile", "FILE"],
    ],
    ids=" ".join,
)
def test_a_snapshot_is_to_be_imported(tmp_path: Path, command: list[str], protocol: int) -> None:
    (tmp_path / "a snap.pickle").write_bytes(pickle.dumps({"segments": []}, protocol))
    code, stdout, said = ampmem_here(tmp_path, *(word.replace("FILE", "a snap.pickle") for word in command))
    assert code in (1, 2) and stdout == ""
    (line,) = said.splitlines()
    assert line.startswith("ampmem: a snap.pickle is a pickle")
    assert line.endswith(": ampmem import 'a snap.pickle' -o 'a snap.ampmem'")
    assert [path.name for path in tmp_path.iterdir()] == ["a snap.pickle"]


@pytest.mark.parametrize("command", ["profile", "compare"])
def test_a_recording_is_no_script(tmp_path: Path, command: str) -> None:
    write(tmp_path / "run.ampmem", small_run().recording())
    code, _, said = ampmem_here(tmp_path, command, "run.ampmem")
    assert (code, said) == (
        2,
        "ampmem: run.ampmem is a recording, not a script; show it with: ampmem show run.ampmem\n",
    )
