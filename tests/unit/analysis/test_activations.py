"""Activations by kind and type, on crafted recordings."""

import pytest
from support.build import Story

from ampmem.analysis.activations import ActivationGroup, activation_groups, plain_groups, savings
from ampmem.analysis.analyse import analyse
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Fact, Phase


def groups(*saved: tuple[str, str, int], op: str = "aten::made") -> list[tuple[str, str | None, int, int]]:
    """The groups of tensors that are saved by these ops, of these types and sizes; by no op for an empty name."""
    story = Story()
    story.parameter(0x10, "weight", 1)
    story.begin(0, Phase.FORWARD)
    for number, (name, dtype, size) in enumerate(saved):
        address = 0x1000 + number
        story.tensor(Fact.OUTPUT, address, size, "aten::made", op=op, dtype="float64")
        if name:
            story.fact(Fact.SAVED, address, name, dtype=dtype)
    story.enter(Phase.BACKWARD)
    story.free(*(0x1000 + number for number in range(len(saved))))
    story.end()
    analysis = analyse(story.recording())
    mark = analysis.marks[0].after_forward
    assert mark is not None
    position = analysis.timeline.position(mark)
    found = activation_groups(analysis, analysis.saved_as, position)
    assert sum(group.bytes for group in found) == analysis.timeline.breakdown(position)[Category.ACTIVATIONS]
    return [(group.kind, group.dtype, group.tensors, group.bytes) for group in found]


@pytest.mark.parametrize(
    ("op", "dtype", "kind"),
    [
        ("aten::native_layer_norm", "float32", "norms"),
        ("aten::native_batch_norm", "bfloat16", "norms"),
        ("aten::_softmax", "float32", "softmax"),
        ("aten::_log_softmax", "float32", "softmax"),
        ("aten::nll_loss_forward", "float32", "loss"),
        ("aten::binary_cross_entropy_with_logits", "float32", "loss"),
        ("aten::masked_fill", "bool", "masks"),
        ("aten::native_dropout", "uint8", "masks"),
        ("aten::masked_fill", "uint8", "masks"),
        ("aten::where", "bool", "masks"),
        ("aten::mkldnn_rnn_layer", "uint8", "workspace of mkldnn_rnn_layer"),
        ("aten::mkldnn_rnn_layer", "float32", "aten::mkldnn_rnn_layer"),
        ("aten::_cudnn_rnn", "uint8", "workspace of _cudnn_rnn"),
        ("aten::cudnn_batch_norm", "uint8", "workspace of cudnn_batch_norm"),
        ("Quantized", "uint8", "Quantized"),
        ("aten::embedding", "int64", "indices"),
        ("aten::nll_loss_forward", "int64", "indices"),
        ("aten::addmm", "bfloat16", "aten::addmm"),
        ("Square", "float32", "Square"),
    ],
)
def test_kinds(op: str, dtype: str, kind: str) -> None:
    assert groups((op, dtype, 10)) == [(kind, dtype, 1, 10)]


def test_what_no_op_saved_is_named_after_the_op_that_made_it() -> None:
    assert groups(("", "", 10)) == [("unsaved aten::made", "float64", 1, 10)]
    assert groups(("", "", 10), op="") == [("unsaved", "float64", 1, 10)]


def test_groups_are_of_one_kind_and_type_and_sorted_by_size() -> None:
    found = groups(
        ("aten::mm", "float32", 10),
        ("aten::mm", "bfloat16", 100),
        ("aten::mm", "float32", 30),
        ("aten::_softmax", "float32", 60),
    )
    assert found == [
        ("aten::mm", "bfloat16", 1, 100),
        ("softmax", "float32", 1, 60),
        ("aten::mm", "float32", 2, 40),
    ]


