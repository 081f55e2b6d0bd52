"""Every program ends as it does without ampmem."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest import FRESH, NAMES, beside

REST = tuple(name for name in NAMES if not name.startswith("fork") and name not in FRESH)
"""Those that fork, and those that see how Python was started, have tests of their own."""


@pytest.mark.parametrize("name", REST)
def test_a_program_ends_as_without_ampmem(tmp_path: Path, name: str) -> None:
    assert beside(tmp_path, name).differences() == []
