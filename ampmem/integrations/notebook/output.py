"""What is shown under a cell: what was done, in a sentence, and the page; as text, where no page can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampmem.output.shown import Bundle
from ampmem.reporters.html.notebook import MOST, Card, Remark, frame, html_of
from ampmem.units import format_bytes


def bundle(said: Sequence[str], recordings: Sequence[Path], tables: Bundle) -> Bundle:
    """``said``, then the page of ``recordings``; ``tables`` say it as text, and where the page would be too large."""
    text = "\n".join(["ampmem: " + " ".join(said), "", tables["text/plain"]])
    framed = frame(recordings, "ampmem: the report of this cell")
    if framed is None:
        remark = f"The page is larger than {format_bytes(MOST)} and is not kept in the notebook: --html FILE writes it."
        below = tables.get("text/html", "")
        return {"text/plain": text, "text/html": _head([*said, remark]) + below}
    return {"text/plain": text, "text/html": _head(said) + framed}


def _head(said: Sequence[str]) -> str:
    return html_of(Card(headline="", facts=(), remarks=[Remark(lead="ampmem", text=" ".join(said))]))
