"""Ranks that stop together: each is a thread here, with a store in memory."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402

from ampmem.recorder.ranks import together  # noqa: E402
from ampmem.recorder.ranks.together import Together  # noqa: E402

Rank = Callable[[Together], object]


@pytest.fixture
def together_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Runs ranks side by side, each a function of its own ``Together``; returns what they return."""
    store, me = distributed.HashStore(), threading.local()
    monkeypatch.setattr(together, "default_store", lambda: store)
    monkeypatch.setattr(distributed, "get_rank", lambda: me.rank)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(together, "_SLOWER_S", 0.3)
    monkeypatch.setattr(together, "_STRANGER_S", 0.1)
    monkeypatch.setattr(together, "_LEAVE_S", 0.1)

    def run(*ranks: Rank | None) -> list[object]:
        monkeypatch.setattr(together, "world_size", lambda: len(ranks))
        found: list[Any] = [None] * len(ranks)

        def one(number: int, rank: Rank) -> None:
            me.rank = number
            found[number] = rank(Together(several=True))

        threads = [
            threading.Thread(target=one, args=(number, rank)) for number, rank in enumerate(ranks) if rank is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def recorded(rank: Together) -> str | None:
    """A rank that makes its steps, and asks whether it may be stopped."""
    rank.step_ended()
    return rank.why_not()


def ends_before(rank: Together) -> None:
    rank.step_ended()
    rank.over()


@pytest.mark.parametrize("size", [2, 4])
def test_all_stop_when_all_have_come_so_far(size: int, together_of: Callable[..., list[object]]) -> None:
    assert together_of(*[recorded] * size) == [None] * size


def test_a_rank_that_is_at_its_end_need_not_be_waited_for(together_of: Callable[..., list[object]]) -> None:
    assert together_of(recorded, ends_before) == [None, None]


def test_nobody_stops_where_one_has_fewer_steps(together_of: Callable[..., list[object]]) -> None:
    found = together_of(recorded, lambda rank: rank.step_ended())
    assert found == ["rank 1 did not get that far", None]


def test_nobody_stops_where_one_is_not_recorded(together_of: Callable[..., list[object]]) -> None:
    assert together_of(recorded, None) == [
        "no step of rank 1 was recorded, so ampmem does not know which ranks wait for each other",
        None,
    ]


def test_what_was_agreed_holds_for_one_that_comes_later(together_of: Callable[..., list[object]]) -> None:
    assert together_of(recorded, None)[0] is not None
    assert together_of(None, recorded) == [None, "another rank did not get that far"]


def test_nobody_stops_where_one_must_not(together_of: Callable[..., list[object]]) -> None:
    def must_not(rank: Together) -> str | None:
        rank.step_ended()
        return rank.why_not("its results are waited for")

    assert together_of(must_not, recorded) == ["its results are waited for", "another rank did not get that far"]


def test_a_store_that_is_gone_stops_nobody(
    together_of: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(together, "default_store", gone)
    assert together_of(recorded, None)[0] == "the ranks could not agree to stop (RuntimeError)"


def test_a_process_alone_is_stopped_at_once() -> None:
    assert Together(several=False).why_not() is None


def test_a_rank_without_torch_distributed_is_not_stopped() -> None:
    assert Together(several=True).why_not() is not None
