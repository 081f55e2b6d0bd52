"""Findings about what mixed precision saves, and why it does not save more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.estimate import break_even, first_saving
from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.ops import plain_op
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.events import Column, Fact, Phase
from ampmem.names import casts_compiled, of_all_layers, shape_of
from ampmem.units import format_bytes
from ampmem.vocabulary import LOW_PRECISION


def no_autocast_effect(run: TrainingRun) -> Finding | None:
    """Autocast had no effect: no parameter was cast, and no op made or kept anything in low precision."""
    facts = run.recording.facts
    seen = np.isin(facts.fact, (Fact.OUTPUT, Fact.SAVED, Fact.OTHER_CAST)) & (facts.dtype != 0)
    if not run.autocast or not seen.any() or (facts.fact == Fact.CAST_COPY).any():
        return None
    if run.low_precision[facts.dtype[seen]].any():
        return None
    device = run.recording.run.device_type
    parameters = run.analysis.parameters
    where = (
        f'with torch.autocast("{device}", dtype=torch.bfloat16): around the forward itself, with the device that the '
        "model is on"
    )
    if parameters and all(record.dtype == "float64" for record in parameters):
        where = "make the model and its inputs float32 (model.float()): autocast does not cast float64"
    entered = run.recording.precision.dtype is not None
    said = "autocast was on, but" if entered else "autocast was requested, but no forward was seen under it:"
    return Finding(
        severity="warning",
        section=Section.ACTIVATIONS,
        message=f"{said} no parameter was cast and nothing ran in low precision.",
        bytes=None,
        change=where,
        evidence=(f"device: {device}", f"op results seen, none in low precision: {int(seen.sum())}"),
    )


def fp16_without_scaler(run: TrainingRun) -> Finding | None:
    """Autocast casts to float16, but no GradScaler made an update."""
    precision = run.recording.precision
    if not run.autocast or precision.dtype != "float16" or precision.scaler:
        return None
    return Finding(
        severity="warning",
        section=Section.STEPS,
        message="autocast casts to float16 and no GradScaler was seen: small gradients may become zero.",
        bytes=None,
        change="scaler = torch.amp.GradScaler(device); scaler.scale(loss).backward(); scaler.step(optimizer); "
        "scaler.update() - or autocast to torch.bfloat16, which needs none",
        evidence=("autocast dtype float16", f"steps without a scaler: {len(run.steps)}"),
    )


_SHARE = 0.2
_LOW_SHARE = 0.01
"""The share of 16-bit parameters from which on an estimate of FP32 says nothing."""
_PLACES = 3
"""The number of ops and modules that are named."""
_CHUNKS = 8
_FUSED_LOSS_SINCE = (2, 13)
"""The first version of torch with ``F.linear_cross_entropy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpKind:
    """Ops whose names have one of ``words``, and what to do about them.

    ``saves`` is the share of the kept bytes that the change removes, as numerator and denominator; ``None`` if the run
    does not tell. ``{low}`` in ``text`` is the type of the autocast region.
    """

    words: tuple[str, ...]
    text: str
    saves: tuple[int, int] | None = None


_SOFTMAX = "softmax"
_MATMULS = ("aten::bmm", "aten::baddbmm")
_GATHERS = ("aten::gather", "aten::index", "aten::take")
"""Ops that gather a bias for each pair of positions from learned values (relative positions); an attention kernel given
such a bias keeps it for backward."""
IN_CHUNKS = f"compute the loss in {_CHUNKS} chunks, each under torch.utils.checkpoint (chunks alone save nothing)"
_FLOAT32 = "autocast itself runs {op} in float32, so a {low} input changes nothing"
_RECOMPUTE = "torch.utils.checkpoint around the function that calls it recomputes these bytes in backward"

