"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` on the simulated GPU: cuDNN runs all their layers as one op.

Its weights are one buffer, into which the module packs its parameters when it moves to the GPU. Autocast makes a
float16 copy of that buffer in each forward. Sources: ``aten/src/ATen/native/cudnn/RNN.cpp`` and
``aten/src/ATen/cudnn/AutocastRNN.cpp`` of torch 2.13; for cuDNN's reserve (kept of a forward for backward), the sizes
that cuDNN 9.19 requested on an H200, in 159 calls of LSTMs, GRUs and RNNs
(``tests/gpu/measured/h200/ops-recurrent.json.gz``).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ampmem.patching import Undo, added, patch, undone_together
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import general
from ampmem.simulator.private.general import FakeTensor, storage_key, without_autocast

aten = torch.ops.aten

_KINDS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""The functions that modules call, and cuDNN's number for each (``cudnnRNNMode_t``)."""
_MODES = {name.upper(): number for name, number in _KINDS.items()}
"""cuDNN's number for each ``nn.RNNBase.mode``."""
_PACKED = (torch.float16, torch.float32, torch.float64)
"""Dtypes of ``torch.backends.cudnn.is_acceptable``: parameters of other dtypes are packed at every call."""
_RESERVE = (
    "assumed: what cuDNN saves of a recurrent layer for backward, and its dropout state, have the sizes that cuDNN "
    "9.19 asked for on an H200"
)
_HALF = "recurrent layers run in float16 under autocast, whatever the autocast type: torch has no other cast for cuDNN"
_SCATTERED = "the weights of a recurrent layer are not contiguous in memory, so they are copied for cuDNN at every call"
WORKSPACES = "cuDNN's workspaces in recurrent layers"


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a module's call of cuDNN. ``steps`` are a packed batch's sizes, empty for a padded batch."""

    kind: int
    source: Tensor
    steps: tuple[int, ...]
    hidden: Tensor
    cell: Tensor | None
    weights: Sequence[Tensor]
    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def shape(self) -> Layers:
        """The layers; the projection is derived from the states, as in torch."""
        width = self.hidden.shape[2]
        hidden = width if self.cell is None else self.cell.shape[2]
        projection = 0 if hidden == width else width
        return Layers(self.kind, self.source.shape[-1], hidden, projection, self.layers, 1 + self.bidirectional)


@undone_together
def install(mode: SimulatedMode) -> Iterator[Undo]:
    """Install cuDNN's ops, and the functions by which modules call them; returns the undo."""
    dropout = _Dropout(mode.device_model)
    answers: dict[Any, Callable[..., Any]] = {
        aten._cudnn_rnn.default: functools.partial(_forward, mode.device_model),
        aten._cudnn_rnn_backward.default: _backward,
    }
    yield general.replace_layers(tuple(_KINDS), functools.partial(_layer, mode.device_model, dropout))
    yield patch(*general.FLATTEN, _flatten)
    yield patch(*general.COPIED, _copied)
    mode.answers.update(answers)
    yield added("ops of cuDNN", "recurrent layers", lambda: [mode.answers.pop(op) for op in answers])


# -- the parameters ---------------------------------------------------------------------------------


def _flatten(original: Callable[[nn.RNNBase], None]) -> Callable[[nn.RNNBase], None]:
    @functools.wraps(original)
    def flatten_parameters(module: nn.RNNBase) -> None:
        weights, count = general.flat_weights(module)
        if not any(isinstance(weight, FakeTensor) for weight in weights):
            original(module)
        elif len(weights) == count and _can_be_packed(weights):
            sizes = (module.input_size, module.hidden_size, module.proj_size, module.num_layers)
            with torch.no_grad():
                _pack(weights, Layers(_MODES[module.mode], *sizes, 1 + module.bidirectional), module.bias)

    return flatten_parameters


def _copied(original: Callable[[nn.RNNBase, Any], None]) -> Callable[[nn.RNNBase, Any], None]:
    """Pack a copied module's parameters into one buffer, too: fake tensors are copied one by one."""

    @functools.wraps(original)
    def setstate(module: nn.RNNBase, state: Any) -> None:
        original(module, state)
        module.flatten_parameters()

    return setstate


def _can_be_packed(weights: Sequence[Any]) -> bool:
    if not all(_on_gpu(weight) and weight.dtype == weights[0].dtype for weight in weights):
        return False
    places = {(storage_key(weight.untyped_storage()), weight.storage_offset()) for weight in weights}
    return weights[0].dtype in _PACKED and torch.backends.cudnn.enabled and len(places) == len(weights)


def _pack(weights: Sequence[Tensor], layers: Layers, biases: bool) -> None:
    """Make the parameters views of one buffer (``copy_weights_to_flat_buf_views``)."""
    buffer = weights[0].new_zeros(layers.elements)
    pieces = [
        buffer[start : start + weight.numel()].view_as(weight)
        for weight, start in zip(weights, layers.starts(biases), strict=True)
    ]
    for weight, piece in zip(weights, pieces, strict=True):
        piece.copy_(weight)
    for weight, piece in zip(weights, pieces, strict=True):
        weight.set_(piece)  # type: ignore[call-overload]


