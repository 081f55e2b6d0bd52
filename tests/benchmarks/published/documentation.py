"""The short tables of ``docs/simulation.md``, which are made of the long one.

One that would have no line is left as it is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from published.sources.snapshots import ABOUT
from published.summaries import Summary, networks_of_xmem, others_beside, summaries
from published.wording import percent, signed

GOOD = "| published runs | peaks | median error | worst | inside of the range | verdicts right, or *may fit* |"
OTHERS = "| predictor | peaks | its median error | its worst | ampmem's median | ampmem's worst |"
RECORDINGS = "| recording of a GPU | allocations in the same order | peak allocated | peak reserved |"
TUNED = "| one step of fine-tuning Qwen3.5 in bfloat16 | tokens | peak on a GPU | predicted |"
RANGES = "| runs | in the range | median | worst |"


def tables(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The lines of those that have some, with their heads."""
    good = [GOOD, "|---|---|---|---|---|---|", *(_good(each) for each in summaries(rows))]
    others = [
        f"| {name} | {theirs.count} | {percent(theirs.median)} | {percent(theirs.worst)} | {percent(ours.median)} | "
        f"{percent(ours.worst)} |"
        for name, theirs, ours in others_beside(rows)
    ]
    every = [
        good,
        [OTHERS, "|---|---|---|---|---|---|", *others],
        [RECORDINGS, "|---|---|---|---|", *_recordings(rows)],
        [TUNED, "|---|---|---|---|", *_tuned(rows)],
        [
            *(RANGES, "|---|---|---|---|"),
            *(
                f"| {what} | {held} | {percent(middle)} | {percent(worst)} |"
                for what, held, middle, worst in networks_of_xmem(rows)
            ),
        ],
    ]
    return [table for table in every if len(table) > 2]


def _recordings(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each recording that was at hand."""
    for snapshot in dict.fromkeys(row["snapshot"] for row in rows if row["sequence"] is not None):
        both = {row["what"]: row for row in rows if row["snapshot"] == snapshot and row["sequence"] is not None}
        if len(both) == 2:
            found = both["allocated"]["sequence"]
            peaks = [_off(both[what]) for what in ("allocated", "reserved")]
            yield f"| {ABOUT[snapshot]} | {found['common']:,} of {found['real']:,} | {' | '.join(peaks)} |"


METHODS = {
    "full": "all parameters",
    "lora": "LoRA",
    "nf4": "LoRA on weights of 4 bits (NF4)",
    "nf4-nested": "LoRA on weights of 4 bits with scales of 8",
    "fsdp": "FSDP, full shard",
    "fsdp2-lora": "FSDP2 with LoRA",
}


def _tuned(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each run of ``scripts/qwen_sft.py``."""
    for row in rows:
        script, *arguments = row["command"]
        if script == "qwen_sft.py":
            model, method, tokens, *options = arguments
            named = [f"{model}, {METHODS[method]}"]
            named += [f"one of {row['ranks']} ranks"] if row["ranks"] else []
            named += ["two batches accumulated"] if "--accumulate" in options else []
            named += ["checkpointed"] if "--checkpoint" in options else []
            yield f"| {', '.join(named)} | {tokens} | {row['real'] / (1 << 30):.3f} GiB | {signed(row['error'])} |"


def _off(row: dict[str, Any]) -> str:
    """Small differences in bytes: a percentage would not show them."""
    difference = row["predicted"]["likely"] - row["real"]
    if not difference:
        return "equal to the byte"
    if abs(row["error"]) < 0.0005:
        return f"{difference:+,} bytes"
    return signed(row["error"])


def _good(each: Summary) -> str:
    name = each.family if each.precision == "all" else f"{each.family}, {each.precision}"
    inside = f"{each.held} of {each.ranges}" if each.ranges else ""
    verdicts = f"{each.right} of {each.verdicts}" if each.verdicts else ""
    cells = (name, str(each.count), percent(each.median), percent(each.worst), inside, verdicts)
    return f"| {' | '.join(cells)} |"


def update(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put the tables where ``path`` has those with the same heads."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for table in tables(rows):
        first = lines.index(table[0])
        last = next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))
        lines[first:last] = table
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
