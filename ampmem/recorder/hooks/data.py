"""The DataLoader: what is born while it makes a batch belongs to phase ``data``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.misses import Misses
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private.general import NEXT_BATCH, SAMPLER, tree_leaves


def install(listener: Listener, misses: Misses) -> Callable[[], None]:
    """Wrap the iterators' ``__next__``; returns what undoes it."""

    def loaded(iterator: Any, batch: Any) -> None:
        listener.batch_loaded(_samples(iterator, batch))

    started, ended = misses.guarded(listener.data_started), misses.guarded(listener.data_ended)
    count = misses.guarded(loaded)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if not listener.recording or not listener.on_thread():
                return original(iterator)
            before = started()
            batch = None
            try:
                batch = original(iterator)
                return batch
            finally:
                count(iterator, batch)
                if before is not None:
                    ended(before)

        return __next__

    return patch(*NEXT_BATCH, wrap)


def _samples(iterator: Any, batch: Any) -> int | None:
    """How many samples a DataLoader has made into ``batch``, where that is the first dimension of all tensors in it."""
    samples = getattr(getattr(iterator, SAMPLER, None), "batch_size", None)
    sizes = {leaf.shape[:1] for leaf in tree_leaves(batch) if is_tensor(leaf)}
    return samples if isinstance(samples, int) and sizes == {(samples,)} else None
