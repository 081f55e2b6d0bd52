"""Recordings as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from ampmem.reporters.html.write import write

__all__ = ["write"]
