"""The workflows of GitHub call scripts that are there, with steps and versions that these know."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI = ROOT / ".ci" / "run"
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="no checkout: the source distribution is without the workflows")


def commands(workflow: Path) -> list[list[str]]:
    """What each ``run:`` line runs, in words; the place of a matrix's value is one word."""
    lines = re.findall(r"^\s*(?:- )?run:(.*)$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "VALUE", line)) for line in lines]


def matrix(workflow: Path, name: str) -> list[str]:
    """The values of one list, written on one line."""
    (found,) = re.findall(rf"^\s*{name}: \[(.*)\]$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    return [value.strip().strip('"') for value in found.split(",")]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_it_is_yaml_with_jobs_and_steps(workflow: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(ran) == len(jobs) == len(commands(workflow))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_there(workflow: Path) -> None:
    found = commands(workflow)
    assert found
    for words in found:
        if words[0] == ".ci/run":
            assert os.access(CI, os.X_OK)
            assert len(words) > 1
            steps = listed("fast") if words[1:] == ["fast"] else words[1:]
            assert all(re.search(rf"^step_{step}\(\)", CI.read_text(encoding="utf-8"), re.MULTILINE) for step in steps)
        else:
            assert words[:2] == ["python3", "tests/versions.py"]
            own = words[2 : words.index("--select")] if "--select" in words else words[2:]  # the rest is for pytest
            shown = subprocess.run([sys.executable, ROOT / words[1], *own, "--help"], capture_output=True)
            assert shown.returncode == 0


def listed(name: str) -> list[str]:
    """The steps that ``.ci/run`` calls ``name``."""
    (found,) = re.findall(rf"^{name}=\((.*)\)$", CI.read_text(encoding="utf-8"), re.MULTILINE)
    steps: list[str] = found.split()
    return steps


def test_all_steps_are_called_at_night_and_the_fast_ones_for_a_pull_request() -> None:
    called = {
        path.stem: {step for words in commands(path) if words[0] == ".ci/run" for step in words[1:]}
        for path in WORKFLOWS
    }
    assert called == {"tests": {"fast"}, "nightly": set(listed("all"))}


def test_a_step_that_is_not_there_is_refused() -> None:
    done = subprocess.run([CI, "lint", "dance"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ".ci/run: no step 'dance'; there are: emulated tests cpu lint types wheel cold quick\n"


def test_the_versions_are_those_that_the_project_names() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tests, nightly = (ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("tests", "nightly"))
    pythons = matrix(nightly, "python")
    assert matrix(tests, "python") == [pythons[0], pythons[-1]]
    assert pythons == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (tested,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (oldest,) = re.findall(r'"torch>=(.*)"', project)
    versions = matrix(nightly, "torch")
    assert set(matrix(tests, "torch")) < set(versions)
    assert tested in versions
    assert versions[0].startswith(oldest)