def test_the_first_op_that_saved_counts() -> None:
    story = Story()
    story.parameter(0x10, "weight", 1)
    story.begin(0, Phase.FORWARD)
    story.tensor(Fact.SAVED, 0x1000, 8, "aten::_softmax", op="aten::_softmax", dtype="float32")
    story.fact(Fact.SAVED, 0x1000, "aten::mm", dtype="float32")
    story.end(Phase.BACKWARD)
    analysis = analyse(story.recording())
    mark = analysis.marks[0].after_forward
    assert mark is not None
    (group,) = activation_groups(analysis, analysis.saved_as, analysis.timeline.position(mark))
    assert group.kind == "softmax"


def several() -> tuple[ActivationGroup, ...]:
    """What two modules and the script keep: two norms, a masked softmax, the loss, and what no op saved."""
    story = Story()
    story.parameter(0x10, "weight", 1)
    story.begin(0, Phase.FORWARD)
    made = [  # address, bytes, made by, in module, saved for, type
        (0x1000, 100, "aten::add", "block.0", "aten::native_layer_norm", "float32"),
        (0x2000, 200, "aten::add", "block.1", "aten::native_layer_norm", "float32"),
        (0x3000, 7, "aten::native_layer_norm", "block.1", "aten::native_layer_norm", "float32"),
        (0x4000, 50, "aten::addmm", "block.0", "aten::gelu", "bfloat16"),
        (0x5000, 400, "aten::_log_softmax", "", "aten::_log_softmax", "float32"),
        (0x6000, 30, "aten::_softmax", "block.0", "aten::_softmax", "float32"),
        (0x7000, 3, "aten::ge", "block.0", "aten::where", "bool"),
        (0x8000, 60, "aten::mm", "head", "", "bfloat16"),
    ]
    for address, size, op, module, saved, dtype in made:
        story.alloc(address, size, op=op, module=module)
        story.fact(Fact.OUTPUT, address, op, dtype=dtype)
        if saved:
            story.fact(Fact.SAVED, address, saved, dtype=dtype)
    story.end(Phase.BACKWARD)
    analysis = analyse(story.recording())
    mark = analysis.marks[0].after_forward
    assert mark is not None
    return activation_groups(analysis, analysis.saved_as, analysis.timeline.position(mark))


def test_a_group_says_what_saved_and_made_its_tensors_and_where() -> None:
    groups = {(group.kind, group.dtype): group for group in several()}
    norms = groups["norms", "float32"]
    assert [(part.saved_for, part.made_by, part.module, part.tensors, part.bytes) for part in norms.parts] == [
        ("aten::native_layer_norm", "aten::add", "block.1", 1, 200),
        ("aten::native_layer_norm", "aten::add", "block.0", 1, 100),
        ("aten::native_layer_norm", "aten::native_layer_norm", "block.1", 1, 7),
    ]
    (unsaved,) = groups["unsaved aten::mm", "bfloat16"].parts
    assert (unsaved.saved_for, unsaved.made_by, unsaved.module) == (None, "aten::mm", "head")
    (loss, attention) = groups["softmax", "float32"].parts
    assert (loss.module, attention.module) == (None, "block.0")


def test_groups_in_words_tell_the_loss_from_other_softmaxes_and_lose_nothing() -> None:
    found = [(group.kind, group.dtype, group.tensors, group.bytes) for group in plain_groups(several())]
    assert found == [
        ("the loss", "float32", 1, 400),
        ("norms", "float32", 3, 307),
        ("not saved by any op", "bfloat16", 1, 60),
        ("gelu", "bfloat16", 1, 50),
        ("softmax", "float32", 1, 30),
        ("masks", "bool", 1, 3),
    ]


def test_savings_pair_the_op_that_saved_with_the_one_that_made() -> None:
    found = [(each.saved_for, each.made_by, each.dtype, each.tensors, each.bytes) for each in savings(several())]
    assert found == [
        ("log-softmax", "log-softmax", "float32", 1, 400),
        ("layer norm", "add", "float32", 2, 300),
        (None, "mm", "bfloat16", 1, 60),
        ("gelu", "addmm", "bfloat16", 1, 50),
        ("softmax", "softmax", "float32", 1, 30),
        ("layer norm", "layer norm", "float32", 1, 7),
        ("where", "ge", "bool", 1, 3),
    ]
