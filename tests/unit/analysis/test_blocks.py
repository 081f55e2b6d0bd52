"""Which modules can be checkpointed, by the names of a model's parameters, and which come first."""

import pytest

from ampmem.analysis.blocks import Blocks, names_of_blocks
from ampmem.events import ParameterRecord


def parameters(*modules: str, width: int = 8, kind: str = "Linear") -> tuple[ParameterRecord, ...]:
    """A layer in each of ``modules``, with a weight."""
    return tuple(
        ParameterRecord(
            name=f"{module}.weight", elements=width, bytes=4 * width, dtype="float32", trainable=True,
            shape=(width,), kind=kind,
        )
        for module in modules
    )  # fmt: skip


def widening(*modules: str) -> tuple[ParameterRecord, ...]:
    """The same, each wider than the one before."""
    return tuple(each for width, module in enumerate(modules, 1) for each in parameters(module, width=width))


BN = parameters("layers.2.norm", kind="BatchNorm2d")
MODELS = {
    "blocks of one list": (parameters("embed", "h.0.up", "h.1.up", "head"), ("h.0", "h.1")),
    "among layers that are no blocks": (parameters("0", "1.up", "2.up", "3"), ("1", "2")),
    "layers with none inside": (parameters("0", "1", "2"), ()),
    "one block": (parameters("embed", "h.0.up"), ()),
    "unequal ones beside equal ones": (
        (*parameters("h.0.up", "h.1.up"), *parameters("h.2.up", width=9)),
        ("h.0", "h.1", "h.2"),
    ),
    "unequal ones": (widening("ups.0.conv", "ups.1.conv", "ups.2.conv"), ("ups.0", "ups.1", "ups.2")),
    "stages of blocks": (
        (
            *parameters("stages.0.blocks.0.up", "stages.0.blocks.1.up"),
            *parameters("stages.1.blocks.0.up", "stages.1.blocks.1.up", width=16),
        ),
        ("stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"),
    ),
    "lists of their own": (
        (*parameters("encoder.0.up", "encoder.1.up"), *parameters("decoder.0.up", "decoder.1.up", width=16)),
        ("encoder.0", "encoder.1", "decoder.0", "decoder.1"),
    ),
    "heads in a block": (
        parameters("h.0.heads.0.q", "h.0.heads.1.q", "h.1.heads.0.q", "h.1.heads.1.q"),
        ("h.0", "h.1"),
    ),
    "batch norm in some": ((*parameters("layers.0.up", "layers.1.up", "layers.2.up"), *BN), ("layers.0", "layers.1")),
    "batch norm in all": (parameters("h.0.norm", "h.1.norm", kind="BatchNorm2d"), ("h.0", "h.1")),
}
"""Parameters, and which modules are blocks."""


@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_found_by_the_names_and_shapes_of_parameters(model: str) -> None:
    made, expected = MODELS[model]
    assert names_of_blocks(made) == expected


def test_what_has_no_forward_is_not_a_block() -> None:
    made = widening("downs.0.0.conv", "downs.0.1.conv", "downs.1.0.conv", "downs.1.1.conv")
    ran = frozenset({"", "downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1"})
    assert names_of_blocks(made, ran) == ("downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1")
    assert names_of_blocks(made, ran - {"downs.1.0"}) == ("downs.0.0", "downs.0.1", "downs.1.1")


def test_a_list_of_lists_has_blocks_in_those() -> None:
    made = parameters("ups.0.0.conv", "ups.0.1.conv", "ups.1.0.conv", "ups.1.1.conv")
    assert names_of_blocks(made) == ("ups.0", "ups.1")
    assert names_of_blocks(made, frozenset({"ups.0.0", "ups.0.1", "ups.1.0"})) == ("ups.0.0", "ups.0.1", "ups.1.0")


NAMES = ("a.0", "a.1", "b.0", "b.1")


@pytest.mark.parametrize(
    ("saved", "flops", "best"),
    [
        ((), (), NAMES),
        ((5, 5, 5, 5), (2, 2, 2, 2), NAMES),
        ((1, 2, 3, 4), (1, 1, 1, 1), NAMES[::-1]),
        ((8, 8, 8, 8), (4, 2, 4, 1), ("b.1", "a.1", "a.0", "b.0")),
        ((1000, 1001, 1002, 1003), (1, 1, 1, 1), NAMES),  # about equal
        ((9, 1, 9, 9), (3, 0, 3, 3), ("a.1", "a.0", "b.0", "b.1")),  # what computes nothing costs nothing
        ((1, 2, 2, 1), (), ("a.1", "b.0", "a.0", "b.1")),  # a real device counts none
    ],
)
def test_what_saves_most_for_a_flop_comes_first(
    saved: tuple[int, ...], flops: tuple[int, ...], best: tuple[str, ...]
) -> None:
    blocks = Blocks(names=NAMES, saved_bytes=saved, flops=flops)
    assert blocks.best == best
    for count in range(5):
        assert blocks.first(count) == tuple(name for name in NAMES if name in best[:count])


def test_a_choice_is_written_by_slices_or_by_names() -> None:
    blocks = Blocks(names=NAMES)
    assert blocks.in_code(("a.0", "a.1")) == "model.a[:2]"
    assert blocks.in_code(("a.1",)) == "map(model.get_submodule, ('a.1',))"
    assert blocks.in_code(("a.0", "b.0")) == "map(model.get_submodule, ('a.0', 'b.0'))"
    assert Blocks(names=("0", "1")).in_code(("0",)) == "model[:1]"
    assert Blocks(names=("0.h.0", "0.h.1")).in_code(("0.h.0",)) == "model[0].h[:1]"
