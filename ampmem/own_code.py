"""Which code is ampmem's own where it runs beside a script: no line of it is the script's."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent

OWN_FOLDERS = tuple(str(_PACKAGE / name) + os.sep for name in ("cli", "recorder", "simulator"))
"""What the file of a frame of ampmem's own starts with; ``ampmem.workloads`` are scripts like any other."""

RUNNER = str(_PACKAGE / "recorder" / "script.py")
"""The file that runs the script: what called it is none of the script's."""
