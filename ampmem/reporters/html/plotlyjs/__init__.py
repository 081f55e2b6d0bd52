"""The drawing library in every page: plotly.js's own basic bundle, as published, in gzip.

The whole plotly.js, which the package plotly has, is four times as large, and the page uses nothing more of it.
``tests/plotly_bundle.py`` fetches the bundle anew.
"""

from __future__ import annotations

import gzip
from pathlib import Path

FOLDER = Path(__file__).parent
BUNDLE = FOLDER / "plotly-basic.min.js.gz"


def packed() -> bytes:
    """The bundle in gzip."""
    return BUNDLE.read_bytes()


def source() -> str:
    """The bundle as a script."""
    return gzip.decompress(packed()).decode()
