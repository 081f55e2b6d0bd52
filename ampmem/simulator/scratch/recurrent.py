"""How cuDNN lays out the weights of recurrent layers, and what it keeps of a forward for backward.

Sources: ``aten/src/ATen/native/cudnn/RNN.cpp`` of torch 2.13; for what is kept, the sizes that cuDNN 9.19 asked for
on an H200, in 159 calls of LSTMs, GRUs and RNNs (``tests/gpu/measured/h200/ops-recurrent.json.gz``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

_GATES = (1, 1, 4, 3)
"""Of each kind of cell, by cuDNN's number for it (``cudnnRNNMode_t``): RNN with ReLU, with tanh, LSTM, GRU."""
_KEPT = (1, 1, 5, 6)
"""Values of each cell that are kept for backward. An LSTM's are its gates and its state; a GRU's are not documented."""
_HEAD, _ALIGNED = 256, 32
"""Bytes before what is kept, and of what the rest is a multiple."""
_DROPOUT_STATE = 48 << 10
"""Bytes of the state of cuDNN's dropout for each multiprocessor: 6,488,064 for the 132 of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of one module. ``width`` is that of the input, ``projection`` 0 where there is none."""

    kind: int
    width: int
    hidden: int
    projection: int
    layers: int
    directions: int

    @property
    def output(self) -> int:
        """The width of the output, in one direction."""
        return self.projection or self.hidden

    @property
    def elements(self) -> int:
        """Elements of the buffer. It has biases where the module has none (``CUDNN_RNN_DOUBLE_BIAS``)."""
        return sum(map(sum, self._sizes()))

    def starts(self, biases: bool) -> list[int]:
        """At which element of the buffer each of the module's parameters begins, in the module's order.

        cuDNN's own order may be another, which changes no size.
        """
        pieces, start = [], 0
        for sizes in self._sizes():
            places = list(accumulate(sizes, initial=start))
            start = places.pop()
            pieces += places if biases else places[:2] + places[4:]
        return pieces

    def _sizes(self) -> Iterator[tuple[int, ...]]:
        """Of each layer and direction the elements of its matrices, its biases, and its projection."""
        rows = _GATES[self.kind] * self.hidden
        for layer in range(self.layers):
            width = self.output * self.directions if layer else self.width
            projected = (self.projection * self.hidden,) if self.projection else ()
            yield from [(rows * width, rows * self.output, rows, rows, *projected)] * self.directions


def reserve(layers: Layers, cells: int, item: int, *, dropout: bool = False) -> int:
    """Bytes that cuDNN keeps of a forward in training; ``cells`` is how many steps all sequences have together.

    Exact in all calls that were measured. Of layers with a projection, or with dropout, those had two layers.
    """
    width = _KEPT[layers.kind] * layers.hidden
    between = (layers.layers - 1) * layers.output
    if layers.projection:  # the output before it, and its own two times more
        width += layers.hidden + 2 * layers.projection
        between *= 2
    kept = cells * layers.directions * (layers.layers * width + between) * item
    if dropout:  # a bit for each value between layers, of both directions, for each direction
        kept += cells * between * layers.directions**2 // 8
    return _HEAD + -(-kept // _ALIGNED) * _ALIGNED


def dropout_state(multiprocessors: int) -> int:
    """Bytes of the state of cuDNN's dropout, of which a process has one."""
    return multiprocessors * _DROPOUT_STATE
