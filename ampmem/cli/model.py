"""``ampmem model``: the published formulas of static memory, and which of them a recording agrees with."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from pathlib import Path

import click

from ampmem.analysis.soundness import measure
from ampmem.analysis.static_model.recipes import OPTIMIZERS, PRECISIONS, OptimizerModel, optimizer_model, recipe
from ampmem.analysis.summary import Summary
from ampmem.cli.show import report_of
from ampmem.errors import NothingRecorded, UsageError
from ampmem.reporters.text.layout import layout_for
from ampmem.reporters.text.model import note, render_recipe, render_recipes

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**15


@click.command("model", short_help="Compare the published formulas of static memory.")
@click.argument("file", required=False, metavar="[FILE]", type=click.Path(path_type=Path))
@click.option("--params", metavar="COUNT", help="Number of parameters: 7e9, 7B, 350M or 124_000_000.")
@click.option(
    "--optimizer",
    metavar="NAME",
    type=click.Choice(list(OPTIMIZERS), case_sensitive=False),
    default="adamw",
    show_default=True,
    help=f"The optimizer of the recipes: {', '.join(OPTIMIZERS)}. The published formulas are all for Adam.",
)
@click.option(
    "--recipe",
    "name",
    metavar="NAME",
    type=click.Choice(list(PRECISIONS)),
    help=f"Show only this recipe, with its terms and source: {', '.join(PRECISIONS)}.",
)
def model(file: Path | None, params: str | None, optimizer: str, name: str | None) -> None:
    """Compare the published formulas of static memory.

    Static memory is parameters, their copies, gradients and optimizer state: what training needs before any activation.
    Give a number of parameters with --params, or a recording: then the measured memory is shown too, and which recipes
    and formulas agree with it, in total and in each part.
    """
    if file is None and params is None:
        raise UsageError("give a number of parameters, as in --params 7e9, or a recording")
    if file is not None and params is not None:
        raise UsageError("give either --params or a recording, and not both")
    keys = list(PRECISIONS) if name is None else [name]
    recipes = [recipe(key, optimizer) for key in keys]
    parameters, measured, remark = 0, None, None
    if params is not None:
        parameters = parse_count(params)
    if file is not None:
        summary = report_of(file).summary
        try:
            measured = measure(summary)
        except NothingRecorded as error:
            raise NothingRecorded(f"{file}: {error}") from error
        parameters, remark = measured.parameters, _remark(summary, OPTIMIZERS[optimizer])
    layout = layout_for(sys.stdout)
    if name is None:
        text = render_recipes(recipes, parameters, measured, layout)
    else:
        text = render_recipe(recipes[0], parameters, measured, layout)
    click.echo(text if remark is None else f"{text}\n\n{note(remark, layout)}")


def parse_count(text: str) -> int:
    """The number in a text such as ``7e9``, ``1.5B``, ``350M``, ``124_000``. Raises :class:`UsageError` otherwise."""
    found = _COUNT.fullmatch(text.strip())
    if found is not None:
        number, unit = found.groups()
        count = Decimal(number) * _UNITS[unit.lower()]
        if 0 < count <= _MOST and count == int(count):
            return int(count)
    raise UsageError(f"--params {text!r} is not a number of parameters; write it as 7e9, 7B, 350M or 124_000_000")


def _remark(summary: Summary, chosen: OptimizerModel) -> str | None:
    """The note if the run's optimizer keeps other tensors than the chosen one; settings are not recorded."""
    for item in summary.optimizer:
        used = optimizer_model([item.class_name], {})
        if used is not None and not _same_family(used, chosen):
            return (
                f"this run's optimizer is {item.class_name}, and the recipes are for {chosen.title}; "
                "choose another with --optimizer"
            )
    return None


def _same_family(used: OptimizerModel, chosen: OptimizerModel) -> bool:
    """Whether ``chosen`` is ``used``, possibly with settings that add states."""
    return chosen.key.startswith(used.key) or (bool(used.states) and set(used.states) <= set(chosen.states))
