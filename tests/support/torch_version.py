"""Which torch runs, for tests of what not every version has."""

import torch


def older_than(version: str) -> bool:
    """Whether torch is older than ``version``, such as ``2.12``."""
    return _numbers(torch.__version__) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number, of ``2.12.1+cu130`` and ``2.16.0a0`` too."""
    return tuple(int(part) for part in version.split(".")[:2])
