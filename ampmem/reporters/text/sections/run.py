"""What was run, and on what; and, at the end, what the numbers stand on."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.summary import Summary
from ampmem.names import casts_compiled
from ampmem.reporters.text.common.describe import (
    conserved,
    describe_allocator,
    describe_arm,
    describe_devices,
    of_all_ranks,
    optimizers_or_none,
    recognised,
)
from ampmem.reporters.text.common.layout import Layout
from ampmem.reporters.text.common.plain_text import wrapped
from ampmem.reporters.text.static_model import judgement
from ampmem.units import format_bytes, format_count, format_peak

KEY = 12


def render_run(summary: Summary, title: str, layout: Layout) -> str:
    """Script (where it is known), device, precision, versions, parameters and optimizer, a line each."""
    device, allocator = summary.device, summary.caching_allocator
    rows = [("script", title)] if title else []
    rows.append(("device", f"{device.name} ({device.type}), events from {summary.source}"))
    if summary.world_size > 1:
        rows.append(("rank", f"{summary.rank} of {summary.world_size}"))
    if allocator is not None:
        devices = describe_devices(allocator)
        rows += [("allocator", describe_allocator(allocator)), *([("devices", devices)] * bool(devices))]
    rows += [
        ("precision", describe_arm(summary)),
        ("torch", f"{summary.torch}, ampmem {summary.ampmem}"),
        ("parameters", describe_parameters(summary)),
        *([("untrained", untrained)] if (untrained := describe_untrained(summary)) else []),
        ("optimizer", optimizers_or_none(summary)),
    ]
    return "\n".join([layout.strong("the run"), *keyed(rows, layout)])


def keyed(rows: Sequence[tuple[str, str]], layout: Layout) -> list[str]:
    """What each of ``rows`` is about, and beside it what is so, in as many lines as that takes."""
    return [
        f"{'' if i else key:<{KEY}}{line}".rstrip()
        for key, value in rows
        for i, line in enumerate(wrapped(value, layout.width - KEY, indent=""))
    ]


def describe_parameters(summary: Summary) -> str:
    """How many there are, in how many bytes, and what of them is trained and cast."""
    parameters = summary.parameters
    if not parameters.count:
        return "not known"
    if not parameters.exact:
        return f"{recognised(summary)} recognised"
    amount = f"{format_count(parameters.count)} in {format_bytes(parameters.bytes)}{of_all_ranks(summary)}"
    if parameters.trainable != parameters.count:
        amount += f", {format_count(parameters.trainable)} trainable"
    if parameters.cast_eligible is not None:
        amount += f", {format_count(parameters.cast_eligible)} cast by autocast"
        if casts_compiled(summary.notes):
            amount += ", without casts inside compiled code, which are not seen"
    return amount


def describe_untrained(summary: Summary) -> str:
    """How many parameters nothing trains, such as an average's or a teacher's; empty for none."""
    parameters = summary.parameters
    if not parameters.untrained_bytes:
        return ""
    count = f"{format_count(parameters.untrained_count)} more " if parameters.untrained_count else ""
    return f"{count}in {format_bytes(parameters.untrained_bytes)}: models that nothing trains, not counted in B/param"


def render_foot(summary: Summary, notes: Sequence[str], layout: Layout, *, judged: bool = False) -> str:
    """How far the sums are from the allocator's own, what lies above the tensors, and the recorder's remarks.

    ``judged`` says that the verdict on the static model is there already.
    """
    lines = wrapped(f"conservation: {conserved(summary)}", layout.width)
    layers = summary.allocator
    if layers.reserved is not None:
        parts = " + ".join(
            f"{name} {format_peak(getattr(layers, name))}" for name in ("requested", "rounding", "cached")
        )
        outside = "" if layers.outside is None else f", outside {format_bytes(layers.outside)}"
        if layers.outside_process is not None:
            outside += f", of which this process {format_bytes(layers.outside_process)}"
        text = f"allocator at the peak: {parts} = reserved {format_peak(layers.reserved)}{outside}"
        lines += wrapped(text, layout.width)
    if summary.static_recipe is not None and not judged:
        lines += wrapped(f"static memory: {judgement(summary)}", layout.width)
    for note in notes:
        lines.extend(wrapped(f"note: {note}", layout.width))
    return "\n".join(lines)
