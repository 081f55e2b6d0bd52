"""Options that ``profile`` and ``compare`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

ARMS = ("fp32", "amp", "amp-nocache")
DTYPES = ("bf16", "fp16")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_SHARED: tuple[Decorator, ...] = (
    click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does."),
    click.option("--dtype", type=click.Choice(DTYPES), help="What autocast casts to.  [default: what the script says]"),
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
