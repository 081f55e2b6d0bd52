"""The observer moves nothing: a script allocates, computes and fails as it does without ampmem."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import measure
from support.measure import EXTRA, PRECISIONS, WORKLOADS, Observed, observed, options, plain
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ampmem
from ampmem.errors import UsageError
from ampmem.recorder.sources import extension
from ampmem.recorder.torch_private import general

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def run_steps(make: Callable[[], nn.Module] = small_model, steps: int = 2) -> list[Any]:
    """Losses and the parameters of a short training."""
    model = make()
    optimizer = AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, [p.tolist() for p in model.parameters()]]


def both(function: Callable[[], Any]) -> tuple[Observed, Observed]:
    """``function`` without ampmem and with it, after a run that leaves torch's lasting buffers behind."""
    function()
    without = plain(function)
    return without, observed(function)[0]


# -- allocations, results, random numbers -----------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_run_as_without(name: str, precision: str) -> None:
    module = measure.workload(name)

    def run() -> list[float]:
        with measure.watched(module, keep=False) as seen:
            module.train(options(precision), **EXTRA.get(name, {}))
        return seen.losses

    without, with_ampmem = both(run)
    assert without.allocs
    assert with_ampmem.allocs == without.allocs
    # The order in which autocast's cache frees its copies is not the same twice even without ampmem.
    assert with_ampmem.frees == without.frees
    assert with_ampmem.result == without.result
    assert len(without.result) == 2
    assert with_ampmem.rng == without.rng


def test_variables_hold_their_tensors_no_longer_than_without() -> None:
    def run() -> list[Any]:
        model = small_model()
        optimizer = AdamW(model.parameters())
        kept: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            out = {"logits": model(torch.randn(8 + step, 32))}
            logits = out["logits"] * 1.0
            loss = logits.square().mean()
            loss.backward()
            del out, logits
            again = torch.ones(100 + step)
            optimizer.step()
            del again
            loss = torch.ones(200 + step).sum()
            kept.append(loss.item())
        return kept

    without, with_ampmem = both(run)
    assert with_ampmem.both == without.both


class Tagger(nn.Module):
    """A linear layer on the output of a recurrent one, whose dimensions are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


class Functions(nn.Module):
    """A linear layer as a function of the script's, beside a product and a sum that are the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return nn.functional.linear(x, self.layer.weight, self.layer.bias) + (x @ self.layer.weight.t())


class Renamed(Functions):
    """The same by another name, which does not say what is called."""

    def forward(self, x: Tensor) -> Tensor:
        function = nn.functional.linear
        return function(x.transpose(0, 1), self.layer.weight, self.layer.bias)


class Masked(nn.Module):
    """Attention with a mask that is computed op by op, since it has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=torch.zeros(16, 16), need_weights=False)[0]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


BATCH, TIME, STEPS = 4, 16, 2


def train_tagger(make: Callable[[], nn.Module], autocast: bool) -> list[float]:
    model = make()
    optimizer = AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(BATCH, TIME, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "autocast"),
    [(Tagger, False), (encoder, False), (Masked, True), (Functions, False), (Renamed, False)],
)
def test_what_torch_adds_in_place_is_added_in_place(
    make: Callable[[], nn.Module], autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``at::linear`` adds a bias into the product, and attention its mask, but not while a dispatch mode is active.

    Where the script calls such a function by a name of its own, the op is let be: its result is there twice, which a
    note says.
    """
    monkeypatch.setenv(extension.VARIABLE, "off")
    run = partial(train_tagger, make, autocast)
    without, (with_ampmem, recording) = plain(run), observed(run)
    said = [note for note in recording.notes if "its result exists twice for a moment" in note]
    assert len(said) == (make is Renamed)
    extra = Counter({BATCH * TIME * 24 * 4: STEPS} if make is Renamed else {})
    assert Counter(with_ampmem.allocs) - Counter(without.allocs) == extra
    assert Counter(with_ampmem.frees) - Counter(without.frees) == extra
    assert not Counter(without.allocs) - Counter(with_ampmem.allocs)
    assert not Counter(without.frees) - Counter(with_ampmem.frees)
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


