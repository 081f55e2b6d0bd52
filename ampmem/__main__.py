"""``python -m ampmem`` is the command ``ampmem``."""

from __future__ import annotations

from ampmem.cli.main import main

if __name__ == "__main__":
    main()
