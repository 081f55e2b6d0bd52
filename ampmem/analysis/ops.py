"""Ops and frames for people: ``layer norm`` for ``aten::native_layer_norm``, and the frames of the user's own code."""

from __future__ import annotations

from collections.abc import Sequence

_ATEN = "aten::"
_PREFIXES = ("_", "native_", "cudnn_", "mkldnn_", "miopen_", "thnn_", "fused_")
_SUFFIXES = ("_forward", "_with_indices", "_legit", "_")
_WORDS = {"_to_copy": ".to()", "_log_softmax": "log-softmax", "nll_loss2d_forward": "nll loss"}
_RESULTS = {
    "_log_softmax": "log-probabilities",
    "_softmax": "probabilities",
    "embedding": "embeddings",
    "nll_loss_forward": "loss",
    "nll_loss2d_forward": "loss",
    "_to_copy": "cast",
    "clone": "copy",
}
"""The field's word for an op's result, if there is one."""
_KERNELS = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN"}
"""The kernels of attention, by a part of their ops' names."""
_COMPILED = ("CompiledFunction", "CompiledFunctionBackward")
_LOSSES = ("loss", "log_softmax", "cross_entropy", "kl_div")
_NORM_LAYERS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "rmsnorm", "layernorm")
_MATMULS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "matmul", "linear", "_scaled_mm"]
)
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "neg", "abs", "reciprocal", "addcmul", "addcdiv", "lerp")
_FUNCTIONS = ("pow", "exp", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "erf")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "minimum", "maximum")
_ELEMENTWISE = frozenset((*_ARITHMETIC, *_FUNCTIONS, *_LIMITS))


def plain_op(op: str) -> str:
    """``mul`` for ``aten::mul``, ``batch norm`` for ``aten::cudnn_batch_norm``; other names stay as they are.

    The autograd Function that runs the graphs of torch.compile is ``compiled code``.
    """
    if op in _COMPILED:
        return "compiled code"
    if not op.startswith(_ATEN):
        return op
    name = op.removeprefix(_ATEN)
    if "attention" in name:
        return next((f"{words} attention" for part, words in _KERNELS.items() if part in name), "attention")
    return _WORDS.get(name) or _trimmed(name).replace("_", " ")


def result_of(op: str, dtype: str | None = None, shape: str = "", *, mask: bool = False) -> str:
    """The tensor that ``op`` made, in words, as far as known: ``float32 log-probabilities [8192, 50304]``.

    ``dtype`` and ``shape`` are the tensor's, as torch writes them; ``mask`` says that it is a mask. An op that is not
    torch's keeps its name.
    """
    if not op.startswith(_ATEN):
        what = op
    elif mask or dtype == "bool":
        what = "mask"
    else:
        what = _RESULTS.get(op.removeprefix(_ATEN), f"output of {plain_op(op)}")
    return " ".join(filter(None, (dtype, what, shape)))


def plain_kind(op: str) -> str:
    """The kind of the op that saved something: ``the loss``, ``norms``, ``attention``, ``matmuls`` and so on.

    An op of no such kind is its own kind (``gelu``), and so is one that is not torch's, such as an
    ``autograd.Function``.
    """
    if not op.startswith(_ATEN):
        return plain_op(op)
    name = op.removeprefix(_ATEN)
    found = next((kind for kind, words in _KINDS if any(word in name for word in words)), None)
    if found is not None:
        return found
    if name.rstrip("_") in _MATMULS:
        return "matmuls"
    return "element-wise ops" if name.rstrip("_") in _ELEMENTWISE else plain_op(op)


_KINDS = (
    ("the loss", _LOSSES),
    ("norms", _NORM_LAYERS),
    ("attention", ("attention",)),
    ("convolutions", ("convolution", "conv2d", "conv3d", "conv_depthwise")),
    ("RNNs", ("rnn", "lstm", "gru")),
    ("pooling", ("pool",)),
    ("dropout", ("dropout",)),
)
"""The kinds, each with words in its ops' names; the first kind that matches counts."""


def _trimmed(name: str) -> str:
    """``name`` without the implementation: whose library, in place or not, forward or not."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


# Which frames of a stack matter to the user: those of their own code.

_TORCH = ("/torch/", "<frozen ")
_LIBRARIES = ("/site-packages/", "/dist-packages/", *_TORCH)


def user_frames(stack: Sequence[str]) -> list[str]:
    """The frames outside the libraries; else those outside torch (a script may be installed), else the innermost."""
    for hidden in (_LIBRARIES, _TORCH):
        own = [frame for frame in stack if not any(part in frame for part in hidden)]
        if own:
            return own
    return list(stack[-1:])


def user_frame(stack: Sequence[str]) -> str | None:
    """The innermost frame of :func:`user_frames`."""
    return next(reversed(user_frames(stack)), None)
