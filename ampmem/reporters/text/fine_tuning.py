"""The text of ``ampmem estimate``: what fits, what does not and what that needs, and the commands to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ampmem.analysis.fine_tuning import Estimate, Estimated, Method
from ampmem.names import is_warning, warning_text
from ampmem.reporters.text.fit import DOES_NOT_FIT, device_in_words, simulated_gpu
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.plain_text import ABSENT, wrapped_text
from ampmem.units import format_alike, format_bytes, format_count

_METHODS = {
    Method.FULL: "full fine-tuning",
    Method.LORA: "LoRA",
    Method.NF4: "LoRA on 4-bit weights (NF4)",
    Method.INT8: "LoRA on 8-bit weights",
}


def render_estimate(found: Estimate, written: Path | None, layout: Layout = PLAIN) -> str:
    """The answer, then the asked run of each cell with its largest batch; ``written`` is the script's file, if any."""
    sections = [
        layout.heading(headline(found), indent=""),
        wrapped_text((f"{name:<11}{text}" for name, text in facts(found)), layout.width, indent=" " * 11),
        f"{layout.heading(title(found))}\n{_table(found, layout)}",
        wrapped_text((f"note: {note}" for note in found.notes if not is_warning(note)), layout.width),
        wrapped_text([f"next: {_next(found, written)}"], layout.width, indent=" " * 6),
    ]
    return "\n\n".join(section for section in sections if section)


def headline(found: Estimate) -> str:
    """The answer: ``gpt2 fits in 24 GiB with LoRA in bf16 up to a batch of 30; full fine-tuning needs ….``.

    Of each method the precision with the largest batch counts, and if none fits, the one that needs least.
    """
    best = [_best([cell for cell in found.cells if cell.method is each]) for each in found.training.methods]
    cells = sorted((cell for cell in best if cell), key=lambda cell: -(cell.largest_fitting or 0))
    fitting = [
        f"{what_is_trained(cell)} up to a batch of {format_count(cell.largest_fitting)}"
        for cell in cells
        if cell.largest_fitting
    ]
    others = [
        f"{what_is_trained(cell)} needs at least {format_bytes(_needed(cell))} "
        f"at a batch of {format_count(cell.asked.value)}"
        for cell in cells
        if not cell.largest_fitting
    ]
    verb = "fits in" if fitting else "does not surely fit in"
    said = f"{found.training.model} {verb} {device_in_words(found.gpu, found.total)}"
    if found.training.world_size is not None:
        said += f" on each of {found.training.world_size} GPUs"
    said += f" with {', '.join(fitting)}" if fitting else ""
    return f"{said}; {', '.join(others)}." if others else f"{said}."


def _best(cells: Sequence[Estimated]) -> Estimated | None:
    return max(cells, key=lambda cell: (cell.largest_fitting or 0, -_needed(cell)), default=None)


def what_is_trained(cell: Estimated) -> str:
    """The method and the precision."""
    return f"{_METHODS[cell.method]} in {cell.name}"


def _needed(cell: Estimated) -> int:
    """The bytes below which the asked batch cannot fit: allocated, and in use outside of the allocator."""
    point = cell.asked
    return (point.allocated or 0) + (point.used or 0) - (point.reserved or 0)


def facts(found: Estimate) -> list[tuple[str, str]]:
    """The GPU, the optimizer, the adapters, the runs and the warnings, each with its name."""
    training = found.training
    optimizer = f"{training.optimizer}{', activations of each block computed again' if training.checkpointing else ''}"
    ranks = "" if training.world_size is None else f", rank 0 of {training.world_size} with FSDP2"
    adapters = f"of rank {training.lora}, beside all linear layers but the head"
    return [
        ("gpu", f"{simulated_gpu(found.gpu, found.total)}{ranks}"),
        ("optimizer", optimizer),
        *([("adapters", adapters)] if len(training.methods) > 1 else []),
        ("runs", f"{format_count(found.runs)}, of a script with random weights and batches"),
        *(("warning", warning_text(note)) for note in found.notes if is_warning(note)),
    ]


def title(found: Estimate) -> str:
    """The title of the table."""
    training = found.training
    each = "" if training.seq is None else f" ({format_count(training.seq)} tokens each)"
    return f"peak at a batch of {format_count(training.batch)}{each}, and the largest batch that fits"


COLUMNS = ("method", "precision", "allocated", "reserved", "largest\nbatch")


def _table(found: Estimate, layout: Layout) -> str:
    method, precision, *figures = COLUMNS
    return table([words(method), words(precision), *map(number, figures)], rows_of(found), layout)


def rows_of(found: Estimate) -> list[list[str]]:
    """The cells under :data:`COLUMNS`, one row for each method in each precision."""
    points = [cell.asked for cell in found.cells]
    shown = format_alike([(each.allocated or 0, each.reserved or 0) for each in points])
    return [
        [
            _METHODS[cell.method],
            cell.name,
            ABSENT if cell.asked.allocated is None else shown(cell.asked.allocated),
            ABSENT if cell.asked.reserved is None else shown(cell.asked.reserved),
            _largest(cell),
        ]
        for cell in found.cells
    ]


def _largest(cell: Estimated) -> str:
    """``3``, ``96 to 101`` where batches between were not run, or ``does not fit``."""
    fits, too_large = cell.largest_fitting, cell.smallest_not_fitting
    if fits is None:
        return DOES_NOT_FIT if cell.largest_that_may_fit is None else f"{cell.largest_that_may_fit} may fit"
    if too_large is None:
        return f"{format_count(fits)} or more"
    return format_count(fits) if too_large == fits + 1 else f"{format_count(fits)} to {format_count(too_large - 1)}"


def _next(found: Estimate, written: Path | None) -> str:
    """The command to go on with: on the written script, or the option that writes it."""
    if written is None:
        return "--write train.py writes the script, for ampmem profile, advise, fit and compare, or for a GPU"
    cell = _best(found.cells)
    assert cell is not None
    largest = cell.largest_fitting
    ranks = "" if found.training.world_size is None else f"--world-size {found.training.world_size} "
    command = "advise" if largest is None else "profile"
    batch = "" if largest is None else f" --batch {largest}"
    return f"ampmem {command} --gpu {quote(found.gpu)} {ranks}{quote(str(written))} {cell.arguments}{batch}"
