from __future__ import annotations

import pytest

from ampmem.names import StateName, shape_of, shape_text


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


@pytest.mark.parametrize(
    ("shape", "text"), [((), "[]"), ((3,), "[3]"), ((8, 0, 512), "[8, 0, 512]"), ((1,) * 64, None)]
)
def test_a_shape_is_read_as_it_is_written(shape: tuple[int, ...], text: str | None) -> None:
    assert shape_text(shape) == (text or str([*shape]))
    assert shape_of(shape_text(shape)) == shape


@pytest.mark.parametrize("shape", [(1,) * 65, (2, "s0"), (2, True)])
def test_a_shape_that_is_not_known_in_numbers_has_no_text(shape: tuple[object, ...]) -> None:
    assert shape_text(shape) == ""


@pytest.mark.parametrize("text", ["", "[", "3", "[3,4]", "[3, ]", "[-1]", "[٣]", "[3]\n", str([1] * 65), f"[{10**19}]"])
def test_what_is_no_shape_is_none(text: str) -> None:
    assert shape_of(text) is None
