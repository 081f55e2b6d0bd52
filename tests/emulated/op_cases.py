"""The larger cases of what training uses, for ops.py: each op in shapes of real models, forward and backward.

Recurrent networks are in recurrent_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from ops import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

F32, BF16 = torch.float32, torch.bfloat16
Built = tuple[Any, ...]
"""A function, or a module, and its arguments."""
Build = Callable[[torch.dtype], Built]

PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]] = {
    "f32": (F32, nullcontext),
    "bf16": (BF16, nullcontext),
    "amp": (F32, lambda: torch.autocast("cuda", BF16)),
}


def cases() -> Iterable[Case]:
    """All of them, in all precisions."""
    for name, build in CASES.items():
        for precision in PRECISIONS:
            yield Case(name=name, precision=precision, run=partial(trained, build, precision))


def trained(build: Build, precision: str) -> Iterator[str]:
    """Forward, and backward where the result has a gradient; gradients are given in the format of the outputs."""
    dtype, context = PRECISIONS[precision]
    function, *arguments = build(dtype)
    yield "forward"
    with context():
        result = function(*arguments)
    yield ""
    outs = [out for out in tensors(result) if out.requires_grad]
    grads = [torch.ones_like(out) for out in outs]
    if outs:
        del result
        yield "backward"
        torch.autograd.backward(outs, grads)


def tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from tensors(each)


def rand(dtype: torch.dtype, *shape: int, grad: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_(grad)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def last(x: Tensor) -> Tensor:
    """The same in channels-last format, as a leaf."""
    return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)


def module(kind: Callable[..., nn.Module], *how: Any, **named: Any) -> Callable[[torch.dtype], nn.Module]:
    return lambda t: kind(*how, **named, device="cuda", dtype=t)


def of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Build:
    """``function`` of tensors with these shapes."""
    return lambda t: (function, *(rand(t, *shape) for shape in shapes))


def through(make: Callable[[torch.dtype], nn.Module], *shape: int) -> Build:
    """A module of a tensor with this shape."""
    return lambda t: (make(t), rand(t, *shape))


def after(change: Callable[[Tensor], Tensor], build: Build) -> Build:
    """What ``build`` makes, with its first argument changed before."""

    def built(t: torch.dtype) -> Built:
        function, first, *rest = build(t)
        return (function, change(first), *rest)

    return built


def leaf(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change of a leaf, so that the result is one."""
    return lambda x: change(x.detach()).requires_grad_(x.requires_grad)


PERMUTED = leaf(lambda x: x.permute(0, 2, 3, 1) if x.dim() == 4 else x.transpose(0, 1))


# -- attention --------------------------------------------------------------------------------------

B, H, L, D = 8, 12, 256, 64


def sdpa(
    *,
    heads: int = H,
    keys: int = 0,
    length: int = L,
    kv: int = 0,
    width: int = D,
    batch: int = B,
    mask: Callable[[torch.dtype, int, int, int, int], Tensor] | None = None,
    packed: bool = False,
    backend: SDPBackend | None = None,
    **how: Any,
) -> Build:
    """Attention on tensors as they come out of a model: heads transposed, from one projection where ``packed``."""

    def build(t: torch.dtype) -> Built:
        if packed:
            qkv = rand(t, batch, length, 3, heads, width)
            given: tuple[Tensor, ...] = (qkv,)
        else:
            given = (
                rand(t, batch, heads, length, width),
                *(rand(t, batch, keys or heads, kv or length, width) for _ in range(2)),
            )
        masked = {} if mask is None else {"attn_mask": mask(t, batch, heads, length, kv or length)}

        def attention(*given: Tensor) -> Tensor:
            if packed:
                q, k, v = (x.transpose(1, 2) for x in given[0].unbind(2))
            else:
                q, k, v = given
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **masked, **how)

        return (attention, *given)

    return build


def bool_mask(t: torch.dtype, batch: int, heads: int, length: int, kv: int) -> Tensor:
    return torch.ones(batch, 1, 1, kv, dtype=torch.bool, device="cuda")


def float_mask(t: torch.dtype, batch: int, heads: int, length: int, kv: int) -> Tensor:
    return torch.zeros(batch, 1, length, kv, dtype=t, device="cuda")


def bias_mask(t: torch.dtype, batch: int, heads: int, length: int, kv: int) -> Tensor:
    return torch.zeros(1, heads, length, kv, dtype=t, device="cuda")


def trained_bias(t: torch.dtype, batch: int, heads: int, length: int, kv: int) -> Tensor:
    return rand(t, 1, heads, length, kv)


def by_hand(t: torch.dtype, *, causal: bool, dropout: float) -> Built:
    mask = torch.ones(L, L, dtype=torch.bool, device="cuda").tril()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * D**-0.5
        if causal:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.float().softmax(-1).to(q.dtype)
        return F.dropout(weights, dropout) @ v

    return (attention, *(rand(t, 2, H, L, D) for _ in range(3)))


