"""``ampmem check`` of scripts: the example in the docs, exit codes, and the same bytes in every run."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.commands import ampmem

DOCS = Path(__file__).resolve().parents[2] / "docs" / "budgets.md"
SIM = ("--device", "sim", "--gpu", "h100")

pytestmark = pytest.mark.slow


def example() -> tuple[str, list[str]]:
    """The script in the docs, and the lines that it is said to print once it is changed."""
    text = DOCS.read_text(encoding="utf-8")
    script, said = (
        re.search(r"```python\n(import torch.*?)```", text, re.S),
        re.search(r"```\n(\$ .*?)\n```", text, re.S),
    )
    assert script is not None and said is not None
    return script[1], said[1].split("\n")[1:]


@pytest.fixture
def project() -> Iterator[Path]:
    """A folder with a short path, so that no line is cut."""
    with TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def test_the_example_of_the_docs(project: Path) -> None:
    script, said = example()
    train = project / "train.py"
    train.write_text(script)
    made = ampmem(project, "check", *SIM, "--baseline", "main.ampmem", "--update-baseline", "train.py")
    assert (made.returncode, made.stdout) == (0, "") and made.stderr.startswith("ampmem: wrote main.ampmem, ")
    # To the byte, without a tolerance.
    same = ampmem(project, "check", *SIM, "--baseline", "main.ampmem", "--budget", "growth=0B", "train.py")
    assert same.returncode == 0, same.stdout
    assert same.stdout.startswith("train.py: kept: growth, 0 B of 0 B; all sizes equal those of main.ampmem")
    train.write_text(script.replace("torch.relu", "nn.functional.gelu"))
    grown = ampmem(project, "check", *SIM, "--baseline", "main.ampmem", "train.py")
    assert grown.returncode == 1
    printed = iter(grown.stdout.replace(str(project), "/home/me/project").split("\n"))
    # What is left out in the docs lies in torch's own files.
    assert [line for line in said if line.strip() != "…" and line not in printed] == []


def test_a_script_that_fails_keeps_its_exit_code_and_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('about to fail')\nsys.exit(7)\n")
    done = ampmem(tmp_path, "check", "--budget", "peak=1GiB", "train.py")
    assert (done.returncode, done.stdout) == (7, "")
    assert "train.py failed: exit code 7" in done.stderr and "about to fail" in done.stderr
    done = ampmem(tmp_path, "check", "train.py", "--budget", "peak=1GiB")
    assert done.returncode == 2 and "no budget and no baseline given for train.py" in done.stderr


def test_a_script_that_runs_out_of_memory_is_not_kept(tmp_path: Path) -> None:
    script, _ = example()
    (tmp_path / "train.py").write_text(script.replace("randn(512,", "randn(51200,").replace("(512,)", "(51200,)"))
    done = ampmem(tmp_path, "check", "--device", "sim", "--gpu", "592MiB", "--budget", "peak=1TiB", "train.py")
    assert done.returncode == 1
    assert " ".join(done.stdout.split()).startswith(
        "train.py: not judged: memory ran out in forward of step 0: how much the run would have needed is not known"
    )
