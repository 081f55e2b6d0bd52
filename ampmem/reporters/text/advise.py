"""The measured savings of changes, as text: the table of ``ampmem advise`` and the code of each change."""

from __future__ import annotations

from ampmem.analysis.advise import AdviceDocument, AdvisedRun, ProvenResults
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.plain_text import ABSENT, command_lines, size_beside, wrapped, wrapped_text
from ampmem.units import format_alike, format_bytes, format_count
from ampmem.vocabulary import Device


def render_advice(found: AdviceDocument, layout: Layout = PLAIN) -> str:
    """The answer, a row for each run, the refused changes with reasons, and the code of the best change."""
    sections = ["\n".join(layout.strong(line) for line in wrapped(headline(found), layout.width, indent=""))]
    if found.ranks:
        sections.append(wrapped_text([ranks_line(found)], layout.width, indent=""))
    sections.append(_table(found, layout))
    listed = ((REFUSED, refused_lines(found)), (PROVEN, proof_lines(found)), (COMPUTED, computed_lines(found)))
    for title, each in listed:
        if each:
            sections.append(f"{layout.strong(title)}\n\n{wrapped_text(each, layout.width)}")
    best = best_change(found)
    if rows_of_blocks(found):
        place, block, *figures = COLUMNS_OF_BLOCKS
        columns = [number(place), words(block), *map(number, figures)]
        sections.append(f"{layout.strong(BLOCKS)}\n\n{table(columns, rows_of_blocks(found), layout)}")
    if best is not None:
        tries = command_lines(best.command, layout.width)
        sections.append("\n".join([layout.strong(f"in code: {best.change}"), "", *best.code, *tries]))
        others = [
            line
            for run in found.runs
            if run is not best and _worth(run)
            for line in ("", f"{run.change}:", *run.code, *command_lines(run.command, layout.width))
        ]
        if others:
            sections.append("\n".join([layout.strong(ALONE), *others]))
    return "\n\n".join(sections)


def _worth(run: AdvisedRun) -> bool:
    """Whether ``run`` made one change, which saves something."""
    return "," not in run.change and bool(run.code) and _saved(run) not in (ABSENT, "nothing")


REFUSED = "refused or failed"
PROVEN = "losses and gradients of three steps on the CPU"


COMPUTED = "not run: other changes that lower the peak of the script as it is, computed from its recording"
ALONE = "each change alone, in code, and the command that tries it"
BLOCKS = "blocks, in the order in which they are checkpointed"
COLUMNS_OF_BLOCKS = ("order", "block", "kept for\nbackward", "FLOPs of\nforward")


def rows_of_blocks(found: AdviceDocument) -> list[list[str]]:
    """The cells under :data:`COLUMNS_OF_BLOCKS`; empty if the blocks are alike and taken in the model's order."""
    if len({(block.saved_bytes, block.flops) for block in found.blocks}) < 2:
        return []
    return [
        [
            str(place),
            block.name,
            ABSENT if block.saved_bytes is None else format_bytes(block.saved_bytes),
            ABSENT if block.flops is None else f"{block.flops:.3g}",
        ]
        for place, block in enumerate(found.blocks, 1)
    ]


def computed_lines(found: AdviceDocument) -> list[str]:
    """Each change that was not run, and its computed saving."""
    return [f"{each.change}: {format_bytes(each.saved_bytes)} computed" for each in found.suggestions]


def best_change(found: AdviceDocument) -> AdvisedRun | None:
    """The first run of the table that has a change to write in the script."""
    first = found.runs[0]
    return first if first.failure is None and first.code else None


def refused_lines(found: AdviceDocument) -> list[str]:
    """Each change that could not be made, and why."""
    return [
        f"{run.change}: {'' if run.rank is None else f'rank {run.rank}: '}{run.failure}"
        for run in found.runs
        if run.failure is not None
    ]


def proof_lines(found: AdviceDocument) -> list[str]:
    """Each change that was compared on the CPU, and the result."""
    return [f"{run.change}: {proof_in_words(run.proof)}" for run in found.runs if run.proof is not None]


def headline(found: AdviceDocument) -> str:
    """The answer in one sentence."""
    plain = next(run for run in found.runs if not run.options)
    best, limit = found.runs[0], limit_of(found)
    if found.budget_bytes is None and plain.meets:
        if best is plain:
            return f"The script fits on {limit} as it is, and no change that was run lowers its peak."
        return f"The script fits on {limit} as it is; {best.change} allocates least."
    if plain.meets:
        return f"The script fits into {limit} as it is."
    if best.meets:
        return f"With {best.change} the script fits into {limit}."
    if best.allocated_bytes is None:
        return f"No run fits into {limit}: memory runs out in each run."
    over = (best.limited_bytes or 0) - (found.budget_bytes or found.gpu_bytes or 0)
    if found.device is not Device.SIMULATED:
        return f"No run fits into {limit}; {best.change} allocates least, and needs {format_bytes(max(over, 0))} more."
    return (
        f"No run surely fits into {limit}; {best.change} allocates least, and the device would need up to "
        f"{format_bytes(max(over, 0))} more."
    )


