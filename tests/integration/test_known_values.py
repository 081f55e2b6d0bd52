"""What a simulated device claims to know is what a CPU beside it computes; whatever else is read was made up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ampmem.allocator.gpus import find_gpu
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.start import Simulation
from ampmem.simulator.values import Guesses
from ampmem.simulator.where import NotSimulated

pytestmark = pytest.mark.slow
TYPED = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
RESIZES = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
Op = Callable[[Tensor, Tensor, int], Any]


class MadeUp(Exception):
    """Something was read that is not known."""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[SimulatedDevice]:
    """A simulated GPU on which nothing is made up: reading what is not known raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise MadeUp

    simulation = Simulation(find_gpu("h100"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guesses, "read", refuse)
        patch.setattr(Guesses, "copied", refuse)
        yield simulation.device
    simulation.end()


def shared_with_numpy(device: str, n: int) -> Tensor:
    array = np.array([n, n + 1, 3])
    tensor = torch.from_numpy(array).to(device, copy=True)
    array += 7
    return tensor


MAKERS: list[Callable[[str, int], Tensor]] = [
    lambda device, n: torch.tensor([[n, 2, -1], [3, n, 0]]).to(device),
    lambda device, n: torch.tensor([n, 5, 2], device=device),
    lambda device, n: torch.tensor([True, n > 2, False]).to(device),
    lambda device, n: torch.full((), float(n), device=device),
    lambda device, n: torch.tensor([n / 4]).to(device),
    lambda device, n: torch.arange(n + 1, device=device),
    shared_with_numpy,
]


def into_cpu(write: Callable[[Tensor, Tensor], Any], x: Tensor) -> Tensor:
    """A tensor on the CPU to which ``write`` brings ``x``."""
    there = torch.zeros(x.shape, dtype=x.dtype)
    write(there, x)
    return there


VIEWS: list[Op] = [
    lambda x, y, n: x[:1],
    lambda x, y, n: x[..., ::2],
    lambda x, y, n: x.flatten(),
    lambda x, y, n: x.mT,
    lambda x, y, n: x.unsqueeze(0).expand(3, *x.shape),
    lambda x, y, n: x.detach(),
    lambda x, y, n: x.data,
    lambda x, y, n: x.unbind()[0],
    lambda x, y, n: x.view(torch.uint8),
    lambda x, y, n: x.as_strided((2,), (1,), 1),
]
COMPUTED: list[Op] = [
    lambda x, y, n: x + y,
    lambda x, y, n: x * n,
    lambda x, y, n: x == y,
    lambda x, y, n: x > n,
    lambda x, y, n: x.sum(),
    lambda x, y, n: x.max(),
    lambda x, y, n: x.to(torch.int32),
    lambda x, y, n: x.bool(),
    lambda x, y, n: x.clone(),
    lambda x, y, n: torch.cat([x.flatten(), y.flatten()]),
    lambda x, y, n: torch.where(x > n, x, y),
    lambda x, y, n: torch.ones_like(x),
    lambda x, y, n: y.new_full((2,), n),
    lambda x, y, n: x.unique(),
    lambda x, y, n: y[x > n],
    lambda x, y, n: x.nonzero(),
    lambda x, y, n: x.sum() / n,
    lambda x, y, n: copy.copy(x),
    lambda x, y, n: torch.tensor([x.flatten()[0], n]),
    lambda x, y, n: torch.as_tensor([x.flatten()[0], y.flatten()[0]]),
    lambda x, y, n: torch.tensor([torch.equal(x, y), torch.equal(x, x.clone())]),
    lambda x, y, n: into_cpu(torch.Tensor.copy_, x),
    lambda x, y, n: into_cpu(lambda there, x: torch._foreach_copy_([there], [x]), x),
    lambda x, y, n: into_cpu(lambda there, x: there.__setitem__(..., x), x),
]
UNKNOWN: list[Op] = [
    lambda x, y, n: torch.randint(n + 1, (2,), device=x.device),
    lambda x, y, n: torch.empty_like(x),
    lambda x, y, n: x.float() + torch.tensor([0.5, 1.0]).to(x.device),
]


def accumulated(x: Tensor, y: Tensor, n: int) -> Tensor | None:
    """The gradient of two backwards, of which the second adds to the first."""
    leaf = x.flatten()[:1].detach().float().requires_grad_()
    first = (leaf * n).sum()
    first.backward()
    (leaf * n + leaf * 2).sum().backward()
    return leaf.grad


def summed(x: Tensor, y: Tensor, n: int) -> Tensor | None:
    """A gradient into which the engine adds another in place."""
    leaf = x.flatten()[:1].detach().float().requires_grad_()
    (leaf * n + leaf * 2).sum().backward()
    return leaf.grad


def normalized(x: Tensor, y: Tensor, n: int) -> Tensor:
    """The statistics of one channel, which the op changes without saying so."""
    mean, variance = torch.zeros(1, device=x.device), torch.ones(1, device=x.device)
    F.batch_norm(torch.full((4, 1), float(n), device=x.device), mean, variance, training=True)
    return mean


def stepped(x: Tensor, y: Tensor, n: int, **options: Any) -> Tensor:
    weight = x.flatten()[:1].detach().float().clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=n, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight.detach()


def inferred(x: Tensor, y: Tensor, n: int) -> Tensor:
    with torch.inference_mode():
        made = x + n
        made.data.add_(1)
        x.add_(1)
        return made


def set_data(x: Tensor, y: Tensor, n: int) -> None:
    x.data = y


def set_first(x: Tensor, y: Tensor, n: int) -> None:
    x[0] = n


def set_where(x: Tensor, y: Tensor, n: int) -> None:
    x[x > n] = n


def set_bytes(x: Tensor, y: Tensor, n: int) -> None:
    x.untyped_storage()[0] = n


def set_typed(x: Tensor, y: Tensor, n: int) -> None:
    x.storage()[0] = n


def set_copy(x: Tensor, y: Tensor, n: int) -> Tensor:
    other = copy.copy(x)
    other.fill_(n)
    return other


def from_numpy(x: Tensor, y: Tensor, n: int) -> None:
    x.copy_(torch.from_numpy(np.full(tuple(x.shape), n)))


WRITES: list[Op] = [
    lambda x, y, n: x.add_(n),
    lambda x, y, n: x.fill_(n),
    lambda x, y, n: x.zero_(),
    lambda x, y, n: x.copy_(y),
    lambda x, y, n: x.data.add_(n),
    lambda x, y, n: x.detach().mul_(2),
    lambda x, y, n: x.masked_fill_(x > n, n),
    lambda x, y, n: x.index_put_((torch.zeros(1, dtype=torch.int64, device=x.device),), y[0], accumulate=True),
    lambda x, y, n: x.scatter_(0, torch.zeros_like(x, dtype=torch.int64), n),
    lambda x, y, n: x.random_(),
    lambda x, y, n: x.bernoulli_(),
    lambda x, y, n: torch.add(x, n, out=y),
    lambda x, y, n: torch.max(x, 0, out=(y, torch.empty(0, dtype=torch.int64, device=x.device))),
    lambda x, y, n: torch._foreach_add_([x, y], n),
    lambda x, y, n: torch._foreach_zero_([y, x]),
    lambda x, y, n: torch._foreach_copy_([x], [y]),
    lambda x, y, n: x.untyped_storage().fill_(n),
    lambda x, y, n: x.untyped_storage().copy_(y.untyped_storage()),
    lambda x, y, n: x.untyped_storage().resize_(x.untyped_storage().nbytes() + 8 * n),
    lambda x, y, n: x.resize_(n),
    lambda x, y, n: x.set_(y),
    lambda x, y, n: x.set_(y.untyped_storage(), 0, (1,), (1,)),
    lambda x, y, n: x.unsqueeze_(0),
    lambda x, y, n: torch.utils.swap_tensors(x, y),
    lambda x, y, n: torch.clamp_(x, 0, n),
    lambda x, y, n: F.relu_(x),
    set_data,
    set_first,
    set_where,
    set_bytes,
    set_typed,
    set_copy,
    lambda x, y, n: x.storage().fill_(n),
    from_numpy,
    normalized,
    accumulated,
    summed,
    stepped,
    partial(stepped, fused=True),
    inferred,
]
OPS = [*VIEWS, *COMPUTED, *UNKNOWN, *WRITES]
STEPS = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))


