"""Precisions that are forced on a script: its autocast regions, its GradScalers, and a region where it has none."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.autocast_mode import autocast as Autocast
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from ampmem.recorder.steering.steering import CAME_LATE, GAVE_WAY, WRAPPED, Steering
from ampmem.vocabulary import AutocastDtype

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: AutocastDtype.BF16, FP16: AutocastDtype.FP16}
PRECISIONS = ("fp32", "amp", "amp-nocache")
Region = Callable[..., Any]
State = tuple[bool, torch.dtype, bool]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*[Dd]isabling.*:UserWarning")


def state(device: str = "cpu") -> State:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


def patched() -> list[Any]:
    classes = (Autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast)
    entries: list[Any] = [vars(owner)[name] for owner in classes for name in ("__init__", "__enter__", "__exit__")]
    entries += [dict(vars(GradScaler)), dict(_global_optimizer_pre_hooks), torch.utils.checkpoint._get_autocast_kwargs]
    return [*entries, torch.autograd.backward, torch.autograd.grad, torch.autograd._engine_run_backward]


def nesting() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def all_is_as_it_was() -> Iterator[None]:
    before = patched(), state("cpu"), state("cuda"), nesting()
    yield
    assert (patched(), state("cpu"), state("cuda"), nesting()) == before


@contextmanager
def steered(
    precision: str, dtype: torch.dtype | None = None, device: str = "cpu"
) -> Iterator[tuple[Steering, list[str]]]:
    notes: list[str] = []
    steering = Steering(precision, NAMES.get(dtype), device, notes.append)
    undo = steering.install()
    try:
        yield steering, notes
    finally:
        undo()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


X = torch.ones(2, 4)

SPELLINGS: list[tuple[str, Region]] = [
    ("cpu", lambda **kw: torch.autocast("cpu", **kw)),
    ("cpu", lambda **kw: torch.amp.autocast("cpu", **kw)),
    ("cpu", lambda **kw: torch.cpu.amp.autocast(**kw)),
    ("cuda", lambda **kw: torch.autocast("cuda", **kw)),
    ("cuda", lambda **kw: torch.cuda.amp.autocast(**kw)),
]
SAID: list[dict[str, Any]] = [
    {"enabled": True},
    {"enabled": False},
    {"enabled": False, "dtype": FP32},
    {"enabled": True, "dtype": BF16, "cache_enabled": False},
    {"enabled": False, "dtype": FP16},
]


# -- regions of the script ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("device", "spelling"), SPELLINGS)
def test_every_spelling_is_entered_in_the_precision(device: str, spelling: Region, precision: str) -> None:
    for said, dtype, decorator in product(SAID, (None, BF16, FP16), (False, True)):
        inside = state_inside(device, partial(spelling, **said), precision, dtype, decorator)
        if precision == "fp32":
            assert inside[0] is False, said
            continue
        default = BF16 if device == "cpu" else FP16
        own = said.get("dtype", default)
        assert inside == (True, dtype or (default if own is FP32 else own), precision == "amp"), (said, dtype)


def state_inside(device: str, region_of: Region, precision: str, dtype: torch.dtype | None, decorator: bool) -> State:
    """The state in a region that is steered, which leaves nothing behind and changes nothing of the region."""
    with steered(precision, dtype, device) as (steering, notes):
        region = region_of()
        kept = dict(vars(region))
        outside = state(device)
        if decorator:
            inside: State = region(lambda: state(device))()
        else:
            with region as entered:
                assert entered is region
                inside = state(device)
        assert state(device) == outside
        assert {name: vars(region)[name] for name in kept} == kept
        assert not steering.wrapped
        assert not notes
    return inside


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_disabled_inside_stays_disabled(precision: str) -> None:
    with steered(precision):
        with torch.autocast("cpu", enabled=False):
            with torch.autocast("cpu", enabled=False):
                assert state()[0] is False
                with torch.cpu.amp.autocast(enabled=False):
                    assert state()[0] is False
                with torch.autocast("cpu"):
                    assert state()[0] is (precision != "fp32")
            assert state()[0] is (precision != "fp32")
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", enabled=False))
            assert state()[0] is (precision != "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_regions_of_another_device_type(precision: str) -> None:
    with steered(precision, BF16, "cuda"):
        with torch.autocast("cpu", enabled=False):
            assert state("cpu")[0] is False
            with torch.autocast("cuda", enabled=False):
                assert state("cuda")[0] is (precision != "fp32")
        with torch.autocast("cpu", dtype=FP16, cache_enabled=False):
            assert state("cpu") == (precision != "fp32", FP16, False)


def test_each_thread_has_its_own_nesting() -> None:
    seen: list[bool] = []

    def work() -> None:
        with torch.autocast("cpu", enabled=False):
            seen.append(state()[0])

    with steered("amp"), torch.autocast("cpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_region_that_raises_is_left() -> None:
    with steered("amp-nocache"):
        with pytest.raises(ValueError, match="inside"), torch.autocast("cpu", enabled=False):
            raise ValueError("inside")
        assert state() == (False, BF16, True)


def function(seen: list[State], cast_inputs: torch.dtype | None) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append((*state()[:2], x.dtype))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(state())
            return grad * 2

    return Double


@pytest.mark.parametrize("cast_inputs", [None, FP16])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_custom_functions(precision: str, enabled: bool, cast_inputs: torch.dtype | None) -> None:
    seen: list[Any] = []
    x = torch.ones(4, requires_grad=True)
    with steered(precision, FP16):
        with torch.autocast("cpu", enabled=enabled):
            y = function(seen, cast_inputs).apply(x)
        y.float().sum().backward()
    amp = precision != "fp32"
    casts = amp and cast_inputs is not None
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4
    assert seen[0][0] is (amp and not casts)
    assert seen[0][2] is (FP16 if casts else FP32)
    assert seen[1][0] is (amp and not casts)
    assert seen[1][2] is (precision != "amp-nocache")
    if amp:
        assert seen[0][1] is seen[1][1] is FP16


def test_a_region_in_backward_is_left_as_it_is() -> None:
    seen: list[State] = []

    def hook(grad: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            seen.append(state())

    x = torch.ones(4, requires_grad=True)
    with steered("amp"):
        x.register_hook(hook)
        (x * 2).sum().backward()
    assert [entry[0] for entry in seen] == [False]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside", "deep inside", "nowhere"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_runs_as_the_forward_did(precision: str, where: str, reentrant: bool) -> None:
    layer, seen, no = nn.Linear(4, 4), [], False

    def plain(x: Tensor) -> Tensor:
        seen.append((X @ X.T).dtype)
        return layer(x)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=no):
            return plain(x)

    run = {"inside": inside, "deep inside": lambda x: inside(x)}.get(where, plain)
    with steered(precision) as (steering, _):
        with torch.autocast("cpu", enabled=no) if where == "outside" else nullcontext():
            y = checkpoint(run, X.clone().requires_grad_(), use_reentrant=reentrant)
        y.float().sum().backward()
        assert steering.wrapped is (precision != "fp32" and where in ("deep inside", "nowhere"))
    # A switch out of sight is taken for an island of FP32: what matters is that both runs are alike.
    assert seen == [FP32 if precision == "fp32" or where == "deep inside" else BF16] * 2
    assert layer.weight.grad is not None


# -- GradScalers ----------------------------------------------------------------------------------


def update(scaler: GradScaler, layer: nn.Module) -> Tensor:
    """One step with everything a script does with a scaler; returns what ``scale`` did to a 1."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(X).float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return scaler.scale(torch.ones(()))


