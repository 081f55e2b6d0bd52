"""The scatter of predicted and real peaks, as an SVG without a script."""

import html
import math
from collections.abc import Sequence
from typing import Any

from ampmem.allocator.settings import MIB
from published.wording import signed

SIZE, LEFT, BOTTOM, TOP = 620, 70, 50, 12
LEAST, MOST = 64 * MIB, 128 * 1024 * MIB
TICKS = (128, 512, 2 * 1024, 8 * 1024, 32 * 1024)
"""MiB."""


def place(size: int) -> float:
    """Between 0 and 1, on a scale of logarithms."""
    return math.log(size / LEAST) / math.log(MOST / LEAST)


def across(size: int) -> float:
    """To the right, in the units of the drawing."""
    return LEFT + place(size) * (SIZE - LEFT - TOP)


def upwards(size: int) -> float:
    """The same from the bottom."""
    return SIZE - BOTTOM - place(size) * (SIZE - BOTTOM - TOP)


def scatter(rows: Sequence[dict[str, Any]]) -> str:
    """A mark for each row: a square under autocast, a circle without. The page's table has every number."""
    parts = [
        f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="Predicted against real peaks, on logarithmic scales;'
        f' {len(rows)} marks near the line where both are the same. The table below has every number.">'
    ]
    for tick in TICKS:
        size = tick * MIB
        label = f"{tick // 1024} GiB" if tick >= 1024 else f"{tick} MiB"
        parts += [
            _line("grid", across(size), TOP, across(size), SIZE - BOTTOM),
            _line("grid", LEFT, upwards(size), SIZE - TOP, upwards(size)),
            f'<text x="{across(size):.0f}" y="{SIZE - BOTTOM + 18}" text-anchor="middle">{label}</text>',
            f'<text x="{LEFT - 6}" y="{upwards(size) + 4:.0f}" text-anchor="end">{label}</text>',
        ]
    parts.append(_line("same", across(LEAST), upwards(LEAST), across(MOST), upwards(MOST)))
    parts += [_mark(row) for row in rows]
    parts += [
        f'<text x="{(LEFT + SIZE) / 2:.0f}" y="{SIZE - 10}" text-anchor="middle">real peak</text>',
        f'<text transform="translate(14 {SIZE / 2:.0f}) rotate(-90)" text-anchor="middle">predicted</text>',
        "</svg>",
    ]
    families = ", ".join(
        f'<svg viewBox="0 0 12 12" style="display:inline;width:.8em" aria-hidden="true"><circle class="{each}" '
        f'cx="6" cy="6" r="5"/></svg> {each}'
        for each in dict.fromkeys(row["family"] for row in rows)
    )
    legend = (
        f"<p class=quiet>{families}</p>\n<p class=quiet>Circles: without autocast "
        "(FP32, TF32 and 16-bit weights); squares: under autocast; bars: the range given.</p>"
    )
    return "\n".join([*parts, legend])


def _mark(row: dict[str, Any]) -> str:
    peak, x = row["predicted"], across(row["real"])
    y = upwards(peak["likely"])
    said = (
        f"{row['key']}: real {row['real'] / MIB:,.1f} MiB, predicted {peak['likely'] / MIB:,.1f}, "
        f"{signed(row['error'])}"
    )
    title = f"<title>{html.escape(said)}</title>"
    span = ""
    if peak["most"] > peak["least"]:
        span = _line(f"span {row['family']}", x, upwards(peak["least"]), x, upwards(peak["most"]))
    if row["precision"].startswith("amp"):
        shape = f'<rect class="dot {row["family"]}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">'
        return f"{span}{shape}{title}</rect>"
    return f'{span}<circle class="dot {row["family"]}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
