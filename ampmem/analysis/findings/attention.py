"""Findings about attention: the kernels that ran, why no other, and the masks that they keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ampmem.allocator.gpus import GPUS
from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.precision import weights_low
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Fact
from ampmem.names import of_all_layers, shape_of, shape_text
from ampmem.units import format_bytes, listed
from ampmem.vocabulary import FUSED_ATTENTION, LOW_PRECISION

_MATH = "aten::_safe_softmax"
"""The op that makes the attention weights in the math kernel, which keeps them for backward."""
_EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
_CUDNN = "aten::_scaled_dot_product_cudnn_attention"
_WITH_MASK = (_EFFICIENT, _CUDNN)
_FLEX = "flex"
_EAGER_FLEX = ("flex_attention", "FlexAttentionAutogradOpBackward")
"""The ops of flex_attention without a compiler; compiled code has kernels of its own."""
_KERNELS = {
    "math": (_MATH,),
    "memory-efficient": (_EFFICIENT,),
    "cuDNN": (_CUDNN,),
    "flash": ("aten::_scaled_dot_product_flash_attention",),
    _FLEX: ("aten::flex_attention", "FlexAttentionAutogradOp"),
}
"""The ops that save for backward, by kernel; those of :data:`_SLOW` run only where the others cannot."""
_SLOW = ("math", "memory-efficient")
_WIDEST = 256
"""The largest head size of the flash and cuDNN kernels."""
_ALIGNED = 8
"""The fused kernels take head sizes that are a multiple of this in 16 bits, and of half as many in FP32."""
_AMPERE = (8, 0)
_NARROW = {(8, 6), (8, 9), (12, 0), (12, 1)}
"""The capabilities of devices whose flash kernel does not train all head sizes above :data:`_TRAINED`."""
_TRAINED = 192
_DIMENSIONS = 4
_SHARE = 0.01
"""The smallest share of the peak that attention has to keep."""
_PADDED = 32
"""The memory-efficient kernel keeps a number in FP32 for each query, their count padded to a multiple of this."""
_ALLOW = "allow them again around attention: the list given to sdpa_kernel, or torch.backends.cuda.enable_*_sdp(True)"
_REDUCED = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)"
_LAYOUT = "their last dimension is not contiguous, a storage offset is not aligned, or their batch sizes differ"
_ASK = (
    "torch.backends.cuda.can_use_efficient_attention(torch.backends.cuda.SDPAParams(q, k, v, attn_mask, dropout_p, "
    "is_causal, enable_gqa), debug=True) prints what the fused kernels refuse"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why a faster kernel did not run, and what to change.

    ``saves`` is the share of the kept bytes that the change surely removes, as numerator and denominator. ``known``
    says that the condition is one that the recording shows.
    """

    why: str
    change: str
    saves: tuple[int, int] = (0, 1)
    known: bool = True


def attention_kernel(run: TrainingRun) -> Finding | None:
    """The kernels of attention, the bytes that they keep, and why the math or the memory-efficient kernel ran.

    The reasons are the conditions of ``select_sdp_backend`` and of the checks that it calls, in
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (torch 2.14): torch prints those to standard error, which
    is the script's, so they are derived from the types and shapes of what the kernel saved.
    """
    if run.kept_most is None:
        return None
    lifetimes, least = run.analysis.lifetimes, _SHARE * int(run.analysis.timeline.total[run.peak])
    alive = lifetimes.alive_at(run.kept_most)
    kept = {
        kernel: mine
        for kernel, ops in _KERNELS.items()
        if run.bytes_of(mine := _ever(run, *ops) & alive) >= least
        and (kernel not in _SLOW or _shapes(run, Fact.OUTPUT, ops[0]))
    }
    if not kept:
        return None
    kernel, mine = next(iter(kept.items()))
    refusal = _refusal(run, kernel, mine)
    first, *others = (_said(run, *each) for each in kept.items())
    return Finding(
        section=Section.ACTIVATIONS,
        message=f"{'; '.join([f'{first}: {refusal.why}' if refusal.why else first, *others])}.",
        bytes=run.bytes_of(mine),
        change=refusal.change,
        evidence=run.largest(mine),
        off_peak=run.off_peak(
            np.where(_ever(run, *_KERNELS[kernel]), lifetimes.bytes, 0) * refusal.saves[0] // refusal.saves[1]
        ),
    )


def _said(run: TrainingRun, kernel: str, mine: Mask) -> str:
    """Where ``kernel`` ran, and what it keeps."""
    modules = {of_all_layers(module) for op in _KERNELS[kernel] for module in _seen(run, Fact.OUTPUT, op, "module")}
    where = f" in {min(modules)}" if modules else ""
    size = f"{format_bytes(run.bytes_of(mine))}{' of attention weights' * (kernel == 'math')} for backward"
    if kernel == _FLEX:
        return f"flex_attention{where} keeps {size}"
    return f"F.scaled_dot_product_attention{where} ran its {kernel} kernel, which keeps {size}"


