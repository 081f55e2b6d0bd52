"""The folder of what Inductor has compiled for simulated GPUs: private, bounded, and only in use for the run."""

import os
from pathlib import Path

import pytest

from ampmem.simulator.private.compilation import CACHE
from ampmem.simulator.torch_cuda import compiler_cache


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "the user's")


def folders(root: Path) -> list[Path]:
    """What the variable says for two GPUs; afterwards it is as before."""
    found = []
    for gpu in ("H100", "A100"):
        undo = compiler_cache.use(root, gpu)
        found.append(Path(os.environ[CACHE]))
        undo()
    assert os.environ[CACHE] == "the user's"
    return found


def test_each_gpu_has_a_folder_that_only_this_user_reads(tmp_path: Path) -> None:
    root = tmp_path / "compiled"
    first, second = folders(root)
    assert first != second
    assert first.parent == second.parent == root
    assert root.stat().st_mode & 0o777 == 0o700
    assert folders(root) == [first, second]


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    undo = compiler_cache.use(tmp_path, "H100")
    used = Path(os.environ[CACHE]).parent
    assert used != tmp_path
    assert used.is_dir()
    undo()
    assert not used.exists()


def test_the_oldest_files_go_while_nobody_else_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_cache, "LIMIT", 25)
    root = tmp_path / "compiled"
    (root / "key").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    paths = [root / "key" / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(10))
        os.utime(path, (number, number))
    other = os.open(root / "lock", os.O_RDWR | os.O_CREAT)
    compiler_cache.fcntl.flock(other, compiler_cache.fcntl.LOCK_SH)
    compiler_cache.use(root, "H100")()
    assert all(path.exists() for path in paths)
    os.close(other)
    compiler_cache.use(root, "H100")()
    assert [path.exists() for path in paths] == [False, False, True, True]
