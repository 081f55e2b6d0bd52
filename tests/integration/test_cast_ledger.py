"""The cast ledger against independent counts: of module calls, and of a dispatch mode of the tests' own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import measure
from support.precisions import PRECISIONS, all_judged, record, terms, workload
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.backends import mkldnn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.casts import Casts, CopyCount
from ampmem.analysis.findings import findings
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.precision import amp_saves
from ampmem.analysis.summary import summary_of
from ampmem.events import Fact
from ampmem.names import CASTS_COMPILED
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.text.table import render

clean_start = measure.clean_start
pytestmark = pytest.mark.usefixtures("clean_start")

HALF = 2
NONE = CopyCount(copies=0, bytes=0)
AMP = PRECISIONS[1:]


class Counter(TorchDispatchMode):
    """Counts casts of ``parameters`` to another type, and the ops that read the results."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._of = {p.untyped_storage().data_ptr() for p in parameters}
        self._copies: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.copies = self.bytes = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in ("aten::t", "aten::transpose", "aten::view", "aten::detach"):
            self.reads += sum(self._is_copy(item) for item in args)
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype
        if cast and args[0].untyped_storage().data_ptr() in self._of:
            storage = result.untyped_storage()
            self._copies[storage.data_ptr()] = weakref.ref(storage)
            self.copies += 1
            self.bytes += storage.nbytes()
        return result

    def _is_copy(self, item: Any) -> bool:
        if not isinstance(item, Tensor):
            return False
        known = self._copies.get(item.untyped_storage().data_ptr())
        return known is not None and known() is not None


class Twice(nn.Module):
    """Two linear layers with biases, gone through twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.last(self.first(x).tanh()))
        return x


def train(model: nn.Module, inputs: Tensor, steps: int = 2) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()


def book(function: Callable[[], Any], precision: str = "as-is") -> tuple[Casts, Analysis]:
    analysis = analyse(record(function, precision))
    all_judged(analysis)
    return analysis.casts, analysis


@pytest.mark.parametrize("precision", AMP)
def test_copies_and_hits_are_what_a_dispatch_mode_counts(precision: str) -> None:
    found, _ = book(lambda: train(Twice(), torch.randn(4, 16)), precision)
    model = Twice()
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=precision == "amp"),
        Counter(list(model.parameters())) as counter,
    ):
        model(torch.randn(4, 16))
    assert counter.copies == (4 if precision == "amp" else 8)
    # Two steps; each of the four calls of a layer reads its weight and its bias.
    assert (found.copies, found.bytes) == (2 * counter.copies, 2 * counter.bytes)
    assert counter.reads == 8
    assert found.cache_hits == 2 * (counter.reads - counter.copies) == (8 if precision == "amp" else 0)


@pytest.mark.parametrize("precision", AMP)
def test_who_holds_what_at_the_end_of_forward(precision: str) -> None:
    """Weights are saved by autograd, but for the first layer's first copy, and biases are not."""
    found, _ = book(lambda: train(Twice(), torch.randn(4, 16)), precision)
    weight, bias = 16 * 16 * HALF, 16 * HALF
    rows = {row.name: row for row in found.by_parameter}
    assert set(rows) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    for name, row in rows.items():
        each = weight if "weight" in name else bias
        held = (row.held_by_cache, row.held_by_autograd, row.held_by_both)
        if precision == "amp":
            assert (row.copies, row.bytes, row.cache_hits) == (2, 2 * each, 2)
            assert held == ((0, 0, 2) if "weight" in name else (2, 0, 0))
        else:
            assert (row.copies, row.bytes, row.cache_hits) == (4, 4 * each, 0)
            assert held == {"first.weight": (0, 2, 0), "last.weight": (0, 4, 0)}.get(name, (0, 0, 0))
    for step in found.steps:
        assert set(step.phases) == {"forward"}
        made = step.phases["forward"]
        assert (made.copies, made.cache_hits) == ((4, 4) if precision == "amp" else (8, 0))
        holders = step.after_forward
        # The region around a script without autocast is left just before backward starts, and with it the cache.
        assert holders is not None
        kept = 2 if precision == "amp" else 3
        assert holders.autograd == CopyCount(copies=kept, bytes=kept * weight)
        assert holders.cache == holders.both == holders.neither == NONE
        assert step.surviving == step.views == step.recomputed == NONE


