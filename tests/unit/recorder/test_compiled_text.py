"""What the texts of compiled graphs say of their buffers: texts that Inductor wrote, without the bodies of kernels.

All are of one program: ``x + down(relu(up(norm(x))))`` twice, under bf16 autocast, ``up`` with a bias, and at last the
mean of squares. Its arguments are ``norm.weight, norm.bias, x, up.weight, up.bias, down.weight`` and the same without
``x`` of the second block.
"""

from pathlib import Path

import pytest

from ampmem.recorder.compiled.text import BufferContents, Text

DATA = Path(__file__).parents[2] / "data/inductor"
KINDS = ("2.14.1-cuda", "2.13.0-cpu")
WEIGHTS = ["primals_4", "primals_6", "primals_9", "primals_11"]


def read(kind: str, direction: str) -> Text:
    return Text((DATA / f"{kind}-{direction}.txt").read_text())


def held(text: Text) -> list[BufferContents]:
    """What each allocation holds, in order."""
    found = [text.at(line) for line, _ in text.allocations]
    assert None not in found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_results_and_sizes(kind: str) -> None:
    forward, backward = read(kind, "forward"), read(kind, "backward")
    assert (forward.trains, forward.backward, backward.trains, backward.backward) == (True, False, False, True)
    assert forward.inputs == tuple(f"primals_{number}" for number in range(1, 12))
    assert len(forward.returned) == len(backward.inputs) == 17  # the loss takes the place of its gradient
    assert backward.inputs[-1] == "tangents_1"
    widths = {"float32": 4, "bfloat16": 2}
    for text in (forward, backward):
        for (_, size), each in zip(text.allocations, held(text), strict=True):
            elements = 1
            for length in each.layout.shape:
                assert length is not None
                elements *= length
            assert size == elements * widths[each.dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_weights_are_told_by_the_argument(kind: str) -> None:
    text = read(kind, "forward")
    copies = [each for each in held(text) if each.cast in (*WEIGHTS, "primals_5", "primals_10")]
    assert [each.cast for each in copies if len(each.shape) > len("[64]")] == WEIGHTS
    assert {each.shape for each in copies if each.cast in WEIGHTS} <= {"[64, 32]", "[32, 64]"}
    assert {each.dtype for each in copies} == {"bfloat16"}
    # The second bias is copied into the memory of the first one's copy.
    (bias,) = (each for each in copies if each.cast == "primals_5")
    assert [other.cast for other in bias.others] == ["primals_10"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_backward_are_the_gradients_of_arguments(kind: str) -> None:
    text = read(kind, "backward")
    kept = [each.gradient for each in held(text) if each.dtype == "float32" and each.gradient is not None]
    assert {0, 1, 3, 4, 5, 6, 7, 8, 9, 10} - set(kept) == set()  # 2 is x, which needs none
    assert text.returned[2] == ""


def test_nodes_of_dynamos_graph_are_found_by_their_comments() -> None:
    text = read("2.14.1-cuda", "forward")
    assert text.understood
    found = [(each.op, each.sources[0], each.shape) for each in held(text) if not each.cast]
    assert found == [
        ("aten::native_layer_norm", "layer_norm", "[16, 1]"),
        ("aten::native_layer_norm", "layer_norm", "[16, 1]"),
        ("aten::_to_copy", "linear", "[16, 32]"),
        ("aten::relu", "relu", "[16, 64]"),
        ("aten::mm", "linear_1", "[16, 32]"),
        ("aten::native_layer_norm", "layer_norm_1", "[16, 1]"),
        ("aten::native_layer_norm", "layer_norm_1", "[16, 1]"),
        ("aten::_to_copy", "linear_2", "[16, 32]"),
        ("aten::relu", "relu_1", "[16, 64]"),
        ("aten::mm", "linear_3", "[16, 32]"),
        ("aten::mean", "mean", "[]"),
        ("aten::mul", "mul_4", "[16, 32]"),
    ]
    # Equal kernels are one kernel, and its comment is that of the first call.
    assert [each.sources for each in held(text) if each.cast in WEIGHTS] == [
        ("linear",),
        ("linear_1",),
        ("linear_2",),
        ("linear_3",),
    ]


def test_a_saved_tensor_is_kept_for_the_op_that_reads_it_in_backward() -> None:
    text = read("2.14.1-cuda", "backward")
    readers = {name: text.reader(name) for name in text.inputs}
    assert readers["primals_7"] == "aten::native_layer_norm"
    assert {readers[name] for name in text.inputs if name.startswith(("permute", "view"))} == {"aten::mm"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_lacks_lines_is_read_as_far_as_it_goes(kind: str, direction: str) -> None:
    lines = (DATA / f"{kind}-{direction}.txt").read_text().splitlines()
    whole = held(Text("\n".join(lines)))
    for at in range(0, len(lines), 5):
        text = Text("\n".join([*lines[:at], "", *lines[at + 1 :]]))
        assert {each.cast for each in held(text)} <= {each.cast for each in whole} | {"", *text.inputs}
    assert Text("").allocations == []


TEMPLATE = """
# Topologically Sorted Source Nodes: [attend], Original ATen: [flex_attention]
# Source node to ATen node mapping:
#   attend => flex_attention
triton_tem_0 = async_compile.triton('triton_tem_0', '''
def triton_tem_0(arg_V, arg_LSE, arg_IDX, out_ptr0):
''')
def call(args):
    primals_1, primals_2 = args
    buf0 = empty_strided_cuda((2, 4), (4, 1), torch.float32)
    buf1 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)
    # Topologically Sorted Source Nodes: [attend], Original ATen: [flex_attention]
    triton_tem_0.run(primals_1, buf0, primals_2, buf1, 1, stream=raw_stream0)
    return (buf1, buf0)
"""


def test_a_template_fills_what_it_is_given_empty() -> None:
    sums, result = held(Text(TEMPLATE))
    assert (sums.op, sums.sources, sums.dtype) == ("aten::flex_attention", ("attend",), "float32")
    assert (result.op, result.sources) == ("aten::flex_attention", ("attend",))
    assert sums.reads == result.reads == ("primals_1", "primals_2")
