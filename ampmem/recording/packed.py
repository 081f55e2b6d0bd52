"""A recording as one text and back, for files of other formats that have room for a text: written and read there."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ampmem.errors import RecordingError, UsageError
from ampmem.events import Recording
from ampmem.recording.kinds import is_recording
from ampmem.recording.reader import read
from ampmem.recording.writer import write_recording

PACKED: Final = "ampmem recording, a file in zlib and base64: "
"""What such a text begins with."""

# A recording takes some 200 bytes for each event with its facts, and zlib makes a third to a tenth of that.
_LEAST: Final = 4 << 20
_FOR_EACH_EVENT: Final = 1 << 10
_FOR_EACH_BYTE: Final = 12
_PIECE: Final = 1 << 16


def pack(recording: Recording) -> str:
    """``recording``, whole, as a text that :func:`unpack` reads. Raises :class:`UsageError` when no disk has room."""
    try:
        with TemporaryDirectory(prefix="ampmem-") as folder:
            path = Path(folder) / "recording"
            write_recording(path, recording)
            return PACKED + base64.b64encode(b"".join(_squeezed(path))).decode("ascii")
    except OSError as error:
        raise UsageError(f"cannot write a temporary file: {error}") from error


def _squeezed(path: Path) -> Iterator[bytes]:
    packer = zlib.compressobj()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            yield packer.compress(piece)
    yield packer.flush()


def unpack(text: str, events: int) -> Recording:
    """The recording in ``text``, which may be anybody's; it is to have about as many ``events``.

    Raises :class:`RecordingError` for a text that is damaged, or holds more than a recording of so many events would;
    :class:`UsageError` when no disk has room.
    """
    try:
        packed = base64.b64decode(text.removeprefix(PACKED).encode("ascii"), validate=True)
        with TemporaryDirectory(prefix="ampmem-") as folder:
            path = Path(folder) / "recording"
            most = _LEAST + _FOR_EACH_EVENT * events + _FOR_EACH_BYTE * len(packed)
            with path.open("wb") as stream:
                for piece in _stretched(packed, most):
                    stream.write(piece)
            if not is_recording(path):
                raise ValueError("what was packed is not a recording")
            try:
                return read(path)
            except RecordingError as error:
                raise RecordingError(str(error).replace(str(path), "it")) from None
    except (ValueError, binascii.Error, zlib.error) as error:
        raise RecordingError(f"it is damaged ({error})") from None
    except OSError as error:
        raise UsageError(f"cannot write a temporary file: {error}") from error


def _stretched(packed: bytes, most: int) -> Iterator[bytes]:
    """The bytes that were packed, in pieces. Raises ``ValueError`` for more than ``most``, and for what has no end."""
    unpacker, rest = zlib.decompressobj(), packed
    while piece := unpacker.decompress(rest, _PIECE):
        most -= len(piece)
        if most < 0:
            raise ValueError("it is too large for its events")
        yield piece
        rest = unpacker.unconsumed_tail
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut off, or has something after its end")