# autocast's own lists: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference. On CUDA and XPU rms_norm
# is in the float32 list since torch 2.12 (pytorch/pytorch#174824), layer_norm and group_norm have always been.
_KINDS = (
    _OpKind(words=("log_softmax", "cross_entropy", "nll_loss"), text=IN_CHUNKS, saves=(_CHUNKS - 1, _CHUNKS)),
    _OpKind(words=("loss",), text=IN_CHUNKS, saves=(_CHUNKS - 1, _CHUNKS)),
    # F.scaled_dot_product_attention runs this op if no fused kernel applies: attention.attention_kernel says why.
    _OpKind(words=("_safe_softmax",), text="a fused kernel of F.scaled_dot_product_attention; " + _RECOMPUTE),
    _OpKind(
        words=(_SOFTMAX,),
        text="F.scaled_dot_product_attention(q, k, v) instead of softmax(q @ k.transpose(-2, -1)) @ v",
        saves=(1, 1),
    ),
    _OpKind(
        words=("layer_norm", "group_norm", "rms_norm"),
        text="norms keep a float32 input. On a GPU autocast itself runs layer_norm and group_norm, and since torch "
        "2.12 rms_norm, in float32. In low precision a norm keeps half: x = x.to({low}){place}, and with "
        "torch.autocast(x.device.type, enabled=False): norm(x), if the norm's weight has that type too",
    ),
    _OpKind(
        words=(
            *("acos", "asin", "cosh", "sinh", "tan", "exp", "log", "pow", "reciprocal", "rsqrt", "erfinv", "softplus"),
            *("cumprod", "cumsum", "dist", "cdist", "norm", "prod", "renorm", "sum", "cosine_similarity", "softmin"),
        ),
        text=f"{_FLOAT32}; {_RECOMPUTE}",
    ),
)
_NO_ATTENTION = _OpKind(words=(), text=f"{_FLOAT32}; {_RECOMPUTE}")
_ON_CPU = " (the CPU's kernels take neither dropout nor a learned bias)"
_DIMENSIONS = 4
_TOKENS_AND_CLASSES = 2
"""The dimensions of a language model's logits at the loss."""
_FOUR = ", with q, k and v of four dimensions (batch, heads, length, width): its kernels take no others"
_OTHER = _OpKind(words=(), text="{maker}; where {low} will do, cast it there")
_STATISTICS = "batch_norm"
"""An op that keeps in float32, besides its input, only a few numbers per channel."""


def fp32_activations(run: TrainingRun) -> Finding | None:
    """More than a fifth of the activations' bytes at the peak are float32.

    The finding is about the bytes that one change removes.
    """
    if not run.autocast or run.recording.precision.dtype is None:  # no type: autocast was never seen on
        return None
    kept = run.kept_by_autograd(run.peak)
    by_op = _float32_by_op(run, kept)
    size, activations = int(sum(sizes.sum() for sizes in by_op.values())), run.bytes_of(kept)
    if size <= _SHARE * activations or not run.notable(size):
        return None
    attends = _attends(run, by_op)
    groups: dict[_OpKind, list[str]] = {}
    for op in sorted(by_op, key=lambda op: (-int(by_op[op].sum()), op)):
        kind = _kind(op)
        groups.setdefault(_NO_ATTENTION if _SOFTMAX in kind.words and not attends else kind, []).append(op)
    found = [_finding(run, kind, {op: by_op[op] for op in ops}, activations) for kind, ops in groups.items()]
    if weights_low(run):  # autocast does not halve what such a model keeps: what it makes float32 comes first
        return max(found, key=lambda finding: finding.bytes or 0)
    return max(found, key=lambda finding: (finding.off_peak or 0, finding.bytes or 0))