def three_dimensional(t: torch.dtype) -> Built:
    return (F.scaled_dot_product_attention, *(rand(t, 24, 128, 64) for _ in range(3)))


def mha(t: torch.dtype, *, weights: bool, batch_first: bool = True) -> Built:
    layer = nn.MultiheadAttention(384, 6, batch_first=batch_first, device="cuda", dtype=t)
    x = rand(t, 8, 196, 384)
    return (lambda x: layer(x, x, x, need_weights=weights)[0], x)


def encoder(t: torch.dtype, *, fast: bool) -> Built:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, device="cuda", dtype=t)
    if not fast:
        return (layer, rand(t, 8, 128, 256))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(x)
        return out

    layer.eval()
    return (run, rand(t, 8, 128, 256))


ATTENTION: dict[str, Build] = {
    "sdpa": sdpa(),
    "sdpa causal": sdpa(is_causal=True),
    "sdpa dropout": sdpa(dropout_p=0.1),
    "sdpa packed": sdpa(packed=True, is_causal=True),
    "sdpa packed dropout": sdpa(packed=True, dropout_p=0.1),
    "sdpa packed mask": sdpa(packed=True, mask=bool_mask),
    **{
        f"sdpa d={width}": sdpa(width=width, batch=2, is_causal=True)
        for width in (32, 36, 40, 80, 88, 96, 100, 128, 160, 192, 256)
    },
    **{f"sdpa packed d={width}": sdpa(width=width, batch=2, packed=True) for width in (32, 72, 80, 96, 128, 256)},
    "sdpa cross": sdpa(length=64, kv=77 * 4),
    "sdpa cross 77": sdpa(length=1024, kv=77, heads=8, width=40, batch=2),
    "sdpa short": sdpa(length=1, kv=512, batch=2),
    "sdpa short 16": sdpa(length=16, kv=2048, batch=1),
    "sdpa long": sdpa(length=2048, batch=1, is_causal=True),
    "sdpa odd": sdpa(length=197, batch=4),
    "sdpa odd packed": sdpa(length=197, batch=4, packed=True),
    "sdpa gqa": sdpa(heads=16, keys=4, enable_gqa=True, is_causal=True, batch=2),
    "sdpa gqa d=128": sdpa(heads=16, keys=2, enable_gqa=True, is_causal=True, batch=1, width=128),
    "sdpa bool mask": sdpa(mask=bool_mask),
    "sdpa float mask": sdpa(mask=float_mask),
    "sdpa bias": sdpa(mask=bias_mask),
    "sdpa bias odd": sdpa(mask=bias_mask, length=197),
    "sdpa float mask odd": sdpa(mask=float_mask, length=197),
    "sdpa bool mask odd": sdpa(mask=bool_mask, length=77),
    "sdpa trained bias": sdpa(mask=trained_bias, batch=2),
    "sdpa trained bias odd": sdpa(mask=trained_bias, batch=2, length=197),
    "sdpa mask dropout": sdpa(mask=float_mask, dropout_p=0.1),
    "sdpa 3d": three_dimensional,
    **{
        f"sdpa {backend.name.lower()}": sdpa(backend=backend)
        for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
    },
    "sdpa math causal": sdpa(backend=SDPBackend.MATH, is_causal=True, batch=2),
    "sdpa math mask": sdpa(backend=SDPBackend.MATH, mask=bool_mask, batch=2),
    **{
        f"sdpa efficient d={width}": sdpa(
            backend=SDPBackend.EFFICIENT_ATTENTION, width=width, batch=2, heads=4, length=length
        )
        for width, length in ((32, 200), (80, 256), (128, 300), (160, 256), (256, 512))
    },
    "sdpa efficient many": sdpa(backend=SDPBackend.EFFICIENT_ATTENTION, batch=32, length=64),
    "sdpa efficient causal": sdpa(backend=SDPBackend.EFFICIENT_ATTENTION, is_causal=True),
    "sdpa efficient packed": sdpa(backend=SDPBackend.EFFICIENT_ATTENTION, packed=True),
    "attention by hand": partial(by_hand, causal=False, dropout=0.0),
    "attention by hand causal": partial(by_hand, causal=True, dropout=0.1),
    "mha": partial(mha, weights=False),
    "mha weights": partial(mha, weights=True),
    "mha batch second": partial(mha, weights=False, batch_first=False),
    "encoder layer": partial(encoder, fast=False),
    "encoder layer fast path": partial(encoder, fast=True),
}

# -- norms ------------------------------------------------------------------------------------------


def mixed_norm(function: Callable[..., Any], *shape: int) -> Build:
    """A norm whose weights stay in float32 while the input is in the precision's type."""
    return lambda t: (function, rand(t, *shape), rand(F32, shape[-1]), rand(F32, shape[-1]))


LN, RMS = partial(module, nn.LayerNorm), partial(module, nn.RMSNorm)
GN, BN = partial(module, nn.GroupNorm), partial(module, nn.BatchNorm2d)

