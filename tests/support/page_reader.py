"""Reads back what the HTML report holds, as the page's script does; nothing of the writing side is used."""

import base64
import gzip
import json
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampmem.analysis.timeline.categories import CATEGORIES

PHASES = ("setup", "data", "forward", "backward", "optimizer", "between", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A stream of mode ``exact``: a code and a time for every event."""

    header: dict[str, Any]
    codes: np.ndarray
    times_ns: np.ndarray
    places: np.ndarray | None

    def sums(self, size: list[int]) -> np.ndarray:
        """Bytes at every position, where each kind has ``size``."""
        kind, free = self.codes >> 1, self.codes & 1
        return np.append(0, np.cumsum(np.where(free, -1, 1) * np.array(size, dtype=np.int64)[kind]))

    @property
    def reserved(self) -> np.ndarray:
        """What is reserved at every position."""
        rows = zip(self.header["segments"]["since"], self.header["segments"]["bytes"], strict=True)
        changes = np.zeros(len(self.codes) + 2, dtype=np.int64)
        for since, size in rows:
            changes[since] += size
        return np.cumsum(changes)[:-1]

    @property
    def live(self) -> np.ndarray:
        """Bytes of each category at every position, shape (categories, events + 1)."""
        kind, free = self.codes >> 1, self.codes & 1
        delta = np.where(free, -1, 1) * np.array(self.header["kinds"]["bytes"], dtype=np.int64)[kind]
        category = np.array(self.header["kinds"]["category"], dtype=np.int64)[kind]
        live = np.zeros((len(CATEGORIES), len(kind) + 1), dtype=np.int64)
        for row in range(len(CATEGORIES)):
            live[row, 1:] = np.cumsum(delta * (category == row))
        return live

    def alive_at(self, position: int) -> np.ndarray:
        """How many allocations of each kind live at ``position``."""
        count = len(self.header["kinds"]["bytes"])
        kind, free = self.codes[:position] >> 1, self.codes[:position] & 1
        born = np.bincount(kind[free == 0], minlength=count)
        return born - np.bincount(kind[free == 1], minlength=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A stream of mode ``reduced``: the bytes of each category at some positions, and of the layers above them."""

    header: dict[str, Any]
    positions: np.ndarray
    times_ns: np.ndarray
    live: np.ndarray
    layers: np.ndarray


def page_data(page: str) -> dict[str, Any]:
    """The JSON block of a page, with the summary and the words of each run unpacked."""
    blocks = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, flags=re.DOTALL)
    assert len(blocks) == 1
    data: dict[str, Any] = json.loads(blocks[0])
    for run in data.get("runs", ()):
        run |= unpacked(run.pop("packed"))
    return data


def unpacked(packed: str) -> dict[str, Any]:
    """The JSON that the page has of a run in gzip and base64: ``summary`` and ``said``."""
    words: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return words


def scripts(page: str) -> list[str]:
    """The scripts that a browser would run."""
    return re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)


def container(packed: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and what follows it."""
    whole = gzip.decompress(packed)
    (length,) = struct.unpack("<I", whole[:4])
    assert (4 + length) % 8 == 0
    return json.loads(whole[4 : 4 + length]), whole[4 + length :]


def exact(packed: bytes | str) -> Exact:
    """A stream of mode ``exact``, from bytes or from the page's base64."""
    header, rest = container(packed if isinstance(packed, bytes) else base64.b64decode(packed))
    widths = header["code_bytes"] + header["time_bytes"] + header.get("place_bytes", 0)
    events = len(rest) // widths
    assert len(rest) == events * widths
    planes = np.frombuffer(rest, dtype=np.uint8).reshape(widths, events).astype(np.int64)
    codes = sum((plane << 8 * place for place, plane in enumerate(planes[: header["code_bytes"]])), start=0)
    behind = header["code_bytes"] + header["time_bytes"]
    timed = planes[header["code_bytes"] : behind]
    deltas = sum((plane << 8 * place for place, plane in enumerate(timed)), start=0)
    places = None
    if "addresses" in header:
        places = np.asarray(sum((plane << 8 * place for place, plane in enumerate(planes[behind:])), start=0))
    times = header["start_ns"] + np.cumsum(deltas) * header["time_unit_ns"]
    return Exact(header=header, codes=np.asarray(codes), times_ns=times, places=places)


def reduced(packed: bytes | str) -> Reduced:
    """A stream of mode ``reduced``."""
    header, rest = container(packed if isinstance(packed, bytes) else base64.b64decode(packed))
    arrays = np.frombuffer(rest, dtype="<f8").reshape(-1, header["count"])
    assert len(arrays) == len(CATEGORIES) + (4 if header["layered"] else 2)
    assert (arrays == np.round(arrays)).all()
    positions, times, *series = arrays.astype(np.int64)
    live, layers = np.array(series[: len(CATEGORIES)]), np.array(series[len(CATEGORIES) :])
    return Reduced(header=header, positions=positions, times_ns=times, live=live, layers=layers)