def _refusal(run: TrainingRun, kernel: str, mine: Mask) -> _Refusal:
    """Why no kernel ran that keeps less, or is faster, than ``kernel``; empty if there is none."""
    if kernel == _FLEX and (eager := run.recording.naming(*_EAGER_FLEX)[run.analysis.lifetimes.op]).any():
        scores = format_bytes(int(run.analysis.lifetimes.bytes[eager].max()))
        why = f"it is not compiled, so it makes all attention scores ({scores} at once)"
        return _Refusal(why=why, change="flex_attention = torch.compile(flex_attention), whose kernel makes none")
    if kernel not in _SLOW:
        return _Refusal(why="", change="nothing to change: this kernel keeps no attention weights")
    call = _shapes(run, Fact.OUTPUT, _KERNELS[kernel][0])[0]
    refusal = _math_refusal(run, call) if kernel == "math" else _efficient_refusal(run, call)
    on_cpu = run.recording.run.device_type == "cpu"
    faster = [each for each in FUSED_ATTENTION if each != kernel and not (on_cpu and each != "flash")]
    disabled = [each for each in faster if each in _disabled(run, mine)]
    if not disabled:
        return refusal
    said = f"the script disabled the {listed(disabled)} kernel{'s' * (len(disabled) > 1)}"
    fused = kernel == "math" and "memory-efficient" in disabled
    if refusal.known or (kernel == "math" and not (fused or on_cpu)):
        spared = (0, 1) if fused and not refusal.change.startswith(_REDUCED) else refusal.saves
        return replace(refusal, why=f"{refusal.why}; {said}", saves=spared)
    fused = fused and not on_cpu and "float64" not in _seen(run, Fact.OUTPUT, _MATH, "dtype")
    return _Refusal(why=said, change=_ALLOW, saves=_of_weights(run, call) if fused else (0, 1))


def _disabled(run: TrainingRun, mine: Mask) -> set[str]:
    """The kernels that the script had disabled when any of ``mine`` was returned."""
    facts = run.analysis.facts
    names = np.unique(facts.name[(facts.fact == Fact.DISABLED) & mine[facts.allocation]]).tolist()
    return {kernel for name in names for kernel in run.text(name).split(", ")}


def _of_weights(run: TrainingRun, weights: tuple[int, ...]) -> tuple[int, int]:
    """The share of attention weights of this shape that a fused kernel saves: it keeps its result instead."""
    *_, queries, keys = weights
    kept = (
        queries * max(_widths(run, weights), default=keys) + 2 * math.ceil(queries / _PADDED) * _PADDED
    )  # those numbers may be of a wider type
    return max(queries * keys - kept, 0), queries * keys


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
    return run.ever_kept_by_autograd & run.recording.naming(*ops)[run.analysis.saved_as.op]


def _seen(run: TrainingRun, fact: Fact, op: str, column: str) -> set[str]:
    """The texts in the ``column`` of all facts of this kind about ``op``."""
    facts = run.recording.facts
    rows = (facts.fact == fact) & run.recording.naming(op)[facts.name]
    return {run.text(index) for index in np.unique(getattr(facts, column)[rows]).tolist()} - {""}


def _shapes(run: TrainingRun, fact: Fact, op: str) -> list[tuple[int, ...]]:
    """The shapes that ``op`` returned, or saved, the largest first: batch, heads, queries, width.

    The math kernel also takes shapes without the heads. The width is a head's, or the number of keys for weights and
    masks. cuDNN's kernel also returns a number per query.
    """
    shapes = (shape_of(text) for text in _seen(run, fact, op, "shape"))
    least = _DIMENSIONS - (op == _MATH)
    found = (shape for shape in shapes if shape is not None and least <= len(shape) <= _DIMENSIONS and shape[-1] > 1)
    return sorted(found, key=math.prod, reverse=True)


def _mask_shapes(run: TrainingRun) -> set[str]:
    """The shapes, as texts, of the masks that fused kernels saved, as they were before they were expanded."""
    found = set()
    for op in _WITH_MASK:
        for batch, heads, queries, width in _shapes(run, Fact.OUTPUT, op):
            keys = {shape[3] for shape in _shapes(run, Fact.SAVED, op) if shape[2] == queries} - {width}
            found |= {(*first, queries, n) for n in keys for first in ((), *product((1, batch), (1, heads)))}
    return {shape_text(shape) for shape in found}


def _all_shapes(run: TrainingRun) -> list[tuple[int, ...]]:
    return [shape for text in run.recording.texts if (shape := shape_of(text)) is not None]


def _widths(run: TrainingRun, weights: tuple[int, ...]) -> set[int]:
    """The head sizes of queries that attention ``weights`` of this shape may be of."""
    return {each[-1] for each in _all_shapes(run) if len(each) > 1 and each[:-1] == weights[:-1]} - {weights[-1]}


