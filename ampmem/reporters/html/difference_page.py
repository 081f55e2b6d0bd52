"""The page of two runs of changed code: what changed, and the whole page of each."""

from __future__ import annotations

from dataclasses import replace

from ampmem.analysis.difference.difference import Difference, Side
from ampmem.reporters.html.page.page import PageView, page_view
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.run import column
from ampmem.reporters.html.views.changes import changes_view, difference_verdict


def difference_page(before: Side, after: Side, found: Difference, limit: int, progress: Progress) -> PageView:
    """The page of what was ``found`` between two sides; of one that is in no file it has no more than that.

    ``limit`` is how many bytes of the page the events of each may take.
    """
    sides = [("before", before), ("after", after)]
    shown = [
        replace(column(side.file, limit, progress)[1], label=label) for label, side in sides if side.file is not None
    ]
    return page_view(
        tuple(shown), None, difference_verdict(found), changes=changes_view(found), opens=max(0, len(shown) - 1)
    )
