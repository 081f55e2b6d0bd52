"""Recipes and published formulas of static memory as text; only an address may be longer than a line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ampmem.analysis.static_model.recipes import (
    COMPONENTS,
    PUBLISHED,
    TOLERANCE,
    FormulaMatch,
    Measured,
    Published,
    Recipe,
    match_published,
    match_recipe,
)
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, table_lines, words
from ampmem.reporters.text.plain_text import AT_MARK, per_parameter, shorten
from ampmem.units import format_bytes, format_count

_NAME = 12
"""The least width of a recipe's name."""
_TERMS = 20
"""The least width of a component's terms."""
_TOTAL = "total"
_TRANSIENT = (
    "* at most, and not in the total: the copies are alive from forward until backward has used them; "
    "only parameters that autocast casts have copies, so not norms and embeddings"
)
_HEADERS = ("para-\nmeters", "cast\ncopies", "gradi-\nents", "master\ncopies", "optim.\nstate")


def render_recipes(
    recipes: Sequence[Recipe], parameters: int, measured: Measured | None = None, layout: Layout = PLAIN
) -> str:
    """All recipes with one optimizer, the published formulas, and which of them ``measured`` agrees with."""
    sections = [
        _head(recipes[0], parameters, layout),
        *([_measurement(measured, layout)] if measured else []),
        _recipes(recipes, parameters, layout),
        _recipes_in_bytes(recipes, parameters, layout),
        _published(PUBLISHED.values(), parameters, layout),
        *([_matches(recipes, PUBLISHED.values(), measured, layout)] if measured else []),
        _sources(PUBLISHED.values(), layout),
    ]
    return "\n\n".join(sections)


def render_recipe(recipe: Recipe, parameters: int, measured: Measured | None = None, layout: Layout = PLAIN) -> str:
    """One recipe with its terms and sources, and whether ``measured`` agrees with it."""
    name = _line("recipe", f"{recipe.precision.key}: {recipe.precision.title}", layout)
    sections = [
        f"{name}\n{_head(recipe, parameters, layout)}",
        *([_measurement(measured, layout)] if measured else []),
        _terms(recipe, parameters, layout),
        *([_matches([recipe], [], measured, layout)] if measured else []),
        "\n".join(_wrap(f"source: {source}", layout) for source in (recipe.precision.source, recipe.optimizer.source)),
    ]
    return "\n\n".join(sections)


def note(text: str, layout: Layout = PLAIN) -> str:
    """``text`` as a wrapped remark."""
    return _wrap(f"note: {text}", layout)


def _head(recipe: Recipe, parameters: int, layout: Layout) -> str:
    optimizer = recipe.optimizer
    states = ", ".join(state.name for state in optimizer.states) or "no state"
    kept = _line("optimizer", f"{optimizer.title}: {states}", layout)
    return f"{_line('parameters', format_count(parameters), layout)}\n{kept}"


def _line(key: str, value: str, layout: Layout) -> str:
    return _wrap(f"{key:<12}{value}", layout)


def _recipes(recipes: Sequence[Recipe], parameters: int, layout: Layout) -> str:
    rows = [
        [
            recipe.precision.key,
            *(_part(recipe, component) for component in COMPONENTS),
            _number(recipe.static),
            _size(recipe.static, parameters),
        ]
        for recipe in recipes
    ]
    columns = [
        words("recipe, bytes\nper parameter", least=_NAME),
        *map(number, _HEADERS),
        number("total"),
        number("bytes", rank=1),
    ]
    text = table(columns, rows, layout)
    if any(recipe.precision.transient_casts for recipe in recipes):
        text += "\n" + _wrap(_TRANSIENT, layout)
    return text + _small_state(recipes[0], layout)


def _small_state(recipe: Recipe, layout: Layout) -> str:
    """The note on an optimizer whose state does not grow per parameter and counts as 0; empty for others."""
    states = recipe.optimizer.states
    if not states or any(state.elements for state in states):
        return ""
    remark = (
        f"state of {recipe.optimizer.title} is counted as 0: it depends on the parameters' shapes, and is much less "
        "than the parameters if they are large matrices"
    )
    return "\n" + _wrap(remark, layout)


def _recipes_in_bytes(recipes: Sequence[Recipe], parameters: int, layout: Layout) -> str:
    """The recipes in bytes, for this number of parameters."""
    rows = [
        [
            recipe.precision.key,
            *(_component(recipe, component, parameters) for component in COMPONENTS),
            _size(recipe.static, parameters),
        ]
        for recipe in recipes
    ]
    columns = [words("recipe, bytes\nof each part", least=_NAME), *map(number, _HEADERS), number("total")]
    return table(columns, rows, layout)


def _component(recipe: Recipe, component: Category, parameters: int) -> str:
    size = recipe.components[component]
    return _size(size, parameters) + _mark(recipe, component) if size else "0"


def _part(recipe: Recipe, component: Category) -> str:
    return _number(recipe.components[component]) + _mark(recipe, component)


