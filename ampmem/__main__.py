"""Runs the command ``ampmem`` for ``python -m ampmem``."""

from __future__ import annotations

from ampmem.cli.main import main

if __name__ == "__main__":
    main()
