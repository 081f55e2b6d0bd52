"""The study of advice without its runs: what its file says is what blocks compute, and its page is of its file."""

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

REPORTS = Path(__file__).resolve().parents[2] / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.is_dir(), reason="no checkout: the reports are missing")
if REPORTS.is_dir():
    sys.path.insert(0, str(REPORTS))
    import make_advice
    from advice_train import NAMES, SIZES, WIDTHS, build

TIMES = {"even": (4,) * 6, "uneven": (1, 8, 2, 6, 3, 4)}
"""How many times wider than the model the hidden layer of each block is."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / "advice.json").read_text())
    return found


def again(name: str, block: int) -> int:
    """The FLOPs of a block's forward that backward needs once more.

    A multiplication and an addition for each weight of its linear layers and each token. The last layer is left out, as
    nothing of its result is saved, and attention, for which torch has no formula on a CPU.
    """
    tokens, width = SIZES.batch_size * SIZES.length, SIZES.width
    total: int = 2 * tokens * (3 * width * width + width * width + width * TIMES[name][block] * width)
    return total


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_every_set_of_blocks_recomputes_what_its_blocks_compute(document: dict[str, Any], name: str) -> None:
    sets = [each for each in document["choices"][name] if each["tool"] == make_advice.EVERY]
    expected = {
        ", ".join(map(str, blocks)) or "none": sum(again(name, block) for block in blocks)
        for count in range(7)
        for blocks in combinations(range(6), count)
    }
    assert {each["setting"]: each["recomputed"] for each in sets} == expected


def test_models_are_those_of_the_page() -> None:
    assert (("even", "uneven"), TIMES["uneven"]) == (NAMES, WIDTHS)
    assert [block.mlp.up.out_features for block in build("uneven").blocks] == [n * SIZES.width for n in WIDTHS]


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ([], []),
        (["--force-checkpoint", "blocks.*"], [0, 1, 2, 3, 4, 5]),
        (["--force-fused", "--force-checkpoint", "blocks.4,blocks.1"], [1, 4]),
    ],
)
def test_blocks_are_read_from_the_options_of_a_run(options: list[str], blocks: list[int]) -> None:
    assert make_advice.blocks_of(options) == blocks


def test_the_page_is_of_the_file(document: dict[str, Any]) -> None:
    assert make_advice.text_of(document) == (REPORTS / "advice.md").read_text()
