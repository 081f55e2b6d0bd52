"""The page of the published runs: one file that loads nothing."""

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ampmem.allocator.settings import MIB
from ampmem.reporters.html.page import self_contained
from published.claims import ABOVE_HALF, BERT, CLAIMED, NEAREST, RESNET50
from published.figures import scatter
from published.savings import SAVINGS, Saving
from published.summaries import below_the_least, larger_misses, others_beside, summaries
from published.wording import percent, signed

STYLE = """
:root { --shade: light-dark(#00000055, #ffffff66); --transformer: light-dark(#3958d1, #7f9bff);
  --cnn: light-dark(#ec6f00, #ff9a4d); --mlp: light-dark(#0d6d46, #4fae7f); --other: light-dark(#532d74, #b07cc0); }
.card > p, .card li { max-width: 66rem; margin-top: 8px; } .card h3 { margin-top: 18px; }
.card h2 { margin-bottom: 4px; }
.card ul { padding-left: 20px; } code { font-family: var(--mono); font-size: 12.5px; overflow-wrap: anywhere; }
.across { overflow-x: auto; margin-top: 8px;
  background: linear-gradient(to right, var(--card) 40%, transparent) left / 2.5rem 100%,
  linear-gradient(to left, var(--card) 40%, transparent) right / 2.5rem 100%,
  linear-gradient(to right, var(--shade), transparent) left / 1rem 100%,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100%;
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }
.across thead th { white-space: normal; vertical-align: bottom; }
.across table { width: auto; min-width: 60%; font-size: 13px; }
.across th, .across td { padding-right: 18px; }
th.n, td.n { text-align: right; white-space: nowrap; } thead th { border-bottom-width: 2px; }
th.long, td.long { overflow-wrap: anywhere; }
@media (min-width: 701px) { th.long, td.long { min-width: 11.5rem; } #every-run td:last-child { min-width: 27rem; } }
@media (max-width: 700px) { .across .stacked tr { grid-template-columns: minmax(0, 1fr); }
  .across .stacked td { padding-right: 0; text-align: left; } .across .stacked td::before { max-width: 60%; }
  section.card svg text { font-size: 15px; }
  .across .stacked td:is(.wide, #every-run :last-child) { display: block; }
  .across .stacked td:is(.wide, #every-run :last-child)::before { content: attr(data-head) ": "; } }
.card svg { display: block; width: 100%; max-width: 44rem; height: auto; }
.card svg text { fill: var(--quiet); font-size: 12px; }
svg .grid { stroke: var(--edge); } svg .same { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .dot { stroke: var(--card); stroke-width: 1; } svg .span { stroke-width: 2; opacity: .5; }
svg .dot:hover { stroke: var(--ink); stroke-width: 2.5; }
.transformer { fill: var(--transformer); stroke: var(--transformer); } .cnn { fill: var(--cnn); stroke: var(--cnn); }
.mlp, .recurrent { fill: var(--mlp); stroke: var(--mlp); } .other { fill: var(--other); stroke: var(--other); }
@media print { .across { overflow: visible; background: none; }
  .across table { font-size: 9px; } .across th, .across td { padding-right: 6px; white-space: normal; } }
"""
"""What the page has beside the style of ampmem's other pages. A wide table scrolls in a box of its own; a shade at
an edge says that it goes on there."""
COMMAND = (
    "python tests/benchmarks/published.py --jobs 2 --json reports/published.json --html reports/published.html "
    "--docs docs/simulation.md"
)
MEASURED = {"allocated": "allocated", "reserved": "reserved", "device": "nvidia-smi", "fits": "ran or not"}


def write_page(document: dict[str, Any], path: Path) -> None:
    """The page of ``document``, as ``document.py`` makes it."""
    path.write_text(page_of(document), encoding="utf-8")


