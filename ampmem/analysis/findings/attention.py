"""Findings about ``F.scaled_dot_product_attention``: the kernel that ran, why no other, and the masks that it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from ampmem.allocator.gpus import GPUS
from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.precision import weights_low
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Fact
from ampmem.names import of_all_layers, shape_of, shape_text
from ampmem.units import format_bytes
from ampmem.vocabulary import LOW_PRECISION

_MATH = "aten::_safe_softmax"
"""The op that makes the attention weights in the math kernel, which keeps them for backward."""
_EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
_WITH_MASK = (_EFFICIENT, "aten::_scaled_dot_product_cudnn_attention")
_WIDEST = 256
"""The largest head size of the flash and cuDNN kernels."""
_ALIGNED = 8
"""The fused kernels take head sizes that are a multiple of this in 16 bits, and of half as many in FP32."""
_AMPERE = (8, 0)
_DIMENSIONS = 4
_SHARE = 0.01
"""The smallest share of the peak that attention has to keep."""
_REDUCED = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)"
_ASK = (
    "torch.backends.cuda.can_use_efficient_attention(torch.backends.cuda.SDPAParams(q, k, v, attn_mask, dropout_p, "
    "is_causal, enable_gqa), debug=True) prints what the fused kernels refuse"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why a faster kernel did not run, and what to change.

    ``saves`` is the share of the kept bytes that the change surely removes, as numerator and denominator.
    """

    why: str
    change: str
    saves: tuple[int, int] = (0, 1)


