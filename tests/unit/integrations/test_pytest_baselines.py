"""Where the pytest plugin keeps what it compares with."""

import re
from pathlib import Path

import pytest

from ampmem.errors import UsageError
from ampmem.integrations.pytest.judging import Baselines, file_of

HOSTILE = (
    "a/test_a.py::test_a[../../etc/passwd]",
    "a/test_a.py::test_a[x y]",
    "a/test_a.py::test_a[x-y]",
    "a/test_a.py::test_a[x:y]",
    "a/test_a.py::test_a[\u00e9\u20ac]",
    "a/test_a.py::test_a[]",
    "a/test_a.py::test_a[.]",
    "a/test_a.py::test_a[" + "long" * 100 + "]",
    "a/test_a.py::test_a[" + "long" * 100 + "!]",
    "a/test_a.py::.hidden",
    "../outside/test_a.py::test_a",
    "/rooted/test_a.py::test_a",
)


def test_a_plain_test_has_a_plain_file() -> None:
    assert file_of("tests/test_a.py::test_b", 1) == Path("tests/test_a/test_b.json")
    assert file_of("tests/test_a.py::TestB::test_c", 1) == Path("tests/test_a/TestB.test_c.json")
    assert file_of("tests/test_a.py::test_b", 2) == Path("tests/test_a/test_b-block2.json")


def test_any_other_has_one_of_its_own_inside_the_folder() -> None:
    files = [file_of(test, block) for test in HOSTILE for block in (1, 2)]
    assert len(set(files)) == len(files)
    for file in files:
        assert not file.is_absolute()
        assert ".." not in file.parts
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.json", file.name), file
        assert len(file.name) < 130


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="no such directory; --ampmem-update creates it"):
        Baselines(tmp_path / "none", named=Path("none"), allow="0%", update=False)
    for update in (False, True):
        with pytest.raises(UsageError, match="it is not a directory"):
            Baselines(file, named=Path("file"), allow="0%", update=update)
    with pytest.raises(UsageError, match="'much' is neither a share"):
        Baselines(tmp_path, named=Path(), allow="much", update=False)
