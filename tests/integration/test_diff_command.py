"""``ampmem diff`` of a script before and after a change: the example in the docs."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.commands import ampmem

DOCS = Path(__file__).resolve().parents[2] / "docs" / "budgets.md"

pytestmark = pytest.mark.slow


def example() -> tuple[str, str]:
    """The script in the docs, and what is said to be printed once it is changed."""
    text = DOCS.read_text(encoding="utf-8")
    script = re.search(r"```python\n(import torch.*?)```", text, re.DOTALL)
    said = re.search(r"```\n\$ ampmem diff main.ampmem gelu.ampmem\n(.*?)```", text, re.DOTALL)
    assert script is not None and said is not None
    return script[1], said[1]


def test_the_example_of_the_docs() -> None:
    script, said = example()
    changed = "# The activation is smooth now.\n" + script.replace("torch.relu", "nn.functional.gelu")
    with TemporaryDirectory() as folder:  # whose path is short, so that no line is cut
        project = Path(folder).resolve()
        for code, output in ((script, "main.ampmem"), (changed, "gelu.ampmem")):
            (project / "train.py").write_text(code)
            done = ampmem(project, "profile", "--device", "sim", "--gpu", "h100", "-o", output, "train.py")
            assert done.returncode == 0, done.stderr
        done = ampmem(project, "diff", "main.ampmem", "gelu.ampmem")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.replace(str(project), "/home/me/project") == said