@pytest.mark.parametrize(
    "spelling", [lambda **kw: GradScaler("cpu", **kw), lambda **kw: torch.cpu.amp.GradScaler(**kw)]
)
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("dtype", [None, BF16, FP16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scalers(precision: str, dtype: torch.dtype | None, said: bool, spelling: Region) -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    with steered(precision, dtype):
        scaler = spelling(enabled=said, init_scale=8.0)
        scaled = update(scaler, layer)
    enabled = precision != "fp32" and (said or dtype is FP16)
    assert scaler.is_enabled() is enabled
    assert scaled.item() == (8.0 if enabled else 1.0)
    assert bool(scaler.state_dict()) is enabled
    assert scaler.get_growth_factor() == 2.0 if said or enabled else True
    torch.testing.assert_close(layer.weight.detach(), before - 0.2, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("seen", "enabled"), [(FP16, True), (BF16, False)])
def test_a_scaler_is_decided_on_when_it_first_scales(seen: torch.dtype, enabled: bool) -> None:
    with steered("amp"):
        scaler = GradScaler("cpu", enabled=False)
        assert not scaler.is_enabled()
        with torch.autocast("cpu", dtype=seen, enabled=False):
            loss = model()(X).float().sum()
        assert scaler.scale(loss).item() == loss.item() * (2.0**16 if enabled else 1)
        assert scaler.is_enabled() is enabled
        with torch.autocast("cpu", dtype=FP16):
            pass
        scaler.scale(loss)
        assert scaler.is_enabled() is enabled


def test_a_scaler_that_cannot_work_stays_as_the_script_wants_it() -> None:
    with warnings.catch_warnings(), steered("amp", FP16):
        warnings.simplefilter("error")
        for scaler in (GradScaler("cuda", enabled=False), GradScaler("cpu", growth_factor=0.5, enabled=False)):
            assert scaler.scale(X) is X


# -- a script without autocast --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["backward", "grad", "step", "leave", "undo"])
@pytest.mark.parametrize("precision", ["amp", "amp-nocache"])
def test_forward_and_loss_run_under_ours(precision: str, end: str) -> None:
    net, seen = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with steered(precision) as (steering, notes):
        y = net(X)
        assert y.dtype is BF16
        assert state() == (True, BF16, precision == "amp")
        assert (y @ y.T).dtype is BF16
        loss = y.float().sum()
        assert steering.wrapped and not notes
        loss.register_hook(lambda _: seen.append(state()))
        if end == "backward":
            loss.backward()
        elif end == "grad":
            torch.autograd.grad(loss, list(net.parameters()))
        elif end == "step":
            optimizer.step()
        elif end == "leave":
            steering.leave()
            steering.leave()
        assert state()[0] is (end == "undo")
    assert seen in ([], [(False, BF16, True)]) and bool(seen) is (end in ("backward", "grad"))
    assert steering.wrapped and notes == [WRAPPED]
    assert state() == (False, BF16, True)


def trained(region: Region) -> list[list[float]]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        with region():
            y = net(X)
            assert y.dtype is FP16
            loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert state()[0] is False
    return [parameter.flatten().tolist() for parameter in net.parameters()]


def test_a_wrapped_script_trains_as_one_with_autocast_does() -> None:
    with steered("amp", FP16) as (_, notes):
        ours = trained(nullcontext)
    assert set(notes) == {WRAPPED}
    assert ours == trained(lambda: torch.autocast("cpu", dtype=FP16))


def test_fp32_wraps_nothing() -> None:
    with steered("fp32") as (steering, notes):
        assert model()(X).dtype is FP32
    assert not steering.wrapped and not notes


def test_a_forward_without_gradients_ends_ours() -> None:
    net = model()
    with steered("amp"):
        with torch.no_grad():
            assert net(X).dtype is BF16
            assert state()[0] is False
        with torch.inference_mode():
            assert net(X).dtype is BF16
        assert state()[0] is False


class Calls(nn.Module):
    """A model whose forward is ``around`` its layer."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.around = nn.Linear(4, 4), around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.layer, self.layer(x).float())


def fails(layer: nn.Module, x: Tensor) -> Tensor:
    raise ValueError("inside")


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_that_raises_leaves_nothing_open(grad: bool) -> None:
    with steered("amp"):
        with pytest.raises(ValueError, match="inside"), torch.set_grad_enabled(grad):
            Calls(fails)(X)
        assert state()[0] is grad
    assert state()[0] is False


def test_a_forward_in_another_thread_is_not_wrapped() -> None:
    seen: list[torch.dtype] = []
    with steered("amp") as (steering, _):
        thread = threading.Thread(target=lambda: seen.append(model()(X).dtype))
        thread.start()
        thread.join()
    assert seen == [FP32] and not steering.wrapped


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Within(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        assert self.layer(x).dtype is FP32
        switch = False
        with torch.autocast("cpu", enabled=switch):
            return self.layer(x)


class InAFunction(Decorated):
    def forward(self, x: Tensor) -> Tensor:
        def run() -> Tensor:
            with torch.cpu.amp.autocast():
                return self.layer(x)

        return run()


@pytest.mark.parametrize("own", [Decorated, Within, InAFunction])
def test_a_model_with_autocast_inside_is_not_wrapped(own: type[nn.Module]) -> None:
    with steered("amp") as (steering, notes):
        for _ in range(2):
            net = nn.Sequential(nn.Linear(4, 4), own())
            y = net(X)
            assert y.dtype is BF16 and state()[0] is False
            y.float().sum().backward()
    assert not steering.wrapped and not notes


def test_a_script_that_has_entered_autocast_is_not_wrapped() -> None:
    net = model()
    with steered("amp") as (steering, notes):
        with torch.autocast("cpu", enabled=False):
            assert net(X).dtype is BF16
        assert net(X).dtype is FP32
    assert not steering.wrapped and not notes


def helper(layer: nn.Module, x: Tensor) -> Tensor:
    said = False
    with torch.autocast("cpu", enabled=said, cache_enabled=False):
        assert state() == (True, BF16, True) and nesting() == 2
        y = layer(x)
    assert state()[0] is False
    return y


def test_a_region_met_inside_ours_takes_over_and_that_is_noted() -> None:
    net = Calls(helper)
    with steered("amp") as (steering, notes):
        for _ in range(2):
            net(X).float().sum().backward()
    assert not steering.wrapped and notes == [GAVE_WAY]


def made_elsewhere(*, enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", enabled=enabled)


class InAVariable(Calls):
    def forward(self, x: Tensor) -> Tensor:
        autocast_ctx = made_elsewhere(enabled=True)
        with autocast_ctx:
            y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(y.float())


class InAVariableOfTwo(Calls):
    def forward(self, x: Tensor) -> Tensor:
        autocast_ctx: Any = nullcontext()
        if x.numel():
            autocast_ctx = made_elsewhere(enabled=True)
        with autocast_ctx:
            y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(y.float())


class InAnArgument(Calls):
    def forward(self, x: Tensor, autocast_ctx: Any = None) -> Tensor:
        if autocast_ctx is None:
            autocast_ctx = nullcontext()
        with autocast_ctx:
            y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(y.float())


@pytest.mark.parametrize("kind", [InAVariable, InAVariableOfTwo, InAnArgument])
def test_a_variable_that_another_function_made_may_hold_a_region_of_the_scripts(kind: type[Calls]) -> None:
    net = kind(lambda layer, x: layer(x))
    with steered("amp") as (steering, notes):
        net(X).float().sum().backward()
    assert not steering.wrapped and notes == []


def test_a_region_met_after_ours_takes_over_and_that_is_noted() -> None:
    net = model()
    with steered("amp") as (steering, notes):
        with torch.no_grad():
            net(X)
        with torch.autocast("cpu"):
            net(X)
        assert net(X).dtype is FP32
    assert not steering.wrapped and notes == [WRAPPED, CAME_LATE]


def island(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(device_type="cpu", enabled=False):
        return layer(x)


class Island(Calls):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type="cpu", enabled=False):
            self.layer(x)
        return super().forward(x)


def island_in_a_variable(layer: nn.Module, x: Tensor) -> Tensor:
    autocast_ctx = nullcontext()
    if x.numel():
        autocast_ctx = torch.autocast("cpu", enabled=False)
    with autocast_ctx:
        return layer(x)


class IslandInAVariable(Calls):
    def forward(self, x: Tensor) -> Tensor:
        autocast_ctx = nullcontext()
        if x.requires_grad:
            autocast_ctx = torch.autocast(device_type="cpu", enabled=False)
        with autocast_ctx:
            return super().forward(x)


@pytest.mark.parametrize("net", [Calls(island), Island(island), IslandInAVariable(island_in_a_variable)])
def test_an_island_of_fp32_in_a_model_stays_one_inside_ours(net: nn.Module) -> None:
    with steered("amp") as (steering, notes):
        y = net(X)
        assert y.dtype is FP32 and state()[0] is True
        y.sum().backward()
    assert steering.wrapped and notes == [WRAPPED]


def test_a_custom_function_that_disables_autocast_does_not_end_ours() -> None:
    seen: list[Any] = []
    net = Calls(lambda layer, x: layer(function(seen, FP32).apply(x)))
    with steered("amp") as (steering, notes):
        y = net(X)
        assert y.dtype is BF16 and seen == [(False, BF16, FP32)]
        y.float().sum().backward()
    assert steering.wrapped and notes == [WRAPPED]


def test_regions_of_another_device_type_may_overlap_ours() -> None:
    net = model()
    with steered("amp-nocache"):
        with torch.autocast("cuda", cache_enabled=True):
            y = net(X)
        assert state() == (True, BF16, False)
        y.float().sum().backward()
        assert state() == (False, BF16, True)
        y = net(X)
        with torch.autocast("cuda", dtype=FP16, cache_enabled=True):
            y.float().sum().backward()
            assert state() == (False, BF16, True)
        assert state() == (False, BF16, True)


def test_a_gradient_inside_a_forward_does_no_harm() -> None:
    def forces(layer: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.sum(), layer.weight, create_graph=True)
        return layer(x) + grad.sum()

    with steered("amp"):
        Calls(forces)(X).float().sum().backward()
        assert state()[0] is False


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["around", "with", "decorated", "none", "island"])
def test_compiled_code_runs_in_the_precision(kind: str, precision: str) -> None:
    torch.compiler.reset()
    net = {"with": Within, "decorated": Decorated, "island": lambda: Island(island)}.get(kind, model)()
    if kind == "with":
        net.forward = InAFunction.forward.__get__(net)  # a graph without the assertion
    around = torch.autocast("cpu", enabled=False)
    with steered(precision) as (steering, _):
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        for _ in range(2):
            with around if kind == "around" else nullcontext():
                y = compiled(X)
            assert y.dtype is (FP32 if precision == "fp32" or kind == "island" else BF16)
            y.float().sum().backward()
            assert state()[0] is False
    assert steering.wrapped is (precision != "fp32" and kind in ("none", "island"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_break_inside_a_region(precision: str) -> None:
    torch.compiler.reset()
    net, said = model(), False

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=said):
            x = net(x)
            torch._dynamo.graph_break()
            return net(x)

    with steered(precision):
        assert run(X).dtype is (FP32 if precision == "fp32" else BF16)
        assert state()[0] is False