def check(pairs: list[tuple[Tensor, Tensor]]) -> int:
    """That whatever is read of the second ones is what the first ones hold; how many can be read."""
    known = 0
    for real, simulated in pairs:
        try:
            found = simulated.item() if simulated.dim() == 0 else simulated.tolist()
        except MadeUp:
            continue
        assert found == (real.item() if real.dim() == 0 else real.tolist())
        known += 1
    return known


def both(op: Op, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], n: int) -> tuple[Any, Any] | None:
    """What ``op`` gives on the CPU and on the device; ``None`` where it fails, or asks for what is not known."""
    try:
        return op(first[0], second[0], n), op(first[1], second[1], n)
    except (RuntimeError, IndexError, TypeError, NotSimulated, MadeUp):
        return None


@RESIZES
@TYPED
@pytest.mark.parametrize("of", MAKERS)
def test_each_op_leaves_what_is_true_or_nothing(of: Callable[[str, int], Tensor]) -> None:
    for op, other in itertools.product(OPS, (MAKERS[0], MAKERS[3])):
        first, second = (of("cpu", 2), of("cuda", 2)), (other("cpu", 3), other("cuda", 3))
        part = (first[0].flatten(), first[1].flatten())
        assert check([first, second, part]) == 3
        results = both(op, first, second, 2)
        check([first, second, part])
        if results is not None and isinstance(results[0], Tensor):
            known = check([results])
            assert not (known and op in UNKNOWN)
            assert known or op in (*UNKNOWN, *WRITES) or (results[0].is_floating_point() and results[0].numel() > 1)