def test_a_region_that_is_left_after_backward_holds_its_copies_through_it() -> None:
    def run() -> None:
        model = Twice()
        optimizer, inputs = SGD(model.parameters(), lr=0.1), torch.randn(4, 16)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(inputs).float().square().mean().backward()
            optimizer.step()

    found, analysis = book(run)
    weights, biases = CopyCount(copies=2, bytes=2 * 512), CopyCount(copies=2, bytes=2 * 32)
    for step, verdict in zip(found.steps, all_judged(analysis), strict=True):
        assert step.after_forward is not None
        assert (step.after_forward.both, step.after_forward.cache) == (weights, biases)
        assert step.after_forward.autograd == step.after_forward.neither == NONE
        why = "copies that the cache still holds: the autocast region has not ended"
        assert terms(verdict, "after_backward", "cast_copies") == {why: 2 * 512 + 2 * 32}
        assert terms(verdict, "after_optimizer", "cast_copies") == {}
        assert step.surviving == NONE


def test_a_region_open_over_all_steps_keeps_stale_copies() -> None:
    """The same copies in every step: the cache does not know that the weights were updated."""

    def run() -> None:
        model = Twice()
        with torch.autocast("cpu", torch.bfloat16):
            train(model, torch.randn(4, 16), steps=3)

    found, _ = book(run)
    assert (found.copies, found.bytes) == (4, 2 * 512 + 2 * 32)
    assert found.cache_hits == 3 * 8 - 4
    assert [step.surviving for step in found.steps] == [CopyCount(copies=4, bytes=found.bytes)] * 3
    assert [set(step.phases) for step in found.steps] == [{"forward"}, set(), set()]


def test_copies_without_gradients_stay_until_the_region_is_left() -> None:
    def run(*, cache: bool) -> Casts:
        def evaluate_and_train() -> None:
            model = Twice()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.no_grad():
                model(torch.randn(4, 16))
            train(model, torch.randn(4, 16), steps=1)

        return book(evaluate_and_train)[0]

    cached, uncached = run(cache=True), run(cache=False)
    assert cached.peak_bytes == 2 * 512 + 2 * 32
    assert uncached.peak_bytes == 512 + 32  # one layer's at a time
    assert (cached.copies, uncached.copies) == (4, 8)
    assert {row.held_by_cache for row in cached.by_parameter} == {1}
    assert {row.held_by_cache for row in uncached.by_parameter} == {0}


@pytest.mark.parametrize("precision", AMP)
def test_recomputation_casts_again(precision: str) -> None:
    analysis, run = workload("checkpointed", "fp32", precision)
    found = analysis.casts
    (model,) = run.models
    inside = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    size = sum(HALF * p.numel() for module in inside for p in module.parameters())
    for step in found.steps:
        assert step.recomputed == CopyCount(copies=2 * len(inside), bytes=size)
        assert step.phases["backward"].copies == 2 * len(inside)
        outside = 4  # weight and bias of the layers before and after the blocks
        assert step.phases["forward"].copies == 2 * len(inside) + outside
        assert step.surviving == NONE