NORMS: dict[str, Build] = {
    "layer_norm": through(LN(768), 8, 256, 768),
    "layer_norm transposed gradient": of(
        lambda x, w, b: F.layer_norm(x, (768,), w, b).transpose(0, 1).contiguous(), (8, 256, 768), (768,), (768,)
    ),
    "layer_norm no affine": through(LN(768, elementwise_affine=False), 8, 256, 768),
    "layer_norm no bias": through(LN(768, bias=False), 8, 256, 768),
    "layer_norm tall": through(LN(96), 80_000, 96),
    "layer_norm permuted": after(PERMUTED, through(LN(96), 4, 96, 56, 56)),
    "layer_norm transposed": after(PERMUTED, through(LN(384), 197, 8, 384)),
    "layer_norm float32 weights": mixed_norm(
        lambda x, w, b: F.layer_norm(x.float(), (768,), w, b).to(x.dtype), 4, 128, 768
    ),
    "rms_norm": through(RMS(1024), 4, 256, 1024),
    "rms_norm eps": through(RMS(1024, eps=1e-6), 4, 256, 1024),
    "rms_norm no affine": through(RMS(1024, elementwise_affine=False), 4, 256, 1024),
    "rms_norm tall": through(RMS(64), 80_000, 64),
    "rms_norm by hand": lambda t: (
        lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype),
        rand(t, 4, 256, 1024),
        rand(t, 1024),
    ),
    "group_norm": through(GN(32, 128), 4, 128, 32, 32),
    "group_norm 1": through(GN(1, 128), 4, 128, 32, 32),
    "group_norm channels-last": after(last, through(GN(32, 128), 4, 128, 32, 32)),
    "group_norm 3d": through(GN(8, 64), 4, 64, 1024),
    "group_norm no affine": through(GN(32, 128, affine=False), 4, 128, 32, 32),
    "instance_norm": through(module(nn.InstanceNorm2d, 64, affine=True), 4, 64, 32, 32),
    "instance_norm no affine": through(module(nn.InstanceNorm2d, 64), 4, 64, 32, 32),
    "batch_norm": through(BN(64), 8, 64, 56, 56),
    "batch_norm channels-last": after(last, through(BN(64), 8, 64, 56, 56)),
    "batch_norm no affine": through(BN(64, affine=False), 8, 64, 56, 56),
    "batch_norm no statistics": through(BN(64, track_running_stats=False), 8, 64, 56, 56),
    "batch_norm eval": through(lambda t: BN(64)(t).eval(), 8, 64, 56, 56),
    "batch_norm 1d": through(module(nn.BatchNorm1d, 512), 1024, 512),
    "batch_norm 1d long": through(module(nn.BatchNorm1d, 128), 16, 128, 1000),
    "batch_norm 3d": through(module(nn.BatchNorm3d, 32), 2, 32, 8, 28, 28),
    "local_response_norm": of(lambda x: F.local_response_norm(x, 5), (4, 64, 27, 27)),
    "normalize": of(lambda x: F.normalize(x, dim=-1), (1024, 768)),
    "weight_norm": lambda t: (
        nn.utils.parametrizations.weight_norm(nn.Linear(512, 512, device="cuda", dtype=t)),
        rand(t, 64, 512),
    ),
    "cosine_similarity": of(F.cosine_similarity, (1024, 768), (1024, 768)),
}

# -- losses, softmax --------------------------------------------------------------------------------


def with_targets(function: Callable[..., Any], shape: tuple[int, ...], targets: tuple[int, ...]) -> Build:
    return lambda t: (function, rand(t, *shape), whole(*targets))


def against(function: Callable[..., Any], *shape: int) -> Build:
    """A loss against values of the same shape, which need no gradient."""
    return lambda t: (function, rand(t, *shape), rand(t, *shape, grad=False))


