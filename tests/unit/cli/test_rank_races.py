"""Every order in which the ranks of jobs look for their names: each job has one number, and no number has two jobs.

A recording is a text here, since a SQLite file takes a hundred times as long to make.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from shutil import rmtree
from threading import Semaphore, Thread, current_thread
from typing import Any

import pytest

from ampmem import output as files
from ampmem.cli.processes import plan as rank_names
from ampmem.cli.processes.plan import claim_rank
from ampmem.events import PlaceRecord
from ampmem.recorder.ranks.environment import Launched
from ampmem.recording import rank_files
from ampmem.recording.rank_files import claimed_for, lock_of_claim, rank_of, remove_claim

_RECORDED = "recorded by "


def _job_of(path: Path) -> str:
    try:
        content = path.read_text()
    except OSError:
        return ""
    return content.removeprefix(_RECORDED) if content.startswith(_RECORDED) else ""


@pytest.fixture(autouse=True)
def _texts_for_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_names, "job_of", _job_of)


def launched(number: int, job: str, world_size: int = 2) -> Launched:
    return Launched(place=PlaceRecord(rank=number, world_size=world_size, job=job), here=range(world_size))


class Rank:
    """A rank of ``job`` in ``folder``, with the things that it can do one after the other."""

    def __init__(self, folder: Path, number: int, job: str) -> None:
        self.job = job
        self._folder = folder
        self._launched = launched(number, job)
        self.path: Path | None = None
        self.number = 0

    def claim(self) -> None:
        self.path, self.number = claim_rank(self._named, self._launched)

    def _named(self, number: int) -> Path:
        return self._folder / (f"t.{number}.ampmem" if number > 1 else "t.ampmem")

    def record(self) -> None:
        """As a writer does: what takes the place of the claim is whole."""
        lock = lock_of_claim(self.path)
        assert lock is not None
        half = self.path.with_name(f".{self.path.name}.new")
        half.write_text(_RECORDED + self.job)
        half.replace(self.path)
        os.close(lock)

    def discard(self) -> None:
        """Nothing was recorded."""
        self.path.unlink()

    def give_up(self) -> None:
        """The recording could not begin."""
        assert self.path is not None
        remove_claim(self.path)

    def die(self) -> None:
        """Killed: what it had claimed stays, without the lock."""
        assert self.path is not None
        lock = lock_of_claim(self.path)
        assert lock is not None
        os.close(lock)


def _sets(folder: Path) -> dict[int, dict[int, str]]:
    """By number, the job of each rank's file, claimed or recorded."""
    found: dict[int, dict[int, str]] = {}
    for path in folder.glob("*.ampmem"):
        name = rank_of(path)
        number = int(name.job.name.removeprefix("t").removesuffix("ampmem").strip(".") or 1)
        found.setdefault(number, {})[name.rank] = claimed_for(path) or _job_of(path)
    return found


