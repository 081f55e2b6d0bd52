"""How cuDNN lays out the weights of recurrent layers, and what it keeps of a forward for backward.

Sources: ``aten/src/ATen/native/cudnn/RNN.cpp`` of torch 2.13; for what is kept, the sizes that cuDNN asked for of an
LSTM and of a GRU of 4 layers, printed on a GPU in FP32 (https://github.com/pytorch/pytorch/issues/2895).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

_GATES = (1, 1, 4, 3)
"""Of each kind of cell, by cuDNN's number for it (``cudnnRNNMode_t``): RNN with ReLU, with tanh, LSTM, GRU."""
_KEPT = (1, 1, 5, 6)
"""Values of each cell that are kept for backward. An LSTM's are its gates and its state; a GRU's are not documented."""


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


def reserve(layers: Layers, cells: int, item: int) -> int:
    """Bytes that cuDNN keeps of a forward in training; ``cells`` is how many steps all sequences have together.

    It was seen for FP32 without projection, dropout or a second direction: there it is exact.
    """
    width = _KEPT[layers.kind] * layers.hidden + (layers.hidden if layers.projection else 0)
    between = (layers.layers - 1) * layers.output
    return cells * layers.directions * (layers.layers * width + between) * item