def page_of(document: dict[str, Any]) -> str:
    """The same, as text."""
    rows: list[dict[str, Any]] = document["rows"]
    sized = [row for row in rows if row["error"] is not None]
    parts = [
        opening(rows, document),
        "<h2>Predicted and real</h2>",
        scatter(sized),
        how_good(rows),
        what_was_seen(rows, document),
        beside_others(rows),
        misses(rows),
        saved(),
        every_run(rows),
        left_out(document["left_out"]),
    ]
    return whole_page("Predictions beside published runs", parts)


def whole_page(title: str, parts: Iterable[str]) -> str:
    """A page in the style of ampmem's others; each heading of level 2 in ``parts`` begins a card, linked at the top."""
    first, *sections = "\n".join(parts).split("<h2>")
    titles = [section.partition("</h2>")[0] for section in sections]
    cards = [f'<section class="card">\n{first}</section>']
    cards += [
        f'<section class="card" id="{_anchor(title)}" data-jump="{title}">\n<h2>{section}</section>'
        for title, section in zip(titles, sections, strict=True)
    ]
    body = "\n".join(cards)
    return self_contained("document.html", "document.js", None, title=title, style=STYLE, body=body, plotly_packed="")


def _anchor(title: str) -> str:
    """The name of the section with that heading, in addresses."""
    return "".join(each if each.isalnum() else "-" for each in title.lower()).strip("-")


