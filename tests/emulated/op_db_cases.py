"""PyTorch's own samples of its ops (``op_db``), for ops.py: the first three of each op, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from op_cases import tensors
from ops import Case
from torch.testing._internal.common_methods_invocations import op_db

PRECISIONS = {"f32": (torch.float32,), "low": (torch.bfloat16, torch.float16)}
"""In which type the samples are: the first of these that an op supports."""
SAMPLES = 3
NOT_EMULATED = ("linalg.", "fft.", "sparse.", "cholesky", "lu", "ormqr", "geqrf", "svd", "pca_lowrank", "stft", "istft")
"""Ops whose memory is for cuSOLVER, cuFFT and cuSPARSE to say."""


def cases() -> Iterable[Case]:
    """All of them, in both precisions where an op supports them."""
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if not name.startswith(NOT_EMULATED):
            for precision, types in PRECISIONS.items():
                supported = [dtype for dtype in types if dtype in op.supported_dtypes("cuda")]
                if supported:
                    yield Case(name=name, precision=precision, run=partial(sampled, op, supported[0]))


def sampled(op: Any, dtype: torch.dtype) -> Iterator[str]:
    """Forward and backward of each sample."""
    grad = dtype in op.supported_backward_dtypes("cuda")
    for number, sample in enumerate(islice(op.sample_inputs("cuda", dtype, requires_grad=grad), SAMPLES)):
        yield f"{number} forward"
        result = op(sample.input, *sample.args, **sample.kwargs)
        yield ""
        outs = [out for out in tensors(result) if out.requires_grad and out.grad_fn is not None]
        grads = [torch.ones_like(out) for out in outs]
        del result
        if outs:
            yield f"{number} backward"
            torch.autograd.backward(outs, grads)
            yield ""
        del outs, grads
