"""Recipes and published formulas of static memory as text; only an address may be longer than a line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ampmem.analysis.static_model.recipes import COMPONENTS, PUBLISHED, TOLERANCE, Measured, Published, Recipe, match
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, table_with_lines, words
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
        _published(parameters, layout),
        *([_matches([*recipes, *PUBLISHED.values()], measured, layout)] if measured else []),
        _sources(layout),
    ]
    return "\n\n".join(sections)


def render_recipe(recipe: Recipe, parameters: int, measured: Measured | None = None, layout: Layout = PLAIN) -> str:
    """One recipe with its terms and sources, and whether ``measured`` agrees with it."""
    name = _line("recipe", f"{recipe.precision.key}: {recipe.precision.title}", layout)
    sections = [
        f"{name}\n{_head(recipe, parameters, layout)}",
        *([_measurement(measured, layout)] if measured else []),
        _terms(recipe, parameters, layout),
        *([_matches([recipe], measured, layout)] if measured else []),
        "\n".join(_wrap(f"source: {source}", layout) for source in (recipe.precision.source, recipe.optimizer.source)),
    ]
    return "\n\n".join(sections)


def note(text: str, layout: Layout = PLAIN) -> str:
    """``text`` as a wrapped remark."""
    return _wrap(f"note: {text}", layout)


def _head(recipe: Recipe, parameters: int, layout: Layout) -> str:
    states = ", ".join(state.name for state in recipe.optimizer.states) or "no state"
    kept = _line("optimizer", f"{recipe.optimizer.title}: {states}", layout)
    return f"{_line('parameters', format_count(parameters), layout)}\n{kept}"


def _line(key: str, value: str, layout: Layout) -> str:
    return _wrap(f"{key:<12}{value}", layout)


def _recipes(recipes: Sequence[Recipe], parameters: int, layout: Layout) -> str:
    rows = [
        [
            recipe.precision.key,
            *(_part(recipe, component) for component in COMPONENTS),
            *_in_both(recipe.total, parameters),
        ]
        for recipe in recipes
    ]
    sums = [number("total"), number("bytes", rank=1)]
    columns = [words("recipe, bytes\nper parameter", least=_NAME), *map(number, _HEADERS), *sums]
    return table(columns, rows, layout) + _below(recipes, layout)


def _below(recipes: Sequence[Recipe], layout: Layout) -> str:
    """The notes below a table of ``recipes``, which share an optimizer."""
    transient = any(recipe.precision.transient_casts for recipe in recipes)
    return (f"\n{_wrap(_TRANSIENT, layout)}" if transient else "") + _small_state(recipes[0], layout)


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
            *(
                _size(size, parameters) + _mark(recipe, component) if (size := recipe.components[component]) else "0"
                for component in COMPONENTS
            ),
            _size(recipe.total, parameters),
        ]
        for recipe in recipes
    ]
    columns = [words("recipe, bytes\nof each part", least=_NAME), *map(number, _HEADERS), number("total")]
    return table(columns, rows, layout)


def _part(recipe: Recipe, component: Category) -> str:
    return f"{recipe.components[component]:.2f}{_mark(recipe, component)}"


def _mark(recipe: Recipe, component: Category) -> str:
    """The mark after a number that is not in the total."""
    return "*" if component == Category.CAST_COPIES and recipe.precision.transient_casts else ""


def _published(parameters: int, layout: Layout) -> str:
    """The table of the published formulas; the parts that each counts are below its row."""
    rows = [[formula.key, *_in_both(formula.total, parameters)] for formula in PUBLISHED.values()]
    columns = [words("published, with Adam", least=_NAME), number("B/param"), number("bytes")]
    below = []
    for formula in PUBLISHED.values():
        parts = [f"{size:g} {component.replace('_', ' ')}" for component, size in formula.components.items() if size]
        below.append([_wrap(f"{' + '.join(parts)}. {formula.counts}", layout, "  ", hang="")])
    return "\n".join(table_with_lines(columns, rows, below, layout))


def _terms(recipe: Recipe, parameters: int, layout: Layout) -> str:
    rows = [
        [component, _part(recipe, component), _size(recipe.components[component], parameters), _why(recipe, component)]
        for component in COMPONENTS
    ]
    rows.append([_TOTAL, *_in_both(recipe.total, parameters), "alive after backward, without casts"])
    if recipe.precision.transient_casts:
        rows.append(["with casts", *_in_both(recipe.peak, parameters), "until backward has used every copy"])
    columns = [words("component"), number("B/param"), number("bytes", rank=1), words("terms", least=_TERMS, wraps=True)]
    return table(columns, rows, layout, strong=(_TOTAL,)) + _below([recipe], layout)


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


def _matches(formulas: Iterable[Recipe | Published], measured: Measured, layout: Layout) -> str:
    lines = []
    for formula in formulas:
        key, found = formula.precision.key if isinstance(formula, Recipe) else formula.key, match(formula, measured)
        verdict = "split matches, total does not: it is not the sum of its parts"
        if found.total:
            verdict = f"total matches, split {'matches' if found.split else 'does not: right for the wrong reason'}"
        if found.total or found.split:
            lines.append(_wrap(f"{key:<31}{verdict}", layout, "  "))
    total = per_parameter(measured.static_bytes, measured.parameters)
    intro = f"what agrees with this run's {total} bytes per parameter, within {TOLERANCE:.0%}:"
    return "\n".join([layout.strong(_wrap(intro, layout)), *(lines or ["  nothing"])])


def _sources(layout: Layout) -> str:
    keys: dict[str, list[str]] = {}
    for formula in PUBLISHED.values():
        keys.setdefault(formula.source, []).append(formula.key)
    found = [_wrap(f"{', '.join(names)}: {source}", layout, "  ") for source, names in keys.items()]
    return "\n".join([layout.strong("sources"), *found])


def _in_both(per_param: float, parameters: int) -> list[str]:
    """The cells for bytes per parameter, and for the bytes of all ``parameters``."""
    return [f"{per_param:.2f}", _size(per_param, parameters)]


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