def attention_kernel(run: TrainingRun) -> Finding | None:
    """Attention ran in the math or the memory-efficient kernel on a GPU, and the reason why not in another.

    The reasons are the conditions of ``select_sdp_backend`` and of the checks that it calls, in
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (torch 2.14): torch prints those to standard error, which
    is the script's, so they are derived from the types and shapes of what the kernel saved.
    """
    position = run.kept_most
    if position is None:
        return None
    lifetimes = run.analysis.lifetimes
    for op, name in ((_MATH, "math"), (_EFFICIENT, "memory-efficient")):
        mine = _ever(run, op) & lifetimes.alive_at(position)
        size, calls = run.bytes_of(mine), _shapes(run, Fact.OUTPUT, op)
        if size < _SHARE * int(run.analysis.timeline.total[run.peak]) or not calls:
            continue
        refusal = _math_refusal(run, calls[0]) if op == _MATH else _efficient_refusal(run, calls[0])
        modules = sorted(map(of_all_layers, _seen(run, Fact.OUTPUT, op, "module")))
        return Finding(
            code="attention-kernel",
            section=Section.ACTIVATIONS,
            message=f"F.scaled_dot_product_attention{f' in {modules[0]}' if modules else ''} ran its {name} kernel, "
            f"which keeps {format_bytes(size)}{' of attention weights' * (op == _MATH)} for backward: {refusal.why}.",
            bytes=size,
            change=refusal.change,
            evidence=run.largest(mine),
            off_peak=run.off_peak(np.where(_ever(run, op), lifetimes.bytes, 0) * refusal.saves[0] // refusal.saves[1]),
        )
    return None


def attention_masks(run: TrainingRun) -> Finding | None:
    """Several calls of attention keep a mask of one size each, such as a boolean mask that each of them converts."""
    position = run.kept_most
    lifetimes, shapes = run.analysis.lifetimes, _mask_shapes(run)
    found: dict[tuple[int, int], list[int]] = {}
    for allocation in np.flatnonzero(_ever(run, *_WITH_MASK)).tolist():
        if run.text(run.analysis.tensors.shape[allocation]) in shapes:
            found.setdefault((int(lifetimes.step[allocation]), int(lifetimes.bytes[allocation])), []).append(allocation)
    # One mask stays: the first, which the last call of backward frees.
    others = run.marked([allocation for each in found.values() for allocation in each[1:]])
    if position is None or not others.any():
        return None
    alive = others & lifetimes.alive_at(position)
    low = run.text(run.analysis.tensors.dtype[np.flatnonzero(others)[0]])
    return Finding(
        code="attention-masks",
        section=Section.ACTIVATIONS,
        message=f"{np.count_nonzero(alive) + 1} calls of F.scaled_dot_product_attention each keep a mask of their own, "
        f"{format_bytes(run.bytes_of(alive))} more than one: a boolean attn_mask is converted in each call.",
        bytes=run.bytes_of(alive),
        change="convert the mask once, before the layers: mask = torch.zeros_like(mask, dtype=torch."
        f"{low}).masked_fill(~mask, -math.inf); or is_causal=True in place of a causal mask",
        evidence=run.largest(alive),
        off_peak=run.off_peak(np.where(others, lifetimes.bytes, 0)),
    )


def _ever(run: TrainingRun, *ops: str) -> Mask:
    """The allocations that any of ``ops`` saved for backward."""
    return run.ever_kept_by_autograd & run.naming(*ops)[run.analysis.saved_as.op]


def _seen(run: TrainingRun, fact: Fact, op: str, column: str) -> set[str]:
    """The texts in the ``column`` of all facts of this kind about ``op``."""
    facts = run.recording.facts
    rows = (facts.fact == fact) & run.naming(op)[facts.name]
    return {run.text(index) for index in np.unique(getattr(facts, column)[rows]).tolist()} - {""}


def _shapes(run: TrainingRun, fact: Fact, op: str) -> list[tuple[int, ...]]:
    """The shapes of four dimensions that ``op`` returned, or saved, the largest first: batch, heads, queries, width.

    The width is a head's, or the number of keys for weights and masks. cuDNN's kernel also returns a number per query.
    """
    shapes = (shape_of(text) for text in _seen(run, fact, op, "shape"))
    found = (shape for shape in shapes if shape is not None and len(shape) == _DIMENSIONS and shape[3] > 1)
    return sorted(found, key=math.prod, reverse=True)


def _mask_shapes(run: TrainingRun) -> set[str]:
    """The shapes, as texts, of the masks that fused kernels saved, as they were before they were expanded."""
    found = set()
    for op in _WITH_MASK:
        for batch, heads, queries, width in _shapes(run, Fact.OUTPUT, op):
            keys = {shape[3] for shape in _shapes(run, Fact.SAVED, op) if shape[2] == queries} - {width}
            found |= {(*first, queries, n) for n in keys for first in ((), *product((1, batch), (1, heads)))}
    return {shape_text(shape) for shape in found}


def _math_refusal(run: TrainingRun, weights: tuple[int, ...]) -> _Refusal:
    low, on_cpu = run.autocast or weights_low(run), run.recording.run.device_type == "cpu"
    aligned = _ALIGNED if low else _ALIGNED // 2
    shapes = [shape for text in run.recording.texts if (shape := shape_of(text)) is not None]
    widths = {each[3] for each in shapes if len(each) == _DIMENSIONS and each[:3] == weights[:3]} - {weights[3]}
    odd = sorted(width for width in widths if width % aligned)
    # With enable_gqa the math kernel repeats keys and values: a dimension for the groups follows that of the heads.
    repeated = (each for each in shapes if len(each) == _DIMENSIONS + 1 and each[2] > 1 and each[4] in widths)
    grouped = any((each[0], each[1] * each[2]) == weights[:2] for each in repeated)
    device, types = run.recording.run.device_name, {each.dtype for each in run.analysis.parameters}
    old = [gpu for gpu in GPUS.values() if gpu.name == device and (gpu.compute_capability or _AMPERE) < _AMPERE]
    if on_cpu:
        why, change = "the CPU's fused kernel takes neither dropout nor a mask with a gradient", "leave those out"
    elif old and "bfloat16" in types | {run.recording.precision.dtype}:
        why = "the fused kernels take bfloat16 only from compute capability 8.0 on"
        change = "float16, which the memory-efficient kernel takes on this device"
    elif odd:
        why = f"the fused kernels need a head size that is a multiple of {aligned}, and it is {odd[0]}"
        change = f"F.pad of q, k and v to a head size that is a multiple of {aligned}, with scale= of the one before"
    elif grouped:
        missing = "with these arguments on this device" if low else "in float32 before torch 2.14"
        why, change = f"there is no fused kernel of enable_gqa {missing}", ""
    else:
        why, change = "no fused kernel takes its arguments on this device", _ASK
    if grouped:
        change += f"{'; ' * bool(change)}k.repeat_interleave(groups, 1), and v likewise, in place of enable_gqa"
    if low and not on_cpu and _seen(run, Fact.OUTPUT, _MATH, "dtype") == {"float32"}:
        return _Refusal(why=why, change=f"{_REDUCED}, which keeps them in 16 bits; or {change}", saves=(1, 2))
    return _Refusal(why=why, change=change, saves=(1, 1) if grouped and not (odd or on_cpu) else (0, 1))


def _efficient_refusal(run: TrainingRun, result: tuple[int, ...]) -> _Refusal:
    _, _, queries, width = result
    masked = any(shape[2] == queries and shape[3] != width for shape in _shapes(run, Fact.SAVED, _EFFICIENT))
    if not _seen(run, Fact.SAVED, _EFFICIENT, "dtype").intersection(LOW_PRECISION):
        why = "q, k and v are float32, and the flash and cuDNN kernels take 16-bit types only"
        change = "torch.autocast around the forward, or q, k and v in bfloat16"
    elif width > _WIDEST:
        why = f"the head size is {width}, and the flash and cuDNN kernels take at most {_WIDEST}"
        change = f"more heads of at most {_WIDEST}"
    elif masked:
        why = "it was given an attn_mask, which the flash kernel does not take, and cuDNN's only without a gradient"
        change = "is_causal=True in place of a causal attn_mask; no attn_mask where nothing is masked"
    else:
        why, change = "the flash and cuDNN kernels do not take its arguments on this device", _ASK
    return _Refusal(why=why, change=change)
