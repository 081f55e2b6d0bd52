"""The timeline as a plotly figure in JSON, for ``plotly.io.read_json``, notebooks, dashboards, experiment trackers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.output import write_text
from ampmem.reporters.html.palette import FILLS, label
from ampmem.reporters.html.stream import extreme_positions

BUCKETS = 1_000
"""The number of stretches of a long recording; the lowest and highest instant of each are drawn."""

_MIB = 1 << 20


def write_figure(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Write the figure; ``force`` replaces a file. Raises :class:`~ampmem.errors.UsageError` if it is not writable."""
    write_text(path, timeline_figure(analysis).to_json(), force=force)


def timeline_figure(analysis: Analysis) -> go.Figure:
    """Live MiB of each category after each event, stacked; of a long recording the exact extremes."""
    timeline = analysis.timeline
    positions = np.union1d(extreme_positions(timeline.total, BUCKETS), np.array(analysis.peaks, dtype=np.intp))
    drawn = ((category, timeline.series(category)[positions]) for category in CATEGORIES)
    # Lists instead of arrays, which plotly.js before 2.35 cannot read.
    areas = [
        go.Scatter(
            name=label(category),
            x=positions.tolist(),
            y=(series / _MIB).tolist(),
            stackgroup="live",
            line={"width": 0, "shape": "hv"},
            fillcolor=FILLS[category].light,
            fillpattern={"shape": FILLS[category].pattern},
            hovertemplate="%{y:,.1f} MiB",
        )
        for category, series in drawn
        if series.any()
    ]
    axes = {"xaxis_title": "allocator event", "yaxis_title": "live MiB"}
    return go.Figure(areas, go.Layout(hovermode="x unified", template="plotly_white", **axes))
