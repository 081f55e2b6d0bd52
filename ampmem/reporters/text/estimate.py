"""What a simulated run would take of a GPU's memory: one line, and a table of terms that add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampmem.analysis.fit.estimate import Fit, Prediction, Terms
from ampmem.names import is_warning, not_modelled
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.plain_text import wrapped
from ampmem.reporters.text.words import size_beside
from ampmem.units import format_bytes

_LAYERS = ("rounding", "allocated", "cached", "reserved", "outside", "total")
_SUMS = {
    "allocated": "= allocated",
    "reserved": "= reserved",
    "total": "= total, as nvidia-smi would show",
    "outside": "outside (assumed)",
}
_INSTANTS = (
    "allocated is with rounding; each column is an instant of its own, and the peak by category, of what was asked "
    "for, may be another"
)
_NAME = 20
"""So much of what a row is about is left at least."""
_TOTALS = {_SUMS[key] for key in ("allocated", "reserved", "total")}


def headline(prediction: Prediction, gpu: str, *, stopped: str = "", failure: str = "") -> str:
    """One line: the peaks, and whether they fit.

    ``stopped`` says up to where the script came when it failed for another reason, ``failure`` what request failed.
    """
    highest = prediction.highest
    low = (prediction.at_peak_allocated.allocated, prediction.at_peak_reserved.reserved)
    high = low if highest is None else (highest.allocated, highest.reserved)
    allocated, taken = map(_between, low, high)
    peaks = f"{gpu} (simulated): peak {allocated} allocated, {taken} reserved"
    if prediction.fit is Fit.DOES_NOT_FIT and prediction.margin is None:
        return f"{peaks}; it does not fit: {failure or 'out of memory'}"
    peaks += f" of {format_bytes(prediction.gpu_bytes)}"
    return f"{peaks}, {stopped}" if stopped else f"{peaks}; {verdict(prediction)}"


def verdict(prediction: Prediction) -> str:
    """Whether it fits, with what is left."""
    outside = f"the {format_bytes(prediction.at_peak_reserved.outside)} that the CUDA context is assumed to use"
    if prediction.margin is None:
        return "it does not fit"
    if prediction.margin < 0:
        return f"it does not fit: it lacks {format_bytes(-prediction.margin)} beside {outside}"
    if prediction.highest is not None and prediction.fit is Fit.MAY_NOT_FIT:
        short = format_bytes(prediction.highest.total - prediction.gpu_bytes)
        return f"it may not fit: with {' and '.join(prediction.highest.bounds)} it lacks up to {short} beside {outside}"
    left = prediction.margin
    least = left if prediction.highest is None else prediction.gpu_bytes - prediction.highest.total
    return f"it fits, with {_between(least, left)} to spare beside {outside}"


def fit_in_short(prediction: Prediction) -> tuple[str, str]:
    """Whether it fits, and how much of the GPU is used at the peak of reserved memory, as two cells."""
    low, highest = prediction.at_peak_reserved.total, prediction.highest
    used = f"{_between(low, low if highest is None else highest.total)} of {format_bytes(prediction.gpu_bytes)} used"
    until = " when a request failed" if prediction.margin is None else ""
    return prediction.fit.replace("-", " "), f"predicted: {used}{until}"


def render_prediction(prediction: Prediction | None, gpu: str, layout: Layout = PLAIN) -> str:
    """What a simulated run takes of the memory, beside its :func:`headline`; empty for a run that was measured."""
    if prediction is None:
        return ""
    size = format_bytes(prediction.gpu_bytes)
    caption = f"the prediction for {gpu}, {size}" if size_beside(gpu) else f"the prediction for a GPU of {size}"
    lines = [*map(layout.strong, wrapped(caption, layout.width)), "", _table(prediction, layout)]
    texts = [_INSTANTS, *_bounds(prediction), *map(not_modelled, prediction.not_modelled)]
    return "\n".join([*lines, "", *(line for text in texts for line in wrapped(text, layout.width))])


def _bounds(prediction: Prediction) -> Iterator[str]:
    if prediction.highest is not None:
        for what, size in prediction.highest.bounds.items():
            yield f"up to: {what} are not known; with the most that is assumed for them, {format_bytes(size)} at once"


def sentences(prediction: Prediction | None) -> Iterator[str]:
    """All of the section in sentences, for where no table can be; none for a run that was measured."""
    if prediction is None:
        return
    instants = {"allocated": prediction.at_peak_allocated, "reserved": prediction.at_peak_reserved}
    for layer, terms in instants.items():
        parts = [f"{name} {format_bytes(size)}" for name, (size,) in _rows([terms]) if size and name not in _TOTALS]
        yield f"predicted at the peak of what is {layer}: {' + '.join(parts)} = {format_bytes(terms.total)} in all"
    if prediction.highest is not None:
        highest = prediction.highest
        yield (
            f"predicted at most: {format_bytes(highest.allocated)} allocated, {format_bytes(highest.reserved)} "
            f"reserved, {format_bytes(highest.total)} in all"
        )
    yield verdict(prediction)
    yield from _bounds(prediction)


def other_notes(prediction: Prediction | None, notes: Sequence[str]) -> list[str]:
    """The notes that neither :func:`render_prediction` nor the warnings show."""
    shown = set() if prediction is None else set(map(not_modelled, prediction.not_modelled))
    return [note for note in notes if note not in shown and not is_warning(note)]


def _table(prediction: Prediction, layout: Layout) -> str:
    instants = [prediction.at_peak_allocated, prediction.at_peak_reserved]
    rows = [[name, *(format_bytes(size) for size in sizes)] for name, sizes in _rows(instants)]
    columns = [words("", least=_NAME), number("at peak\nallocated"), number("at peak\nreserved")]
    if prediction.highest is not None:
        columns.append(number("up to"))
        highest = prediction.highest
        most = {"allocated": highest.allocated, "reserved": highest.reserved, "total": highest.total}
        named = {_SUMS.get(key, key): format_bytes(size) for key, size in {**highest.bounds, **most}.items()}
        rows = [[*row, named.get(row[0], "")] for row in rows]
    return table(columns, rows, layout, strong=_TOTALS)


def _rows(columns: list[Terms]) -> Iterator[tuple[str, list[int]]]:
    yield "tensors", [terms.tensors for terms in columns]
    for library in _names(terms.workspaces for terms in columns):
        yield f"workspaces of {library}", [terms.workspaces.get(library, 0) for terms in columns]
    for op in _names(terms.scratch for terms in columns):
        yield f"scratch of {op}", [terms.scratch.get(op, 0) for terms in columns]
    for layer in _LAYERS:
        yield _SUMS.get(layer, layer), [getattr(terms, layer) for terms in columns]
        if layer == "outside":
            for what in _names(terms.libraries for terms in columns):
                yield what, [terms.libraries.get(what, 0) for terms in columns]


def _names(groups: Iterable[Mapping[str, int]]) -> list[str]:
    """What any of them has, in order."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _between(low: int, high: int) -> str:
    """One size, or two that differ."""
    first, last = format_bytes(low), format_bytes(high)
    return first if first == last else f"{first} to {last}"
