"""The JSON Schema of the summary."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import cast

from ampmem.analysis.summary import Json


def schema() -> dict[str, Json]:
    """The schema of ``ampmem show --json`` (JSON Schema 2020-12), from ``summary.schema.json``."""
    text = files("ampmem.analysis").joinpath("summary.schema.json").read_text(encoding="utf-8")
    return cast(dict[str, Json], json.loads(text))
