"""The wire format of protocol buffers, as far as it takes to write a trace.

Source: "Encoding", protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_VARINT: Final = 0
_LENGTH: Final = 2


def varint(number: int) -> bytes:
    """A number from 0 on, in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def key(number: int) -> bytes:
    """What comes before the value of a field that holds a number."""
    return varint(number << 3 | _VARINT)


def field(number: int, value: int | str | bytes) -> bytes:
    """A field: a number from 0 on, a text, or a message that is encoded already."""
    if isinstance(value, int):
        return key(number) + varint(value)
    data = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return varint(number << 3 | _LENGTH) + varint(len(data)) + data


def message(fields: dict[int, int | str | bytes]) -> bytes:
    """A message without the length that a field puts before it."""
    return b"".join(field(number, value) for number, value in fields.items())


def width_of(largest: int) -> int:
    """How many bytes a number up to ``largest`` takes as a varint."""
    return max(1, -(-largest.bit_length() // 7))


def varints(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Numbers from 0 on as varints that all have ``width`` bytes, one in each row.

    Shorter ones are filled up with groups that are 0, which every reader of the format takes.
    """
    shifts = np.arange(width, dtype=np.int64) * 7
    groups = (numbers[:, np.newaxis] >> shifts & 0x7F).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups
