"""Programs compute the same under ampmem as without it, whatever they do to their parameters."""

from pathlib import Path

import pytest
from support.field import plain, record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", ["lazy", "swapped_data", "compiled_gradient"])
def test_results_are_those_without_ampmem(tmp_path: Path, program: str) -> None:
    ran = record(tmp_path, program)
    assert ran.exit_code == 0, ran.said
    assert ran.counted == plain(tmp_path, program)
    assert ran.summary["conservation"]["residual_bytes"] == 0
    for mark in ran.last.values():
        assert mark["parameters"] == ran.counted["parameters"]
