"""A whole page inside of a notebook: in a frame of its own, or not at all where it would be too large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampmem.reporters.html.page.template import filled
from ampmem.reporters.html.write import page_of

MOST = 2_000_000
"""Bytes of a frame. A notebook keeps its outputs, and Jupyter's server drops what comes faster than 1 MB/s, counted
over three seconds."""

STREAM_ROOM = 600_000
"""Bytes of it for the events; without events a page has 0.8 MB, three quarters of which draw it."""

HEIGHT = 720
"""Pixels: nothing in a sandbox may say how high it is."""


def frame(recordings: Sequence[Path], title: str) -> str | None:
    """The page of ``recordings`` in a frame; ``None`` where that is larger than :data:`MOST`.

    Raises what reading and summing up a recording raises.
    """
    framed = filled("frame.html", page=page_of(recordings, STREAM_ROOM), title=title, height=HEIGHT)
    return framed if len(framed.encode()) <= MOST else None
