"""Recurrent networks in shapes of real models, for ops.py.

cuDNN alone knows what it keeps of them and which workspaces it takes. ``ops.py --real`` measured both on a GPU; the
emulated runtime keeps what was measured there, and has no workspaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product

import torch
from op_cases import Build, rand, trained
from ops import Case
from torch import nn

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
SHAPES = (  # layers, both directions, time, batch, input, hidden
    *product((1, 2, 3), (False, True), (64,), (16,), (256,), (512,)),
    (1, False, 35, 20, 200, 200),
    (2, False, 35, 20, 650, 650),
    (2, False, 70, 40, 1150, 1150),
    (1, False, 256, 32, 128, 128),
    (1, False, 256, 64, 1024, 1024),
    (2, True, 400, 16, 80, 320),
    (4, True, 200, 32, 80, 512),
    (1, True, 50, 128, 300, 150),
    (1, False, 1, 64, 512, 512),
)


def cases() -> Iterable[Case]:
    """Each kind in each shape and precision; some LSTMs with dropout, projections, without bias, and evaluating."""
    for kind in KINDS:
        for shape in SHAPES:
            yield from _precisions(f"{kind} {_text(*shape)}", partial(network, kind, shape))
    for shape in ((2, False, 64, 16, 256, 512), (2, True, 64, 16, 256, 512)):
        for named in ({"dropout": 0.2}, {"bias": False}, {"proj_size": 128}, {"batch_first": True}):
            yield from _precisions(f"lstm {_text(*shape)} {named}", partial(network, "lstm", shape, **named))


def _text(layers: int, both: bool, time: int, batch: int, inputs: int, hidden: int) -> str:
    return f"layers={layers} both={int(both)} time={time} batch={batch} input={inputs} hidden={hidden}"


def _precisions(name: str, build: Build) -> Iterable[Case]:
    for precision in ("f32", "bf16", "amp"):
        yield Case(name=name, precision=precision, run=partial(trained, build, precision))


def network(
    kind: str, shape: tuple[int, bool, int, int, int, int], dtype: torch.dtype, **named: object
) -> tuple[nn.Module, torch.Tensor]:
    """A network and its input ``(time, batch, input)``, or with the batch first."""
    layers, both, time, batch, inputs, hidden = shape
    options = {"num_layers": layers, "bidirectional": both, "device": "cuda", "dtype": dtype, **named}
    sizes = (batch, time, inputs) if named.get("batch_first") else (time, batch, inputs)
    return KINDS[kind](inputs, hidden, **options), rand(dtype, *sizes)
