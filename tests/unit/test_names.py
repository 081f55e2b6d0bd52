import pytest

from ampmem.names import StateName, layers, layers_named, natural, of_all_layers, shape_of, shape_text


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


def test_layers_are_told_by_numbers_that_stand_alone() -> None:
    assert of_all_layers("h.11.attn.c_proj.weight") == "h.*.attn.c_proj.weight"
    assert of_all_layers("exp_avg of layers.0.1.weight") == "exp_avg of layers.*.*.weight"
    assert of_all_layers("layer1.conv2d.norm") == "layer1.conv2d.norm"


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["h.10.b", "h.2.b", "h.2.a", "h", "10"], key=natural) == ["10", "h", "h.2.a", "h.2.b", "h.10.b"]


def test_equal_layers_are_grouped_where_the_first_stood() -> None:
    items = [("h.10", 100), ("wte", 500), ("h.2", 101), ("h.3", 120), (None, 7), ("h.1", 100)]
    groups = layers(items, what=lambda item: (item[0],), sizes=lambda item: (item[1],))
    assert groups == [[("h.1", 100), ("h.2", 101), ("h.10", 100)], [("wte", 500)], [("h.3", 120)], [(None, 7)]]
    assert [layers_named([name for name, _ in group if name]) for group in groups[:3]] == ["h.* (3)", "wte", "h.3"]
    assert layers_named(["MmBackward0", "MmBackward0"], more=True) == "MmBackward0 (2 or more)"
