"""Every program ends as it does without ampmem."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest import NAMES, beside


@pytest.mark.parametrize("name", NAMES)
def test_a_program_ends_as_without_ampmem(tmp_path: Path, name: str) -> None:
    assert beside(tmp_path, name).differences() == []
