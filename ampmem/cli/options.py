"""Options that ``profile`` and ``compare`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ampmem.allocator.device import GPUS, GpuSpec, find_gpu
from ampmem.errors import UsageError

ARMS = ("fp32", "amp", "amp-nocache")
DTYPES = ("bf16", "fp16")
SIMULATED = "sim"
"""The device that is not there."""
DEVICES = ("auto", "cuda", "cpu", SIMULATED)
DEFAULT_GPU = "a100-80"
"""What is simulated unless ``--gpu`` says otherwise."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_SHARED: tuple[Decorator, ...] = (
    click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does."),
    click.option("--dtype", type=click.Choice(DTYPES), help="What autocast casts to.  [default: what the script says]"),
    click.option(
        "--device",
        type=click.Choice(DEVICES),
        default="auto",
        show_default=True,
        help="Whose memory to record; auto takes the GPU where torch sees one, sim simulates the one that --gpu names.",
    ),
    click.option(
        "--gpu",
        metavar="NAME|BYTES",
        help=f"The GPU to simulate ({', '.join(GPUS)}), or its memory, such as 24GiB.  [default: {DEFAULT_GPU}]",
    ),
    click.option(
        "--sync/--no-sync",
        "synchronize",
        default=True,
        show_default=True,
        help="On a GPU, wait for it at the end of each step.",
    ),
    click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="How many steps to record."),
    click.option("--skip", type=click.IntRange(min=0), default=0, show_default=True, help="Steps to let pass before."),
    click.option("--stacks/--no-stacks", default=True, show_default=True, help="Record the Python stack of every op."),
    click.option("--force", is_flag=True, help="Replace files that exist."),
    click.argument("script_or_module", metavar="SCRIPT|-m MODULE"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
)


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the script to run and how to record it."""
    for decorate in reversed(_SHARED):
        command = decorate(command)
    return command


def simulated_gpu(device: str, gpu: str | None) -> GpuSpec | None:
    """The GPU to simulate; ``None`` for another device. Raises :class:`UsageError` for one that nobody knows."""
    if device != SIMULATED:
        if gpu is not None:
            raise UsageError("--gpu names the GPU to simulate, so it needs --device sim")
        return None
    return find_gpu(gpu or DEFAULT_GPU)