def _packed(call: _Call) -> Tensor | None:
    """The buffer of which the weights are views; ``None`` if they are not (``try_get_weight_buf``)."""
    layers, first = call.shape, call.weights[0]
    storage = first.untyped_storage()
    if storage.nbytes() < layers.elements * first.element_size():
        return None
    for weight, start in zip(call.weights, layers.starts(call.biases), strict=True):
        if storage_key(weight.untyped_storage()) != storage_key(storage) or weight.storage_offset() != start:
            return None
    return first.detach().as_strided((layers.elements,), (1,), 0)


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


# -- from the module to the op ----------------------------------------------------------------------


class _Dropout:
    """The state of cuDNN's dropout, kept until the random generator is seeded again (``get_dropout_state``)."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._state: Tensor | None = None
        self._seeds = 0

    def prepare(self, call: _Call) -> None:
        """Allocate the state if ``call`` needs it."""
        if not (call.train and call.dropout) or (self._state is not None and self._seeds == self._device.seeds):
            return
        self._seeds = self._device.seeds
        torch.empty((), dtype=torch.int64, device="cuda").random_()  # the seed
        size = (self._device.gpu.sm_count or 108) * _DROPOUT_STATE
        self._state = torch.empty(size, dtype=torch.uint8, device="cuda")


def _layer(device: SimulatedDevice, dropout: _Dropout, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of ``torch._VF.lstm`` and the like (``_cudnn_impl``)."""

    @functools.wraps(original)
    def run(*args: Any) -> Any:
        if not _on_gpu(args[0]) or not torch.backends.cudnn.enabled or not args[0].numel():
            return original(*args)
        call = _call(_KINDS[name], args)
        dropout.prepare(call)
        run_it = _cast_and_run if torch.is_autocast_enabled("cuda") else _run_cudnn
        with without_autocast():
            results = run_it(device, call, _packed(call))
        return results if call.cell is not None else results[:2]

    return run


def _call(kind: int, args: Sequence[Any]) -> _Call:
    steps, batch_first = (), False
    if isinstance(args[3], bool):
        states, weights, *rest, batch_first = args[1:]
    else:
        batch_sizes, states, weights, *rest = args[1:]
        steps = tuple(batch_sizes.tolist())
    hidden, cell = states if kind == _KINDS["lstm"] else (states, None)
    biases, layers, dropout, train, both_ways = rest
    return _Call(kind, args[0], steps, hidden, cell, weights, biases, layers, dropout, train, both_ways, batch_first)


def _cast_and_run(device: SimulatedDevice, call: _Call, buffer: Tensor | None) -> tuple[Tensor, ...]:
    """Run with a float16 buffer of all weights; autograd sees its pieces (``_cudnn_rnn_cast_reflatten``)."""
    first, weights = call.weights[0], call.weights
    device.assume(_HALF)
    if first.dtype in (torch.float32, torch.bfloat16):
        buffer = first.new_zeros(call.shape.elements, dtype=torch.float16)
        weights = []
        for weight, start in zip(call.weights, call.shape.starts(call.biases), strict=True):
            piece = buffer[start : start + weight.numel()].view_as(weight).detach()
            weights.append(piece.copy_(weight))
    cell = None if call.cell is None else _half(call.cell)  # arguments are cast from last to first
    hidden = _half(call.hidden)
    call = replace(call, source=_half(call.source), hidden=hidden, cell=cell, weights=weights)
    return _run_cudnn(device, call, buffer)


def _half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype in (torch.float32, torch.bfloat16) else tensor


def _run_cudnn(device: SimulatedDevice, call: _Call, buffer: Tensor | None) -> tuple[Tensor, ...]:
    if buffer is None:
        device.assume(_SCATTERED)
        warnings.warn(_SCATTERED + "; torch warns of it on a GPU, too: call flatten_parameters()", stacklevel=4)
    layers = call.shape
    results: tuple[Tensor, ...] = aten._cudnn_rnn(
        call.source,
        call.weights,
        len(call.weights) // (layers.layers * layers.directions),
        buffer,
        call.hidden,
        call.cell,
        call.kind,
        layers.hidden,
        layers.projection,
        layers.layers,
        call.batch_first,
        call.dropout,
        call.train,
        call.bidirectional,
        call.steps,
        None,
    )
    return results[:3]


# -- the ops ----------------------------------------------------------------------------------------


def _forward(device: SimulatedDevice, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Tensor, ...]:
    """``_cudnn_rnn``: output, last states, the reserve for backward, and the buffer of the weights."""
    source, _, _, buffer, hidden, cell, kind, width, projection, layers, batch_first = args[:11]
    dropout, train, bidirectional, steps = args[11:15]
    shape = Layers(kind, source.shape[-1], width, projection, layers, 1 + bidirectional)
    turned = batch_first and not steps
    x = (source.transpose(0, 1) if turned else source).contiguous()
    output = x.new_empty((*x.shape[:-1], shape.output * shape.directions))
    last = hidden.new_empty(hidden.shape)
    last_cell = hidden.new_empty((0,) if cell is None else cell.shape)
    if buffer is None:
        buffer = x.new_empty(shape.elements).zero_()
    cells = x.shape[0] if steps else x.shape[0] * x.shape[1]
    size = reserve(shape, cells, x.element_size(), dropout=dropout > 0) if train else 0
    kept = x.new_empty(size, dtype=torch.uint8)
    device.assume(_RESERVE)
    device.leave_out(WORKSPACES)
    return output.transpose(0, 1) if turned else output, last, last_cell, kept, buffer


