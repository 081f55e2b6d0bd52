"""How much of a parameter is its own: several may lie in the same memory, which must count once."""

from __future__ import annotations

from ampmem.events import ParameterRecord


def own_bytes(record: ParameterRecord) -> int:
    """Bytes of ``record`` that no parameter before it has: none where it lies in another's memory."""
    return 0 if record.shares is not None else record.bytes - record.overlap


def own_elements(record: ParameterRecord) -> int:
    """The elements in :func:`own_bytes`."""
    return own_bytes(record) * record.elements // record.bytes if record.bytes else 0