def _orders(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to lay sequences of these lengths into each other."""
    if not any(lengths):
        yield ()
    for first, length in enumerate(lengths):
        if length:
            rest = [*lengths[:first], length - 1, *lengths[first + 1 :]]
            yield from ((first, *order) for order in _orders(rest))


KEPT, NOTHING = ("claim", "record"), ("claim", "record", "discard")
REFUSED, KILLED = ("claim", "give_up"), ("claim", "die")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("earlier", "lives"),
    [
        ("nothing", (KEPT, KEPT, KEPT)),
        ("nothing", (KEPT, NOTHING, KEPT)),
        ("a complete set", (NOTHING, KEPT, KEPT)),
        ("a complete set", (KEPT, KILLED, KEPT)),
        ("a claim", (KEPT, KEPT, KEPT)),
        ("a claim", (KILLED, KEPT, KEPT)),
        ("a claim", (KEPT, KILLED, NOTHING)),
        ("a claim", (KEPT, REFUSED, KILLED)),
    ],
)
def test_in_every_order_a_job_has_one_number_and_a_number_one_job(
    tmp_path: Path, lives: Sequence[Sequence[str]], earlier: str
) -> None:
    """Both ranks of the job ``x``, and one of ``y``."""
    for order in _orders([len(life) for life in lives]):
        folder = tmp_path / "now"
        folder.mkdir()
        left_over = [Rank(folder, number, "earlier") for number in range(2)]
        for each in left_over[: {"nothing": 0, "a complete set": 2, "a claim": 1}[earlier]]:
            each.claim()
            each.die() if earlier == "a claim" else each.record()
        ranks = [Rank(folder, 0, "x"), Rank(folder, 1, "x"), Rank(folder, 1, "y")]
        left = [list(life) for life in lives]
        for who in order:
            getattr(ranks[who], left[who].pop(0))()
        sets = _sets(folder)
        if earlier == "a complete set":
            assert sets.pop(1) == {0: "earlier", 1: "earlier"}, order
        assert all(len(set(jobs.values())) == 1 for jobs in sets.values()), order
        for job in {each.job for each, life in zip(ranks, lives, strict=True) if life == KEPT}:
            kept = {each.number for each, life in zip(ranks, lives, strict=True) if each.job == job and life == KEPT}
            assert len(kept) == 1, order
        if all(life == KEPT for life in lives):
            assert sorted(sets) == ([2, 3] if earlier == "a complete set" else [1, 2]), order
        rmtree(folder)


class Killed(BaseException):
    """A rank is killed here."""


class Scheduler:
    """Runs ranks one at a time, on threads; ``switch_at`` are the file operations after which the next one goes on.

    ``kill_at`` is the operation at which the first rank is killed, so that none after it is done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turn: dict[Thread, Semaphore] = {}
        self._order: list[Thread] = []
        for owner, name in ((os, "open"), (os, "link"), (os, "write"), (os, "close"), (fcntl, "flock")):
            monkeypatch.setattr(owner, name, self._stepped(getattr(owner, name), name))
        for name in ("unlink", "read_bytes", "stat"):  # what exists is asked of stat
            monkeypatch.setattr(Path, name, self._stepped(getattr(Path, name), name))
        monkeypatch.setattr(files, "sleep", lambda _: self._next())

    def run(self, programs: Sequence[Callable[[], None]], switch_at: Sequence[int], kill_at: int | None = None) -> int:
        """How many operations there were; raises what a rank has raised."""
        self._count, self._switch_at, self._kill_at = 0, switch_at, kill_at
        self._killed: Thread | None = None
        self._opened: set[int] = set()
        self._errors: list[BaseException] = []
        done = Semaphore(0)
        threads = [Thread(target=self._body, args=(program, done)) for program in programs]
        self._order = list(threads)
        self._turn = {thread: Semaphore(0) for thread in threads}
        for thread in threads:
            thread.start()
        self._turn[threads[0]].release()
        done.acquire()
        for thread in threads:
            thread.join()
        self._turn = {}
        for error in self._errors:
            raise error
        return self._count

    def _body(self, program: Callable[[], None], done: Semaphore) -> None:
        me = current_thread()
        self._turn[me].acquire()
        try:
            program()
        except Killed:
            self._bury()
        except BaseException as error:
            self._errors.append(error)
        self._order.remove(me)
        if self._order:
            self._turn[self._order[0]].release()
        else:
            done.release()

    def _bury(self) -> None:
        """The kernel closes what a process had open."""
        turns, self._turn = self._turn, {}
        for descriptor in self._opened:
            with suppress(OSError):
                os.close(descriptor)
        for path in [path for path, descriptor in rank_files._held.items() if descriptor in self._opened]:
            del rank_files._held[path]
        self._turn = turns

    def _next(self) -> None:
        me = current_thread()
        if len(self._order) > 1:
            self._order.append(self._order.pop(0))
            self._turn[self._order[0]].release()
            self._turn[me].acquire()

    def _stepped(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            me = current_thread()
            if me not in self._turn:
                return original(*arguments, **options)
            if me is self._killed:
                raise Killed
            if self._count == self._kill_at:
                self._killed = me
                raise Killed
            self._count += 1
            try:
                found = original(*arguments, **options)
                if self._kill_at is not None and name == "open":
                    self._opened.add(found)
                if name == "close":
                    self._opened.discard(*arguments)
                return found
            finally:
                if self._count in self._switch_at:
                    self._next()

        return operation


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["xx", "xy"])
@pytest.mark.parametrize("earlier", [False, True])
def test_between_any_file_operations_another_rank_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, earlier: bool
) -> None:
    """Up to two switches: anywhere in one case, and one in seven in the others, which takes a tenth of the time.

    ``earlier`` is a claim that is left over.
    """
    scheduler, simple = Scheduler(monkeypatch), jobs == "xx" and not earlier

    def look(switch_at: Sequence[int]) -> int:
        folder = tmp_path / "now"
        folder.mkdir()
        if earlier:
            before = Rank(folder, 0, "earlier")
            before.claim()
            before.die()
        ranks = [Rank(folder, number, job) for number, job in zip((1, 0), jobs, strict=True)]

        def program(each: Rank) -> Callable[[], None]:
            return lambda: (each.claim(), each.record())[0]

        count = scheduler.run([program(each) for each in ranks], switch_at)
        numbers = [each.number for each in ranks]
        assert numbers == [1, 1] if jobs == "xx" else sorted(numbers) == [1, 2], switch_at
        assert len(list(folder.iterdir())) == 2, switch_at
        assert not any(claimed_for(path) for path in folder.iterdir())
        rmtree(folder)
        return count

    count = look(())
    twice = combinations(range(count), 2)
    for switch_at in [(at,) for at in range(count)] + [at for at in twice if simple or sum(at) % 7 == 0]:
        look(switch_at)