def _mark(recipe: Recipe, component: Category) -> str:
    """The mark after a number that is not in the total."""
    return "*" if component == Category.CAST_COPIES and recipe.precision.transient_casts else ""


def _published(formulas: Iterable[Published], parameters: int, layout: Layout) -> str:
    """A row for each formula, and under it what it counts, which is too long for a column."""
    shown = list(formulas)
    rows = [[formula.key, _number(formula.total), _size(formula.total, parameters)] for formula in shown]
    columns = [words("published, with Adam", least=_NAME), number("B/param"), number("bytes")]
    lines, body = table_lines(columns, rows, layout)
    for row, formula in zip(body, shown, strict=True):
        lines += [*row, _wrap(f"{_sum(formula)}. {formula.counts}", layout, "  ", hang="")]
    return "\n".join(lines)


def _sum(formula: Published) -> str:
    parts = [f"{size:g} {component.replace('_', ' ')}" for component, size in formula.components.items() if size]
    return " + ".join(parts)


def _terms(recipe: Recipe, parameters: int, layout: Layout) -> str:
    rows = [
        [component, _part(recipe, component), _size(recipe.components[component], parameters), _why(recipe, component)]
        for component in COMPONENTS
    ]
    rows.append(
        [_TOTAL, _number(recipe.static), _size(recipe.static, parameters), "alive after backward, without casts"]
    )
    if recipe.precision.transient_casts:
        rows.append(
            ["with casts", _number(recipe.peak), _size(recipe.peak, parameters), "until backward has used every copy"]
        )
    columns = [words("component"), number("B/param"), number("bytes", rank=1), words("terms", least=_TERMS, wraps=True)]
    text = table(columns, rows, layout, strong=(_TOTAL,))
    text += f"\n{_wrap(_TRANSIENT, layout)}" if recipe.precision.transient_casts else ""
    return text + _small_state(recipe, layout)


def _why(recipe: Recipe, component: Category) -> str:
    size = recipe.components[component]
    if component == Category.OPTIMIZER_STATE:
        return _states(recipe)
    if not size:
        return "none"
    if component == Category.CAST_COPIES and recipe.precision.transient_casts:
        return "* gone after backward"
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


def _measurement(measured: Measured, layout: Layout) -> str:
    shown: list[Mapping[str, int]] = [measured.static]
    columns = [words("measured"), number(AT_MARK[measured.mark].replace(" ", "\n", 1)), number("B/\nparam")]
    if measured.after_forward is not None:
        shown.append(measured.after_forward)
        columns += [number("at the end\nof forward"), number("B/\nparam")]
    rows = [[component, *_cells([column[component] for column in shown], measured)] for component in COMPONENTS]
    rows.append([_TOTAL, *_cells([sum(column.values()) for column in shown], measured)])
    caption = layout.heading(f"this run, step {measured.step}")
    return f"{caption}\n\n{table(columns, rows, layout, strong=(_TOTAL,))}"


def _cells(sizes: Iterable[int], measured: Measured) -> list[str]:
    return [text for size in sizes for text in (format_bytes(size), per_parameter(size, measured.parameters))]


def _matches(recipes: Iterable[Recipe], formulas: Iterable[Published], measured: Measured, layout: Layout) -> str:
    checked = [(recipe.precision.key, match_recipe(recipe, measured)) for recipe in recipes]
    checked += [(formula.key, match_published(formula, measured)) for formula in formulas]
    found = [_wrap(f"{key:<31}{_verdict(match)}", layout, "  ") for key, match in checked if match.total or match.split]
    total = per_parameter(measured.static_bytes, measured.parameters)
    intro = f"what agrees with this run's {total} bytes per parameter, within {TOLERANCE:.0%}:"
    return "\n".join([layout.strong(_wrap(intro, layout)), *(found or ["  nothing"])])


def _verdict(match: FormulaMatch) -> str:
    if match.total:
        return f"total matches, split {'matches' if match.split else 'does not: right for the wrong reason'}"
    return "split matches, total does not: it is not the sum of its parts"


def _sources(formulas: Iterable[Published], layout: Layout) -> str:
    keys: dict[str, list[str]] = {}
    for formula in formulas:
        keys.setdefault(formula.source, []).append(formula.key)
    found = [_wrap(f"{', '.join(names)}: {source}", layout, "  ") for source, names in keys.items()]
    return "\n".join([layout.strong("sources"), *found])


def _number(size: float) -> str:
    return f"{size:.2f}"


def _size(per_param: float, parameters: int) -> str:
    return format_bytes(round(per_param * parameters))


def _wrap(text: str, layout: Layout, indent: str = "", *, hang: str = "  ") -> str:
    """``text`` wrapped, with addresses in one piece so that they can be opened."""
    return textwrap.fill(
        shorten(text, len(text)),
        layout.width,
        initial_indent=indent,
        subsequent_indent=f"{indent}{hang}",
        break_on_hyphens=False,
        break_long_words=False,
    )
