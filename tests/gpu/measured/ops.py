"""The calls of the grid as functions that can be called again and again, with all that they need there before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from measured.grid import Job
from torch import Tensor

_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Call = Callable[[], list[Tensor]]


@contextmanager
def prepared(job: Job) -> Iterator[Call]:
    """The call, whose inputs are there while the block lasts, under the settings that ``job`` asks for."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark = job.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = job.dtype == "tf32"
    try:
        if job.kind == "convolution":
            yield _convolution(job)
        else:
            if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
                clear()  # or only the first product of all would be seen to ask for one
            yield _product(job)
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def _convolution(job: Job) -> Call:
    dtype, groups, kernel, side = _TYPES[job.dtype], job["groups"], job["kernel"], job["image"]
    layout = torch.channels_last if job["channels_last"] else torch.contiguous_format
    x = torch.ones(job["batch"], job["channels"], side, side, dtype=dtype, device="cuda").to(memory_format=layout)
    weight = torch.ones(job["out"], job["channels"] // groups, kernel, kernel, dtype=dtype, device="cuda")
    weight = weight.to(memory_format=layout)
    stride, padding, one, none = [job["stride"]] * 2, [job["padding"]] * 2, [1, 1], [0, 0]
    if job.call == "forward":
        return lambda: [torch.ops.aten.convolution(x, weight, None, stride, padding, one, False, none, groups)]
    end = (side + 2 * job["padding"] - kernel) // job["stride"] + 1
    grad = torch.ones(job["batch"], job["out"], end, end, dtype=dtype, device="cuda").to(memory_format=layout)
    mask = [job.call == "backward-data", job.call == "backward-weight", False]

    def backward() -> list[Tensor]:
        made = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, one, False, none, groups, mask
        )
        return [tensor for tensor in made if tensor is not None]

    return backward


def _product(job: Job) -> Call:
    dtype, batch, m, k, n = _TYPES[job.dtype], job["batch"], job["m"], job["k"], job["n"]
    if job.call == "bmm":
        left, right = _ones(batch, m, k, dtype=dtype), _ones(batch, k, n, dtype=dtype)
        return lambda: [torch.bmm(left, right)]
    a, b, bias = _ones(m, k, dtype=dtype), _ones(k, n, dtype=dtype), _ones(n, dtype=dtype)
    if job.call == "mm":
        return lambda: [torch.mm(a, b)]
    if job.call == "addmm":
        return lambda: [torch.addmm(bias, a, b)]
    return lambda: [torch._addmm_activation(bias, a, b, use_gelu=True)]


def _ones(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")