@pytest.mark.parametrize(
    ("make", "autocast"),
    [(Tagger, False), (encoder, False), (encoder, True), (Masked, True), (Functions, False), (Renamed, False)],
)
def test_with_the_extension_nothing_moves_at_all(
    make: Callable[[], nn.Module], autocast: bool, monkeypatch: pytest.MonkeyPatch, compiled_extension: Path
) -> None:
    """Without a dispatch mode there is nothing to tolerate: no scalars, no results that exist twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    monkeypatch.setattr(general, "compiles", lambda: False)  # other tests in this process do
    run = partial(train_tagger, make, autocast)
    run()  # what happens once in a process
    without, (with_ampmem, recording) = plain(run, scalar=0), observed(run, scalar=0)
    assert not [note for note in recording.notes if "its result exists twice for a moment" in note]
    assert with_ampmem.allocs == without.allocs
    assert with_ampmem.frees == without.frees
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


# -- guests: torch.func, autograd's checks, modes and hooks of the script's own ---------------


class Functional(nn.Module):
    """Uses ``torch.func`` in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.vmap(lambda row: row.tanh() * row.sum())(self.first(x))
        slope = torch.func.grad(lambda row: (row.sin() * row).sum())
        return self.last(x + torch.func.vmap(slope)(x.detach()))


def test_torch_func_inside_forward() -> None:
    without, with_ampmem = both(lambda: run_steps(Functional))
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


class Overwriting(nn.Module):
    """Overwrites what autograd saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        y.add_(1)
        return y


def test_overwritten_saved_tensor_raises_as_without() -> None:
    messages = []
    for profiled in (False, True):
        with ampmem.profile() if profiled else nullcontext():
            model = Overwriting()
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                model(torch.ones(8, 32)).sum().backward()
            messages.append(str(caught.value))
            del caught
            run_steps()
    assert ["version 1; expected version 0" in message for message in messages] == [True, True]


class Listing(TorchDispatchMode):
    """A script's own mode: the names of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def own_step(around_step: Any, around_forward: Any, around_rest: Any, steps: int = 2) -> list[Any]:
    """A training with context managers of the script's own around the step, the forward, or all but the forward."""
    model = small_model()
    optimizer = AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 32)
        with around_step():
            with around_forward():
                out = model(inputs)
            with around_rest():
                loss = out.tanh().square().mean()
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    return [losses, [p.tolist() for p in model.parameters()]]


PLACES = ("step", "forward", "rest")


def at(place: str, enter: Any) -> list[Any]:
    return own_step(*(enter if place == other else nullcontext for other in PLACES))


@pytest.mark.parametrize("place", PLACES)
def test_own_dispatch_mode(place: str) -> None:
    """The script's mode sees the script's ops, and none of ampmem's.

    But for ``aten.detach``: where any saved-tensor hooks are in place autograd makes the alias of an output
    that it saves in backward, where without it makes one in forward. An alias is neither work nor memory.
    """

    def run() -> list[Any]:
        mode = Listing()
        return [at(place, lambda: mode), [op for op in mode.ops if op != "aten.detach.default"]]

    without, with_ampmem = both(run)
    assert without.result[1]
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


@pytest.mark.parametrize("place", PLACES)
def test_own_flop_counter(place: str) -> None:
    def run() -> list[Any]:
        counters: list[FlopCounterMode] = []

        def enter() -> FlopCounterMode:
            counters.append(FlopCounterMode(display=False))
            return counters[-1]

        return [at(place, enter), [counter.get_total_flops() for counter in counters]]

    without, with_ampmem = both(run)
    assert sum(without.result[1]) > 0
    assert with_ampmem.result == without.result


@pytest.mark.parametrize("place", PLACES)
def test_own_saved_tensors_hooks(place: str) -> None:
    def run() -> list[Any]:
        packed, unpacked = [], []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor.detach()

        def unpack(tensor: Tensor) -> Tensor:
            unpacked.append(tuple(tensor.shape))
            return tensor

        return [at(place, lambda: saved_tensors_hooks(pack, unpack)), packed, unpacked]

    without, with_ampmem = both(run)
    assert without.result[1] and without.result[2]
    assert with_ampmem.result == without.result
    assert with_ampmem.allocs == without.allocs