def _math_refusal(run: TrainingRun, weights: tuple[int, ...]) -> _Refusal:
    low, on_cpu = run.autocast or weights_low(run), run.recording.run.device_type == "cpu"
    aligned = _ALIGNED if low else _ALIGNED // 2
    widths = _widths(run, weights)
    odd = sorted(width for width in widths if width % aligned)
    # With enable_gqa the math kernel repeats keys and values: a dimension for the groups follows that of the heads.
    repeated = (each for each in _all_shapes(run) if len(each) == _DIMENSIONS + 1 and each[2] > 1 and each[4] in widths)
    grouped = any((each[0], each[1] * each[2]) == weights[:2] for each in repeated)
    types = {each.dtype for each in run.analysis.parameters}
    if on_cpu:
        why, change = "the CPU's fused kernel takes neither dropout nor a mask with a gradient", "leave those out"
    elif _capability(run) < _AMPERE and "bfloat16" in types | {run.recording.precision.dtype}:
        why = "the fused kernels take bfloat16 only from compute capability 8.0 on"
        change = "float16, which the memory-efficient kernel takes on this device"
    elif "float64" in _seen(run, Fact.OUTPUT, _MATH, "dtype") and not low:
        why, change = "no fused kernel takes float64", "q, k and v in float32, or torch.autocast around the forward"
    elif odd:
        why = f"the fused kernels need a head size that is a multiple of {aligned}, and it is {odd[0]}"
        change = f"F.pad of q, k and v to a head size that is a multiple of {aligned}, with scale= of the one before"
    elif grouped:
        missing = "with these arguments on this device" if low else "in float32 before torch 2.14"
        why, change = f"there is no fused kernel of enable_gqa {missing}", ""
    elif len(weights) < _DIMENSIONS:
        why = "q, k and v have three dimensions, and the fused kernels of this torch take four"
        change = "q.unsqueeze(1), k and v likewise, and squeeze(1) of the result"
    else:
        why = f"no fused kernel takes its arguments: {_LAYOUT}"
        change = f".contiguous() of q, k and v, each with all samples; {_ASK}"
    if grouped:
        change += f"{'; ' * bool(change)}k.repeat_interleave(groups, 1), and v likewise, in place of enable_gqa"
    known = not (change.endswith(_ASK) or on_cpu)
    taken = known and not odd and (grouped or len(weights) < _DIMENSIONS)
    saves = _of_weights(run, weights) if taken else (0, 1)
    if low and not on_cpu and _seen(run, Fact.OUTPUT, _MATH, "dtype") == {"float32"}:
        change, saves = f"{_REDUCED}, which keeps them in 16 bits; or {change}", (1, 2)
    return _Refusal(why=why, change=change, saves=saves, known=known)


def _efficient_refusal(run: TrainingRun, result: tuple[int, ...]) -> _Refusal:
    _, _, queries, width = result
    saved = _shapes(run, Fact.SAVED, _EFFICIENT)
    keys = {shape[2] for shape in saved if shape[3] == width and shape[2] != queries}
    others = {shape[3] for shape in saved if shape[2] == queries and shape[3] != width}
    masked = others & (keys or {queries})
    widest = max({width} | others - masked)
    low = _seen(run, Fact.SAVED, _EFFICIENT, "dtype").intersection(LOW_PRECISION)
    if not low:
        why = "q, k and v are float32, and the flash and cuDNN kernels take 16-bit types only"
        change = "torch.autocast around the forward, or q, k and v in bfloat16"
    elif _capability(run) < _AMPERE:
        why, change = "the flash and cuDNN kernels need compute capability 8.0", "nothing to change on this device"
    elif widest > _WIDEST:
        why = f"the head size is {widest}, and the flash and cuDNN kernels take at most {_WIDEST}"
        change = f"more heads of at most {_WIDEST}"
    elif masked:
        why = "it was given an attn_mask, which the flash kernel does not take, and cuDNN's only without a gradient"
        change = "is_causal=True in place of a causal attn_mask; no attn_mask where nothing is masked"
    elif others:
        size = max(others)
        why = f"q and k have the head size {size}, v has {width}, and the flash kernel takes one size only"
        change = f"F.pad of v to {size}, and the result without what was added"
    elif width > _TRAINED and _capability(run) in _NARROW:
        why = f"on this device the flash kernel trains head sizes of at most {_TRAINED}"
        change = f"more heads of at most {_TRAINED}"
    elif keys:
        why = "the flash kernel takes is_causal only where there are as many keys as queries"
        change = "attn_mask=torch.nn.attention.bias.causal_lower_right(queries, keys), if the last query sees all keys"
    else:
        why, change = "the flash and cuDNN kernels do not take its arguments on this device", _ASK
    return _Refusal(why=why, change=change, known=change != _ASK)


def _capability(run: TrainingRun) -> tuple[int, int]:
    """The compute capability of the recorded device; that of an A100 if it is unknown."""
    name = run.recording.run.device_name
    return next((gpu.compute_capability or _AMPERE for gpu in GPUS.values() if gpu.name == name), _AMPERE)
