"""The cast ledger as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.casts import Casts, CopyCount, ParameterCasts, StepCasts
from ampmem.analysis.summary import Summary
from ampmem.names import casts_compiled, layers, layers_named, natural
from ampmem.reporters.text.common.layout import Layout, number, table, words
from ampmem.reporters.text.common.plain_text import ABSENT, wrapped
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import SourceKind

PARAMETERS = 20
"""Parameters that are shown."""

_NAME = 24
"""So much of a parameter's name is left at least."""


def render_casts(summary: Summary, layout: Layout) -> str:
    """The copies of each step, who holds them, and those of each parameter.

    A snapshot has neither the uses of a copy nor who holds it; only what autocast's cache gives up is seen.
    """
    casts = summary.casts
    if not casts.copies:
        return f"cast copies: none{' was seen; casts inside compiled code are not' * casts_compiled(summary.notes)}"
    seen = summary.source is not SourceKind.SNAPSHOT
    parts = [_caption(casts, layout, uses=seen), _made(casts.steps, layout, uses=seen)]
    parts += [_held(casts.steps, layout, all_holders=seen), _parameters(casts.by_parameter, layout, uses=seen)]
    return "\n\n".join(parts)


def _caption(casts: Casts, layout: Layout, *, uses: bool) -> str:
    served = f"; {format_count(casts.cache_hits or 0)} uses served by the cache" if uses else ""
    text = (
        f"cast copies: {format_count(casts.copies)} made, {format_bytes(casts.bytes)}{served}; "
        f"at most {format_bytes(casts.peak_bytes)} at once"
    )
    return layout.heading(text)


def _made(steps: Sequence[StepCasts], layout: Layout, *, uses: bool) -> str:
    rows = [
        [
            str(step.index),
            phase,
            format_count(made.copies),
            format_bytes(made.bytes),
            *([format_count(made.cache_hits or 0)] if uses else []),
        ]
        for step in steps
        for phase, made in step.phases.items()
    ]
    columns = [number("step"), words("made in"), number("copies"), number("bytes")]
    return table([*columns, *([number("cache hits")] if uses else [])], rows, layout)


def _held(steps: Sequence[StepCasts], layout: Layout, *, all_holders: bool) -> str:
    """The copies at the end of forward; who else holds them goes first where there is no room."""
    rows = []
    for step in steps:
        held = step.after_forward
        holders = [ABSENT] * 4 if held is None else [_count(held.cache), _count(held.autograd), _count(held.both)]
        if held is not None:
            holders.append(_count(held.neither))
        if not all_holders:  # what the cache was not seen to give up may have been in it, too
            holders = holders[:1]
        rows.append([str(step.index), *holders, format_bytes(step.peak_bytes), _count(step.surviving)])
    others = [number("by\nautograd"), number("by\nboth"), number("by\nneither", rank=2)]
    columns = [
        number("step"),
        number("held by the\ncache"),
        *(others if all_holders else []),
        number("peak", rank=1),
        number("alive at\nits end", rank=3),
    ]
    caption = layout.heading("who holds them at the end of forward")
    return f"{caption}\n\n{table(columns, rows, layout)}{_kinds(steps, layout)}"


def _kinds(steps: Sequence[StepCasts], layout: Layout) -> str:
    """What the ledger knows of copies that are not simply a parameter's."""
    kinds = {
        "made again in backward (recomputation)": [step.recomputed for step in steps],
        "of views of parameters, which are never cached": [step.views for step in steps if step.views is not None],
        "of what is no parameter, not counted above": [step.others for step in steps],
    }
    lines: list[str] = []
    for kind, counts in kinds.items():
        together = CopyCount(copies=sum(c.copies for c in counts), bytes=sum(c.bytes for c in counts))
        if together.copies:
            lines += wrapped(f"copies {kind}: {_count(together)}", layout.width)
    return "\n\n" + "\n".join(lines) if lines else ""


def _count(count: CopyCount | None) -> str:
    if count is None:
        return ABSENT
    return f"{format_count(count.copies)}: {format_bytes(count.bytes)}" if count.copies else "0"


def parameters_in_layers(parameters: Sequence[ParameterCasts]) -> list[tuple[int, ParameterCasts]]:
    """How many parameters each row is of, and their copies: those of equal layers together; the most bytes first."""

    def counts(item: ParameterCasts) -> tuple[int, ...]:
        return (item.bytes, item.copies, *_uses_and_holders(item))

    groups = layers(parameters, what=lambda item: (item.name,), sizes=counts)
    found = []
    for group in groups:
        size, copies, hits, cache, autograd, both = map(sum, zip(*map(counts, group), strict=True))
        together = ParameterCasts(
            name=layers_named([item.name for item in group]),
            copies=copies,
            bytes=size,
            cache_hits=None if group[0].cache_hits is None else hits,
            held_by_cache=None if group[0].held_by_cache is None else cache,
            held_by_autograd=None if group[0].held_by_autograd is None else autograd,
            held_by_both=None if group[0].held_by_both is None else both,
        )
        found.append((len(group), together))
    return sorted(found, key=lambda each: (-each[1].bytes, natural(each[1].name)))


def _uses_and_holders(item: ParameterCasts) -> tuple[int, ...]:
    """What is not known counts as 0, and is not shown."""
    found = item.cache_hits, item.held_by_cache, item.held_by_autograd, item.held_by_both
    return tuple(each or 0 for each in found)


def _parameters(parameters: Sequence[ParameterCasts], layout: Layout, *, uses: bool) -> str:
    groups = parameters_in_layers(parameters)
    rows = [
        [
            item.name,
            format_count(item.copies),
            *(map(format_count, _uses_and_holders(item)) if uses else ()),
            format_bytes(item.bytes),
        ]
        for _, item in groups[:PARAMETERS]
    ]
    of_uses = [
        number("cache\nhits", rank=1),
        number("in cache\nonly", rank=3),
        number("autograd\nonly", rank=3),
        number("both", rank=2),
    ]
    columns = [
        words("parameter", least=_NAME),
        number("copies"),
        *(of_uses if uses else []),
        number("bytes"),
    ]
    left_out = sum(count for count, _ in groups[PARAMETERS:])
    more = f"\n… and {format_count(left_out)} parameters with fewer bytes" if left_out else ""
    return table(columns, rows, layout) + more