LOSSES: dict[str, Build] = {
    "cross_entropy": with_targets(F.cross_entropy, (512, 8192), (512,)),
    "cross_entropy long": with_targets(F.cross_entropy, (2048, 32_000), (2048,)),
    "cross_entropy float": with_targets(lambda x, y: F.cross_entropy(x.float(), y), (512, 8192), (512,)),
    "cross_entropy none": with_targets(partial(F.cross_entropy, reduction="none"), (512, 8192), (512,)),
    "cross_entropy sum": with_targets(partial(F.cross_entropy, reduction="sum"), (512, 8192), (512,)),
    "cross_entropy smooth": with_targets(partial(F.cross_entropy, label_smoothing=0.1), (512, 1000), (512,)),
    "cross_entropy soft": against(F.cross_entropy, 512, 1000),
    "cross_entropy 2d": with_targets(F.cross_entropy, (4, 21, 128, 128), (4, 128, 128)),
    "cross_entropy 2d channels-last": after(last, with_targets(F.cross_entropy, (4, 21, 128, 128), (4, 128, 128))),
    "cross_entropy weights": lambda t: (
        lambda x, y, w: F.cross_entropy(x, y, w),
        rand(t, 512, 1000),
        whole(512),
        rand(t, 1000, grad=False),
    ),
    "nll_loss": with_targets(F.nll_loss, (512, 1000), (512,)),
    "mse_loss": against(F.mse_loss, 512, 1024),
    "mse_loss none": against(partial(F.mse_loss, reduction="none"), 512, 1024),
    "l1_loss": against(F.l1_loss, 512, 1024),
    "smooth_l1_loss": against(F.smooth_l1_loss, 512, 1024),
    "huber_loss": against(F.huber_loss, 512, 1024),
    "kl_div": against(partial(F.kl_div, reduction="batchmean"), 512, 1024),
    "kl_div log": against(partial(F.kl_div, reduction="batchmean", log_target=True), 512, 1024),
    "bce_with_logits": against(F.binary_cross_entropy_with_logits, 512, 1024),
    "bce_with_logits weights": lambda t: (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        rand(t, 512, 1024),
        rand(t, 512, 1024, grad=False),
        rand(t, 1024, grad=False),
    ),
    "bce_with_logits none": against(partial(F.binary_cross_entropy_with_logits, reduction="none"), 512, 1024),
    "soft_margin_loss": lambda t: (F.soft_margin_loss, rand(t, 512, 1024), rand(t, 512, 1024, grad=False)),
    "hinge_embedding_loss": against(F.hinge_embedding_loss, 512, 1024),
    "gaussian_nll_loss": lambda t: (
        F.gaussian_nll_loss,
        rand(t, 512, 1024),
        rand(t, 512, 1024, grad=False),
        rand(t, 512, 1024),
    ),
    "poisson_nll_loss": against(F.poisson_nll_loss, 512, 1024),
    "cosine_embedding_loss": lambda t: (
        F.cosine_embedding_loss,
        rand(t, 512, 768),
        rand(t, 512, 768),
        torch.ones(512, device="cuda"),
    ),
    "triplet_margin_loss": of(F.triplet_margin_loss, *((512, 768),) * 3),
    "margin_ranking_loss": lambda t: (
        F.margin_ranking_loss,
        rand(t, 4096),
        rand(t, 4096),
        torch.ones(4096, device="cuda"),
    ),
    "softmax": of(lambda x: x.softmax(-1), (8, 12, 128, 128)),
    "softmax dim 1": of(lambda x: x.softmax(1), (8, 12, 128, 128)),
    "softmax float": of(lambda x: x.softmax(-1, dtype=F32), (8, 12, 128, 128)),
    "softmax back": of(lambda x: x.float().softmax(-1).to(x.dtype), (8, 12, 128, 128)),
    "softmax permuted": after(PERMUTED, of(lambda x: x.softmax(-1), (8, 12, 128, 128))),
    "log_softmax": of(lambda x: x.log_softmax(-1), (512, 8192)),
    "log_softmax float": of(lambda x: x.log_softmax(-1, dtype=F32), (512, 8192)),
    "softmin": of(lambda x: F.softmin(x, -1), (512, 1024)),
    "gumbel_softmax": of(lambda x: F.gumbel_softmax(x, dim=-1), (512, 1024)),
    "gumbel_softmax hard": of(lambda x: F.gumbel_softmax(x, dim=-1, hard=True), (512, 1024)),
    "logsumexp": of(lambda x: x.logsumexp(-1), (512, 8192)),
    "logsumexp 0": of(lambda x: x.logsumexp(0), (512, 8192)),
}

# -- elementwise ------------------------------------------------------------------------------------

