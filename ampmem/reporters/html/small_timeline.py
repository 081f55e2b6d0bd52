"""Memory over time as a small picture: SVG without scripts, for a notebook's cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ampmem.analysis.analyse import analyse
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.recording import read
from ampmem.reporters.html.palette import FILLS, label
from ampmem.reporters.html.stream import extreme_positions
from ampmem.units import format_peak

WIDTH, HEIGHT = 720, 180
"""The size of the picture in its own units."""
_POINTS = 60
"""The stretches of the recording of which the picture has the least and the most."""


def small_timeline(recording: Path) -> str:
    """The live bytes of each category over the recorded events, stacked, as in the page's timeline.

    Raises what reading and analysing a recording raises.
    """
    timeline = analyse(read(recording)).timeline
    places = extreme_positions(timeline.total, _POINTS)
    across = np.round(places * WIDTH / max(int(places[-1]), 1)).astype(int)
    most, below, areas = max(int(timeline.total.max()), 1), np.zeros(len(places)), []
    for category in CATEGORIES:
        live = timeline.series(category)[places]
        if not live.any():
            continue
        upper, lower = (HEIGHT - (below + each) * HEIGHT / most for each in (live, 0))
        outline = [*zip(across, upper, strict=True), *zip(across[::-1], lower[::-1], strict=True)]
        drawn = " ".join(f"{x},{y:.1f}" for x, y in outline)
        fill, below = FILLS[category].light, below + live
        areas.append(f'<polygon fill="{fill}" points="{drawn}"><title>{label(category)}</title></polygon>')
    said = f"memory over the recorded events; the most is {format_peak(most)}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20}" width="{WIDTH}" role="img" aria-label="{said}" '
        f'style="max-width:100%;background:#fff">{"".join(areas)}'
        f'<text x="0" y="{HEIGHT + 15}" font-size="12" font-family="sans-serif">{said}</text></svg>'
    )
