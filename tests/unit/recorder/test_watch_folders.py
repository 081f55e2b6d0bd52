"""The temporary folders of watched runs: those of killed processes are removed, and no others."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ampmem.output import lock_file
from ampmem.recorder.watch.watcher import _locked_folder


def test_a_watch_removes_what_a_killed_one_has_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, running, other = (tmp_path / name for name in ("ampmem-watch-left", "ampmem-watch-running", "ampmem-other"))
    for folder in (left, running, other):
        folder.mkdir()
        (folder / "full.ampmem").touch()
    (tmp_path / "ampmem-watch-link").symlink_to(other)
    lock = os.open(running, os.O_DIRECTORY)
    lock_file(lock)
    with ExitStack() as undo:
        own = Path(_locked_folder(undo))
        with ExitStack() as second:
            assert _locked_folder(second) != str(own)
        assert own.is_dir()
        assert not left.exists()
    os.close(lock)
    assert not own.exists()
    assert [(folder / "full.ampmem").exists() for folder in (running, other)] == [True, True]
