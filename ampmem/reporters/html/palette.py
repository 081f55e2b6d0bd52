"""The colours of the categories, told apart under the three common colour-vision deficiencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """How an area of one category looks; ``pattern`` is a plotly fill pattern, empty for a plain fill."""

    light: str
    dark: str
    pattern: str = ""


_UNUSUAL = {"light": "#7a2205", "dark": "#9c4627"}
_PRECISION_COPIES = {"light": "#66d5ff", "dark": "#8ddefe"}

# Categories of one hue differ by their hatching.
FILLS: dict[str, Fill] = {
    "parameters": Fill(light="#3958d1", dark="#5074e9"),
    "gradients": Fill(light="#0d6d46", dark="#2f835f"),
    "optimizer_state": Fill(light="#532d74", dark="#884493"),
    "master_copies": Fill(**_PRECISION_COPIES),
    "cast_copies": Fill(**_PRECISION_COPIES, pattern="/"),
    "activations": Fill(light="#ec6f00", dark="#ee7105"),
    "buffers": Fill(light="#129684", dark="#19b19c"),
    "inputs": Fill(light="#d093bb", dark="#fba0be"),
    "temporaries": Fill(light="#f2e67e", dark="#e5dc83"),
    "workspace": Fill(**_UNUSUAL),
    "communication": Fill(**_UNUSUAL, pattern="/"),
    "other": Fill(**_UNUSUAL, pattern="."),
}
