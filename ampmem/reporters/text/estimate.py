"""The memory that a simulated run would need on a GPU: one line, and a table of terms that add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampmem.analysis.estimate import Fit, Prediction, Terms
from ampmem.names import CUDNN_TRIALS, is_warning, not_modelled
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.plain_text import between, size_beside, wrapped_text
from ampmem.units import format_bytes, format_peak

_LAYERS = ("rounding", "allocated", "cached", "reserved", "outside", "total")
_SUMS = {
    "allocated": "= allocated",
    "reserved": "= reserved",
    "total": "= total, as nvidia-smi would show",
    "outside": "outside (assumed)",
}
_INSTANTS = (
    "allocated includes rounding; each column is an instant of its own, and the peak by category, which counts "
    "requested bytes, may be another instant"
)
_NAME = 20
"""The least width of a row's name."""
_TOTALS = {_SUMS[key] for key in ("allocated", "reserved", "total")}


def prediction_headline(prediction: Prediction, gpu: str, *, failure: str = "", place: str = "") -> str:
    """One line: the peaks, and whether they fit.

    ``failure`` describes the failed request. A run that failed for another reason has no verdict. ``place`` is the part
    of the run with the peak of allocated memory, if known.
    """
    low = (prediction.at_peak_allocated.allocated, prediction.least_reserved)
    high = (prediction.most_allocated, prediction.most_reserved)
    allocated, taken = (between(*ends, format_peak) for ends in zip(low, high, strict=True))
    peaks = f"{gpu} (simulated): peak {allocated} allocated{f' {place}' * bool(place)}, {taken} reserved"
    if prediction.fit is Fit.DOES_NOT_FIT and prediction.margin is None:
        # The peaks until then may be at another instant.
        return f"{gpu} (simulated): it does not fit: {failure or 'out of memory'}"
    peaks += f" of {format_bytes(prediction.gpu_bytes)}"
    said = f"{peaks}, {prediction.stopped}" if prediction.stopped else f"{peaks}; {verdict(prediction)}"
    if prediction.filled is None:
        return said
    free = f"all free memory, up to {format_bytes(prediction.filled)}"
    return f"{said}; cudnn.benchmark's trials may take {free}, once, at each convolution's first call"


def verdict(prediction: Prediction) -> str:
    """Whether the run fits, and how much is left or missing."""
    if prediction.margin is None:
        return "it does not fit"
    left, highest = prediction.gpu_bytes - prediction.least_total, prediction.highest
    least = min(left, prediction.gpu_bytes - prediction.most_total)
    outside = prediction.at_peak_reserved.outside
    most = outside if highest is None else highest.outside
    beside = f"beside the {between(outside, most)} that the CUDA context is assumed to use"
    if prediction.margin < 0:
        return f"it does not fit: it lacks {between(-prediction.margin, -min(prediction.margin, least))} {beside}"
    if prediction.limited and prediction.allowed is not None:
        return _within_the_limit(prediction, prediction.allowed)
    if highest is not None and prediction.fit is Fit.MAY_NOT_FIT:
        by_context, unknown = most - outside - prediction.margin, _with_unknown(prediction)
        if unknown and by_context > 0:
            context = f"the most of the {between(outside, most)} that the CUDA context is assumed to use"
            return f"it may not fit: it lacks {between(by_context, -least)} beside {context}"
        return f"it may not fit: {unknown}it lacks up to {format_bytes(-least)} {beside}"
    return f"it fits, with {between(least, left)} to spare {beside}"


def _within_the_limit(prediction: Prediction, allowed: int) -> str:
    """The verdict where the process may take only ``allowed`` bytes of the device."""
    of, most = f"the {format_bytes(allowed)} that this process may use", allowed - prediction.most_reserved
    if prediction.fit is Fit.MAY_NOT_FIT:
        return f"it may not fit: {_with_unknown(prediction)}it needs up to {format_bytes(-most)} more than {of}"
    return f"it fits, with {between(most, allowed - prediction.least_reserved)} to spare of {of}"


def _with_unknown(prediction: Prediction) -> str:
    """The unknown memory that decides whether a run fits: ``with cuDNN's workspaces ``; empty if there is none."""
    bounds = () if prediction.highest is None else prediction.highest.bounds
    deciding = [what for what in bounds if what != CUDNN_TRIALS]
    return f"with {' and '.join(deciding)} " if deciding else ""