@pytest.mark.parametrize("after", ["x", "y"])
def test_wherever_a_rank_is_killed_the_next_one_finds_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The rank that comes ``after`` is of the same job or of the next one; then comes a job of two ranks."""
    scheduler, kill_at, killed_with = Scheduler(monkeypatch), 0, set()
    while True:
        folder = tmp_path / "now"
        folder.mkdir()
        killed, other = Rank(folder, 0, "x"), Rank(folder, 1, after)
        count = scheduler.run([killed.claim], (), kill_at)
        claims = [path for path in folder.glob("*.ampmem") if claimed_for(path) is not None]
        if killed.path is not None:  # it lived, and is killed after that
            killed.die()
        killed_with.add(len(claims))
        other.claim()
        other.record()
        assert other.number == 1
        assert _sets(folder) == {1: {1: after}}
        later = [Rank(folder, number, "z") for number in (1, 0)]
        for each in later:
            each.claim()
            each.record()
        assert _sets(folder) == {1: {1: after}, 2: {0: "z", 1: "z"}}
        rmtree(folder)
        if killed.path is not None:
            break
        assert count == kill_at
        kill_at += 1
    assert killed_with == {0, 1} and kill_at > 10


@pytest.mark.parametrize(("came", "force"), list(product(["first", "last"], [False, True])))
def test_a_forced_run_takes_the_place_of_a_claim_that_is_left_over(tmp_path: Path, came: str, force: bool) -> None:
    number = 0 if came == "first" else 1
    dead = Rank(tmp_path, number, "earlier")
    dead.claim()
    dead.die()
    for each in (0, 1):
        path, said = rank_names.place_rank(
            lambda number: tmp_path / "t.ampmem", launched(each, "x"), numbered=False, force=force
        )
        assert said == f"recording to {path}"
        descriptor = files.lock_output(path, force=True) if force else lock_of_claim(path)
        assert descriptor is not None
        os.close(descriptor)
