"""Every program ends as it does without ampmem."""

from pathlib import Path

import pytest
from support.guest import NAMES, beside

pytestmark = pytest.mark.slow

TESTS = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
REST = tuple(name for name in NAMES if not name.startswith("fork") and f'"{name}"' not in TESTS)
"""Those that fork, and those that are named in a test, are run there, which looks for differences too."""


@pytest.mark.parametrize("name", REST)
def test_a_program_ends_as_without_ampmem(tmp_path: Path, name: str) -> None:
    assert beside(tmp_path, name, to_the_end=True).differences() == []
