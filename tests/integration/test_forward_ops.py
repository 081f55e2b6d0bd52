"""The C++ extension sees the ops of forward as the dispatch mode does: order, names, stacks, results and casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ampmem.events import Fact
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.forward import ForwardMode, ForwardObserver, SavedTensors
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources import extension
from ampmem.recorder.torch_private import general

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTS = {fact.value: fact.name for fact in Fact}


class Seen:
    """What was seen of ops: a row for each op, and one for each fact but its time and address.

    ``by_extension`` if the extension has begun, ``to_end`` if no mode has taken over.
    """

    def __init__(self, log: Log, stacks: Stacks, *, by_extension: bool, to_end: bool) -> None:
        ops, facts, value = log.take_ops(), log.take_facts(), log.texts.value
        texts = stacks.text_ids(log.texts)
        self.by_extension, self.to_end = by_extension, to_end
        # Under a mode torch's reshape calls another op, which makes the same view.
        names = [value(name).replace("_reshape_alias", "view") for name in ops.name]
        self.ops = list(zip(names, (value(texts[stack]) for stack in ops.stack), strict=True))
        self.numbers = (ops.sequence - ops.sequence[0]).tolist() if len(ops) else []
        assert (ops.end_ns >= ops.start_ns).all()
        assert (ops.start_ns[1:] >= ops.end_ns[:-1]).all()
        self.facts: list[Any] = []
        for fact, *rest in zip(facts.fact, facts.name, facts.dtype, facts.shape, strict=True):
            row = (FACTS[int(fact)], *(value(each) for each in rest))
            if row not in self.facts or fact != Fact.SAVED:
                self.facts.append(row)
        self.facts.sort(key=str)


def seen(run: Callable[[], object], *, by_extension: bool) -> Seen:
    """What is seen while ``run`` is observed as forward."""
    log = Log(RealAddresses())
    stacks, models = Stacks(enabled=True), Models(log)
    casts = CastHooks(log, models)
    notes: list[str] = []
    log.misses.note = notes.append
    mode = ForwardMode(log, casts, stacks)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(extension.VARIABLE, "on" if by_extension else "off")
        observer = ForwardObserver(log, mode, SavedTensors(log), lambda _: False)
    undo = observer.install()
    try:
        observer.enter()
        used = mode.saved.in_cpp is not None
        result = run()  # alive until forward ends
        to_end = mode.saved.in_cpp is not None
        observer.leave()
        del result
    finally:
        undo()
    assert not notes
    return Seen(log, stacks, by_extension=used, to_end=to_end)


def same(run: Callable[[], object], *, inside: bool = False) -> Seen:
    """``run`` seen by both, which must be the same; ``inside`` if ops run Python code."""
    run()  # what happens once in a process
    # In one line, which is in all stacks.
    mine, theirs = (seen(run, by_extension=by_extension) for by_extension in (True, False))
    assert (mine.by_extension, theirs.by_extension) == (True, False)
    assert mine.to_end
    assert [name for name, _ in mine.ops] == [name for name, _ in theirs.ops]
    # The mode also has the frames of Python code that runs inside of an op, such as another mode's.
    assert all(there.startswith(here) for (_, here), (_, there) in zip(mine.ops, theirs.ops, strict=True))
    assert mine.ops == theirs.ops or inside
    assert mine.numbers == theirs.numbers
    assert mine.facts == theirs.facts
    return mine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(-1)


def image() -> Callable[[], object]:
    model, x = Net().to(DEVICE), torch.randn(2, 3, 8, 8, device=DEVICE)
    return lambda: model(x).log().mean()


def encoder() -> Callable[[], object]:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(DEVICE)
    x = torch.randn(2, 5, 16, device=DEVICE)
    return lambda: F.cross_entropy(model(x).reshape(10, 16), torch.arange(10, device=DEVICE))


def recurrent() -> Callable[[], object]:
    model, x = nn.LSTM(8, 8, batch_first=True).to(DEVICE), torch.randn(2, 5, 8, device=DEVICE)
    return lambda: model(x)[0].sum()


def embedded() -> Callable[[], object]:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 10)).to(DEVICE)
    x = torch.arange(10, device=DEVICE)
    return lambda: F.cross_entropy(model(x), x)


def many() -> Callable[[], object]:
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device=DEVICE).tril()

    def run() -> object:
        y = x * 2
        y = torch.cat([y, y.t()], 1).chunk(2, 1)[0]
        y = y.masked_fill(mask, -1.0).softmax(-1)
        F.silu(y.clone(), inplace=True)
        F.hardtanh(y.clone(), inplace=True)
        y = torch.einsum("ij,jk->ik", y, x) + torch.ones(4, device=DEVICE)
        y = torch.stack([each.exp() for each in y.unbind(0)])
        values, order = y.sort(-1)
        y = values.gather(1, order) + y.std(dim=1, unbiased=False)
        y = F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])
        y = torch.where(mask, y, torch.zeros_like(y)).to(torch.float64)
        y = F.layer_norm(y.float(), (4,))
        buffer = torch.empty(1, 1, 4, 4, device=DEVICE)
        buffer.copy_(y)
        buffer[0, 0, 1] = 3.0
        torch.linalg.norm(y).item()
        z = y.square().sum() + torch.nn.functional.mse_loss(y, torch.rand(1, 1, 4, 4, device=DEVICE))
        return z + torch.rand(3, device=DEVICE).cumsum(0).clamp(min=0.1).prod() + y.detach().max()

    return run


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y, x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def function() -> Callable[[], object]:
    layer, x = nn.Linear(8, 8).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    return lambda: Double.apply(Double.apply(layer(x)).sin()).sum()


def checkpointed() -> Callable[[], object]:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    return lambda: checkpoint(layer, layer(x), use_reentrant=False).sum()


def reentrant() -> Callable[[], object]:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    return lambda: checkpoint(layer, layer(x), use_reentrant=True).sum()


def fails() -> Callable[[], object]:
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)

    def run() -> None:
        with pytest.raises(RuntimeError):
            (x * 2) @ torch.ones(3, 3, device=DEVICE)
        x.exp()

    return run


def on_one_tensor() -> Callable[[], object]:
    """Many ops, alone, whose autograd or decomposition is of a kind of its own."""
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    layer = nn.Linear(4, 4).to(DEVICE)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).to(DEVICE)

    def views(y: torch.Tensor) -> torch.Tensor:
        y[0].mul_(2)
        y[1:].add_(1)
        y[torch.tensor([0], device=DEVICE)] = 1.0
        y.index_add_(0, torch.tensor([1], device=DEVICE), torch.ones(1, 4, device=DEVICE))
        return y.relu_()

    def run() -> object:
        kept: list[object] = [views(x.clone()).sum(), x.roll(1).flip(0).sum(), scripted(x)]
        kept += [F.group_norm(x[None], 2), F.rms_norm(x, (4,)), F.glu(x), F.dropout(x, 0.5), F.pad(x, (1, 1))]
        kept += [torch.logsumexp(x, 0), x.norm(), x.topk(2), x.max(0), x.var(), x.std(0)]
        kept += [F.max_pool2d(x[None], 2), F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")]
        kept += [F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()), F.kl_div(x, x.detach().softmax(-1))]
        kept += [x.double().float(), x.tolist()]
        kept += [torch.eye(3, device=DEVICE), torch.linspace(0, 1, 3, device=DEVICE), torch.tensor([1.0]).to(DEVICE)]
        with torch.no_grad():
            kept.append(torch.add(x, 1, out=torch.empty(4, 4, device=DEVICE)))
            layer.weight.data = layer.weight.data.clone()
        with torch.autograd.graph.save_on_cpu():
            kept.append(layer(x).sin())
        return kept

    return run


def of_modules() -> Callable[[], object]:
    x = torch.randn(4, 4, device=DEVICE)
    attention, bag = nn.MultiheadAttention(4, 2).to(DEVICE), nn.EmbeddingBag(4, 3).to(DEVICE)
    gates = nn.GRU(4, 3, batch_first=True, bidirectional=True, num_layers=2).to(DEVICE)
    order = torch.tensor([[0, 1], [1, 2]], device=DEVICE)
    return lambda: (attention(x, x, x), bag(order), gates(x[None]))


@torch.library.custom_op("ampmem_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def selective() -> Callable[[], object]:
    """Checkpointing with a dispatch mode of its own: the mode of the script sees the ops first."""
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(4, 4, device=DEVICE, requires_grad=True)
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return lambda: checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=False, context_fn=kept).sum()


PROGRAMS = (
    *(image, encoder, recurrent, embedded, many, function, checkpointed, reentrant, fails),
    *(on_one_tensor, of_modules, selective),
)


@pytest.fixture(autouse=True)
def compiled(compiled_extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "compiles", lambda: False)  # other tests in this process do
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))


def in_region(make: Callable[[], Callable[[], object]], grad: str, precision: str) -> Callable[[], object]:
    """The program in this precision, with gradients on or off."""
    run = make()

    def step() -> object:
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        region = torch.autocast(DEVICE, dtype, enabled=precision != "fp32", cache_enabled=precision != "nocache")
        mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[grad]
        with mode(), region:
            return run()

    return step


GRADS = [*((grad, precision) for grad in ("grad", "no_grad") for precision in ("fp32", "bf16", "fp16", "nocache"))]


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize(("grad", "precision"), [*GRADS, ("inference", "fp32")])
def test_both_see_the_same(make: Callable[[], Callable[[], object]], grad: str, precision: str) -> None:
    if make is recurrent and precision == "fp16" and DEVICE == "cpu":
        pytest.skip("oneDNN has no LSTM in FP16 here")
    if make is on_one_tensor and grad == "inference":
        pytest.skip("sets the data of a parameter")
    assert len(same(in_region(make, grad, precision), inside=make is selective).ops) > 1


def test_kernels_of_attention_that_the_script_disabled() -> None:
    x = torch.randn(1, 2, 4, 8, device=DEVICE, requires_grad=True)

    def run() -> object:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
            y = F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4, device=DEVICE, requires_grad=True))
        return y, F.scaled_dot_product_attention(x, x, x)

    assert run_facts(same(run), "DISABLED") == [("DISABLED", "flash, memory-efficient", "float32", "[1, 2, 4, 4]")]


def test_inference_mode_leaves_autocast_on() -> None:
    """A dispatch mode turns autocast off inside of an op, and the op is the whole layer then."""
    run = in_region(recurrent, "inference", "bf16")
    assert len(run_facts(seen(run, by_extension=True), "OTHER_CAST")) > 2
    assert not run_facts(seen(run, by_extension=False), "OTHER_CAST")


def run_facts(of: Seen, fact: str) -> list[Any]:
    return [row for row in of.facts if row[0] == fact]


class Wrapper(torch.Tensor):
    """A tensor that holds another."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [each.held if isinstance(each, Wrapper) else each for each in args]
        return Wrapper(func(*args, **(kwargs or {})))


