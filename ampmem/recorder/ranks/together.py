"""Ranks that stop together: one that leaves while another waits for it in a collective would hang or break that one.

They agree through the store by which torch.distributed brought them together, and nothing is ever sent over the
script's groups. A rank that has made its steps says so and waits, outside of any collective, until all have; then all
stop. Where one does not come, because it has fewer steps, works in another way, or is not recorded, all scripts are
let run to their ends.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, sleep  # taken now: a script may put others in their place
from typing import Any

from torch import distributed

from ampmem.recorder.torch_private.distributed import default_store, world_size
from ampmem.signals import SIGNALS

_KEY = "ampmem"
_STOP, _GO_ON = "stop", "go on"
_POLL_S = 0.02
_STRANGER_S = 10.0
"""How long to wait for ranks of which no step was recorded: ampmem may not run there at all."""
_SLOWER_S = 20.0
"""How long at least to wait for ranks that are recorded."""
_LEAVE_S = 5.0
"""How long the rank that may hold the store waits until the others have read what was agreed."""


class Together:
    """Of one rank. ``several`` says that a launcher started this process as one of several."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._joined = self._stopped = False
        self._last: float | None = None
        self._longest = 0.0

    def step_ended(self) -> None:
        """A step of this rank was recorded."""
        now = monotonic()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        if not self._joined and world_size() > 1:
            self._joined = True
            with suppress(Exception):
                _say(_store(), "here")

    def why_not(self, unless: str = "") -> str | None:
        """Wait for the others; why this rank must not be stopped, ``None`` when all stop now.

        ``unless`` says why this one must not, where that is so; then none does.
        """
        size = world_size()
        if size == 1 and unless:
            return unless
        if size == 1:
            if not self._several or self._joined:
                return None
            return "torch.distributed is not in use, so it is not known whether other ranks wait for this one"
        if distributed.get_backend() == "fake":
            return None
        try:
            store = _store()
            if unless and _agreed(store, _GO_ON) == _GO_ON:
                return unless
            return self._agree(store, size)
        except Exception as error:  # a store of the script's, one that is gone
            return f"the ranks could not agree to stop ({type(error).__name__})"

    def over(self) -> None:
        """The script has ended by itself: nobody need wait for this rank."""
        with suppress(Exception):
            if world_size() > 1 and not self._stopped:
                store = _store()
                _say(store, "done")
                _say(store, "left")

    def _agree(self, store: Any, size: int) -> str | None:
        _say(store, "done")
        patience = max(_SLOWER_S, 2 * self._longest)
        began = monotonic()
        while not store.check(_of_all("done", size)):
            if store.check([f"{_KEY}/agreed"]):
                break
            waited = monotonic() - began
            if (
                waited > patience
                or SIGNALS.waiting()
                or (waited > _STRANGER_S and not store.check(_of_all("here", size)))
            ):
                return _not_stopped(store, size)
            sleep(_POLL_S)
        if _agreed(store, _STOP) == _GO_ON:
            return "another rank did not get so far"
        self._stopped = True
        self._leave(store, size)
        return None

    def _leave(self, store: Any, size: int) -> None:
        """The others may still ask the store, which rank 0 may hold."""
        _say(store, "left")
        until = monotonic() + _LEAVE_S
        while distributed.get_rank() == 0 and not store.check(_of_all("left", size)) and monotonic() < until:
            sleep(_POLL_S)


def _not_stopped(store: Any, size: int) -> str | None:
    """Let all go on, unless they have agreed otherwise meanwhile; says who has not come."""
    absent = [rank for rank in range(size) if not store.check([f"{_KEY}/done/{rank}"])]
    strange = [rank for rank in absent if not store.check([f"{_KEY}/here/{rank}"])]
    if _agreed(store, _GO_ON) == _STOP:
        return None
    if strange:
        return f"no step of {_ranks(strange)} was recorded, so it is not known who waits for whom"
    return f"{_ranks(absent)} did not get so far"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} ranks ({ranks[0]} and others)"


def _store() -> Any:
    if default_store is None:
        raise LookupError("this torch has no such function")
    return default_store()


def _of_all(word: str, size: int) -> list[str]:
    return [f"{_KEY}/{word}/{rank}" for rank in range(size)]


def _say(store: Any, word: str) -> None:
    store.set(f"{_KEY}/{word}/{distributed.get_rank()}", "1")


def _agreed(store: Any, wanted: str) -> str:
    """What all have agreed on: ``wanted``, unless somebody was first."""
    answer: bytes = store.compare_set(f"{_KEY}/agreed", "", wanted)
    return answer.decode()