NAMED = ("relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "relu6", "hardswish", "hardsigmoid")
NAMED += ("hardtanh", "softplus", "softsign", "tanhshrink", "hardshrink", "softshrink", "logsigmoid", "sigmoid", "tanh")
X = (4, 256, 1024)
ACTIVATIONS: dict[str, Build] = {
    **{f"act {name}": of(getattr(F, name), X) for name in NAMED},
    "act gelu tanh": of(partial(F.gelu, approximate="tanh"), X),
    "act gelu by hand": of(lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), X),
    "act quick gelu": of(lambda x: x * torch.sigmoid(1.702 * x), X),
    "act glu": of(F.glu, X),
    "act swiglu": of(lambda a, b: F.silu(a) * b, X, X),
    "act geglu": of(lambda x: (lambda a, b: a * F.gelu(b))(*x.chunk(2, -1)), X),
    "act squared relu": of(lambda x: F.relu(x).square(), X),
    "act relu in place": of(lambda x: F.relu_(x * 2), X),
    "act silu in place": of(lambda x: F.silu(x * 2, inplace=True), X),
    "act prelu": through(module(nn.PReLU, 64), 8, 64, 32, 32),
    "act rrelu": through(lambda t: nn.RReLU(), *X),
    "dropout": of(lambda x: F.dropout(x, 0.1), X),
    "dropout in place": of(lambda x: F.dropout(x * 2, 0.1, inplace=True), X),
    "dropout 2d": of(lambda x: F.dropout2d(x, 0.1), (8, 64, 32, 32)),
    "drop path": of(lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.9).div_(0.9), X),
    "add residual": of(lambda a, b: a + b, X, X),
    "add broadcast": of(lambda a, b: a + b, X, (1024,)),
    "mul broadcast": of(lambda a, b: a * b, X, (1, 1, 1024)),
    "mul self": of(lambda a: a * a, X),
    "div": of(lambda a, b: a / b, X, X),
    "where": lambda t: (torch.where, torch.ones(X, dtype=torch.bool, device="cuda"), rand(t, *X), rand(t, *X)),
    "masked_fill": lambda t: (
        lambda x, m: x.masked_fill(m, 0.0),
        rand(t, *X),
        torch.ones(X, dtype=torch.bool, device="cuda"),
    ),
    "clamp": of(lambda x: x.clamp(-1, 1), X),
    "clamp min": of(lambda x: x.clamp(min=0), X),
    "clamp tensors": lambda t: (torch.clamp, rand(t, *X), rand(t, 1), rand(t, 1)),
    "maximum": of(torch.maximum, X, X),
    "minimum": of(torch.minimum, X, X),
    "fmax": of(torch.fmax, X, X),
    "abs": of(torch.abs, X),
    "pow 2": of(lambda x: x.pow(2), X),
    "pow 3": of(lambda x: x.pow(3), X),
    "pow half": of(lambda x: x.pow(0.5), X),
    "pow tensor": of(torch.pow, X, (1024,)),
    "sqrt": of(torch.sqrt, X),
    "rsqrt": of(torch.rsqrt, X),
    "exp": of(torch.exp, X),
    "log": of(torch.log, X),
    "log1p": of(torch.log1p, X),
    "sin": of(torch.sin, X),
    "erf": of(torch.erf, X),
    "lerp": of(torch.lerp, X, X, X),
    "addcmul": of(torch.addcmul, X, X, X),
    "addcdiv": of(torch.addcdiv, X, X, X),
    "atan2": of(torch.atan2, X, X),
    "hypot": of(torch.hypot, X, X),
    "cast": of(lambda x: x.half(), X),
    "rotary": of(
        lambda x, c, s: x * c + torch.cat((-x[..., 32:], x[..., :32]), -1) * s, (4, 8, 256, 64), *((256, 64),) * 2
    ),
    "polar rotary": lambda t: (
        lambda x, f: (
            torch.view_as_real(torch.view_as_complex(x.float().reshape(4, 256, 8, 32, 2)) * f).flatten(3).to(x.dtype)
        ),
        rand(t, 4, 256, 8, 64),
        torch.zeros(256, 1, 32, dtype=torch.complex64, device="cuda"),
    ),
}

# -- reductions -------------------------------------------------------------------------------------

