import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.build import small_run, write

from ampmem.analysis.summary import summary_schema

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "plotly"}:
            raise ImportError(f"{name} must not be imported here")
        return None

sys.meta_path.insert(0, Blocker())
from ampmem.cli.show import show
show.main(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--steps"], ["--all"], ["--json"]])
def test_show_works_where_torch_does_not(tmp_path: Path, options: list[str]) -> None:
    path = write(tmp_path / "run.ampmem", small_run().recording())
    done = run(*options, str(path))
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in options:
        assert json.loads(done.stdout)["conservation"]["residual_bytes"] == 0
    else:
        assert "conservation: 32 events, residual 0 B" in done.stdout


def test_the_blocker_blocks() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = BLOCKED.partition("from ampmem")[0] + "import torch"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "torch must not be imported here" in done.stderr


def test_the_schema_needs_no_recording() -> None:
    done = run("--schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["title"] == summary_schema()["title"]
