"""Recordings as a self-contained HTML page that needs only a browser."""

from __future__ import annotations

from ampmem.reporters.html.write import write, write_difference

__all__ = ["write", "write_difference"]
