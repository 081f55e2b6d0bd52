"""What single ops allocate on a simulated A100, against PyTorch's own CUDA build on the emulated runtime (2.14.1).

The sizes and peaks were printed there, by ``tests/emulated/ops.py``, which runs the same on both sides; most are in
``measured_ops.json``.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.torch_version import TorchVersion  # noqa: E402

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.events import Action  # noqa: E402
from ampmem.simulator.device import DeviceEvent  # noqa: E402
from ampmem.simulator.start import Simulation  # noqa: E402
from ampmem.simulator.where import NotSimulated  # noqa: E402


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    simulated = Simulation(find_gpu("a100-80"))
    ones = rand(8, 8)
    (ones @ ones).sum().backward()  # the workspaces that cuBLAS keeps
    yield simulated
    simulated.end()


def rand(*shape: int) -> Any:
    return torch.zeros(shape, device="cuda", requires_grad=True)


def plain(*shape: int) -> Any:
    return torch.zeros(shape, device="cuda")


def moved(*shape: int) -> Any:
    """Zeros that the simulation knows to be zero."""
    return torch.zeros(shape, dtype=torch.int32).cuda()


def whole(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def made(simulation: Simulation, run: Callable[[], Any]) -> tuple[list[int], int, Any]:
    """The sizes of what ``run`` allocates, in order, their highest sum, and what it returns."""
    events: list[DeviceEvent] = []
    simulation.device.recorder = events.append
    try:
        result = run()
    finally:
        simulation.device.recorder = None
    live = peak = 0
    for event in events:
        live += event.bytes if event.action == Action.ALLOC else -event.bytes
        peak = max(peak, live)
    return [event.bytes for event in events if event.action == Action.ALLOC], peak, result


MEASURED = json.loads(Path(__file__).with_name("measured_ops.json").read_text(encoding="utf-8"))
"""By the name of each case below the bytes of its allocations in their order, and their peak."""
FORWARD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "bce_with_logits": (F.binary_cross_entropy_with_logits, lambda: (rand(512, 768), plain(512, 768))),
    "bce_with_logits, weights of positives": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        lambda: (rand(512, 768), plain(512, 768), plain(768)),
    ),
    "binary_cross_entropy": (F.binary_cross_entropy, lambda: (rand(512, 768), plain(512, 768))),
    "soft_margin_loss": (F.soft_margin_loss, lambda: (rand(512, 768), plain(512, 768))),
    "logsumexp": (lambda x: x.logsumexp(1), lambda: (rand(1024, 3000),)),
    "count_nonzero": (lambda x: x.count_nonzero(1), lambda: (rand(1024, 3000),)),
    "dist": (lambda x, y: x.dist(y), lambda: (rand(512, 768), rand(512, 768))),
    "isinf": (lambda x: x.isinf(), lambda: (rand(512, 768),)),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "mean"),
        lambda: (rand(128, 300), whole(64, 300), rand(64, 300)),
    ),
    "masked_scatter": (
        lambda x, m, s: x.masked_scatter(m, s),
        lambda: (rand(1000, 64), plain(1000, 64).bool(), rand(64_000)),
    ),
    "masked_scatter by a row": (
        lambda x, m, s: x.masked_scatter(m, s),
        lambda: (rand(64, 1000), plain(1000).bool(), rand(64_000)),
    ),
    "nonzero": (torch.nonzero, lambda: (moved(5000),)),
    "nonzero, few": (torch.nonzero, lambda: (moved(10),)),
    "nonzero, not contiguous": (torch.nonzero, lambda: (moved(100, 70)[:, ::2],)),
    "nonzero of a number": (torch.nonzero, lambda: (moved(),)),
    "index by a mask": (lambda x, m: x[m], lambda: (rand(5000), moved(5000).bool())),
    "sort, short rows": (lambda x: x.sort()[0], lambda: (rand(8, 1000),)),
    "sort, long rows": (lambda x: x.sort()[0], lambda: (rand(8, 5000),)),
    "sort, columns": (lambda x: x.sort(0)[0], lambda: (rand(4097, 3),)),
    "sort, one row": (lambda x: x.sort(stable=True, descending=True)[0], lambda: (rand(1_000_000),)),
    "sort, integers": (lambda x: x.sort(), lambda: (whole(100_000),)),
    "sort, two bytes": (lambda x: x.sort(), lambda: (plain(1_000_000).bfloat16(),)),
    "topk, one row": (lambda x: x.topk(3)[0], lambda: (rand(1_000_000),)),
    "topk, many rows": (lambda x: x.topk(3)[0], lambda: (rand(2048, 3000),)),
    "topk, short rows": (lambda x: x.topk(3)[0], lambda: (rand(8, 1000),)),
    "median": (lambda x: x.median(), lambda: (rand(8, 1000),)),
    "cumsum, one row": (lambda x: x.cumsum(0), lambda: (rand(1_000_000),)),
    "cumsum, cast": (lambda x: x.cumsum(1), lambda: (plain(64, 1000).bool(),)),
    "randperm, 32 bits": (partial(torch.randperm, 5000, device="cuda"), tuple),
    "randperm, 64 bits": (partial(torch.randperm, 1_000_000, device="cuda"), tuple),
    "multinomial": (lambda x: torch.multinomial(x, 1), lambda: (plain(4, 5000),)),
    "multinomial, several": (lambda x: torch.multinomial(x, 5), lambda: (plain(4, 100_000),)),
    "multinomial, replaced": (lambda x: torch.multinomial(x, 5, replacement=True), lambda: (plain(4, 5000),)),
    "bernoulli, two bytes": (torch.bernoulli, lambda: (plain(512, 1000).bfloat16(),)),
    "one_hot": (lambda x: F.one_hot(x, 1000), lambda: (whole(512),)),
    "index_put": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        lambda: (plain(500, 512), whole(512), plain(512, 512)),
    ),
    "affine_grid": (lambda theta: F.affine_grid(theta, [4, 3, 64, 64], align_corners=False), lambda: (rand(4, 2, 3),)),
    "bilinear": (F.bilinear, lambda: (rand(128, 64), rand(128, 64), rand(32, 64, 64), rand(32))),
}
BACKWARD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "bce_with_logits": (F.binary_cross_entropy_with_logits, lambda: (rand(512, 768), plain(512, 768))),
    "soft_margin_loss": (F.soft_margin_loss, lambda: (rand(512, 768), plain(512, 768))),
    "median": (lambda x: x.median(), lambda: (rand(8, 1000),)),
    "index": (lambda x, i: x[i], lambda: (rand(1000, 64), whole(5000))),
    "atan2": (torch.atan2, lambda: (rand(1024, 1024), rand(1024, 1024))),
    "index in two dimensions": (lambda x, i, j: x[i, j], lambda: (rand(1000, 64), whole(5000), whole(5000))),
    "affine_grid": (lambda theta: F.affine_grid(theta, [4, 3, 64, 64], align_corners=False), lambda: (rand(4, 2, 3),)),
    "cumprod": (lambda x: x.cumprod(-1), lambda: (rand(512, 5000),)),
    "prod": (lambda x: x.prod(), lambda: (rand(512, 5000),)),
    "prod of a dimension": (lambda x: x.prod(-1), lambda: (rand(512, 5000),)),
    "few indices": (lambda x, i: x[i], lambda: (rand(1000, 64), whole(100))),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(simulation: Simulation, name: str) -> None:
    function, arguments = FORWARD[name]
    given = arguments()
    assert list(made(simulation, lambda: function(*given))[:2]) == MEASURED["forward"][name]


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(simulation: Simulation, name: str) -> None:
    function, arguments = BACKWARD[name]
    result = function(*arguments())
    gradient = torch.ones_like(result)
    assert list(made(simulation, lambda: result.backward(gradient))[:2]) == MEASURED["backward"][name]


def test_affine_grid_under_autocast(simulation: Simulation) -> None:
    """Autocast casts the matrix product inside in forward, and is off in backward."""
    theta = rand(4, 2, 3)
    with torch.autocast("cuda", torch.bfloat16):
        sizes, peak, grid = made(simulation, lambda: F.affine_grid(theta, [4, 3, 64, 64], align_corners=False))
    assert (sizes, peak) == ([196_608, *[256] * 6, 48, 98_304, 65_536], 360_496)
    assert (grid.dtype, grid.grad_fn.name()) == (torch.bfloat16, "AffineGridGeneratorBackward0")
    gradient = torch.ones_like(grid)
    sizes, _, _ = made(simulation, lambda: grid.backward(gradient))
    assert sizes == [98_304, *[128] * 6, 48, 96, 96]
    assert theta.grad.dtype == torch.float32


def test_nonzero_makes_its_result_between_counting_and_looking(simulation: Simulation) -> None:
    """What 5,000 elements that are all found take: the count, its scratch, the places, and the scratch of these."""
    sizes, peak, found = made(simulation, torch.ones(5000, dtype=torch.int32).cuda().nonzero)
    assert found.shape == (5000, 1)
    assert (sizes, peak) == ([4, 17_663, 40_000, 1023], 4 + 40_000 + 1023)


def test_products_have_the_nodes_and_the_higher_gradients_of_torch(simulation: Simulation) -> None:
    source = rand(4, 5)
    for result, name in ((source.prod(), "ProdBackward0"), (source.prod(0), "ProdBackward1")):
        assert result.grad_fn.name() == name
        (gradient,) = torch.autograd.grad(result.sum(), source, create_graph=True)
        gradient.sum().backward()
        assert source.grad.shape == (4, 5)
    assert torch.func.vmap(torch.func.grad(torch.prod))(source).shape == (4, 5)
    assert torch.func.jvp(torch.prod, (source,), (source,))[1].shape == ()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(source, plain(4, 5))
        assert torch.autograd.forward_ad.unpack_dual(dual.prod(0)).tangent.shape == (5,)


def test_gradients_of_products_say_what_they_take_for_granted(simulation: Simulation) -> None:
    rand(4, 5).cumprod(0).sum().backward()
    assert any("prod and cumprod multiply no zeros" in text for text in simulation.device.assumptions)


def test_an_encoder_layer_that_is_not_trained_is_one_op(simulation: Simulation) -> None:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, device="cuda").eval()
    source = plain(8, 128, 256)
    with torch.no_grad():
        layer(source)  # which makes what attention asks of the device for good
        sizes, peak, _ = made(simulation, lambda: layer(source))
    row, number = 1_048_576, 4096
    state = [8, 8] if TorchVersion(torch.__version__) >= "2.14" else []  # of random numbers: before, on the host
    assert sizes == [3 * row, *state, row, row, row, number, number, 4 * row, row, row, number, number]
    assert peak == 6_291_456


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_backward_of_an_embedding_bag(simulation: Simulation, mode: str) -> None:
    result = F.embedding_bag(whole(5000), rand(1000, 64), torch.arange(0, 5000, 10, device="cuda"), mode=mode)
    gradient = torch.ones_like(result)
    assert made(simulation, lambda: result.backward(gradient))[1] == 788_016


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_margins(simulation: Simulation, loss: Callable[..., Any]) -> None:
    target = whole(512) if loss is F.multi_margin_loss else whole(512, 768)
    given = rand(512, 768)
    result = loss(given, target)
    assert made(simulation, result.backward)[0][-1:] == [512 * 768 * 4]
    assert given.grad.shape == given.shape


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_ctc_loss(simulation: Simulation, where: str) -> None:
    """One matrix for each sequence: 50 steps, and 2 × 30 + 1 states."""
    lengths = [torch.full((16,), each, device=where) for each in (50, 30)]
    scores = rand(50, 16, 20)
    targets = whole(16, 30)
    sizes, _, result = made(simulation, lambda: F.ctc_loss(scores, targets, *lengths))
    assert sizes[:5] == [128, 128, 128, 16 * 50 * 61 * 4, 64]
    assert result.shape == ()
    assert made(simulation, result.backward)[0][-5:] == [128, 128, 128, 16 * 50 * 61 * 4, 64_000]


def test_ops_without_a_meta_kernel(simulation: Simulation) -> None:
    pooled = F.fractional_max_pool3d(rand(2, 3, 20, 20, 20), 2, output_size=8)
    assert made(simulation, pooled.sum().backward)[0][-1] == 2 * 3 * 20**3 * 4
    sampled = F.grid_sample(rand(2, 3, 20, 20), rand(2, 15, 15, 2), align_corners=True)
    assert made(simulation, sampled.sum().backward)[0][-2:] == [2 * 3 * 400 * 4, 2 * 225 * 2 * 4]
    x, c = plain(8, 16, 10, 10), plain(16)
    shapes = [each.shape[:1] for each in torch.ops.aten._batch_norm_with_update(x, c, c, c, c, 0.1, 1e-5)]
    assert shapes == [(8,), (16,), (16,), (0,)]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_cell_without_biases_trains(simulation: Simulation, kind: type[nn.Module]) -> None:
    cell = kind(64, 128, bias=False).cuda()
    out = cell(rand(32, 64))
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert [p.grad.shape for p in cell.parameters()] == [p.shape for p in cell.parameters()]


def test_new_tensors_in_pinned_memory(simulation: Simulation) -> None:
    for made in torch.randn(100, pin_memory=True), torch.tensor([3, 4], pin_memory=True):
        assert made.is_pinned()
        assert made.cuda().device.type == "cuda"
    assert made.tolist() == [3, 4]
    assert not torch.randn(100).is_pinned()
    assert not torch.tensor([3, 4]).is_pinned()
    assert torch.empty(2, 2, layout=torch.sparse_csr).layout is torch.sparse_csr


@torch.library.custom_op("ampmem_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    """Matrix products in float32 or under autocast, and copies of them, which only this body makes."""
    product = x @ x
    return (product + product.t().contiguous()).float()


squared.register_fake(torch.empty_like)


@torch.library.custom_op("ampmem_tests::impossible", mutates_args=())
def impossible(x: torch.Tensor) -> torch.Tensor:
    """Needs what is not there."""
    raise ImportError("no kernels here")


impossible.register_fake(torch.empty_like)


def test_an_op_of_the_scripts_allocates_what_its_function_does(simulation: Simulation) -> None:
    x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    squared(x)  # cuBLAS's workspace
    peaks = []
    for enabled in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            found = squared(x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert (found.dtype, torch.cuda.memory_allocated() - before) == (torch.float32, 4 << 20)
        del found
    assert peaks == [12 << 20, 10 << 20]  # as torch 2.14.1 on the emulated runtime
    assert impossible(x).shape == x.shape
    assert simulation.device.assumptions.keys() >= {
        "ampmem_tests.impossible.default cannot run here, so only its results are counted: no kernels here"
    }


@pytest.mark.parametrize("op", [torch._scaled_mm, torch.ops.aten._scaled_mm.out])
def test_a_product_of_8_bit_matrices_is_made_where_it_is_asked_for(simulation: Simulation, op: Any) -> None:
    left, right = (torch.zeros(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    how = {"out": torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)} if op is not torch._scaled_mm else {}
    found = op(left, right.t(), *scales, out_dtype=torch.bfloat16, **how)
    assert (found.shape, found.dtype) == ((64, 64), torch.bfloat16)
    assert found is how.get("out", found)


def test_kernels_that_are_compiled_at_run_time_are_refused(simulation: Simulation) -> None:
    same = torch.cuda.jiterator._create_jit_fn("template <typename T> T same(T x) { return x; }")
    with pytest.raises(NotSimulated, match="write the function with torch's own ops"):
        same(plain(8))


def test_a_fake_process_group_needs_a_world(simulation: Simulation) -> None:
    with pytest.raises(NotSimulated, match="--world-size N"):
        torch.distributed.init_process_group("fake", rank=0, world_size=8)
