"""``--schema``: what a command's ``--json`` prints, as a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import click

from ampmem.analysis.jsonable import Json

_Command = TypeVar("_Command", bound=Callable[..., object])


def schema_option(
    schema: Callable[[], dict[str, Json]], name: str = "--schema", *, of: str = "--json"
) -> Callable[[_Command], _Command]:
    """A flag that prints ``schema``, of what the options ``of`` print, and ends the command, whatever it lacks."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            click.echo(json.dumps(schema(), indent=2))
            context.exit()

    return click.option(
        name,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=f"Print the JSON Schema of what {of} prints, and nothing else.",
    )
