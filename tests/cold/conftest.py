"""The installed environment of AMPMEM_COLD, and a folder that all processes of a run of pytest share."""

import os
from pathlib import Path

import pytest
from support.cold import Cold

VARIABLE = "AMPMEM_COLD"


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """The commands of the environment that AMPMEM_COLD names; without it the test is skipped."""
    if VARIABLE not in os.environ:
        pytest.skip(f"no installed wheel: name an environment that has it in {VARIABLE}, as .ci/run does")
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cold"
    shared.mkdir(exist_ok=True)
    return Cold(installed=Path(os.environ[VARIABLE]).absolute(), shared=shared)
