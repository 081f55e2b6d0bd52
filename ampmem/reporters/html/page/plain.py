"""From typed views to what JSON has; every text becomes visible and bounded on the way."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import is_dataclass

from ampmem.analysis.jsonable import Json, json_fields
from ampmem.reporters.html.safety import MAX_PROSE, visible


def plain(value: object) -> Json:
    """``value`` with dataclasses as objects, bytes in base64, and ``None`` for numbers that JSON does not have."""
    if is_dataclass(value):
        return {key: plain(getattr(value, item.name)) for key, item in json_fields(value)}
    if isinstance(value, Mapping):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, str):
        return visible(value, MAX_PROSE)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    raise TypeError(f"the page cannot hold a {type(value).__name__}")
