"""The bytes that hold the events of one recording: a header in JSON, arrays behind it, and gzip around both."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ampmem.analysis.json.jsonable import Json
from ampmem.events import Column

LEVEL = 5
"""Of gzip; more makes long recordings half a percent smaller in twice the time."""

_GZIP = 31
"""zlib's word for a gzip stream, without a name or a time in it."""

_CHUNK = 1 << 20


def framed(header: Mapping[str, Json]) -> bytes:
    """Length and text of ``header``, padded so that what follows begins at a multiple of eight bytes."""
    text = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 4) % 8)
    return struct.pack("<I", len(text)) + text


def planes(column: Column) -> list[bytes]:
    """The bytes of non-negative ``column``: all the lowest ones, then the next higher ones, as many as it needs."""
    width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
    by_byte = column.astype("<i8").view(np.uint8).reshape(len(column), 8)
    return [by_byte[:, plane].tobytes() for plane in range(width)]


def compressed(parts: Iterable[bytes]) -> bytes:
    """``parts`` in gzip."""
    return b"".join(_squeezed(parts))


def compressed_within(parts: Iterable[bytes], limit: int) -> bytes | None:
    """``parts`` in gzip, or ``None`` as soon as that is more than ``limit`` bytes."""
    out, size = [], 0
    for squeezed in _squeezed(parts):
        out.append(squeezed)
        size += len(squeezed)
        if size > limit:
            return None
    return b"".join(out)


def base64_of(packed: bytes) -> str:
    """``packed`` as the page has it."""
    return base64.b64encode(packed).decode("ascii")


def _squeezed(parts: Iterable[bytes]) -> Iterator[bytes]:
    squeezer = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            yield squeezer.compress(view[start : start + _CHUNK])
    yield squeezer.flush()