def test_the_mode_takes_over_at_a_tensor_that_is_not_plain() -> None:
    wrapper = Wrapper(torch.ones(3, 3, device=DEVICE))

    def run() -> object:
        return [wrapper * 2, wrapper.sin(), wrapper.cos()]

    mine, theirs = (seen(run, by_extension=by_extension) for by_extension in (True, False))
    assert mine.by_extension
    assert not mine.to_end
    assert mine.ops == theirs.ops
    missing = [row for row in theirs.facts if row not in mine.facts]
    assert [row[:2] for row in missing] == [("OUTPUT", "aten::mul")]


def test_the_mode_takes_over_at_a_custom_op_that_torch_does_not_report() -> None:
    """It is so from torch 2.14 on."""
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)

    def run() -> object:
        return [sine(x), sine(x), x.cos()]

    mine = seen(run, by_extension=True)
    assert mine.to_end == (TorchVersion(torch.__version__) < "2.14")
    assert [name for name, _ in mine.ops][-2:] == ["ampmem_tests::sine", "aten::cos"]
    assert [name for name, _ in seen(run, by_extension=False).ops] == ["ampmem_tests::sine"] * 2 + ["aten::cos"]


def test_models_that_are_not_plain_are_observed_by_the_mode() -> None:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(Wrapper(torch.ones(3, 3)), requires_grad=False)
    log = Log(RealAddresses())
    models = Models(log)
    models.add(layer)
    models.note()
    assert not CastHooks(log, models).of_plain_models()
