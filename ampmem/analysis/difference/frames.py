"""Which functions of two checkouts are the same, wherever those lie and whatever their lines are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from ampmem.analysis.frames import user_frame

_FRAME = re.compile(r"(.*?):\d+ (.*)", re.DOTALL)

Function: TypeAlias = tuple[str, str]
"""A file and a function in it."""


@lru_cache(100_000)
def function_of(frame: str) -> Function:
    """Of ``file:line function`` all but the line; of another text, all of it."""
    found = _FRAME.fullmatch(frame)
    return (found[1], found[2]) if found is not None else ("", frame)


class Functions:
    """The functions of stacks, with the files under the names that ``files`` has for them."""

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self._files = files or {}
        self._known: dict[tuple[str, ...], tuple[Function, ...]] = {}
        self._own: dict[tuple[str, ...], Function | None] = {}

    def of(self, stack: tuple[str, ...]) -> tuple[Function, ...]:
        """Those of ``stack``, outermost first."""
        known = self._known.get(stack)
        if known is None:
            known = self._known[stack] = tuple(map(self._function, stack))
        return known

    def own(self, stack: tuple[str, ...]) -> Function | None:
        """The innermost that is the script's own; ``None`` of no stack."""
        if stack not in self._own:
            frame = user_frame(stack)
            self._own[stack] = None if frame is None else self._function(frame)
        return self._own[stack]

    def _function(self, frame: str) -> Function:
        file, function = function_of(frame)
        return self._files.get(file, file), function


def same_files(before: Iterable[str], after: Iterable[str]) -> dict[str, str]:
    """For files of ``before`` what they are called in ``after``, where that is another name.

    A file that both have is the same. Of the others, two are the same whose paths end alike, as long as no other's
    does: ``/a/repo/net.py`` is ``/b/repo/net.py``, but neither of ``/b/repo/one/net.py`` and ``/b/repo/two/net.py``.
    """
    first, second = set(before), set(after)
    old, new = first - second, second - first
    found: dict[str, str] = {}
    longest = max((file.count("/") + 1 for file in old), default=0)
    for length in range(longest, 0, -1):
        tails = _by_tail(new, length)
        for tail, files in _by_tail(old, length).items():
            others = tails.get(tail, [])
            if len(files) == 1 and len(others) == 1:
                found[files[0]] = others[0]
        old.difference_update(found)
        new.difference_update(found.values())
    return found


def _by_tail(files: Iterable[str], length: int) -> dict[Sequence[str], list[str]]:
    tails: dict[Sequence[str], list[str]] = defaultdict(list)
    for file in files:
        parts = tuple(file.split("/"))
        if len(parts) >= length:
            tails[parts[-length:]].append(file)
    return tails
