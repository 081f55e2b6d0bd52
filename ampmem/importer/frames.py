"""What the frames of a stack say about an event: who asked, in which phase, and for what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Final

from ampmem.allocator.snapshot import Frame
from ampmem.events import Phase


class CallSite(Enum):
    """Where in a training script a stack is; what else a script does has no place."""

    DATA = Phase.DATA
    FORWARD = Phase.FORWARD
    BACKWARD = Phase.BACKWARD
    OPTIMIZER = Phase.OPTIMIZER
    BETWEEN = Phase.BETWEEN

    @property
    def phase(self) -> Phase:
        """The phase that such a stack belongs to."""
        phase: Phase = self.value
        return phase


class Purpose(Enum):
    """What memory is for, where a C++ function's name alone says so."""

    CAST = "a copy in low precision that autocast makes"
    PROMOTION = "a copy in full precision that autocast makes"
    WORKSPACE = "a workspace of a library"
    REDUCTION = "scratch of a reduction"
    GRADIENT = "a gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One stack, read. ``text`` has its Python frames as ``file:line function``, outermost first.

    ``op`` is the torch op that asked (``aten::bmm``), ``implementation`` how the optimizer runs, where it is
    one of torch's, and ``optimizing`` whether the innermost Python code is an optimizer's. ``leaving_autocast`` says
    that a region of autocast is being left, ``autocast`` that code of autocast called it, which does not say whether
    autocast was on, ``scaling`` that a GradScaler asked, ``known`` that there is a stack at all, ``native`` that it has
    C++ frames, ``casting_back`` that it is the backward of a cast. ``multiplies`` is the type in which cuBLAS
    multiplies matrices (``bfloat16``), where a name says so.
    """

    place: CallSite | None
    purpose: Purpose | None
    op: str
    text: str
    zeroing: bool
    optimizing: bool
    leaving_autocast: bool
    autocast: bool
    scaling: bool
    multiplies: str
    casting_back: bool
    implementation: str
    known: bool
    native: bool


_PYTHON: Final = (".py", ">")
_MAX_LINES: Final = 64
_MAX_NAME: Final = 300
_MAX_OP: Final = 100

_MODULE_CALLS: Final = frozenset({"_call_impl", "_wrapped_call_impl"})
_PURPOSES: Final = (
    ("getNewWorkspace", Purpose.WORKSPACE),
    ("getCUDABlasLtWorkspace", Purpose.WORKSPACE),
    ("AccumulateGrad::", Purpose.GRADIENT),
    ("gpu_reduce_kernel", Purpose.REDUCTION),
)
_ASKS_FOR_A_WORKSPACE: Final = ("run_conv_plan", "run_fused_conv", "raw_cudnn_convolution", "gemm_and_bias")
"""Functions that ask for a workspace of cuDNN or cuBLASLt by themselves; tensors are asked for through an op."""
_CACHED_CAST: Final = "at::autocast::cached_cast"
_POLICY: Final = re.compile(r"\(at::autocast::CastPolicy\)([1-9])")
"""The policies of autocast but for the first, which is that of ops that run in low precision."""
_ENGINE: Final = "torch::autograd::Engine::"
_IMPLEMENTATIONS: Final = (("_multi_tensor_", "foreach"), ("_fused_", "fused"), ("_single_tensor_", "for-loop"))

_AUTOCAST: Final = "torch/amp/autocast_mode.py"
_CAST_BACKWARD: Final = "::ToCopyBackward"
_SCALER: Final = "/amp/grad_scaler.py"
_TYPES: Final = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
_PRODUCT: Final = re.compile(r"\bat::cuda::blas::\w*gemm\w*<(float|double|c10::BFloat16|c10::Half)\b")

_OP: Final = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)")
# An overload is joined to its op by an underscore; these are those that are no part of a name.
_OVERLOAD: Final = re.compile(
    r"_(?:[A-Z]\w*|dim(?:_\w+)?|out|int|names|memory_format|source|self|dtype(?:_\w+)?|correction(?:_\w+)?|device|"
    r"other|default|start(?:_\w+)?|using_ints)$"
)
_MAKERS: Final = frozenset(
    {"empty", "empty_strided", "resize", "resize_", "empty_like", "new_empty", "new_empty_strided"}
)
"""Ops that only fetch memory for another op, which is the one to name."""


def read_stack(stack: tuple[Frame, ...]) -> Reading:
    """Read a stack, innermost frame first."""
    names = [frame.name for frame in stack]
    python = [frame for frame in stack if frame.filename.endswith(_PYTHON)]
    purpose = _purpose(names)
    op = _op(names)
    if purpose is Purpose.REDUCTION:
        op = f"{op} (scratch)" if op else op
    return Reading(
        place=_place(names, python),
        purpose=purpose,
        op=op,
        text="\n".join(reversed([_line(frame) for frame in python[:_MAX_LINES]])),
        zeroing=any(frame.name == "zero_grad" for frame in python),
        optimizing=bool(python) and "optim" in python[0].filename.lower(),
        leaving_autocast=bool(python) and _leaves_autocast(python[0]),
        autocast=any(frame.filename.endswith(_AUTOCAST) for frame in python),
        scaling=any(frame.filename.endswith(_SCALER) for frame in python),
        multiplies=next((_TYPES[match[1]] for match in map(_PRODUCT.search, names) if match), ""),
        casting_back=any(_CAST_BACKWARD in name for name in names),
        implementation=next(
            (word for mark, word in _IMPLEMENTATIONS if any(frame.name.startswith(mark) for frame in python)), ""
        ),
        known=bool(stack),
        native=len(python) < len(stack),
    )


def _line(frame: Frame) -> str:
    return f"{frame.filename[-_MAX_NAME:]}:{frame.line} {frame.name[:_MAX_NAME]}"


def _purpose(names: list[str]) -> Purpose | None:
    own = takewhile(lambda name: _OP.search(name) is None, names)
    if any(mark in name for name in own for mark in _ASKS_FOR_A_WORKSPACE):
        return Purpose.WORKSPACE
    if any(_CACHED_CAST in name for name in names):
        return Purpose.PROMOTION if any(_POLICY.search(name) for name in names) else Purpose.CAST
    return next((purpose for mark, purpose in _PURPOSES if any(mark in name for name in names)), None)


def _op(names: list[str]) -> str:
    """The innermost op that does more than fetch memory; what autocast copies is a copy whoever needs it."""
    found = ""
    for name in names:
        match = _OP.search(name)
        if match is None:
            continue
        op = _OVERLOAD.sub("", match[1][:_MAX_OP])
        if op not in _MAKERS:
            return f"aten::{op}"
        found = found or f"aten::{op}"
    return found


def _place(names: list[str], python: list[Frame]) -> CallSite | None:
    """The engine runs on a thread of its own, so it is asked for first; then the outermost layers of a step."""
    if any(_ENGINE in name for name in names):
        return CallSite.BACKWARD
    if any(frame.name == "zero_grad" for frame in python):
        return CallSite.BETWEEN
    for applies, place in _PLACES:
        if any(applies(frame) for frame in python):
            return place
    return None


def _steps(frame: Frame) -> bool:
    if frame.filename.endswith("torch/optim/optimizer.py"):
        return frame.name in ("wrapper", "profile_hook_step", "_use_grad")
    return frame.name == "step" and "optim" in frame.filename.lower() and "lr_scheduler" not in frame.filename


def _leaves_autocast(frame: Frame) -> bool:
    return frame.name == "__exit__" and frame.filename.endswith(_AUTOCAST)


def _goes_back(frame: Frame) -> bool:
    engine = frame.filename.endswith(("torch/_tensor.py", "torch/autograd/__init__.py"))
    return engine and frame.name in ("backward", "grad")


def _calls_module(frame: Frame) -> bool:
    return frame.name == "forward" or (
        frame.name in _MODULE_CALLS and frame.filename.endswith("torch/nn/modules/module.py")
    )


def _loads(frame: Frame) -> bool:
    return "torch/utils/data/" in frame.filename


_PLACES: Final = (
    (_steps, CallSite.OPTIMIZER),
    (_goes_back, CallSite.BACKWARD),
    (_calls_module, CallSite.FORWARD),
    (_loads, CallSite.DATA),
)
