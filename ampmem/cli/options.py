"""Options that ``profile`` and ``compare`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ampmem.allocator.gpus import GPUS, GpuSpec, find_gpu
from ampmem.errors import UsageError

ARMS = ("fp32", "amp", "amp-nocache")
DTYPES = ("bf16", "fp16")
SIMULATED = "sim"
"""The device that is not there."""
DEVICES = ("auto", "cuda", "cpu", SIMULATED)
DEFAULT_GPU = "a100-80"
"""What is simulated unless ``--gpu`` says otherwise."""
ASSUMABLE = ("nonzero", "unique")
"""Ops whose result depends on the data, of which ``--assume`` can say how much it is; masks are ``nonzero``."""

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
        "--assume",
        multiple=True,
        metavar="OP=FRACTION",
        help="On a simulated device, the fraction of the elements that an op finds whose result depends on the data: "
        f"{' or '.join(ASSUMABLE)}. May be repeated.",
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


def assumed_fractions(device: str, assume: tuple[str, ...]) -> dict[str, float]:
    """What each ``--assume`` says. Raises :class:`UsageError` for what cannot be meant."""
    if assume and device != SIMULATED:
        raise UsageError("--assume says what a simulated device takes for granted, so it needs --device sim")
    fractions: dict[str, float] = {}
    for text in assume:
        op, _, number = text.partition("=")
        if op not in ASSUMABLE:
            raise UsageError(f"--assume {text}: there is no op {op!r} to assume of; there are {', '.join(ASSUMABLE)}")
        if op in fractions:
            raise UsageError(f"--assume: {op} is there twice")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise UsageError(f"--assume {text}: it takes a fraction of the elements, from 0 to 1, such as {op}=0.5")
        fractions[op] = fraction
    return fractions
