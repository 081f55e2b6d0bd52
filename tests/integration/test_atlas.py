"""Points of the atlas that are made again are those of its file, to the byte."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import python

REPORTS = Path(__file__).resolve().parents[2] / "reports"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (REPORTS / "atlas.json").exists(), reason="no checkout: the reports are missing"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
MADE = """
import sys
sys.path.insert(0, sys.argv[1])
from atlas_document import line_of
from atlas_points import make_point
from atlas_train import Setting
settings = [
    Setting(model="DLRM", optimizer="adamw", checkpointing=False, precision="amp", batch=1),
    Setting(model="MLP-Mixer B/16", optimizer="adamw", checkpointing=False, precision="fp32", batch=16),
    Setting(model="ViT B/16", optimizer="adamw", checkpointing=False, precision="amp-nocache", batch=1),
]
for setting in settings:
    print(line_of(make_point(setting)))
"""


def test_three_points_made_again_are_the_same() -> None:
    sys.path.insert(0, str(REPORTS))
    from make_atlas import about

    stored = (REPORTS / "atlas.json").read_text(encoding="utf-8")
    made_with, here = json.loads(stored)["about"], about()
    if any(made_with.get(name) != here[name] for name in ("torch", "transformers", "gpu", "memory")):
        pytest.skip("the file was made with other libraries")
    done = python(REPORTS.parent, "-c", MADE, str(REPORTS))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    kept = {line.removesuffix(",") for line in stored.splitlines()}
    assert [line for line in lines if line not in kept] == []