@pytest.mark.parametrize("place", PLACES)
def test_own_save_on_cpu(place: str) -> None:
    without, with_ampmem = both(lambda: at(place, save_on_cpu))
    assert with_ampmem.result == without.result
    assert with_ampmem.allocs == without.allocs


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace:UserWarning")
def test_compiled_model() -> None:
    """Compiled in one graph, which nothing of ampmem's breaks."""

    def run() -> list[Any]:
        torch._dynamo.reset()
        return run_steps(lambda: torch.compile(small_model(), backend="eager", fullgraph=True))

    without, with_ampmem = both(run)
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_is_compiled_in_its_place_is_seen(backend: str) -> None:
    torch._dynamo.reset()
    model = small_model()
    model.compile(backend=backend)
    with ampmem.profile() as profile:
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
    assert len(profile.summary().steps) == 2
    assert profile.summary().warnings == ()


# -- what the script may do to the session ----------------------------------------------------


def test_nested_profile_is_refused_and_the_outer_goes_on() -> None:
    with ampmem.profile() as outer:
        run_steps(steps=1)
        with pytest.raises(UsageError, match="nested"), ampmem.profile():
            pytest.fail("entered")
        run_steps(steps=1)
    assert len(outer.summary().steps) == 2


class Broken(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        raise KeyError("forward")


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("backward")


class BrokenOptimizer(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise KeyError("optimizer")


def fail_in_forward() -> None:
    Broken()(torch.ones(8, 32))


def fail_in_backward() -> None:
    BrokenBackward.apply(small_model()(torch.ones(8, 32))).sum().backward()


def fail_in_optimizer() -> None:
    model = small_model()
    optimizer = BrokenOptimizer(model.parameters())
    model(torch.ones(8, 32)).sum().backward()
    optimizer.step()


FAILURES = {"forward": fail_in_forward, "backward": fail_in_backward, "optimizer": fail_in_optimizer}


@pytest.mark.parametrize("place", FAILURES)
def test_exceptions_propagate_out_of_the_block(place: str) -> None:
    """What is left behind, the fixture of every test says."""
    with pytest.raises(KeyError, match=place), ampmem.profile() as profile:
        run_steps(steps=1)
        FAILURES[place]()
    assert len(profile.summary().steps) == 1


@pytest.mark.parametrize("place", FAILURES)
def test_exceptions_caught_by_the_script(place: str) -> None:
    def run() -> list[Any]:
        for _ in range(2):
            with pytest.raises(KeyError, match=place):
                FAILURES[place]()
            gc.collect()  # the traceback's models and optimizers
        return run_steps()

    without, with_ampmem = both(run)
    assert with_ampmem.result == without.result
    assert with_ampmem.rng == without.rng


@pytest.mark.parametrize("inside", [True, False])
def test_the_profile_keeps_nothing_alive(inside: bool) -> None:
    """Nothing is left to the garbage collector either: all dies with its last reference."""
    profile = ampmem.profile()

    def train() -> tuple[list[weakref.ref[Any]], tuple[Any, ...]]:
        model = small_model()
        optimizer = AdamW(model.parameters())
        inputs = torch.randn(8, 32)
        out = model(inputs)
        out.sum().backward()
        optimizer.step()
        alive = (model, optimizer, inputs, out, *model.parameters(), *(p.grad for p in model.parameters()))
        state = (entry["exp_avg"] for entry in optimizer.state.values())
        return [weakref.ref(item) for item in (*alive, *state)], alive

    gc.collect()
    gc.disable()
    try:
        with profile:
            references, alive = train()
            if inside:
                del alive
                assert [reference() for reference in references] == [None] * len(references)
        if not inside:
            del alive
            assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()
    assert len(profile.summary().steps) == 1


def test_named_model_and_optimizer_are_not_kept_alive() -> None:
    model = small_model()
    optimizer = AdamW(model.parameters())
    references = [weakref.ref(model), weakref.ref(optimizer)]
    with ampmem.profile(model, optimizer) as profile:
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert len(profile.summary().steps) == 1
