"""Stops all ranks together: a rank that stops alone would hang or break another that waits for it in a collective.

Ranks agree through torch.distributed's store; nothing is ever sent over the script's process groups. A rank that has
recorded its steps says so and waits, outside of any collective, until all have; then all stop. If one does not come,
because it has fewer steps, works in another way or is not recorded, all scripts run to completion.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, sleep  # imported now: a script may patch time
from typing import Any

from torch import distributed

from ampmem.recorder.torch_private.distributed import default_store, world_size
from ampmem.signals import SIGNALS

_KEY = "ampmem"
_STOP, _GO_ON = "stop", "go on"
_POLL_S = 0.02
_STRANGER_S = 10.0
"""Seconds to wait for ranks without a recorded step: ampmem may not run there at all."""
_SLOWER_S = 20.0
"""Minimum seconds to wait for ranks that are recorded."""
_LEAVE_S = 5.0
"""Seconds that the rank that may host the store waits until the others have read the agreement."""


class Together:
    """Agrees for one rank with the others; ``several`` if a launcher started this process as one of several."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._joined = self._stopped = False
        self._last: float | None = None
        self._longest = 0.0

    def step_ended(self) -> None:
        """Note that a step of this rank was recorded."""
        now = monotonic()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        if not self._joined and world_size() > 1:
            self._joined = True
            with suppress(Exception):
                _say(_store(), "here")

    def why_not(self, unless: str = "") -> str | None:
        """Wait for the other ranks; returns why this rank must not be stopped, or ``None`` if all stop now.

        ``unless`` is a reason of this rank not to stop; then no rank stops.
        """
        size = world_size()
        if size == 1 and unless:
            return unless
        if size == 1:
            if not self._several or self._joined:
                return None
            return "torch.distributed is not in use, so ampmem does not know whether other ranks wait for this one"
        if distributed.get_backend() == "fake":  # torch's backend without peers
            return None
        try:
            store = _store()
            # The first rank to write decides; all others read its answer, so no two act differently.
            if unless and _agreed(store, _GO_ON) == _GO_ON:
                return unless
            return self._agree(store, size)
        except Exception as error:  # the store may be the script's own, or closed
            return f"the ranks could not agree to stop ({type(error).__name__})"

    def over(self) -> None:
        """Tell the others not to wait: this rank's script has ended by itself."""
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
            return "another rank did not get that far"
        self._stopped = True
        self._leave(store, size)
        return None

    def _leave(self, store: Any, size: int) -> None:
        """Wait until the others have read the agreement: rank 0 may host the store."""
        _say(store, "left")
        until = monotonic() + _LEAVE_S
        while distributed.get_rank() == 0 and not store.check(_of_all("left", size)) and monotonic() < until:
            sleep(_POLL_S)


def _not_stopped(store: Any, size: int) -> str | None:
    """Agree that no rank stops, unless the others agreed otherwise meanwhile; returns which ranks have not come."""
    absent = [rank for rank in range(size) if not store.check([f"{_KEY}/done/{rank}"])]
    strange = [rank for rank in absent if not store.check([f"{_KEY}/here/{rank}"])]
    if _agreed(store, _GO_ON) == _STOP:
        return None
    if strange:
        return f"no step of {_ranks(strange)} was recorded, so ampmem does not know which ranks wait for each other"
    return f"{_ranks(absent)} did not get that far"


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
    """The agreement: ``wanted``, unless another rank was first."""
    # With "" as the expected value the store sets the key only if it does not exist.
    answer: bytes = store.compare_set(f"{_KEY}/agreed", "", wanted)
    return answer.decode()