@RESIZES
@TYPED
@given(
    made=st.lists(st.tuples(st.sampled_from(MAKERS), st.integers(1, 4)), min_size=2, max_size=3), steps=st.lists(STEPS)
)
def test_what_is_known_is_true_whatever_is_done(made: list[Any], steps: list[Any]) -> None:
    pairs = [(make("cpu", n), make("cuda", n)) for make, n in made]
    for which, first, second, n in steps:
        results = both(OPS[which], pairs[first % len(pairs)], pairs[second % len(pairs)], n)
        if results is None and OPS[which] in WRITES:
            return  # half of it may be done
        if results is not None and isinstance(results[0], Tensor):
            pairs.append(results)
        check(pairs)


def test_tensors_that_are_known_to_differ_are_not_equal(gpu: SimulatedDevice) -> None:
    x, y = torch.tensor([3, 7]).cuda(), torch.tensor([3, 8]).cuda()
    assert torch.equal(x, torch.tensor([3, 7]).cuda())
    assert not torch.equal(x, y)
    assert not torch.allclose(x, y)
    assert not torch.equal(x, y[:1])
    assert torch.allclose(x, y, atol=1.0)


OPERANDS = [
    torch.tensor([True, True]),
    torch.tensor([False, False]),
    torch.tensor([True, False]),
    torch.tensor([0, 0]),
    torch.tensor([2, 1]),
    torch.tensor(True),
    torch.tensor(0.0),
]
WHATEVER = [torch.tensor([[True, False]]), torch.tensor([[0, 5]]), torch.tensor([[float("inf"), 0.0]])]