def test_views_frozen_weights_and_what_is_no_parameter() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 8))
            self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
            self.register_buffer("table", torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.weight.chunk(3):
                x = x @ part.t()
            x = x @ self.frozen
            x = x @ self.frozen
            return x @ self.table

    def run() -> None:
        model, inputs = Views(), torch.randn(4, 8)
        optimizer = SGD([model.weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()

    found, _ = book(run)
    rows = {row.name: row for row in found.by_parameter}
    assert set(rows) == {"weight", "frozen"}
    # Parts of a weight and weights without gradient are not cached.
    assert (rows["weight"].copies, rows["weight"].bytes, rows["weight"].cache_hits) == (6, 6 * 64 * HALF, 0)
    assert (rows["frozen"].copies, rows["frozen"].cache_hits) == (4, 0)
    assert all(row.held_by_cache == row.held_by_both == 0 for row in rows.values())
    for step in found.steps:
        assert step.views == CopyCount(copies=3, bytes=3 * 64 * HALF)
        assert step.others.copies >= 2  # the batch and the table
        assert step.surviving == NONE


@pytest.mark.parametrize("precision", AMP)
def test_list_arguments_and_additions_in_place_are_uses(precision: str) -> None:
    """Copies that an op takes in a list, or adds in place, are read as those in plain arguments."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.two(self.one(x))
            x.add_(self.two.weight[0].to(torch.bfloat16))
            both = torch.cat([self.one.weight.to(torch.bfloat16), self.two.weight.to(torch.bfloat16)])
            return x @ both.t()

    found, analysis = book(lambda: train(Lists(), torch.randn(4, 8), steps=1), precision)
    # ``to`` makes a copy of its own; nobody but ``cat`` and the addition read it.
    assert {row.name: row.copies for row in found.by_parameter} == {"one.weight": 2, "two.weight": 3}
    assert found.cache_hits == 0
    facts, texts = analysis.recording.facts, analysis.recording.texts
    readers = [texts[name] for name in facts.name[facts.fact == Fact.CAST_USE]]
    assert sorted(readers) == ["aten::add_", "aten::cat", "aten::cat", "aten::mm", "aten::mm"]


def test_copies_that_the_script_keeps_grow() -> None:
    kept: list[Tensor] = []

    def run() -> None:
        model = Twice()
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 16)).float().square().mean()
            loss.backward(retain_graph=True)
            kept.append(loss)
            optimizer.step()

    found, analysis = book(run)
    kept.clear()
    assert [step.surviving.copies for step in found.steps] == [2, 4, 6]
    assert [step.surviving.bytes for step in found.steps] == [1024, 2048, 3072]
    last = all_judged(analysis)[-1]
    assert terms(last, "after_optimizer", "cast_copies") == {
        "copies that autograd had saved and that are still alive": 3072
    }


def test_inference_mode_casts_too() -> None:
    """Ops reach the mode whole there, ``to`` among them: its copies are the weights', and one of the input."""
    width, batch = 64, 512

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(3)])
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, width)).float().square().mean()
            loss.backward()
            optimizer.step()
            # Without oneDNN: on some CPUs it takes memory of its own for a product.
            with mkldnn.flags(enabled=False), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(batch, width).view(width, batch).t())

    found, analysis = book(run)
    weight, batch_bytes = width * width * HALF, batch * width * HALF
    evaluation = found.steps[1].phases["evaluation"]  # the one between the updates
    assert (evaluation.copies, evaluation.bytes, evaluation.cache_hits) == (3, 3 * weight, 0)
    assert found.steps[1].others.bytes - found.steps[0].others.bytes == batch_bytes
    assert [finding.code for finding in findings(analysis)] == ["amp-saves-nothing"]
    peak = summary_of(analysis).peak
    assert peak.phase == "evaluation"
    assert {str(name): size for name, size in peak.categories.items() if size} == {
        "parameters": 3 * 2 * weight,
        "gradients": 3 * 2 * weight,
        "cast_copies": weight,
        "inputs": 2 * batch_bytes,
        "activations": 4,
        "temporaries": 2 * batch_bytes,  # the input of the layer and its output
    }