def opening(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> str:
    """What it is, and the short answer."""
    every = next(summary for summary in summaries(rows) if summary.family == "all")
    mixed = sum(row["precision"].startswith("amp") for row in rows)
    runs = len({row["key"].removesuffix(f"-{row['what']}") for row in rows})
    not_run = "; those on the list that were not run are at the end" if document["left_out"] else ""
    return (
        "<h1>Predictions of GPU memory, beside what other people measured</h1>\n"
        f"<p>{len(rows)} figures of {runs} runs that others published with their configurations, {mixed} of them under "
        f"autocast; allocated and reserved of one run are two figures. ampmem ran each on a simulated GPU: "
        f"the median error of the peak is {text(percent(every.median))}, the worst {text(percent(every.worst))}. "
        f"The runs were chosen by hand{not_run}. {simulated_when(rows)}</p>\n"
        f'<p class="quiet">ampmem {text(document["ampmem"])}, torch {text(document["torch"])}. Made anew by '
        f"<code>{COMMAND}</code>; the allocations of recordings are compared where <code>AMPMEM_SNAPSHOTS</code> names "
        "their folder. The figures are those of the sources; the scripts that repeat the runs are ampmem's own, in "
        "<code>tests/benchmarks/published/scripts/</code>.</p>"
    )


def simulated_when(rows: Sequence[dict[str, Any]]) -> str:
    """How many figures are of which day; those of an earlier ampmem may be others today."""
    days = Counter(row.get("day", "") for row in rows)
    dated = [f"{count} on {text(day)}" for day, count in sorted(days.items(), reverse=True) if day]
    if days[""]:
        dated.append(f"{days['']} earlier, by an earlier ampmem")
    return f"Figures simulated: {', '.join(dated)}."


def what_was_seen(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> str:
    """What the figures can prove, and what they cannot."""
    sized = [row for row in rows if row["error"] is not None]
    course = sum(row["key"].startswith(("cs336/", "snapshots/lm-")) for row in sized)
    recordings = sum(bool(row["snapshot"]) for row in sized)
    assumed = sum(row["gpu_assumed"] for row in rows)
    tuned = sum(row["tuned"] for row in sized)
    versions = sorted({tuple(map(int, row["torch"].split(".")[:2])) for row in rows if row["torch"]})
    theirs = " to ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in (versions[:1] + versions[-1:])))
    points = [
        f"{course} of the {len(sized)} peaks are of language models that students of one course trained.",
        f"{recordings} are of recordings of the allocator: these are what ampmem's own model of the allocator makes of "
        "the recording when it replays it, with no block moved, and the scripts that repeat them were written from the "
        "recordings. The second line of the table leaves them out.",
        f"{tuned or 'None'} are of convolutional networks of xMem's, with which the range of what convolutions reserve "
        "was chosen. Nothing was chosen with its other models, but most of their figures had been seen. Which other "
        "rows were looked at while ampmem was changed was not recorded: do not take them for a test on unseen runs.",
        f"All were simulated with torch {text(document['torch'])}. The published runs were made with "
        + (f"torch {theirs} where that is said" if theirs else "a torch that is not said")
        + "; what changed between the versions is in the errors.",
        f"For {assumed} figures the GPU is assumed: no source names it surely, or ampmem does not simulate it and a "
        "near relative stands for it. The table says which.",
    ]
    return (
        "<h3>What was known before, and what is assumed</h3>\n<ul>"
        + "".join(f"<li>{point}</li>\n" for point in points)
        + "</ul>"
    )


def how_good(rows: Sequence[dict[str, Any]]) -> str:
    """Median and worst of each family and precision."""
    lines = [
        (
            text(each.family),
            text(each.precision),
            str(each.count),
            text(percent(each.median)),
            text(percent(each.worst)),
            f"{each.held} of {each.ranges}" if each.ranges else "",
            f"{each.right} of {each.verdicts}" if each.verdicts else "",
        )
        for each in summaries(rows)
    ]
    heads = (
        "family",
        "precision",
        "peaks",
        "median error",
        "worst",
        "inside of the range",
        "verdicts right, or “may fit”",
    )
    return table("Errors of the predicted peak, without their signs", heads, lines, numbers=(2, 3, 4, 5, 6))


def beside_others(rows: Sequence[dict[str, Any]]) -> str:
    """Each predictor, and ampmem on the same runs."""
    lines = [
        (
            text(name),
            str(theirs.count),
            *(text(percent(error)) for error in (theirs.median, theirs.worst, ours.median, ours.worst)),
        )
        for name, theirs, ours in others_beside(rows)
    ]
    if not lines:
        return ""
    heads = ("predictor", "peaks", "its median error", "its worst", "ampmem's median", "ampmem's worst")
    what = "Other predictors, as xMem's authors ran them"
    return "<h2>Beside other predictors</h2>\n" + table(what, heads, lines, numbers=(1, 2, 3, 4, 5))


def misses(rows: Sequence[dict[str, Any]]) -> str:
    """All that is further off than 1 %, and verdicts that were false."""
    found = larger_misses(rows)
    if not found:
        return "<h2>Misses</h2>\n<p>No prediction is further off than 1 %, and no verdict is false.</p>" + too_high(
            rows
        )
    lines = [(text(row["key"]), text(signed(row["error"])), text(row["why"])) for row in found]
    return (
        f"<h2>Misses over 1 %</h2>\n{table('And verdicts that are false', ('run', 'off by', 'why'), lines, (1,), (2,))}"
        + too_high(rows)
    )


def too_high(rows: Sequence[dict[str, Any]]) -> str:
    """Where what was called the least was not."""
    found = below_the_least(rows)
    if not found:
        return ""
    shown = "; ".join(
        f"{text(row['key'])}: {mib(row['real'])} MiB, and the least predicted {mib(row['predicted']['least'])}"
        for row in found
    )
    told = f"Less was allocated than the least that was predicted in {len(found)} figures, not explained"
    return f"\n<p>{told}: {shown}.</p>"


def saved() -> str:
    """What others measured in both precisions."""
    lines = [_saving(each) for each in SAVINGS]
    heads = ("run", "precision", "FP32", "mixed", "of FP32", "measured", "source")
    return (
        "<h2>What mixed precision saved on real GPUs</h2>\n"
        "<p>Other people's figures; what is simulated is called so, in brackets. Where activations are nearly "
        f"everything, as in a ResNet-50 at batch 256 ({percent_of(_ratio('ResNet-50, batch 256'))} of FP32), the peak "
        f"nearly halves. Of a small CNN at batch 512 {percent_of(_ratio('a small CNN on MNIST'))} were left, less than "
        "half: not explained. A language model of 3.4 billion parameters "
        f"kept {percent_of(_ratio('3.4 billion parameters, training step, AdamW, batch 1, 2048'))} of it at 2,048 "
        f"tokens and {percent_of(_ratio('3.4 billion parameters, training step, AdamW, batch 1, 128'))} at 128; a BERT "
        f"at batch 8 kept {percent_of(_ratio('BERT base, training, batch 8'))}.</p>\n"
        + table("Peaks that others published", heads, lines, numbers=(2, 3, 4), long=(0, 1, 6))
        + claims()
    )


def claims() -> str:
    """Two numbers that are passed around, and what the runs above say of them."""
    said, half = CLAIMED
    lines = [
        (str(each.batch), mib(each.fp32), mib(each.mixed), percent_of(each.ratio), "real" if each.real else "simulated")
        for each in RESNET50
    ]
    weights, gradients, moments = (size * BERT / 10**9 for size in (4, 4, 8))
    return (
        "<h2>Two claims on trial</h2>\n"
        f"<p><strong>“ResNet-50, {said:,} → {half:,} MB under AMP.”</strong> No source of this claim was found. It is "
        "read as MiB here; as decimal MB it would be about batch 140. "
        f"{said:,} MiB are batch {NEAREST.batch} at 224×224 with SGD and momentum, and there autocast makes "
        f"{mib(NEAREST.mixed)} MiB of it in a simulation: {percent_of(NEAREST.ratio)}, "
        f"{NEAREST.mixed / MIB - half:,.0f} MiB more than claimed. So the claim is near. Nearly all of this peak are "
        "activations, and they go from 11,958 to 6,134 MiB, 51.3 %. What the mixed peak has above half of that in "
        f"FP32, in MiB: {_listed()}. Of the gradients only 7.8 MiB are alive at either peak. At batch 256 a real GPU "
        "measured 52.4 %.</p>\n"
        + table("ResNet-50: peak allocated, MiB", ("batch", "FP32", "mixed", "of FP32", "from"), lines, (0, 1, 2, 3))
        + f"<p><strong>“BERT: {BERT / 10**6:.0f}M × 4 B = {weights:.2f} GB.”</strong> No source of this claim was "
        "found, and no BERT that Google published has that many parameters: BERT base has 110 million, BERT large 340. "
        f"Of a model with {BERT / 10**6:.0f} million these are the weights. Training adds their gradients, "
        f"{gradients:.2f} GB, and AdamW's two moments, {moments:.2f} GB: "
        f"{weights + gradients + moments:.2f} GB before any activation, which <code>ampmem model --params 230e6</code> "
        "prints part by part. Autocast takes none of it away, and adds up to "
        f"{2 * BERT / 10**9:.2f} GB of copies while they live.</p>\n"
    )


def _listed() -> str:
    """What is above half, in one line."""
    return ", ".join(f"{size} {text(what)}" for size, what in ABOVE_HALF)


def _ratio(part: str) -> float:
    return next(each.ratio for each in SAVINGS if part in each.what)


def _saving(each: Saving) -> tuple[str, ...]:
    doubt = f" ({text(each.doubt)})" if each.doubt else ""
    return (
        text(each.what),
        text(each.precision),
        f"{each.fp32:,g} {each.unit}" if each.fp32 < 100 else f"{each.fp32:,.0f} {each.unit}",
        f"{each.mixed:,g} {each.unit}" if each.mixed < 100 else f"{each.mixed:,.0f} {each.unit}",
        percent_of(each.ratio),
        text(each.measured),
        linked(each.source, each.address) + doubt,
    )


def every_run(rows: Sequence[dict[str, Any]]) -> str:
    """The whole table."""
    heads = (
        "run",
        "GPU",
        "torch",
        "measured",
        "real MiB",
        "predicted MiB",
        "off by",
        "allocations",
        "simulated",
        "source",
    )
    lines = [
        (
            text(row["key"]),
            text(row["gpu"]) + (" (assumed)" if row["gpu_assumed"] else ""),
            text(row["torch"] or "not said"),
            MEASURED[row["what"]],
            real(row),
            predicted(row),
            text(signed(row["error"])),
            sequence(row["sequence"]),
            f'<span class="amount">{text(row.get("day") or "earlier")}</span>',
            linked(row["source"], row["address"]),
        )
        for row in rows
    ]
    return "<h2>Every run</h2>\n" + table(
        "Allocations: how many of the recording's are in the simulation, in the same order",
        heads,
        lines,
        (4, 5, 6, 7),
    )


def real(row: dict[str, Any]) -> str:
    """MiB, or whether it ran."""
    if row["real"]:
        return mib(row["real"])
    if row["fitted"]:
        return "ran"
    return "ran out" if row["reason_known"] else "failed,<br>the reason is not said"


def predicted(row: dict[str, Any]) -> str:
    """Its range where it is one, and the verdict where that is what is known."""
    peak = row["predicted"]
    if row["fitted"] is not None:
        return {True: "fits", False: "does not fit", None: "may not fit"}[row["fits"]]
    if peak["least"] == peak["most"]:
        return mib(peak["likely"])
    return f"{mib(peak['likely'])} ({mib(peak['least'])} to {mib(peak['most'])})"


def sequence(found: dict[str, int] | None) -> str:
    """How much of a recording's allocations is the same."""
    return "" if found is None else f"{found['common']:,} of {found['real']:,}"


def left_out(runs: Sequence[dict[str, str]]) -> str:
    """Those that could not be run, and why."""
    if not runs:
        return ""
    lines = [(text(run["key"]), text(run["why"])) for run in runs]
    return "<h2>Not run</h2>\n" + table("What could not be simulated here", ("run", "why"), lines, (), (1,))


def table(
    caption: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[str]],
    numbers: Sequence[int],
    long: Sequence[int] = (),
) -> str:
    """``lines`` are HTML already; the columns in ``numbers`` stand to the right, those in ``long`` have sentences.

    On a phone each line is a block, with the head of the column before each value.
    """

    def cell(name: str, place: int, content: str) -> str:
        kind = " class=n" if place in numbers else ' class="long wide"' if place in long else ""
        return f"<{name}{kind}>{content}</{name.split()[0]}>"

    head = "".join(cell("th scope=col", place, text(each)) for place, each in enumerate(heads))
    of_rows = ["th scope=row", *(f'td data-head="{text(each)}"' for each in heads[1:])]
    body = "\n".join(
        "<tr>" + "".join(cell(of_rows[place], place, each) for place, each in enumerate(line)) + "</tr>"
        for line in ([breakable(first), *rest] for first, *rest in lines)
    )
    return (
        f'<div class="across" tabindex="0" role="region" aria-label="{text(caption)}"><table class="stacked">'
        f"<caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def text(raw: object) -> str:
    """Safe inside of an element, and of an attribute."""
    return html.escape(str(raw))


def breakable(name: str) -> str:
    """A name, as HTML, that may go on in the next line behind its dots, slashes and underscores."""
    return re.sub(r"(?<=[a-z])([./_])(?=[a-z])", r"\1<wbr>", name)


def linked(source: str, address: str) -> str:
    """With the address where one is known."""
    if not address.startswith("https://"):
        return f"{text(source)} (address not known)"
    return f'<a href="{text(address)}">{breakable(text(source))}</a>'


def mib(size: int) -> str:
    """Bytes."""
    return f"{size / MIB:,.1f}"


def percent_of(ratio: float) -> str:
    """A share; of nearly all it says that it is not all."""
    return f"{ratio:.1%}".replace("%", " %") if abs(ratio - 1) >= 0.0005 else f"{ratio:.3%}".replace("%", " %")