def autocast_widens(run: TrainingRun) -> Finding | None:
    """The weights are in 16 bits already, and autocast keeps activations in float32 that would be in 16 bits.

    Without autocast at least half of their bytes are gone, if all weights are in 16 bits: others would make more ops
    run in float32.
    """
    position = run.kept_most
    if not run.autocast or position is None or not weights_low(run):
        return None
    by_op = _float32_by_op(run, run.kept_by_autograd(position))
    sizes = sum(by_op.values(), np.zeros(len(run.analysis.lifetimes), dtype=np.int64))
    by_place: dict[str, int] = {}
    for op, of in by_op.items():
        for allocation in np.flatnonzero(of).tolist():
            module = of_all_layers(run.text(run.analysis.lifetimes.module[allocation]))
            place = f"{plain_op(op)}{' in ' * bool(module)}{module}"
            by_place[place] = by_place.get(place, 0) + int(of[allocation])
    size, share = int(sizes.sum()), _low_share(run)
    if not size:
        return None
    places = [
        f"{format_bytes(each)} for {place}" for place, each in sorted(by_place.items(), key=lambda each: -each[1])
    ]
    return Finding(
        section=Section.ACTIVATIONS,
        message=f"{100 * share:.0f} % of the weights are in 16 bits already, so autocast halves nothing of what their "
        f"ops keep; what it runs in float32 keeps {format_bytes(size)}: {', '.join(places[:_PLACES])}.",
        bytes=size,
        change="leave autocast out"
        if share == 1
        else "ampmem compare measures the run without autocast, where the float32 weights run their ops in float32",
        evidence=tuple(places),
        off_peak=run.off_peak(_everywhere(run, by_op) // 2) if share == 1 else None,
        least=True,
    )


def weights_low(run: TrainingRun) -> bool:
    """Whether part of the model has 16-bit weights already, so that its ops run in low precision without autocast."""
    return _low_share(run) > _LOW_SHARE


def _low_share(run: TrainingRun) -> float:
    """The share of the parameters' elements that are in 16 bits."""
    low = sum(each.elements for each in run.analysis.parameters if each.dtype in LOW_PRECISION)
    return low / max(sum(each.elements for each in run.analysis.parameters), 1)


def _finding(run: TrainingRun, kind: _OpKind, by_op: dict[str, Column], activations: int) -> Finding:
    sizes = sum(by_op.values(), np.zeros(len(run.analysis.lifetimes), dtype=np.int64))
    each = [(op, format_bytes(int(of.sum()))) for op, of in by_op.items()]
    size = int(sizes.sum())
    texts = {run.text(shape) for shape in np.unique(run.analysis.tensors.shape[sizes > 0]).tolist()}
    shapes = [shape for text in sorted(texts) if (shape := shape_of(text)) is not None]
    listed = f": {', '.join(f'{share} for {op}' for op, share in each[:3])}{' and others' * (len(each) > 3)}"
    return Finding(
        section=Section.ACTIVATIONS,
        message=f"{format_bytes(size)} of the {format_bytes(activations)} that autograd keeps at {run.instant} are "
        f"float32 in spite of autocast, kept for {each[0][0]}{listed if len(each) > 1 else ''}.",
        bytes=size,
        change=_text(run, kind, each[0][0], shapes, by_op[each[0][0]]),
        evidence=(
            *(f"kept for {op}: {share}" for op, share in each[:4]),
            *(_fused_loss(run, shapes) if kind is _KINDS[0] else ()),
        ),
        off_peak=None
        if kind.saves is None or not _has_a_kernel(run, kind, by_op, shapes)
        else run.off_peak(_everywhere(run, by_op) * kind.saves[0] // kind.saves[1]),
    )


def _everywhere(run: TrainingRun, ops: dict[str, Column]) -> Column:
    """The bytes that autograd keeps in float32 for ``ops`` at any time: without them another event may be the peak."""
    mine = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    for op, sizes in _float32_by_op(run, run.ever_kept_by_autograd).items():
        if op in ops:
            mine += sizes
    return mine


def _float32_by_op(run: TrainingRun, kept: Mask) -> dict[str, Column]:
    """The bytes of the float32 activations in ``kept``, by the op that saved them, else the op that made them.

    Each op has one entry per allocation.
    """
    saved = run.analysis.saved_as
    lifetimes = run.analysis.lifetimes
    found: dict[str, Column] = {}
    for allocation in np.flatnonzero(kept).tolist():
        if run.text(saved.dtype[allocation]) == "float32":
            name = run.text(saved.op[allocation]) or run.text(lifetimes.op[allocation]) or "an unknown op"
            if _STATISTICS not in name:
                sizes = found.setdefault(name, np.zeros(len(lifetimes), dtype=np.int64))
                sizes[allocation] = lifetimes.bytes[allocation]
    return found


def _kind(op: str) -> _OpKind:
    """What to do about the activations of ``op``: the first entry with one of its words counts."""
    name = op.rpartition("::")[2].strip("_")
    for kind in _KINDS[:-1]:
        if any(word in op for word in kind.words):
            return kind
    return _KINDS[-1] if name in _KINDS[-1].words else _OTHER


def _attends(run: TrainingRun, by_op: dict[str, Column]) -> bool:
    """Whether a batched matrix product keeps a tensor of a softmax's size, in its type or in 16 bits (attention)."""
    saved, bytes_ = run.analysis.saved_as, run.analysis.lifetimes.bytes
    of_matmul = run.recording.naming(*_MATMULS)[saved.op]
    softmax = np.concatenate([sizes[sizes > 0] for op, sizes in by_op.items() if _SOFTMAX in op] or [bytes_[:0]])
    return bool(np.isin(bytes_[of_matmul], [*softmax, *(softmax // 2)]).any())


def _has_a_kernel(run: TrainingRun, kind: _OpKind, by_op: dict[str, Column], shapes: list[tuple[int, ...]]) -> bool:
    """Whether the change surely enables a kernel that keeps no attention weights.

    No such kernel takes tensors of three dimensions, and the CPU's take neither dropout nor a mask with a gradient.
    """
    if _SOFTMAX not in kind.words:
        return True
    # A tensor as large as the attention weights is gathered where there is a learned bias.
    gathers = run.recording.naming(*_GATHERS)[run.analysis.lifetimes.op] & _as_large(run, by_op)
    if any(len(shape) != _DIMENSIONS for shape in shapes) or gathers.any():
        return False
    # Dropout anywhere may be attention's.
    drops = any(word in text for text in run.recording.texts for word in ("dropout", "bernoulli", "Dropout"))
    return not _is_cpu(run) or not (drops or _adds(run, by_op, shapes) or _learns(run, shapes))


def _adds(run: TrainingRun, by_op: dict[str, Column], shapes: list[tuple[int, ...]]) -> bool:
    """Whether something is added to a tensor as large as the attention weights: a learned bias or a mask."""
    lifetimes, tensors = run.analysis.lifetimes, run.analysis.tensors
    texts = run.recording.texts
    adds, in_place = (run.recording.naming(op)[lifetimes.op] for op in ("aten::add", "aten::add_"))
    same = np.array([shape_of(text) in shapes for text in texts])[tensors.shape] & (tensors.shape != 0)
    return bool(((adds & same) | (in_place & _as_large(run, by_op))).any())


def _as_large(run: TrainingRun, by_op: dict[str, Column]) -> Mask:
    """The allocations as large as those in ``by_op``, in their type or in 16 bits."""
    weights = np.unique(np.concatenate([sizes[sizes > 0] for sizes in by_op.values()]))
    return np.isin(run.analysis.lifetimes.bytes, np.concatenate([weights, weights // 2]))


def _learns(run: TrainingRun, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a parameter may be an attention bias: as long and wide as the weights, or with one entry per head."""
    pairs, heads = {shape[-2:] for shape in shapes}, {shape[1] for shape in shapes}
    return any(
        each.trainable and (each.shape[-2:] in pairs or (each.kind != "Linear" and heads & set(each.shape)))
        for each in run.recording.parameters
    )


def _is_cpu(run: TrainingRun) -> bool:
    return run.recording.run.device_type == "cpu"


def _text(run: TrainingRun, kind: _OpKind, op: str, shapes: list[tuple[int, ...]], sizes: Column) -> str:
    embedding = any("embedding" in text.lower() for text in run.recording.texts)
    place = " after the embedding" if embedding else " before the norm"
    text = kind.text
    if _SOFTMAX in kind.words:
        text += _ON_CPU * _is_cpu(run) + _FOUR * any(len(shape) != _DIMENSIONS for shape in shapes)
    low = f"torch.{run.recording.precision.dtype}"
    return text.format(op=op, low=low, place=place, maker=_maker(run, op, sizes))


def _maker(run: TrainingRun, op: str, sizes: Column) -> str:
    """What made most of ``sizes``, which are kept for ``op``, in float32."""
    lifetimes = run.analysis.lifetimes
    made: dict[tuple[str, str], int] = {}
    for allocation in np.flatnonzero(sizes).tolist():
        where = run.text(lifetimes.op[allocation]), of_all_layers(run.text(lifetimes.module[allocation]))
        made[where] = made.get(where, 0) + int(sizes[allocation])
    maker, module = max(made, key=lambda where: made[where])
    if not maker:
        return f"find out where the input of {op} becomes float32"
    return f"{maker}{' in ' * bool(module)}{module} makes the input of {op} float32"


def _fused_loss(run: TrainingRun, shapes: list[tuple[int, ...]]) -> tuple[str, ...]:
    # Other logits, as of images, do not come from a linear layer.
    if any(len(shape) > _TOKENS_AND_CLASSES for shape in shapes):
        return ()
    major, minor, *_ = (*run.recording.run.torch.split("."), "0", "0")
    known = major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= _FUSED_LOSS_SINCE
    fused = "instead of chunks, use F.linear_cross_entropy, which this torch has and which does not keep the logits"
    return (fused,) if known else ()


_GIVEN = (Category.INPUTS, Category.BUFFERS)
_MADE = (Category.ACTIVATIONS, Category.TEMPORARIES)
_KNOWN_SHARE = 0.5
"""If the type of a smaller share of the activations' bytes is known, no estimate is made."""
_UNSURE_SHARE = 0.1
"""If library workspaces, whose size in FP32 is unknown, could change the estimate by more than this share, no estimate
is made."""

_LOW_PRECISION_ATTENTION = ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention")
"""Attention ops that run in low precision only; the CPU's op has another name."""
_CUDNN_RECURRENT = "cudnn_rnn"
"""Part of the names of ops whose workspace has only values of the layers' own type, and a bit per droppable value.

All measured calls took half as many bytes in float16 as in float32: ``simulator/torch_cuda/recurrent.py``.
"""

IN_EVALUATION = (
    "the peak is in evaluation, where nothing is saved for backward, so larger training batches do not make AMP pay "
    "there: ampmem compare measures what AMP changes at that peak"
)


def amp_saves(run: TrainingRun) -> Finding | None:
    """The cost of the cast copies against the saving of low-precision activations."""
    if not run.autocast or run.last_forward is None or casts_compiled(run.recording.notes):
        return None  # casts in compiled code count as activations
    _, position = run.last_forward
    if _shares_heads(run, position) or weights_low(run):
        return None
    saved = estimate_saved(run, position)
    copies = run.live(Category.CAST_COPIES, position)
    mine = run.analysis.classes.of(Category.ACTIVATIONS) & run.analysis.lifetimes.alive_at(position)
    unknown = mine & run.analysis.saved_as.workspace & ~_halved(run, mine)
    # Workspaces would take at most their own size again in FP32.
    if saved is None or run.bytes_of(unknown) > _UNSURE_SHARE * abs(saved - copies):
        return None
    if not run.notable(max(copies, saved)):
        return None  # the two may cancel out although both matter
    return _estimate(run, position, copies, saved)


def estimate_saved(run: TrainingRun, position: int) -> int | None:
    """Bytes that the activations alive at ``position`` would take more in FP32; ``None`` if their types are unknown.

    A low-precision activation would be twice as large, and so would the workspaces of cuDNN's recurrent layers.
    Autocast's copies of an activation would be missing: one FP32 tensor would replace them all, and that is there
    already if their original is alive.
    """
    size, low = run.analysis.lifetimes.bytes, run.low_precision[run.analysis.saved_as.dtype]
    alive = run.analysis.lifetimes.alive_at(position)
    mine = run.analysis.classes.of(Category.ACTIVATIONS) & alive
    if size[mine & (run.analysis.saved_as.dtype != 0)].sum() < _KNOWN_SHARE * size[mine].sum():
        return None
    copied = run.with_fact(Fact.OTHER_CAST) > 0
    saved = int(size[mine & (low | _halved(run, mine)) & ~copied].sum())
    served: set[int] = set()
    sources = _sources(run)
    for copy in np.flatnonzero(mine & copied).tolist():
        original = sources[copy] if copy in sources else _original(run, copy, low)
        if original is None or not (alive[original] or original in served):
            saved += int(size[copy]) * (2 if low[copy] else 1)  # its bytes in FP32
        if original is not None:
            served.add(original)
        saved -= int(size[copy])
    return saved


def _shares_heads(run: TrainingRun, position: int) -> bool:
    """Whether a low-precision-only kernel ran attention with fewer key heads than query heads.

    No fused kernel does that in FP32, so the attention weights would be kept there.
    """
    mine = run.analysis.classes.of(Category.ACTIVATIONS) & run.analysis.lifetimes.alive_at(position)
    fused = run.recording.naming(*_LOW_PRECISION_ATTENTION)
    texts = {run.text(shape) for shape in run.analysis.tensors.shape[mine & fused[run.analysis.saved_as.op]].tolist()}
    shapes = [shape for text in texts if (shape := shape_of(text)) is not None and len(shape) == _DIMENSIONS]
    heads = {(shape[-1], shape[1]) for shape in shapes}  # a mask may have one head, and another width
    return len(heads) > len({width for width, _ in heads})


def _halved(run: TrainingRun, mine: Mask) -> Mask:
    """The workspaces in ``mine`` of cuDNN's recurrent layers, if these ran in low precision."""
    saved = run.analysis.saved_as
    of_cudnn = mine & np.array([_CUDNN_RECURRENT in text for text in run.recording.texts])[saved.op]
    others = of_cudnn & ~saved.workspace
    low = others.any() and bool(run.low_precision[saved.dtype[others]].all())
    return of_cudnn & saved.workspace if low else np.zeros_like(mine)


def _sources(run: TrainingRun) -> dict[int, int]:
    """The source of each copy of an activation, where recorded; the two facts of a pair have the same time."""
    facts = run.analysis.facts
    copies, originals = facts.fact == Fact.OTHER_CAST, facts.fact == Fact.CAST_SOURCE
    made_at = dict(zip(facts.time_ns[originals].tolist(), facts.allocation[originals].tolist(), strict=True))
    pairs = zip(facts.allocation[copies].tolist(), facts.time_ns[copies].tolist(), strict=True)
    return {copy: made_at[instant] for copy, instant in pairs if instant in made_at}


def _original(run: TrainingRun, copy: int, low: Mask) -> int | None:
    """The source of ``copy``, guessed from sizes, for a snapshot or an older recording.

    The guess is the youngest live tensor of the step, or input, with as many elements in the other precision; else the
    youngest larger input, of which the copy would be a part.
    """
    lifetimes, dtype = run.analysis.lifetimes, run.analysis.saved_as.dtype[:copy]
    expected = int(lifetimes.bytes[copy]) * 2 if low[copy] else int(lifetimes.bytes[copy]) // 2
    category = run.analysis.classes.category[:copy]
    given = np.isin(category, [CODES[name] for name in _GIVEN])
    made = np.isin(category, [CODES[name] for name in _MADE]) & (lifetimes.step[:copy] == lifetimes.step[copy])
    there = (lifetimes.died[:copy] == ALIVE) | (lifetimes.died[:copy] > lifetimes.born[copy])
    there &= (dtype == 0) | (low[:copy] != low[copy])
    whole = there & (lifetimes.bytes[:copy] == expected) & (given | made)
    part = there & (lifetimes.bytes[:copy] > expected) & given
    found = np.flatnonzero(whole if whole.any() else part)
    return int(found[-1]) if len(found) else None


def _estimate(run: TrainingRun, position: int, copies: int, saved: int) -> Finding:
    pays = saved > copies
    what = f"AMP saves about {format_bytes(saved - copies)} at the end of forward"
    if not pays:
        gain = f"save about {format_bytes(saved)}" if saved > 0 else "save nothing"
        what = (
            f"AMP saves no memory at the end of forward: the cast copies take {format_bytes(copies)} and low-precision "
            f"activations {gain}"
        )
    peak_elsewhere = run.peak_in(Phase.BACKWARD) or run.peak_in(Phase.EVALUATION)
    return Finding(
        code="" if pays else "amp-saves-nothing",
        severity="info" if pays or peak_elsewhere else "warning",
        section=Section.ACTIVATIONS,
        message=f"{what}{_from(run, copies, saved)} (an estimate from this run alone).",
        bytes=abs(saved - copies) or None,
        change="run ampmem compare to measure it against FP32" if pays else _change(run, copies, saved),
        evidence=_numbers(run, position, copies, saved),
    )


def _change(run: TrainingRun, copies: int, saved: int) -> str:
    if run.peak_in(Phase.OPTIMIZER):
        total, phase = run.analysis.timeline.total, run.recording.events.phase
        elsewhere = total[1:][np.isin(phase, (Phase.FORWARD, Phase.BACKWARD))]
        # Where the activations take what AMP saves, forward or backward may peak above the update.
        if int(elsewhere.max(initial=0)) + saved > int(total[run.peak]):
            return (
                "the peak is in the optimizer's update, and without AMP backward could need more than the update: "
                "ampmem compare measures whether the peak is lower with AMP"
            )
        return (
            "the peak is in the optimizer's update, which AMP does not touch: it would move only if activations needed "
            "more than the update does; keep FP32 if memory is the reason for AMP"
        )
    if run.peak_in(Phase.EVALUATION):
        return IN_EVALUATION
    first = first_saving(_batch_size(run), copies, saved)
    larger = "train on larger batches or longer sequences" if first is None else f"batch_size >= {first}"
    if saved <= 0:
        larger = "larger batches change nothing while activations save nothing"
    if run.peak_in(Phase.BACKWARD):  # where copies die and gradients may be halved: the end of forward says little
        return f"{larger}; the peak is in backward, and may still be lower with AMP: ampmem compare measures that"
    return f"{larger}; or keep FP32 if memory is the reason for AMP"


def _from(run: TrainingRun, copies: int, saved: int) -> str:
    """From where on autocast pays, in words: a batch size if known, else the size of the activations."""
    first = first_saving(_batch_size(run), copies, saved)
    if run.peak_in(Phase.OPTIMIZER) or run.peak_in(Phase.EVALUATION):
        return ""  # no batch size is where the peak begins to fall
    if first is not None and copies:
        return f"; it saves from batch size {first} on"
    if saved <= 0 or saved > copies:
        return ""
    times = copies / saved
    factor = f"{times:.3g}" if times < 1.1 else f"{times:.2g}" if times < 10 else f"{times:,.0f}"
    return f"; it saves once the activations are more than {factor} times as large as here"


def _batch_size(run: TrainingRun) -> int:
    """The batch size of the last step with a forward; 0 if no DataLoader made the batch, as it is unknown then."""
    if run.last_forward is None or not run.last_forward[0].batch_loaded:
        return 0
    return run.last_forward[0].batch_size or 0


def _numbers(run: TrainingRun, position: int, copies: int, saved: int) -> tuple[str, ...]:
    batch = _batch_size(run)
    even = break_even(batch, copies, saved)
    low = run.low_precision[run.analysis.saved_as.dtype] & run.analysis.lifetimes.alive_at(position)
    kept = run.bytes_of(run.kept_by_autograd(position) | (low & run.analysis.classes.of(Category.ACTIVATIONS)))
    lines = [
        f"cast copies at the end of forward: {format_bytes(copies)}",
        f"activations then: {format_bytes(kept)}, in FP32 about {format_bytes(kept + saved)}",
    ]
    if even is not None and copies:
        lines.append(f"break-even at batch size {even:.2f}: {batch} * {copies} / {saved}")
    return tuple(lines)
