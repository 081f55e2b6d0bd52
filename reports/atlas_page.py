"""The page of the atlas: one file with data, script and plotly.js, which loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from atlas_document import Document, Point, group_of, setting_of, whole_groups
from atlas_models import BY_NAME, PUBLISHED
from atlas_search import BASE, LARGEST
from atlas_summary import (
    Saving,
    break_even_of,
    compiled_in_words,
    compiled_runs,
    counts_of,
    savings_of,
    setting_in_words,
)
from atlas_tables import compiled_of, emulated_of, findings_of, published_of, rules_of, signed
from atlas_train import AMP, PRECISIONS

from ampmem.reporters.html.page import PLOTLY_CONFIG, self_contained
from ampmem.units import format_bytes

HERE = Path(__file__).parent


STYLE = """
.card > p, .card > ul { margin-top: 8px; max-width: 66rem; }
.card ul { padding-left: 20px; }
.card .selectors { flex-wrap: wrap; margin-top: 10px; }
:root { --shade: light-dark(#00000055, #ffffff66); }
.across { overflow-x: auto; background: linear-gradient(to right, var(--card) 40%, transparent) left / 2.5rem 100%,
  linear-gradient(to left, var(--card) 40%, transparent) right / 2.5rem 100%,
  linear-gradient(to right, var(--shade), transparent) left / 1rem 100%,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100%;
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }
@media print { .across { background: none; } }
.across td { white-space: nowrap; }
@media print { .card .selectors { display: none; } }
#emulated td:last-child { white-space: normal; }
#lines th, #lines td:not(.n), #lines td:last-child { white-space: normal; }
#lines td:last-child, #lines th:last-child { text-align: left; padding-left: 14px; }
@media (min-width: 701px) { #emulated td:last-child { min-width: 20rem; }
  #lines td:last-child, #lines th:last-child { min-width: 9rem; } }
#lines td, #lines th { padding-right: 10px; }
.across td, .across th { padding-right: 18px; }
.across thead th { vertical-align: bottom; }
td.n, th.n { text-align: right; }
@media (max-width: 700px) { .across .stacked tr { grid-template-columns: minmax(0, 1fr); }
  .across .stacked td { padding: 0 !important; text-align: left; } .across .stacked td::before { max-width: 60%; } }
code { font-family: var(--mono); font-size: 12.5px; overflow-wrap: anywhere; }
"""
"""What the page has beside the style of ampmem's other pages. A shade at a table's edge says that it goes on there."""


def page_of(document: Document) -> str:
    """The HTML of the page."""
    points = whole_groups(document)
    parts = {
        "summary": summary_table(points),
        "setting": escape(setting_in_words(points, document["about"]) + compiled_in_words(document)),
        "about": escape(made_with(points, document["about"])),
        "assumed": "".join(f"<li>{escape(line)}</li>\n" for line in assumed(points)),
    }
    body = (HERE / "atlas_page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        body = body.replace(f"[[{name}]]", text, 1)
    data = data_of(points, document) | tables_of(points, document)
    script = (HERE / "atlas_page.js").read_text(encoding="utf-8")
    title = "What mixed precision does to the memory of many models"
    return self_contained("document.html", "document.js", data, title=title, first=script, style=STYLE, body=body)


def summary_table(points: Sequence[Point]) -> str:
    """The answer as a table: what AMP does to the peak, and in how many settings."""
    heads, rows = counts_of(savings_of(points, AMP))
    head = "".join(f"<th scope=col{' class=n' if at else ''}>{escape(each)}</th>" for at, each in enumerate(heads))
    lines = "".join(
        f"<tr><th scope=row>{escape(name)}</th>"
        + "".join(
            f'<td class=n data-head="{escape(of)}">{escape(each)}</td>'
            for of, each in zip(heads[1:], cells, strict=True)
        )
        + "</tr>"
        for name, *cells in rows
    )
    return f"<table class=stacked><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def made_with(points: Sequence[Point], about: Mapping[str, Any]) -> str:
    """The versions and the number of runs, in words."""
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name != "memory")
    return f"{len(points)} runs, each on a simulated GPU. Made with {versions}."


def assumed(points: Sequence[Point]) -> list[str]:
    """The assumptions behind the figures."""
    lines = [
        "Every run is a simulation: no GPU was used. The peak is the most that PyTorch's allocator had handed out "
        "during two steps of training, without what cuDNN may need for convolutions, which is not known.",
        "The workspaces of convolutions are drawn as an interval: from the saving with cuDNN's largest for this "
        "precision and none for FP32, to the saving with none for this precision and the largest for FP32. A mark "
        "without a line has no convolutions, or none whose workspaces reach the peak.",
        "A run fits if it fits even with the most that is assumed for cuDNN and for the CUDA context. Batch sizes are "
        f"powers of two up to {LARGEST:,}. A batch is not run if the peak, growing on as it did, would be beyond the "
        "GPU's memory.",
        "AMP without the weight cache and bf16 are run with AdamW only, at batch 1 and at the largest that fits in "
        "FP32, or at the latter alone; how large a batch they fit was not searched. With SGD, and with checkpointing "
        "(AdamW, for the models whose library offers it), FP32 and AMP are run.",
        "Weights are random and data synthetic; sequences are of full length, so a padding mask of ones is dropped "
        "where the library drops it. Attention runs as PyTorch's scaled_dot_product_attention would on this GPU.",
        "“bf16” has weights, gradients and optimizer states in bfloat16. AMP is autocast to bfloat16 around the "
        "forward pass and the loss, without a GradScaler. Recurrent layers run in float16 under it, as PyTorch has it.",
        "Mamba-2 runs as transformers' own PyTorch code does, without the fused kernels that it is usually trained "
        "with. DiT has the time and class embeddings in each block, as diffusers has them. Deep Speech 2 has cross "
        "entropy in place of CTC. YOLOv3, DenseNet-121, VGG-16, MLP-Mixer, DLRM, GraphSAGE, Deep Speech 2, the LSTM "
        "and the U-Net are written for the atlas after their publications.",
        "Lines only join the runs: between two marks the saving may be another.",
    ]
    wide = [point for point in points if point.get("at_most", 0) > 1.1 * point.get("peak", 0) > 0]
    if wide:
        names = ", ".join(sorted({point["model"] for point in wide}))
        lines.append(f"With cuDNN's workspaces at their largest, the peak of some runs is over 10 % higher: {names}.")
    return lines


def data_of(points: Sequence[Point], document: Document) -> dict[str, Any]:
    """The data that the script draws."""
    compiled = {model: [signed(each.change) for each in runs] for model, runs in compiled_runs(document).items()}
    places = {(group_of(point), point["precision"], point["batch"]): point for point in points if "peak" in point}
    savings = [saving for precision in PRECISIONS if precision != BASE for saving in savings_of(points, precision)]
    return {
        "config": PLOTLY_CONFIG | {"responsive": False, "displayModeBar": False},
        "lines": [
            _line(saving, places)
            | {"compiled": ", ".join(dict.fromkeys(compiled.get(saving.group[0], ()))) if saving.searched else ""}
            for saving in savings
        ],
    }


def tables_of(points: Sequence[Point], document: Document) -> dict[str, Any]:
    """The tables about several models."""
    return {
        "rules": rules_of(points),
        "published": published_of(HERE / "published.json"),
        "compiled": compiled_of(document),
        "emulated": emulated_of(document),
        "findings": findings_of(points),
    }


SIZES = ((50e6, "under 50 M"), (200e6, "50 to 200 M"), (1e9, "200 M to 1 B"))
"""The classes of models by size: the upper bound of their parameters, and their name."""


def size_of(parameters: int) -> str:
    """The class of a model with ``parameters`` parameters."""
    return next((name for below, name in SIZES if parameters < below), "over 1 B")


def _line(saving: Saving, places: dict[Any, Point]) -> dict[str, Any]:
    name, optimizer, checkpointing = saving.group
    base = [places[saving.group, BASE, batch] for batch in saving.shares]
    these = [places[saving.group, saving.precision, batch] for batch in saving.shares]
    last, last_base = these[-1], base[-1]
    return {
        "model": name,
        "family": BY_NAME[name].family,
        "sample": BY_NAME[name].sample,
        "size": size_of(last["parameters"]),
        "published": name in PUBLISHED,
        "optimizer": optimizer,
        "checkpointing": "with checkpointing" if checkpointing else "without checkpointing",
        "precision": saving.precision,
        "parameters": last["parameters"],
        "batches": list(saving.shares),
        "shares": [round(share, 5) for share in saving.shares.values()],
        "least": [_share(point["at_most"], before["peak"]) for before, point in zip(base, these, strict=True)],
        "most": [_share(point["peak"], before["at_most"]) for before, point in zip(base, these, strict=True)],
        "break_even": break_even_of(saving),
        "largest": saving.largest if saving.searched else None,
        "phases": [last_base["phase"], last["phase"]],
        "activations": _ratio(last["activations"], last_base["activations"]),
        "in_fp32": in_fp32_of(last),
        "copies": _ratio(last["copies"], last["parameters"]),
        "points": [_pair(*pair) for pair in zip(base, these, strict=True)],
    }


def _share(peak: int, before: int) -> float:
    """The saved share if a peak of ``before`` bytes becomes ``peak`` bytes."""
    return round(1 - peak / before, 5)


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


NAMED, NOTABLE = 3, 0.01
"""The number of activation kinds that are named, and the least share of the activations of each."""


def in_fp32_of(point: Point) -> str | None:
    """The FP32 part of the activations, in shares of all activations; ``None`` if not recorded."""
    if "in_fp32" not in point or not point["activations"]:
        return None
    shares = {kind: size / point["activations"] for kind, size in point["in_fp32"].items()}
    named = [f"{kind} {round(100 * share)} %" for kind, share in shares.items() if share >= NOTABLE]
    return ", ".join(named[:NAMED]) or "nothing"


def _pair(base: Point, point: Point) -> dict[str, Any]:
    """The breakdown of a point, beside that of FP32 at the same batch."""
    names = dict.fromkeys((*base["at_peak"], *point["at_peak"]))
    rows = [[name, base["at_peak"].get(name, 0), point["at_peak"].get(name, 0)] for name in names]
    rows.sort(key=lambda row: -max(row[1], row[2]))
    return {
        "rows": [[name.replace("_", " "), format_bytes(left), format_bytes(right)] for name, left, right in rows],
        "total": ["peak allocated", format_bytes(base["peak"]), format_bytes(point["peak"])],
        "phase": ["the peak is in", base["phase"], point["phase"]],
        "command": setting_of(point).command,
    }
