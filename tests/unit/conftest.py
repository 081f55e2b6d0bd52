from pathlib import Path

import pytest
from golden_sections import Golden


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """Compares the texts of a test with those in the file beside its module."""
    return Golden(request.path.with_suffix(".txt"), request.node.name, tmp_path)