def ranks_line(found: AdviceDocument) -> str:
    """The ranks as which the script was run."""
    size, ranks = found.world_size, found.ranks
    if found.device is not Device.SIMULATED:
        return f"Each run has {size} ranks; its peaks are those of the worst one."
    if len(ranks) == size:
        return f"Each change was run as each of {size} ranks; its peaks are those of the worst one."
    few, these = ("rank", "this one") if len(ranks) == 1 else ("ranks", "one of these")
    return (
        f"The peaks are those of the worst of {size} ranks. The script as it is was run as each of them, and changes "
        f"as {few} {', '.join(map(str, ranks))}: each other rank has, as it is, the peaks and parameters of {these}."
    )


def proof_in_words(proof: ProvenResults) -> str:
    """The result of the proof, in one sentence."""
    if proof.equal is None:
        return f"not compared: {proof.failure}"
    what = f"{format_count(proof.losses or 0)} losses and {format_count(proof.gradients or 0)} gradients"
    if proof.equal:
        return f"{what} equal those of {proof.compared_with}, bit for bit"
    if proof.loss_difference is None and proof.largest_loss is None:
        return f"losses or gradients differ from those of {proof.compared_with} in number or shape"
    losses = _apart("losses", proof.loss_difference, proof.largest_loss)
    gradients = _apart("gradients", proof.gradient_difference, proof.largest_gradient)
    return f"{what} differ from those of {proof.compared_with}: {losses}, {gradients}"


def _apart(what: str, difference: float | None, largest: float | None) -> str:
    if not difference:
        return f"{what} have equal values"
    return f"{what} differ by up to {difference:.3g} (the largest is {largest:.3g})"


def limit_of(found: AdviceDocument) -> str:
    """The limit that a run must fit into, in words."""
    if found.device is Device.CPU:
        return "the CPU" if found.budget_bytes is None else f"{format_bytes(found.budget_bytes)} of tensors"
    named = found.gpu if found.device is Device.CUDA or size_beside(found.gpu) else ""
    if found.budget_bytes is None:
        return named or format_bytes(found.gpu_bytes or 0)
    return f"{format_bytes(found.budget_bytes)} of {named or 'the GPU'}"


def columns_of(found: AdviceDocument) -> tuple[str, ...]:
    """The heads of the table's columns."""
    cost = "computed" if found.device is Device.SIMULATED else "time measured"
    rank = ("worst\nrank",) if found.ranks else ()
    return ("change", *rank, "peak\nallocated", "peak\nreserved", "device\nat most", "saved", "fits", f"cost ({cost})")


_TWO_CHANGES = 44
"""The width of the first column in which two changes together are one line."""


def _table(found: AdviceDocument, layout: Layout) -> str:
    change, *numbers, fits, cost = columns_of(found)
    columns = [
        words(change, wraps=True, least=min(_TWO_CHANGES, layout.width // 2 - 2)),
        *map(number, numbers),
        words(fits),
        words(cost, wraps=True, least=20),
    ]
    return table(columns, rows_of(found), layout)


def rows_of(found: AdviceDocument) -> list[list[str]]:
    """The cells under :func:`columns_of`, one row for each change that was made."""
    return [_row(run, found) for run in found.runs if run.failure is None]


def _row(run: AdvisedRun, found: AdviceDocument) -> list[str]:
    name = [run.change, *([str(run.rank)] if found.ranks else [])]
    if run.allocated_bytes is None:
        return [*name, "out of memory", ABSENT, ABSENT, ABSENT, "no", run.cost]
    most, limit = run.highest_device_used_bytes or run.device_used_bytes, found.budget_bytes or found.gpu_bytes
    sizes = [ABSENT if size is None else format_bytes(size) for size in (run.allocated_bytes, run.reserved_bytes)]
    sizes.append(ABSENT if most is None else format_alike([(most, limit or most)])(most))
    return [*name, *sizes, _saved(run), _fits(run, found), run.cost]


def _fits(run: AdvisedRun, found: AdviceDocument) -> str:
    """``yes``, ``no``, or ``not surely``: the run fits with the lower bound of the unknown memory only."""
    if run.meets:
        return "yes"
    least, limit = run.device_used_bytes, found.budget_bytes or found.gpu_bytes
    return "not surely" if least is not None and limit is not None and least <= limit else "no"


def _saved(run: AdvisedRun) -> str:
    """The cell ``saved``: ``1.2 GiB`` of the allocated peak, or ``1.2 GiB reserved`` for a setting of the allocator."""
    if run.options and run.saved_at_least_bytes:
        return f"at least {format_bytes(run.saved_at_least_bytes)}"
    if not run.options or run.saved_bytes is None:
        return ABSENT
    if run.options[0] == "--force-allocator" and run.saved_reserved_bytes:
        return f"{format_bytes(run.saved_reserved_bytes)} reserved"
    return "nothing" if run.saved_bytes == 0 else format_bytes(run.saved_bytes)