def _backward(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """``_cudnn_rnn_backward``: gradients of the input, the states, and all weights."""
    source, weights, stride, buffer, hidden, cell, output = args[:7]
    batch_first, train, steps, wanted = args[14], args[16], args[18], args[21]
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    # States without a gradient get zeros, which live until the op ends.
    given = [
        tensor.new_zeros(tensor.shape) if gradient is None else gradient
        for gradient, tensor in zip(args[7:10], (output, hidden, cell), strict=True)
        if tensor is not None
    ]
    if batch_first and not steps:
        source = source.transpose(0, 1)
    of_source = _of_input(source, given[0], turned=batch_first and not steps)
    of_states = [None if state is None else state.new_empty(state.shape) for state in (hidden, cell)]
    of_weights = _of_weights(source, weights, stride, buffer) if wanted[3] else []
    return of_source.transpose(0, 1) if batch_first and not steps else of_source, *of_states, of_weights


def _of_input(source: Tensor, of_output: Tensor, *, turned: bool) -> Tensor:
    """The input's gradient; both tensors are copied if they are batch-first."""
    copies = source.contiguous(), (of_output.transpose(0, 1) if turned else of_output).contiguous()
    of_source = torch.empty_like(source, memory_format=torch.contiguous_format)
    del copies
    return of_source


def _of_weights(source: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor) -> list[Tensor]:
    """The weights' gradients: views of one buffer, or copies if the module has no biases, which cuDNN has."""
    copy = source.contiguous()
    gradients = buffer.new_zeros(buffer.shape)
    del copy
    if stride in (2, 3):
        return [weight.new_empty(weight.shape) for weight in weights]
    starts = accumulate((weight.numel() for weight in weights), initial=0)
    return [
        gradients[start : start + weight.numel()].view(weight.shape)
        for weight, start in zip(weights, starts, strict=False)
    ]


_GATES = (1, 1, 4, 3)
"""Gates by cuDNN's number of the cell (``cudnnRNNMode_t``): RNN with ReLU, with tanh, LSTM, GRU."""
_KEPT = (1, 1, 5, 6)
"""Values per cell that are kept for backward. An LSTM's are its gates and its state; a GRU's are not documented."""
_HEAD, _ALIGNED = 256, 32
"""Bytes before the reserve's data, and its alignment."""
_DROPOUT_STATE = 48 << 10
"""Bytes of cuDNN's dropout state per SM: 6,488,064 for the 132 of an H200."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one module. ``width`` is that of the input; ``projection`` is 0 without one."""

    kind: int
    width: int
    hidden: int
    projection: int
    layers: int
    directions: int

    @property
    def output(self) -> int:
        """The width of the output in one direction."""
        return self.projection or self.hidden

    @property
    def elements(self) -> int:
        """Elements of the buffer. It has biases even if the module has none (``CUDNN_RNN_DOUBLE_BIAS``)."""
        return sum(map(sum, self._sizes()))

    def starts(self, biases: bool) -> list[int]:
        """The element of the buffer at which each of the module's parameters begins, in the module's order.

        cuDNN's own order may differ, which changes no size.
        """
        pieces, start = [], 0
        for sizes in self._sizes():
            places = list(accumulate(sizes, initial=start))
            start = places.pop()
            pieces += places if biases else places[:2] + places[4:]
        return pieces

    def _sizes(self) -> Iterator[tuple[int, ...]]:
        """Elements of the matrices, the biases and the projection of each layer and direction."""
        rows = _GATES[self.kind] * self.hidden
        for layer in range(self.layers):
            width = self.output * self.directions if layer else self.width
            projected = (self.projection * self.hidden,) if self.projection else ()
            yield from [(rows * width, rows * self.output, rows, rows, *projected)] * self.directions


def reserve(layers: Layers, cells: int, item: int, *, dropout: bool = False) -> int:
    """Bytes that cuDNN keeps of a forward in training; ``cells`` is the number of steps of all sequences together.

    Exact in all measured calls. Those with a projection, or with dropout, had two layers.
    """
    width = _KEPT[layers.kind] * layers.hidden
    between = (layers.layers - 1) * layers.output
    if layers.projection:  # the output before the projection, and twice the projected one
        width += layers.hidden + 2 * layers.projection
        between *= 2
    kept = cells * layers.directions * (layers.layers * width + between) * item
    if dropout:  # one bit per value between layers, of both directions, for each direction
        kept += cells * between * layers.directions**2 // 8
    return _HEAD + -(-kept // _ALIGNED) * _ALIGNED
