"""Which op saved what, against what the autograd graph itself holds; and what the activations are."""

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import measure
from support.precisions import PRECISIONS, record
from torch import Tensor, nn

from ampmem.analysis.activations import activation_groups
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Fact

clean_start = measure.clean_start
pytestmark = pytest.mark.usefixtures("clean_start")

OPS = {
    "AddmmBackward0": "aten::addmm",
    "MmBackward0": "aten::mm",
    "NativeLayerNormBackward0": "aten::native_layer_norm",
    "GeluBackward0": "aten::gelu",
    "SoftmaxBackward0": "aten::_softmax",
    "LogSoftmaxBackward0": "aten::_log_softmax",
    "NllLossBackward0": "aten::nll_loss_forward",
    "EmbeddingBackward0": "aten::embedding",
    "MulBackward0": "aten::mul",
    "ReluBackward0": "aten::relu",
    "MaskedFillBackward0": "aten::masked_fill",
    "SquareBackward": "Square",
}
"""Name of each node of the graph, and of the op or Function that makes it."""


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * x * y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.up, self.norm = nn.Embedding(50, 32), nn.Linear(32, 48), nn.LayerNorm(48)
        self.dropout, self.out = nn.Dropout(0.5), nn.Linear(48, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.up(self.tokens(tokens)))
        x = self.dropout(F.gelu(x))
        x = x.masked_fill(tokens[..., None].remainder(2) == 0, 0.0)
        return self.out(torch.softmax(Square.apply(x).relu(), -1))


def held_by_graph(root: Any) -> dict[int, set[str]]:
    """Storage address to the nodes that saved it."""
    found: dict[int, set[str]] = defaultdict(set)
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names] + list(getattr(node, "saved_tensors", ()))
        for value in values:
            if isinstance(value, Tensor):
                found[value.untyped_storage().data_ptr()].add(node.name())
        waiting += [following for following, _ in node.next_functions]
    return found


def trained(precision: str) -> tuple[Analysis, dict[int, set[str]]]:
    graphs: list[dict[int, set[str]]] = []

    def run() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, targets = torch.randint(50, (4, 16)), torch.randint(10, (64,))
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
            graphs.append(held_by_graph(loss.grad_fn))
            loss.backward()
            optimizer.step()

    return analyse(record(run, precision)), graphs[-1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_saved_is_named_after_the_op_whose_node_holds_it(precision: str) -> None:
    analysis, graph = trained(precision)
    lifetimes, facts, texts = analysis.lifetimes, analysis.facts, analysis.recording.texts
    mark = analysis.marks[-1].after_forward
    assert mark is not None
    alive = lifetimes.alive_at(analysis.timeline.position(mark))
    begun = facts.time_ns > analysis.recording.steps[-1].start_ns
    saved = (facts.fact == Fact.SAVED) & alive[facts.allocation] & begun
    found: dict[int, set[str]] = defaultdict(set)
    for allocation, name in zip(facts.allocation[saved].tolist(), facts.name[saved].tolist(), strict=True):
        found[int(lifetimes.address[allocation])].add(texts[name])
    nodes = {node for names in graph.values() for node in names}
    assert nodes <= OPS.keys()
    assert {"SquareBackward", "NativeLayerNormBackward0", "NllLossBackward0", "EmbeddingBackward0"} <= nodes
    assert dict(found) == {address: {OPS[node] for node in names} for address, names in graph.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_groups_of_activations_add_up_and_are_of_their_kind(precision: str) -> None:
    analysis, _ = trained(precision)
    mark = analysis.marks[-1].after_forward
    assert mark is not None
    position = analysis.timeline.position(mark)
    groups = activation_groups(analysis, analysis.saved_as, position)
    assert sum(group.bytes for group in groups) == analysis.timeline.breakdown(position)[Category.ACTIVATIONS]
    for group in groups:
        assert group.bytes == sum(part.bytes for part in group.parts)
        assert group.tensors == sum(part.tensors for part in group.parts)
    sizes = {(group.kind, group.dtype): group.bytes for group in groups}
    low, half = ("bfloat16", 2) if precision != "fp32" else ("float32", 4)
    rows, width = 64, 48
    assert sizes["Square", low] == 2 * rows * width * half
    assert sizes["masks", "bool"] == rows  # of masked_fill
    # The norm keeps its input, and the mean and the deviation of each row.
    statistics = 2 * rows * 4
    assert sum(size for (kind, _), size in sizes.items() if kind == "norms") == rows * width * half + statistics
    softmax = rows * width * half + rows * 10 * 4  # and cross entropy's, which is float32 under autocast too
    assert sum(size for (kind, _), size in sizes.items() if kind == "softmax") == softmax
    assert sizes["loss", "float32"] == 4  # its total weight
    assert sum(size for (kind, _), size in sizes.items() if kind.startswith("unsaved")) == 4  # the loss itself
    assert sizes["aten::gelu", low] == rows * width * half