def out_of_sight(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler whose code makes its casts as a compiled kernel does: no op is dispatched."""

    def run(arguments: list[Any]) -> Any:
        with _disable_current_modes():
            return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seen", [False, True])
def test_casts_inside_compiled_code(seen: bool) -> None:
    """The backward that is traced while torch.compile makes the graph is none of the step's."""
    torch._dynamo.reset()
    backend: Any = "aot_eager" if seen else aot_autograd(fw_compiler=out_of_sight)

    def run() -> None:
        torch.manual_seed(0)
        model = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), backend=backend)
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(torch.randn(8, 16)).float(), torch.randn(8, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    found, analysis = book(run)
    summary = summary_of(analysis)
    weights = (16 * 32 + 32 + 32 * 16 + 16) * HALF
    assert [step.backwards for step in summary.steps] == [1, 1]
    assert "autocast-in-backward" not in [finding.code for finding in summary.findings]
    copies = 4 if seen else 0
    assert [(step.phases.keys(), found.copies, found.bytes) for step in found.steps] == [
        ({"forward"} if seen else set(), 2 * copies, 2 * weights if seen else 0)
    ] * 2
    assert summary.notes == (() if seen else (CASTS_COMPILED,))
    text = render(summary, summary.notes, details=EVERYTHING)
    assert ("without casts inside compiled code" in text) is not seen
    saves = amp_saves(TrainingRun(analysis=analysis))  # a model so small has it on no page
    assert (saves is not None) is seen  # else what the copies take is among the activations
    last = all_judged(analysis)[-1]
    unseen = "no cast was seen: casts inside compiled code cannot be identified"
    assert terms(last, "after_forward", "cast_copies").get(unseen) == (None if seen else -weights)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_is_fp32_only_if_no_tensor_says_otherwise(inside: bool) -> None:
    torch._dynamo.reset()

    class Layer(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return super().forward(batch).relu()

    def run() -> None:
        layer = Layer(16, 32)
        model = torch.compile(layer, backend="aot_eager")
        optimizer = SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 16)).float().square().mean().backward()
            optimizer.step()

    _, analysis = book(run)
    assert analysis.recording.precision.name == ("as-is" if inside else "fp32")


@pytest.mark.parametrize("cast", [False, True])
def test_a_script_that_casts_its_weights_itself_is_not_fp32(cast: bool) -> None:
    class Layer(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            dtype = torch.bfloat16 if cast else torch.float32
            return nn.functional.linear(batch.to(dtype), self.weight.to(dtype), self.bias.to(dtype))

    _, analysis = book(lambda: train(nn.Sequential(Layer(16, 32)), torch.randn(8, 16)))
    assert analysis.recording.precision.name == ("as-is" if cast else "fp32")


@pytest.mark.parametrize("name", measure.WORKLOADS)
def test_without_the_cache_nothing_is_served_by_it_nor_held(name: str) -> None:
    analysis, _ = workload(name, "fp32", "amp-nocache")
    found = analysis.casts
    assert found.copies > 0
    assert found.cache_hits == 0
    for row in found.by_parameter:
        assert row.held_by_cache == row.held_by_both == 0
    for step in found.steps:
        assert step.after_forward is not None
        assert step.after_forward.cache == step.after_forward.both == NONE


@pytest.mark.parametrize("name", measure.WORKLOADS)
def test_with_the_cache_only_it_holds_the_copies_of_biases(name: str) -> None:
    analysis, run = workload(name, "fp32", "amp")
    biases = {f"{path}.bias" for model in run.models for path, _ in model.named_modules()}
    rows = [row for row in analysis.casts.by_parameter if row.name in biases]
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    with_bias = [m for model in run.models for m in model.modules() if isinstance(m, kinds) and m.bias is not None]
    if name != "gan":  # whose names begin with the models'
        assert len(rows) == len(with_bias)
    for row in rows:
        # Those made again inside backward may not be in any cache: that of forward is gone.
        assert row.held_by_autograd == row.held_by_both == 0
        assert row.held_by_cache > 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", measure.WORKLOADS)
def test_copies_alive_at_the_end_of_forward_are_as_counted(name: str, precision: str) -> None:
    analysis, _ = workload(name, "fp32", precision)
    holders = analysis.casts.steps[-1].after_forward
    assert holders is not None
    alive = sum(count.bytes for count in (holders.cache, holders.autograd, holders.both, holders.neither))
    assert alive == (0 if precision == "fp32" else measure.count_casts(name, precision))
