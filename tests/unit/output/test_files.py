"""Files that users name: refused, whole or not there at all."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ampmem.errors import UsageError
from ampmem.output import (
    being_written,
    claim,
    lock_output,
    open_output,
    remove,
    remove_empty,
    replaced_file,
    say_written,
    sized,
)


def test_an_output_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with open_output(path, force=False) as stream:
        stream.write("héllo")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "héllo"
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_output_file_is_replaced_only_when_forced(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(UsageError, match="--force"), open_output(path, force=False):
        pytest.fail("opened")
    with open_output(path, force=True) as stream:
        stream.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_half_written_output_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), open_output(path, force=True) as stream:
        stream.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_that_is_no_regular_file_is_never_replaced() -> None:
    with open_output(Path("/dev/null"), force=True) as stream:
        stream.write("gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", ["", "missing/out.txt"])
def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot write"), open_output(tmp_path / name, force=True):
        pytest.fail("opened")


def test_what_is_made_under_another_name_replaces_the_file_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with replaced_file(path, force=True) as half_written:
        half_written.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(KeyError), replaced_file(path, force=True) as half_written:
        half_written.write_text("half")
        raise KeyError
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_behind_a_link_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    path, link = tmp_path / "out.txt", tmp_path / "link.txt"
    path.write_text("old")
    link.symlink_to(path)
    with open_output(link, force=True) as stream:
        stream.write("new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_no_other_file_takes_the_place_of_a_device() -> None:
    with pytest.raises(UsageError, match="it is not a file"), replaced_file(Path("/dev/null"), force=True):
        pytest.fail("opened")


def test_the_name_of_a_file_that_is_there_is_taken_only_when_forced(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    path.write_text("old")
    with pytest.raises(UsageError, match="--force"):
        lock_output(path, force=False)
    with held(lock_output(path, force=True)):
        assert path.read_text() == "old"
    with held(lock_output(tmp_path / "new", force=False)):
        assert (tmp_path / "new").read_text() == ""


@contextmanager
def held(descriptor: int) -> Iterator[None]:
    """While a file is being written."""
    try:
        yield
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("take", [lambda path: os.close(lock_output(path, force=True)), remove])
def test_a_file_that_is_being_written_is_neither_replaced_nor_removed(
    tmp_path: Path, take: Callable[[Path], None]
) -> None:
    path = tmp_path / "run.ampmem"
    with held(lock_output(path, force=False)):
        path.write_text("growing")
        with pytest.raises(UsageError, match="another ampmem is writing it"):
            take(path)
        assert path.read_text() == "growing"
    take(path)
    assert not being_written(path)


def test_a_file_that_appears_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ampmem"
    monkeypatch.setattr("ampmem.output.check_output", lambda *_, **__: path.write_text("somebody else's"))
    with pytest.raises(UsageError, match="--force"):
        lock_output(path, force=False)
    assert path.read_text() == "somebody else's"


def test_nothing_but_a_file_is_locked(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    device = Path("/dev/null").stat()
    for path, why in ((pipe, "not a file"), (Path("/dev/null"), "not a file"), (tmp_path, "is a directory")):
        for take in (lock_output, lambda path, force: remove(path)):
            with pytest.raises(UsageError, match=why):
                take(path, force=True)
    assert pipe.is_fifo()
    assert os.path.samestat(device, Path("/dev/null").stat())


def test_the_lock_of_a_link_is_that_of_its_file(tmp_path: Path) -> None:
    path, link = tmp_path / "run.ampmem", tmp_path / "link.ampmem"
    path.write_text("old")
    link.symlink_to(path)
    with held(lock_output(link, force=True)):
        assert link.is_symlink()
        assert being_written(path)


def test_a_file_that_is_not_there_need_not_be_removed(tmp_path: Path) -> None:
    remove(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_the_first_number_of_which_no_file_is_there_is_claimed(tmp_path: Path) -> None:
    def files(number: int) -> list[Path]:
        return [tmp_path / f"{number}.{precision}" for precision in ("fp32", "amp")]

    assert [claim(files), claim(files)] == [1, 2]
    (tmp_path / "3.amp").write_text("precious")
    assert claim(files) == 4
    assert not (tmp_path / "3.fp32").exists()
    (tmp_path / "1.amp").write_text("recorded")
    remove_empty([file for number in (1, 2, 3, 4) for file in files(number)])
    assert {path.name for path in tmp_path.iterdir()} == {"1.amp", "3.amp"}


def test_nobody_claims_what_another_has_claimed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim(lambda number: [tmp_path / str(number)]), range(200)))
    assert sorted(numbers) == list(range(1, 201))


def test_what_cannot_be_claimed_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        claim(lambda number: [tmp_path / "first", tmp_path / "missing" / str(number)])
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_named_with_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(bytes(1536))
    assert sized(path) == f"{path}, 1.5 KiB"
    assert sized(Path("page.html"), path) == "page.html, 1.5 KiB"
    for nothing in ("/dev/null", "gone"):
        assert sized(Path(nothing)) == nothing
    say_written(path)
    assert capsys.readouterr().err == f"ampmem: wrote {path}, 1.5 KiB\n"