def fit_in_short(prediction: Prediction) -> tuple[str, str]:
    """Whether the run fits, and the part of the GPU in use at the peak of reserved memory, as two cells."""
    used = f"{between(prediction.least_total, prediction.most_total)} of {format_bytes(prediction.gpu_bytes)} used"
    if prediction.limited and prediction.allowed is not None:
        taken = between(prediction.least_reserved, prediction.most_reserved)
        used = f"{taken} of the {format_bytes(prediction.allowed)} that this process may use are used"
    until = " when a request failed" if prediction.margin is None else f" {prediction.stopped}".rstrip()
    return prediction.fit.replace("-", " "), f"predicted: {used}{until}"


def render_prediction(prediction: Prediction | None, gpu: str, layout: Layout = PLAIN, *, ran_on: bool = False) -> str:
    """The memory of a simulated run in a table, without its :func:`prediction_headline`; empty for a measured run.

    ``ran_on`` says that the run is longer than the recorded steps.
    """
    if prediction is None:
        return ""
    size = format_bytes(prediction.gpu_bytes)
    caption = f"the prediction for {gpu}, {size}" if size_beside(gpu) else f"the prediction for a GPU of {size}"
    if prediction.allowed is not None:
        caption += f", of which this process may use {format_bytes(prediction.allowed)}"
    caption += ", for the whole run" * (ran_on and not prediction.stopped and prediction.margin is not None)
    texts = [_INSTANTS, *_bounds(prediction), *map(not_modelled, prediction.not_modelled)]
    return "\n".join([layout.heading(caption), "", _table(prediction, layout), "", wrapped_text(texts, layout.width)])


def _bounds(prediction: Prediction) -> Iterator[str]:
    if prediction.highest is not None:
        for what, size in prediction.highest.bounds.items():
            yield f"up to: {what} are not known; the column assumes at most {format_bytes(size)} at once for them"
        if prediction.highest.least_reserved is not None and prediction.highest.likely_reserved is not None:
            likely, least = map(format_peak, (prediction.highest.likely_reserved, prediction.highest.least_reserved))
            yield (
                f"reserved: {likely} is likely, {least} the minimum: workspaces come and go between the tensors, and "
                "how much stays cached after them depends on their sizes; the column is without them"
            )


def sentences(prediction: Prediction | None) -> Iterator[str]:
    """The whole section in sentences, for places without tables; nothing for a measured run."""
    if prediction is None:
        return
    instants = {"allocated": prediction.at_peak_allocated, "reserved": prediction.at_peak_reserved}
    for layer, terms in instants.items():
        parts = [f"{name} {format_peak(size)}" for name, (size,) in _rows([terms]) if size and name not in _TOTALS]
        yield f"predicted at the peak of {layer} memory: {' + '.join(parts)} = {format_peak(terms.total)} in total"
    if prediction.highest is not None:
        highest = prediction.highest
        yield (
            f"predicted at most: {format_peak(highest.allocated)} allocated, {format_peak(highest.reserved)} "
            f"reserved, {format_peak(highest.outside)} outside, {format_peak(highest.total)} in total"
        )
    yield f"whether it fits is not known: this is {prediction.stopped}" if prediction.stopped else verdict(prediction)
    yield from _bounds(prediction)


def other_notes(prediction: Prediction | None, notes: Sequence[str]) -> list[str]:
    """The notes that are neither warnings nor shown by :func:`render_prediction`."""
    shown = set() if prediction is None else set(map(not_modelled, prediction.not_modelled))
    return [note for note in notes if note not in shown and not is_warning(note)]


def _table(prediction: Prediction, layout: Layout) -> str:
    instants = [prediction.at_peak_allocated, prediction.at_peak_reserved]
    rows = [[name, *map(format_peak, sizes)] for name, sizes in _rows(instants)]
    columns = [words("", least=_NAME), number("at peak\nallocated"), number("at peak\nreserved")]
    highest, bounds = prediction.highest, {}
    if highest is not None and highest.least_reserved is not None:
        bounds["at least"] = {
            "allocated": prediction.at_peak_allocated.allocated,
            "reserved": prediction.least_reserved,
            "outside": prediction.at_peak_reserved.outside,
            "total": prediction.least_total,
        }
    if highest is not None:
        bounds["up to"] = {**highest.bounds, **{key: getattr(highest, key) for key in _SUMS}}
    for head, sizes in bounds.items():
        columns.append(number(head))
        named = {_SUMS.get(key, key): format_peak(size) for key, size in sizes.items()}
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
    """The names in any of ``groups``, in order."""
    return list(dict.fromkeys(name for group in groups for name in group))
