"""Changes that would lower a script's peak but cannot be forced on it, computed from its recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ampmem.analysis.blocks import in_code
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.training_loop import outputs_kept
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.marks import trains
from ampmem.events import Phase
from ampmem.names import shape_of

_FUSED_LOSS_SINCE = (2, 13)
"""The first version of torch with ``F.linear_cross_entropy``."""
_PRODUCTS = ("mm", "addmm", "linear")
_ADAM = frozenset({"Adam", "AdamW"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change to write in the script, and the bytes that it takes off the script's peak, computed event by event.

    The change was not run: ``saved_bytes`` ignores memory that the change itself may need.
    """

    change: str
    saved_bytes: int


def suggestions(run: TrainingRun) -> tuple[Suggestion, ...]:
    """The changes worth writing in the recorded script, the largest saving first."""
    if not trains(run.recording):
        return ()
    if not run.steps or run.unfinished is not None:  # if memory ran out, the peak is not the script's
        return ()
    found = [*_outputs(run), *_fused_loss(run), *_fewer_bits(run)]
    return tuple(sorted(found, key=lambda each: -each.saved_bytes))


def _outputs(run: TrainingRun) -> Iterator[Suggestion]:
    """Logits and other results that a variable holds although backward does not need them."""
    finding = outputs_kept(run)
    if finding is not None and finding.off_peak:
        yield Suggestion(change=finding.change, saved_bytes=finding.off_peak)


def _fused_loss(run: TrainingRun) -> Iterator[Suggestion]:
    """``F.linear_cross_entropy``, if a linear layer makes the logits for the log-softmax of cross_entropy."""
    version = tuple(int(part) for part in run.recording.run.torch.split(".")[:2] if part.isdecimal())
    if version < _FUSED_LOSS_SINCE:
        return
    analysis = run.analysis
    lifetimes, shapes = analysis.lifetimes, [shape_of(text) for text in run.recording.texts]
    ops = [text.removeprefix("aten::") for text in run.recording.texts]
    step = (lifetimes.step == run.peak_index) & (lifetimes.phase == Phase.FORWARD)
    softmax = step & run.recording.naming("aten::_log_softmax", "_log_softmax")[lifetimes.op]
    largest = max(np.flatnonzero(softmax).tolist(), key=lambda each: int(lifetimes.bytes[each]), default=None)
    shape = None if largest is None else shapes[analysis.tensors.shape[largest]]
    if shape is None or len(shape) != 2:
        return
    flat = (prod(shape), shape[-1:])  # the logits may have several leading dimensions, which the loss flattens
    like = np.array([each is not None and (prod(each), each[-1:]) == flat for each in shapes], dtype=np.bool_)
    product = np.array([op in _PRODUCTS for op in ops], dtype=np.bool_)
    made = np.flatnonzero(step & like[analysis.tensors.shape] & product[lifetimes.op] & (lifetimes.module != 0))
    if not len(made):
        return
    saved = run.off_peak(lifetimes.bytes * _of_logits(run, prod(shape)))
    if saved is None or not run.notable(saved):
        return
    head = in_code(run.text(lifetimes.module[made[-1]]))
    biased = ops[lifetimes.op[made[-1]]] == "addmm"
    bias = f", linear_bias={head}.bias" if biased else ""
    yield Suggestion(
        change=f"F.linear_cross_entropy(x.flatten(0, -2), {head}.weight, target.flatten(){bias}, "
        f"options=torch.nn.LinearCrossEntropyOptions()) in place of {head}(x) and F.cross_entropy",
        saved_bytes=saved,
    )


def _of_logits(run: TrainingRun, elements: int) -> Mask:
    """The logits, what the loss makes of them, and their gradients: all allocations of that size, in any step."""
    lifetimes = run.analysis.lifetimes
    mine: Mask = np.isin(lifetimes.bytes, (2 * elements, 4 * elements))
    return mine & np.isin(lifetimes.phase, (Phase.FORWARD, Phase.BACKWARD))


def _fewer_bits(run: TrainingRun) -> Iterator[Suggestion]:
    """Adam's moments in 8 bits; bitsandbytes leaves small tensors as they are."""
    names = {optimizer.class_name for optimizer in run.recording.optimizers}
    if not names or not names <= _ADAM:
        return
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    moments = classes.of(Category.OPTIMIZER_STATE) & (lifetimes.bytes >= 4 * 4096)
    saved = run.off_peak(lifetimes.bytes * moments * 3 // 4)
    if saved is not None and run.notable(saved):
        named = " and ".join(f"bitsandbytes.optim.{name}8bit" for name in sorted(names))
        yield Suggestion(change=f"{named}, which rounds the optimizer's state to 8 bits", saved_bytes=saved)