ROWS = (512, 5000)
REDUCTIONS: dict[str, Build] = {
    f"{name}({'' if dim is None else dim})": of(
        partial(getattr(torch, name), **({} if dim is None else {"dim": dim})), ROWS
    )
    for name in ("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "logsumexp", "prod", "norm")
    for dim in (None, -1, 0)
    if not (dim is None and name in ("logsumexp",))
    if not (name in ("amax", "amin") and dim is None)
} | {
    "max()": of(torch.max, ROWS),
    "max(-1)": of(lambda x: x.max(-1)[0], ROWS),
    "max(0)": of(lambda x: x.max(0)[0], ROWS),
    "sum to": of(lambda x: x.sum(dtype=F32), ROWS),
    "argmax(-1)": of(lambda x: x.argmax(-1), ROWS),
    "cumsum": of(lambda x: x.cumsum(-1), ROWS),
    "cumprod": of(lambda x: x.cumprod(-1), ROWS),
    "norm 1": of(lambda x: x.norm(p=1, dim=-1), ROWS),
    "vector_norm": of(lambda x: torch.linalg.vector_norm(x, dim=-1), ROWS),
    "cdist": of(torch.cdist, (2, 256, 64), (2, 300, 64)),
    "einsum": of(partial(torch.einsum, "bhid,bhjd->bhij"), (2, 8, 128, 64), (2, 8, 128, 64)),
    "einsum 2": of(partial(torch.einsum, "bsd,dhk->bhsk"), (2, 128, 256), (256, 4, 64)),
    "clip_grad_norm": lambda t: (_clip, [rand(t, 512, 512) for _ in range(4)]),
    "_foreach_norm": lambda t: (torch._foreach_norm, [rand(t, 512, 512, grad=False) for _ in range(4)]),
}


def _clip(tensors: list[Tensor]) -> Tensor:
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    return nn.utils.clip_grad_norm_(tensors, 1.0)


# -- places -----------------------------------------------------------------------------------------


def mean_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


TABLE = (10_000, 256)
PLACES: dict[str, Build] = {
    "embedding": lambda t: (F.embedding, whole(8, 128), rand(t, *TABLE)),
    "embedding long": lambda t: (F.embedding, whole(32, 256), rand(t, *TABLE)),
    "embedding of a slice": lambda t: (F.embedding, whole(8, 128)[:, :-1], rand(t, *TABLE)),
    "embedding transposed gradient": lambda t: (
        lambda words, table: F.embedding(words, table).transpose(0, 1).contiguous(),
        whole(8, 128),
        rand(t, *TABLE),
    ),
    "embedding padding": lambda t: (partial(F.embedding, padding_idx=0), whole(8, 128), rand(t, *TABLE)),
    "embedding frequency": lambda t: (partial(F.embedding, scale_grad_by_freq=True), whole(8, 128), rand(t, *TABLE)),
    **{
        f"embedding_bag {mode}": lambda t, mode=mode: (
            partial(F.embedding_bag, mode=mode),
            whole(64, 16),
            rand(t, *TABLE),
        )
        for mode in ("sum", "mean", "max")
    },
    "one_hot": lambda t: (lambda x: F.one_hot(x, 1000).to(t), whole(512)),
    "cat": of(lambda *xs: torch.cat(xs, 1), *((8, 128, 256),) * 3),
    "cat last": of(lambda *xs: torch.cat(xs, -1), *((8, 128, 256),) * 3),
    "cat channels-last": after(last, of(lambda a, b: torch.cat((a, b), 1), (4, 64, 32, 32), (4, 64, 32, 32))),
    "stack": of(lambda *xs: torch.stack(xs, 1), *((8, 128, 256),) * 3),
    "chunk": of(lambda x: [each * 2 for each in x.chunk(3, -1)], (8, 128, 768)),
    "split sizes": of(lambda x: [each * 2 for each in x.split([256, 512], -1)], (8, 128, 768)),
    "unbind": of(lambda x: [each * 2 for each in x.unbind(0)], (8, 128, 768)),
    "slice": of(lambda x: x[:, 1:] * 2, (8, 128, 768)),
    "select": of(lambda x: x[:, 0] * 2, (8, 128, 768)),
    "slice step": of(lambda x: torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1), (4, 56, 56, 96)),
    "index rows": lambda t: (lambda x, i: x[i], rand(t, 1000, 256), whole(512)),
    "index two": lambda t: (lambda x, i, j: x[i, j], rand(t, 100, 200, 64), whole(512), whole(512)),
    "index second": lambda t: (lambda x, i: x[:, i], rand(t, 16, 1000, 64), whole(512)),
    "index table": lambda t: (
        lambda x, i: x[i.view(-1)].view(49, 49, -1).permute(2, 0, 1),
        rand(t, 169, 12),
        whole(49, 49),
    ),
    "index_select": lambda t: (lambda x, i: x.index_select(0, i), rand(t, 1000, 256), whole(512)),
    "index_add": lambda t: (lambda x, i, s: x.index_add(0, i, s), rand(t, 1000, 256), whole(512), rand(t, 512, 256)),
    "index_copy": lambda t: (lambda x, i, s: x.index_copy(0, i, s), rand(t, 1000, 256), whole(512), rand(t, 512, 256)),
    "index_put": lambda t: (
        lambda x, i, v: torch.index_put(x, (i,), v),
        rand(t, 1000, 256),
        whole(512),
        rand(t, 512, 256),
    ),
    "index_put accumulate": lambda t: (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        rand(t, 1000, 256),
        whole(512),
        rand(t, 512, 256),
    ),
    "gather": lambda t: (lambda x, i: x.gather(1, i), rand(t, 512, 1000), whole(512, 20)),
    "gather last": lambda t: (lambda x, i: x.log_softmax(-1).gather(-1, i), rand(t, 4, 128, 1000), whole(4, 128, 1)),
    "scatter": lambda t: (lambda x, i, s: x.scatter(1, i, s), rand(t, 512, 1000), whole(512, 20), rand(t, 512, 20)),
    "scatter value": lambda t: (lambda x, i: x.scatter(1, i, 1.0), rand(t, 512, 1000), whole(512, 20)),
    "scatter_add": lambda t: (
        lambda x, i, s: x.scatter_add(0, i, s),
        rand(t, 100, 64),
        whole(512, 64),
        rand(t, 512, 64),
    ),
    **{
        f"scatter_reduce {how}": lambda t, how=how: (
            lambda x, i, s: x.scatter_reduce(0, i, s, how),
            rand(t, 100, 64),
            whole(512, 64),
            rand(t, 512, 64),
        )
        for how in ("sum", "mean", "amax")
    },
    "take_along_dim": lambda t: (lambda x, i: torch.take_along_dim(x, i, 1), rand(t, 512, 1000), whole(512, 20)),
    "take": lambda t: (torch.take, rand(t, 512, 1000), whole(512)),
    "roll": of(lambda x: x.roll((3, 3), (1, 2)), (8, 56, 56, 96)),
    "roll one": of(lambda x: x.roll(1, 1), (8, 56, 56, 96)),
    "flip": of(lambda x: x.flip(1), (8, 128, 256)),
    "rot90": of(lambda x: x.rot90(1, (2, 3)), (4, 16, 56, 56)),
    "repeat": of(lambda x: x.repeat(1, 4, 1), (8, 64, 256)),
    "expand": of(lambda x: x.expand(8, 64, 256) * 2, (8, 1, 256)),
    "repeat_interleave": of(lambda x: x.repeat_interleave(4, 1), (2, 4, 128, 64)),
    "repeat_kv": of(lambda x: x[:, :, None].expand(2, 4, 4, 128, 64).reshape(2, 16, 128, 64), (2, 4, 128, 64)),
    "transpose contiguous": of(lambda x: x.transpose(1, 2).contiguous(), (8, 128, 256)),
    "window partition": of(
        lambda x: x.view(8, 8, 7, 8, 7, 96).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 49, 96), (8, 56, 56, 96)
    ),
    "pad": of(lambda x: F.pad(x, (1, 1, 1, 1)), (4, 64, 32, 32)),
    "pad channels-last": after(last, of(lambda x: F.pad(x, (1, 1, 1, 1)), (4, 64, 32, 32))),
    "pad reflect": of(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (4, 64, 32, 32)),
    "pad replicate": of(lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), (4, 64, 32, 32)),
    "pad circular": of(lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), (4, 64, 32, 32)),
    "tril": of(torch.tril, (8, 256, 256)),
    "diagonal": of(lambda x: x.diagonal(0, -2, -1) * 2, (8, 256, 256)),
    "sort": of(lambda x: x.sort(-1)[0], (64, 1000)),
    "sort long": of(lambda x: x.sort(-1)[0], (4, 50_000)),
    "sort rows": of(lambda x: x.sort(-1)[0], ROWS),
    "argsort": of(lambda x: x.argsort(-1), (64, 1000)),
    "topk": of(lambda x: x.topk(8, -1)[0], (512, 1000)),
    "topk rows": of(lambda x: x.topk(50, -1)[0], ROWS),
    "topk router": of(lambda x: x.softmax(-1).topk(2, -1)[0], (4096, 8)),
    "kthvalue": of(lambda x: x.kthvalue(5, -1)[0], (512, 1000)),
    "median": of(lambda x: x.median(-1)[0], (512, 1000)),
    "unfold": of(lambda x: x.unfold(-1, 4, 2) * 1, (8, 128, 1000)),
    "F.unfold": of(lambda x: F.unfold(x, 3, padding=1), (4, 32, 56, 56)),
    "F.fold": of(lambda x: F.fold(x, (56, 56), 3, padding=1), (4, 288, 3136)),
    "pixel_shuffle": of(lambda x: F.pixel_shuffle(x, 2), (4, 64, 32, 32)),
    "pixel_unshuffle": of(lambda x: F.pixel_unshuffle(x, 2), (4, 64, 32, 32)),
    "channel_shuffle": of(lambda x: F.channel_shuffle(x, 4), (4, 64, 32, 32)),
    "grid_sample": lambda t: (
        partial(F.grid_sample, align_corners=False),
        rand(t, 4, 16, 32, 32),
        rand(t, 4, 32, 32, 2),
    ),
    "affine_grid": of(lambda x: F.affine_grid(x, [4, 3, 64, 64], align_corners=False), (4, 2, 3)),
    **{
        f"interpolate {mode}{' cl' if cl else ''}": (partial(after, last) if cl else lambda build: build)(
            of(partial(F.interpolate, scale_factor=2.0, mode=mode), (4, 64, 28, 28))
        )
        for mode in ("nearest", "bilinear", "bicubic", "area")
        for cl in (False, True)
    },
    "interpolate down": of(partial(F.interpolate, size=(14, 14), mode="bilinear", antialias=True), (4, 64, 28, 28)),
    "interpolate 1d": of(partial(F.interpolate, scale_factor=2.0, mode="linear"), (4, 64, 100)),
    "arange": lambda t: (lambda: torch.arange(1000, device="cuda"),),
    "linspace": lambda t: (lambda: torch.linspace(0, 1, 1000, device="cuda"),),
    "rand": lambda t: (lambda: torch.rand(100, 100, device="cuda", dtype=t),),
    "randint": lambda t: (lambda: torch.randint(0, 10, (100, 100), device="cuda"),),
    "randperm": lambda t: (lambda: torch.randperm(50_000, device="cuda"),),
    "bernoulli": of(lambda x: torch.bernoulli(x.detach()), (512, 1000)),
    "multinomial": of(lambda x: torch.multinomial(x.detach().float(), 1), (64, 1000)),
}

