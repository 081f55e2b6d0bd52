"""Of what tensor an allocation is, on crafted recordings."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.build import Story

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.largest import largest
from ampmem.analysis.timeline.lifetimes import dtype_bytes, tensor_sizes
from ampmem.events import OTHER_THREADS, Fact
from ampmem.names import shape_of, shape_text

TYPES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "a type of tomorrow's": None}
FACTS = st.tuples(
    st.sampled_from([Fact.OUTPUT, Fact.SAVED, Fact.GRADIENT, Fact.VIEW_CAST]),
    st.sampled_from([*TYPES, ""]),
    st.lists(st.integers(0, 5) | st.just(1 << 60), max_size=3).map(shape_text) | st.just(""),
)


def known(analysis: Analysis) -> list[tuple[str, str]]:
    texts, tensors = analysis.recording.texts, analysis.tensors
    return [(texts[dtype], texts[shape]) for dtype, shape in zip(tensors.dtype, tensors.shape, strict=True)]


def of(size: int, *facts: tuple[Fact, str, str]) -> tuple[str, str]:
    """The type and the shape of an allocation of ``size`` bytes with these facts."""
    story = Story()
    story.alloc(0x1000, size)
    for fact, dtype, shape in facts:
        story.fact(fact, 0x1000, dtype=dtype, shape=shape)
    (found,) = known(analyse(story.recording()))
    return found


def test_what_it_is_for_counts_before_what_it_was_born_as_and_that_before_what_was_saved() -> None:
    saved = (Fact.SAVED, "float32", "[6, 4]")
    born = (Fact.OUTPUT, "float32", "[4, 6]")
    assert of(96, saved) == ("float32", "[6, 4]")
    assert of(96, saved, born) == ("float32", "[4, 6]")
    assert of(96, saved, born, (Fact.PARAMETER, "float32", "[24]")) == ("float32", "[24]")
    assert of(96, born, (Fact.OUTPUT, "float32", "[24]")) == ("float32", "[4, 6]")


@pytest.mark.parametrize("shape", ["[3, 4]", "[5, 5]", ""])
def test_a_tensor_that_does_not_fill_the_allocation_gives_its_type_alone(shape: str) -> None:
    assert of(96, (Fact.PARAMETER, "float32", shape)) == ("float32", "")
    assert of(96, (Fact.PARAMETER, "float32", shape), (Fact.SAVED, "float32", "[24]")) == ("float32", "[24]")


def test_a_scalar_has_a_shape() -> None:
    assert of(4, (Fact.OUTPUT, "float32", "[]")) == ("float32", "[]")


def test_the_largest_say_type_and_shape_as_data() -> None:
    story = Story()
    for address, shape in ((0x1000, "[2, 3]"), (0x2000, "[]"), (0x3000, "")):
        story.tensor(Fact.OUTPUT, address, 24 if address == 0x1000 else 4, dtype="float32", shape=shape)
    analysis = analyse(story.recording())
    found = largest(analysis, analysis.tensors, 3)
    assert [(each.dtype, each.shape) for each in found] == [("float32", (2, 3)), ("float32", ()), ("float32", None)]


def test_types_that_differ_are_none_unless_one_fills_the_allocation() -> None:
    as_bytes = (Fact.SAVED, "uint8", "[3]")
    assert of(96, as_bytes, (Fact.OUTPUT, "float32", "[3, 4]")) == ("", "")
    assert of(96, as_bytes, (Fact.OUTPUT, "float32", "[24]")) == ("float32", "[24]")


def test_nothing_is_known_without_facts_and_of_other_threads() -> None:
    assert of(96) == ("", "")
    assert of(96, (Fact.SAVED, "", "")) == ("", "")
    story = Story()
    story.alloc(OTHER_THREADS, 4)
    story.scratch(0x1000, 4)
    story.tensor(Fact.OUTPUT, 0x1000, 4, dtype="float32", shape="[]")
    assert known(analyse(story.recording())) == [("", ""), ("", ""), ("float32", "[]")]


@settings(max_examples=200)
@given(st.integers(1, 200), st.lists(FACTS, max_size=4))
def test_a_shape_fills_its_allocation_and_a_type_is_one_that_was_seen(
    size: int, facts: list[tuple[Fact, str, str]]
) -> None:
    dtype, shape = of(size, *facts)
    seen = {kind for _, kind, _ in facts if kind}
    filling = {(kind, form) for _, kind, form in facts if fills(size, kind, form)}
    if filling:
        assert (dtype, shape) in filling
    else:
        assert (dtype, shape) == (next(iter(seen)) if len(seen) == 1 else "", "")


def fills(size: int, dtype: str, text: str) -> bool:
    each, shape = TYPES.get(dtype), shape_of(text)
    return each is not None and shape is not None and each * math.prod(shape) == size


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", "[3, 4]", 48),
        ("float32", "[]", 4),
        ("float32", "[0, 7]", 0),
        ("complex128", "[3]", 48),
        ("bfloat16", f"[{(1 << 62) - 1}]", (1 << 63) - 2),
        ("bfloat16", f"[{1 << 62}]", -1),  # beyond what a column holds
        ("float32", "", -1),
        ("", "[3]", -1),
        ("a type of tomorrow's", "[3]", -1),
    ],
)
def test_the_size_of_a_tensor_is_its_elements_times_their_bytes(dtype: str, shape: str, size: int) -> None:
    texts = ["", dtype, shape, "[1]"]
    kinds, forms = np.array([1, 1, 0]), np.array([2, 3, 2])
    each = dtype_bytes(dtype)
    assert tensor_sizes(kinds, forms, texts).tolist() == [size, -1 if each is None else each, -1]


def test_the_bytes_of_types_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    types = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    unknown = {name for name, kind in types.items() if dtype_bytes(name) != kind.itemsize}
    # Of these no tensor has elements of whole bytes, or none at all can be made.
    assert all(name.startswith(("int", "uint", "bits", "quint")) for name in unknown), unknown
    assert not unknown & {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
