from __future__ import annotations

import pytest

from ampmem.names import StateName


@pytest.mark.parametrize(
    ("text", "state", "parameter"),
    [
        ("exp_avg of h.0.weight", "exp_avg", "h.0.weight"),
        ("step", "step", ""),
        ("sum of squares of w", "sum of squares", "w"),
    ],
)
def test_a_state_is_read_as_it_is_written(text: str, state: str, parameter: str) -> None:
    name = StateName(state=state, parameter=parameter)
    assert str(name) == text
    assert StateName.read(text) == name
