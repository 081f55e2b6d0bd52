"""The rows as lines of text."""

from collections.abc import Sequence
from statistics import median

from ampmem.allocator.settings import MIB
from published.runs import Row
from published.together import LeftOut


def line_of(found: Row | LeftOut) -> str:
    """One run: real and predicted MiB, what they differ by, and the same of others."""
    if isinstance(found, LeftOut):
        return f"{found.key:<52} left out: {found.why}"
    run, predicted = found.run, found.predicted
    shown = f"{predicted.least / MIB:.1f}"
    if predicted.most != predicted.least:
        shown += f" to {predicted.most / MIB:.1f}"
    if found.error is None:
        said = {True: "fits", False: "does not fit", None: "may not fit"}[found.simulated.fits]
        verdict = " FALSE" if found.held is False else ""
        real = "ran" if run.fitted else "ran out" if run.reason_known else "failed, the reason is not said"
        return f"{run.key:<52} {real}; predicted: {said}{verdict} ({shown})"
    others = "".join(f"; {name} {found.error_of(name):+.1%}" for name in run.others)
    outside = " outside" if found.held is False else ""
    sequence = found.sequence
    common = "" if sequence is None else f"; allocations {sequence.real}/{sequence.simulated}/{sequence.common}"
    common += "" if sequence is None else f", first difference {sequence.first_difference}"
    return (
        f"{run.key:<52} {run.what:<9} {run.real / MIB:>9.1f} {shown:>20} {found.error:+7.2%}"
        f"{outside}{others}{common} ({found.simulated.seconds:.0f} s)"
    )


def summary_of(rows: Sequence[Row]) -> str:
    """Median and worst of all that has bytes, and of each predictor on its rows."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    if not errors:
        return f"{len(rows)} runs"
    lines = [f"{len(errors)} runs: median {median(errors):.2%}, worst {max(errors):.2%}"]
    for name in dict.fromkeys(name for row in rows for name in row.run.others):
        pairs = [(abs(row.error or 0), abs(said)) for row in rows if (said := row.error_of(name)) is not None]
        ours, theirs = zip(*pairs, strict=True)
        lines.append(
            f"{len(pairs)} runs of {name}: median {median(theirs):.2%}, worst {max(theirs):.2%}; "
            f"ampmem's on the same: {median(ours):.2%}, {max(ours):.2%}"
        )
    return "\n".join(lines)
