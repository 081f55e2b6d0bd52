"""The activations as bars: what is in each, against sums over what was allocated."""

from collections import Counter
from dataclasses import replace

import pytest
from support.build import AMP, Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summary_of
from ampmem.events import Fact, Phase
from ampmem.reporters.html.run import MAX_MODULES, ActivationsView, PrecisionBar, activations_view

BLOCKS = 3
NORM, GELU, LOSS, MASK = 100, 40, 900, 7
FP32, BF16 = "float32", "bfloat16"


def view_of(story: Story, dtype: str | None = BF16) -> ActivationsView | None:
    story.end(Phase.BACKWARD)
    return activations_view(summary_of(analyse(story.recording(precision=replace(AMP, dtype=dtype)))))


def begun() -> Story:
    story = Story()
    story.parameter(0x10, "weight", 1)
    story.begin(0, Phase.FORWARD)
    return story


def keep(story: Story, size: int, made: str, module: str, saved: str, dtype: str) -> None:
    address = 0x1000 + story.alloc(0x1, 1)  # a new one each time
    story.free(0x1)
    story.alloc(address, size, op=made, module=module)
    story.fact(Fact.OUTPUT, address, made, dtype=dtype)
    if saved:
        story.fact(Fact.SAVED, address, saved, dtype=dtype)


def transformer() -> Story:
    story = begun()
    for block in range(BLOCKS):
        keep(story, NORM, "aten::add", f"blocks.{block}", "aten::native_layer_norm", FP32)
        keep(story, GELU, "aten::addmm", f"blocks.{block}.mlp.0", "aten::gelu", BF16)
        keep(story, MASK, "aten::ge", f"blocks.{block}.mlp.1", "aten::where", "bool")
    keep(story, LOSS, "aten::_log_softmax", "", "aten::_log_softmax", FP32)
    keep(story, 50, "aten::mm", "head", "", BF16)
    return story


def sizes(bar: PrecisionBar) -> tuple[int, int, int]:
    return bar.full, bar.low, bar.other


def test_every_bar_has_its_bytes_by_precision() -> None:
    view = view_of(transformer())
    assert (view.by, view.when) == ("saved for", "at the end of forward")
    assert {bar.label: sizes(bar) for bar in view.kinds} == {
        "the loss": (LOSS, 0, 0),
        "norms": (BLOCKS * NORM, 0, 0),
        "gelu": (0, BLOCKS * GELU, 0),
        "not saved by any op": (0, 50, 0),
        "masks": (0, 0, BLOCKS * MASK),
    }
    assert [bar.label for bar in view.kinds][:3] == ["the loss", "norms", "gelu"]
    assert {bar.label: bar.detail for bar in view.kinds} == {
        "the loss": "log-softmax",
        "norms": "layer norm",
        "gelu": "",
        "not saved by any op": "a variable or a checkpoint holds them; made by mm",
        "masks": "where",
    }
    assert sizes(view.whole) == (LOSS + BLOCKS * NORM, BLOCKS * GELU + 50, BLOCKS * MASK)
    words = view.words
    assert (words.full, words.low, words.other) == ("still float32", "bfloat16", "masks and indices")


def test_repeated_modules_are_one_bar_and_those_of_a_sequence_are_not() -> None:
    view = view_of(transformer())
    assert {bar.label: (*sizes(bar), bar.module) for bar in view.modules} == {
        "outside the modules": (LOSS, 0, 0, None),
        "blocks.*": (BLOCKS * NORM, 0, 0, "blocks.*"),
        "blocks.*.mlp.0": (0, BLOCKS * GELU, 0, "blocks.*.mlp.0"),
        "blocks.*.mlp.1": (0, 0, BLOCKS * MASK, "blocks.*.mlp.1"),
        "head": (0, 50, 0, "head"),
    }
    assert {bar.detail for bar in view.modules if "*" in bar.label} == {"3 modules"}
    assert view.modules_rest is None


def test_blocks_that_keep_nothing_below_them_are_one_bar() -> None:
    """As those of a checkpointed model, of which only the inputs are kept."""
    story = begun()
    for block in range(12):
        story.parameter(0x100000 + 0x100 * block, f"blocks.{block}.up.weight", 1)
        keep(story, 100, "aten::add", f"blocks.{block}", "", BF16)
    view = view_of(story)
    assert [(bar.label, bar.detail, bar.low) for bar in view.modules] == [("blocks.*", "12 modules", 1200)]


def test_what_the_bars_leave_out_is_one_more() -> None:
    story = begun()
    for number in range(MAX_MODULES + 5):
        keep(story, 1000 - number, "aten::mm", f"part{number}", "aten::mm", FP32)
    view = view_of(story)
    assert len(view.modules) == MAX_MODULES
    assert view.modules_rest.label == "5 more"
    assert view.modules_rest.full == sum(1000 - number for number in range(MAX_MODULES, MAX_MODULES + 5))
    assert sum(map(sum, map(sizes, (*view.modules, view.modules_rest)))) == sum(sizes(view.whole))


def test_where_nothing_was_seen_saved_the_bars_are_by_the_op_that_made_them() -> None:
    story = begun()
    for op, size in (("aten::mm", 20), ("aten::bmm", 30), ("aten::exp", 100), ("", 5)):
        keep(story, size, op, "", "", "")
    view = view_of(story, dtype=None)
    assert view.by == "made by"
    assert Counter({bar.label: bar.other for bar in view.kinds}) == {
        "element-wise ops": 100,
        "matmuls": 50,
        "an unknown op": 5,
    }
    assert view.words.other == "type not known"
    assert view.modules == ()


@pytest.mark.parametrize(("dtype", "word"), [(BF16, "still float32"), (None, "float32")])
def test_only_autocast_could_have_made_it_smaller(dtype: str | None, word: str) -> None:
    assert view_of(transformer(), dtype=dtype).words.full == word


def test_without_activations_there_is_no_view() -> None:
    assert view_of(begun()) is None