@pytest.mark.parametrize(
    "op", [torch.bitwise_or, torch.bitwise_and, torch.logical_or, torch.logical_and, torch.mul, torch.bitwise_xor]
)
@pytest.mark.parametrize("other_way", [False, True])
def test_what_one_operand_settles_is_known_and_nothing_else(op: Callable[..., Tensor], other_way: bool) -> None:
    """Beside one that nobody knows, in another shape: known is what no value of it can change."""
    for operand, unknown in itertools.product(OPERANDS, WHATEVER):
        possible = [torch.full_like(unknown, value) for value in (0, 1, -1 if unknown.dtype != torch.bool else 1)]
        try:
            results = [op(operand, each) for each in (*possible, unknown)]
        except RuntimeError:  # no bits in floating point
            continue
        settled = all(torch.equal(each, results[0]) for each in results) and not results[0].is_floating_point()
        there = torch.empty_like(unknown, device="cuda").random_()
        pair = (there, operand.to("cuda")) if other_way else (operand.to("cuda"), there)
        if settled:
            assert torch.equal(op(*pair).cpu(), results[0])
        else:
            with pytest.raises(MadeUp):
                op(*pair).cpu()


def test_zero_times_a_complex_number_that_nobody_knows_is_not_known() -> None:
    unknown = torch.empty((), dtype=torch.complex64, device="cuda").normal_()
    with pytest.raises(MadeUp):
        (torch.zeros((), device="cuda") * unknown).item()


def test_a_loop_that_generates_ends_at_its_limit() -> None:
    """As transformers does: a row is done at the limit or at an end that nobody knows of; done when all rows are."""
    unfinished, made = torch.ones(3, dtype=torch.long, device="cuda"), 0
    while True:
        made += 1
        ended = torch.empty(3, dtype=torch.long, device="cuda").random_() == 7
        done = torch.full((3,), False, device="cuda") | torch.full((3,), made >= 5, device="cuda") | ended
        unfinished = unfinished & ~done
        try:
            if unfinished.max() == 0:
                break
        except MadeUp:
            continue
    assert made == 5


def test_a_number_is_copied_into_a_tensor(gpu: SimulatedDevice) -> None:
    x = torch.zeros((), dtype=torch.int32, device="cuda")
    x.copy_(7)
    assert x.item() == 7


def test_what_is_pinned_is_a_copy(gpu: SimulatedDevice) -> None:
    x = torch.tensor([1, 2])
    pinned = x.pin_memory()
    pinned[0] = 9
    assert x.tolist() == [1, 2]
    assert pinned.tolist() == [9, 2]
    assert (x.is_pinned(), pinned.is_pinned(), pinned.cuda().is_pinned()) == (False, True, False)
    assert pinned.pin_memory() is pinned


def test_the_scale_of_a_grad_scaler_grows_while_it_is_known_when(gpu: SimulatedDevice) -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)

    def scales(updates: int) -> Iterator[float]:
        for _ in range(updates):
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale()

    assert list(scales(5)) == [8.0, 16.0, 16.0, 32.0, 32.0]
    held = "a GradScaler's scale was kept constant, because it is unknown when it last grew"
    assert held not in gpu.assumptions
    scaler._growth_tracker.random_()
    assert list(scales(3)) == [32.0, 32.0, 32.0]
    assert held in gpu.assumptions


def test_only_what_has_to_know_a_size_or_a_number_waits_for_the_stream(
    gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, places, mask = torch.ones(8, 4).cuda(), torch.tensor([1, 3]).cuda(), torch.ones(8).bool().cuda()
    waited: list[Any] = []
    monkeypatch.setattr(gpu, "synchronize", waited.append)

    def waits(op: Callable[[], Any]) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            batch = torch.empty(1000, device="cuda")
        batch.record_stream(torch.cuda.current_stream())
        del batch  # which has to wait for the stream from now on
        waited.clear()
        op()
        return bool(waited)

    assert not waits(lambda: table[places])
    assert not waits(lambda: table[:, places].sum())
    assert not waits(lambda: table.index_put_((places,), table[places], accumulate=True))
    assert not waits(lambda: places + 1)
    assert waits(lambda: table[mask])
    assert waits(lambda: mask.nonzero())
    assert waits(lambda: places.unique())
    assert waits(lambda: places.bincount())
    assert waits(lambda: places.max().item())