# -- pools, linear, convolutions, recurrent ---------------------------------------------------------

IMAGE = (8, 64, 56, 56)
POOLS: dict[str, Build] = {
    f"{name}{' cl' if cl else ''}": (partial(after, last) if cl else lambda build: build)(of(function, IMAGE))
    for name, function in {
        "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool": lambda x: F.avg_pool2d(x, 2),
        "adaptive_avg_pool 1": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_avg_pool 7": lambda x: F.adaptive_avg_pool2d(x, 7),
        "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 7),
        "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    }.items()
    for cl in (False, True)
} | {
    "max_pool 1d": of(lambda x: F.max_pool1d(x, 3, 2), (8, 64, 500)),
    "avg_pool 1d": of(lambda x: F.avg_pool1d(x, 3, 2), (8, 64, 500)),
    "adaptive_avg_pool 1d": of(lambda x: F.adaptive_avg_pool1d(x, 1), (8, 64, 500)),
    "max_pool 3d": of(lambda x: F.max_pool3d(x, 2), (2, 16, 8, 28, 28)),
    "avg_pool 3d": of(lambda x: F.avg_pool3d(x, 2), (2, 16, 8, 28, 28)),
}

LINEAR: dict[str, Build] = {
    "linear": through(module(nn.Linear, 768, 3072), 8, 128, 768),
    "linear no bias": through(module(nn.Linear, 768, 3072, bias=False), 8, 128, 768),
    "linear 2d": through(module(nn.Linear, 768, 3072), 1024, 768),
    "linear 1d": through(module(nn.Linear, 768, 3072), 768),
    "linear transposed": after(PERMUTED, through(module(nn.Linear, 768, 3072), 128, 8, 768)),
    "linear expanded": lambda t: (
        lambda x, w, b: F.linear(x.expand(8, 128, 768), w, b),
        rand(t, 8, 1, 768),
        rand(t, 3072, 768),
        rand(t, 3072),
    ),
    "linear sliced": lambda t: (
        lambda x, w, b: F.linear(x[:, 1:], w, b),
        rand(t, 8, 129, 768),
        rand(t, 512, 768),
        rand(t, 512),
    ),
    "linear gelu": lambda t: (
        nn.Sequential(nn.Linear(768, 3072, device="cuda", dtype=t), nn.GELU()),
        rand(t, 8, 128, 768),
    ),
    "linear one": through(module(nn.Linear, 768, 1), 8, 128, 768),
    "bilinear": lambda t: (nn.Bilinear(64, 64, 32, device="cuda", dtype=t), rand(t, 128, 64), rand(t, 128, 64)),
    "mm": of(torch.mm, (512, 768), (768, 1024)),
    "mm transposed": of(lambda a, b: a @ b.t(), (512, 768), (1024, 768)),
    "bmm": of(torch.bmm, (24, 128, 64), (24, 64, 128)),
    "bmm transposed": of(lambda a, b: torch.bmm(a, b.transpose(1, 2)), (24, 128, 64), (24, 128, 64)),
    "baddbmm": of(torch.baddbmm, (24, 128, 128), (24, 128, 64), (24, 64, 128)),
    "addmm": of(torch.addmm, (1024,), (512, 768), (768, 1024)),
    "addmm beta": of(partial(torch.addmm, beta=0.5), (1024,), (512, 768), (768, 1024)),
    "addmm full": of(torch.addmm, (512, 1024), (512, 768), (768, 1024)),
    "matmul 4d": of(torch.matmul, (2, 8, 128, 64), (2, 8, 64, 128)),
    "matmul heads": of(
        lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).transpose(-1, -2), (2, 128, 8, 64), (2, 128, 8, 64)
    ),
    "matmul 3d 2d": of(torch.matmul, (8, 128, 768), (768, 64)),
    "matmul broadcast": of(torch.matmul, (8, 1, 128, 64), (4, 64, 128)),
    "mv": of(torch.mv, (512, 768), (768,)),
    "dot": of(torch.dot, (5000,), (5000,)),
    "outer": of(torch.outer, (512,), (768,)),
    **{
        f"conv {name}{' cl' if cl else ''}": (partial(after, last) if cl else lambda build: build)(
            through(module(nn.Conv2d, *how, **named), 4, how[0], 32, 32)
        )
        for name, how, named in (
            ("3x3", (64, 64, 3), {"padding": 1}),
            ("1x1", (64, 256, 1), {}),
            ("stride", (64, 128, 3, 2), {"padding": 1, "bias": False}),
            ("patches", (3, 384, 16, 16), {}),
            ("depthwise", (64, 64, 7), {"padding": 3, "groups": 64}),
            ("groups", (64, 64, 3), {"padding": 1, "groups": 8}),
        )
        for cl in (False, True)
    },
    "conv 1d": through(module(nn.Conv1d, 64, 64, 3, padding=1), 8, 64, 500),
    "conv 3d": through(module(nn.Conv3d, 8, 16, 3, padding=1), 2, 8, 8, 28, 28),
    "conv transposed": through(module(nn.ConvTranspose2d, 64, 32, 2, 2), 4, 64, 28, 28),
    **{
        f"{name} cell": lambda t, kind=kind: (kind(128, 256, device="cuda", dtype=t), rand(t, 16, 128))
        for name, kind in (("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("rnn", nn.RNNCell))
    },
}

CASES: dict[str, Build] = {
    **ATTENTION, **NORMS, **LOSSES, **ACTIVATIONS, **REDUCTIONS, **PLACES, **POOLS, **LINEAR,
}  # fmt: skip
