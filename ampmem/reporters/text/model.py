"""Recipes and published formulas of static memory as text, never wider than the tables of a summary."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ampmem.analysis.static_model.published import (
    PUBLISHED,
    TOLERANCE,
    Match,
    Measured,
    Published,
    match_published,
    match_recipe,
)
from ampmem.analysis.static_model.static_model import COMPONENTS, Recipe
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.plain_text import WIDTH, per_parameter, shorten, table
from ampmem.reporters.text.words import AT_MARK
from ampmem.units import format_bytes, format_count

_COUNTS_WIDTH = 52
_HEADERS = ("para-\nmeters", "cast\ncopies", "gradi-\nents", "master\ncopies", "optim.\nstate")


def render_recipes(recipes: Sequence[Recipe], parameters: int, measured: Measured | None = None) -> str:
    """All recipes of one optimizer, then the published formulas, then which of them ``measured`` agrees with."""
    sections = [
        _head(recipes[0], parameters),
        *([_measurement(measured)] if measured else []),
        _recipes(recipes, parameters),
        _published(PUBLISHED.values(), parameters),
        *([_matches(recipes, PUBLISHED.values(), measured)] if measured else []),
        _sources(PUBLISHED.values()),
    ]
    return "\n\n".join(sections)


def render_recipe(recipe: Recipe, parameters: int, measured: Measured | None = None) -> str:
    """One recipe with its terms and its sources, and whether ``measured`` agrees with it."""
    sections = [
        f"{_line('recipe', f'{recipe.precision.key}: {recipe.precision.title}')}\n{_head(recipe, parameters)}",
        *([_measurement(measured)] if measured else []),
        _terms(recipe, parameters),
        *([_matches([recipe], [], measured)] if measured else []),
        "\n".join(_wrap(f"source: {source}") for source in (recipe.precision.source, recipe.optimizer.source)),
    ]
    return "\n\n".join(sections)


def note(text: str) -> str:
    """A remark, wrapped."""
    return _wrap(f"note: {text}")


def _head(recipe: Recipe, parameters: int) -> str:
    optimizer = recipe.optimizer
    states = ", ".join(state.name for state in optimizer.states) or "no state"
    kept = _line("optimizer", f"{optimizer.title}: {states}")
    return f"{_line('parameters', format_count(parameters))}\n{kept}"


def _line(key: str, value: str) -> str:
    return _wrap(f"{key:<12}{value}")


def _recipes(recipes: Sequence[Recipe], parameters: int) -> str:
    rows = [
        [
            recipe.precision.key,
            *(_part(recipe, component) for component in COMPONENTS),
            _number(recipe.static),
            _size(recipe.static, parameters),
        ]
        for recipe in recipes
    ]
    text = table(rows, ["recipe, bytes per parameter", *_HEADERS, "total", "bytes"], ["left"] + ["right"] * 7)
    if any(recipe.precision.transient_casts for recipe in recipes):
        text += "\n" + _wrap(
            "* alive from forward until backward has used them, and not in the total; "
            "of the parameters that autocast casts only, so not of norms and embeddings"
        )
    return text


def _part(recipe: Recipe, component: Category) -> str:
    transient = component == Category.CAST_COPIES and recipe.precision.transient_casts
    return _number(recipe.components[component]) + ("*" if transient else "")


def _published(formulas: Iterable[Published], parameters: int) -> str:
    rows = [
        [
            formula.key,
            _number(formula.total),
            _size(formula.total, parameters),
            textwrap.fill(f"{_sum(formula)}. {formula.counts}", _COUNTS_WIDTH),
        ]
        for formula in formulas
    ]
    headers = ["published, with Adam", "B/param", "bytes", "what it counts"]
    return table(rows, headers, ["left", "right", "right", "left"])


def _sum(formula: Published) -> str:
    parts = [f"{size:g} {component.replace('_', ' ')}" for component, size in formula.components.items() if size]
    return " + ".join(parts)


def _terms(recipe: Recipe, parameters: int) -> str:
    rows = [
        [component, _part(recipe, component), _size(recipe.components[component], parameters), _why(recipe, component)]
        for component in COMPONENTS
    ]
    rows.append(["total", _number(recipe.static), _size(recipe.static, parameters), "alive after backward"])
    if recipe.precision.transient_casts:
        rows.append(["with casts", _number(recipe.peak), _size(recipe.peak, parameters), "if every copy is alive"])
    return table(rows, ["component", "B/param", "bytes", "terms"], ["left", "right", "right", "left"])


def _why(recipe: Recipe, component: Category) -> str:
    size = recipe.components[component]
    if component == Category.OPTIMIZER_STATE:
        return _states(recipe)
    if not size:
        return "none"
    if component == Category.CAST_COPIES and recipe.precision.transient_casts:
        return "* gone after backward; only what autocast casts"
    if component == Category.GRADIENTS and size == 6:
        return "2 as backward makes them + 4 accumulated"
    return "float32" if size == 4 else "bfloat16 or float16"


def _states(recipe: Recipe) -> str:
    itemsize = recipe.precision.optimized_itemsize
    terms = [
        f"{state.elements * (itemsize if state.itemsize is None else state.itemsize):g} {state.name}"
        if state.elements
        else f"{state.name} (small)"
        for state in recipe.optimizer.states
    ]
    return " + ".join(terms) or "none"


def _measurement(measured: Measured) -> str:
    columns: list[Mapping[str, int]] = [measured.static]
    headers = ["measured", AT_MARK[measured.mark].replace(" ", "\n", 1), "B/\nparam"]
    if measured.after_forward is not None:
        columns.append(measured.after_forward)
        headers += ["at the end\nof forward", "B/\nparam"]
    rows = [[component, *_cells([column[component] for column in columns], measured)] for component in COMPONENTS]
    rows.append(["total", *_cells([sum(column.values()) for column in columns], measured)])
    return f"this run, step {measured.step}\n\n{table(rows, headers, ['left'] + ['right'] * (2 * len(columns)))}"


def _cells(sizes: Iterable[int], measured: Measured) -> list[str]:
    return [text for size in sizes for text in (format_bytes(size), per_parameter(size, measured.parameters))]


def _matches(recipes: Iterable[Recipe], formulas: Iterable[Published], measured: Measured) -> str:
    checked = [(recipe.precision.key, match_recipe(recipe, measured)) for recipe in recipes]
    checked += [(formula.key, match_published(formula, measured)) for formula in formulas]
    found = [f"  {key:<31}{_verdict(match)}" for key, match in checked if match.total or match.split]
    total = per_parameter(measured.static_bytes, measured.parameters)
    intro = f"what agrees with the {total} bytes per parameter of this run, within {TOLERANCE:.0%}:"
    return "\n".join([intro, *(found or ["  nothing"])])


def _verdict(match: Match) -> str:
    if match.total:
        return f"total matches, split {'matches' if match.split else 'does not: right for the wrong reason'}"
    return "split matches, total does not: it is not the sum of its parts"


def _sources(formulas: Iterable[Published]) -> str:
    keys: dict[str, list[str]] = {}
    for formula in formulas:
        keys.setdefault(formula.source, []).append(formula.key)
    return "\n".join(["sources", *(_wrap(f"{', '.join(names)}: {source}", "  ") for source, names in keys.items())])


def _number(size: float) -> str:
    return f"{size:.2f}"


def _size(per_param: float, parameters: int) -> str:
    return format_bytes(round(per_param * parameters))


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        shorten(text, len(text)),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )
