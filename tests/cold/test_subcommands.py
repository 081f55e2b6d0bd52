"""Each subcommand on the CPU, on a simulated GPU, with two ranks, and as one of eight simulated ranks.

What a command of the documents tries already is not run here again.
"""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from cold import CHANGED, RANK_OF_8, SIM, TRAIN, Cold, way_of
from test_documents import BARE, tried

from ampmem.cli.main import SUBCOMMANDS

pytestmark = pytest.mark.slow

WAYS: Mapping[str, str] = {"cpu": "", "simulated": SIM, "two ranks": "--nproc-per-node 2", "one of eight": RANK_OF_8}
"""How a script runs, and the options that say so."""
RECORDED: Mapping[str, tuple[str, str]] = {
    "cpu": ("train.ampmem", "ampmem profile train.py"),
    "simulated": ("train.ampmem", f"ampmem profile {SIM} train.py"),
    "two ranks": ("train.rank0-of-2.ampmem train.rank1-of-2.ampmem", "ampmem profile --nproc-per-node 2 train.py"),
    "one of eight": ("train.rank0-of-8.ampmem", f"ampmem profile {RANK_OF_8} train.py"),
}
"""The files that ``profile`` leaves in each way, and the command that made them."""

RUNS: Mapping[str, str] = {
    "compare": "ampmem compare --precision fp32,amp --no-times {options} train.py",
    "check": "ampmem check --budget peak=1GiB {options} train.py",
    "advise": "ampmem advise {options} train.py",
    "watch": "ampmem watch {options} train.py",
    "fit": "ampmem fit --precision as-is --points 0 --vary --batch-size=4:8 {options} train.py",
}
"""The subcommands that run a script, beside ``profile``."""
READS: Mapping[str, str] = {
    "show": "ampmem show --all {files}",
    "report": "ampmem report {files} -o page.html",
    "diff": "ampmem diff {job} changed.ampmem",
    "export": "ampmem export {first} --format snapshot -o out.pickle",
    "import": "ampmem import out.pickle -o imported.ampmem",
    "model": "ampmem model {first}",
}
"""The subcommands that read what ``profile`` left; ``export`` is before ``import``, whose file it writes."""

WITHOUT_MEANING: Mapping[tuple[str, str], str] = {
    ("fit", "cpu"): "every run of fit is on a simulated GPU, since it asks what fits on one",
    ("fit", "two ranks"): "fit simulates one rank (--world-size) and starts no others",
    ("advise", "two ranks"): "advise runs the script in one process, as one rank where it simulates (--world-size)",
    ("watch", "two ranks"): "watch runs in each process that a launcher starts, and starts none",
    **{("top", way): "it shows what watch has left, a file of one form in every way" for way in WAYS},
    **{("extension", way): "it compiles a file for every later recording" for way in WAYS if way != "cpu"},
    **{("completion", way): "it prints text for a shell and runs no script" for way in WAYS if way != "cpu"},
}
"""The combinations that are not tried, and why."""


OF_THE_DOCUMENTS = frozenset(
    (line.split()[1], way_of(line)) for line in (each.line for each in tried()) if line.startswith("ampmem ")
)
"""The subcommands, and the ways, of the commands that ``test_documents.py`` runs."""
LEFT_OUT = OF_THE_DOCUMENTS | set(WITHOUT_MEANING)


def test_each_subcommand_is_tried_in_each_way_that_has_a_meaning() -> None:
    assert {"profile", *RUNS, *READS, "top", "extension", "completion"} == set(SUBCOMMANDS)
    assert all(name in SUBCOMMANDS and way in WAYS for name, way in LEFT_OUT)
    assert {way_of(command) for _, command in RECORDED.values()} == set(WAYS)
    assert {way_of(line) for line in BARE if line.startswith("ampmem profile")} == set(WAYS)
    assert {line.split()[1] for line in BARE if line.startswith("ampmem ")} == {"profile", *RUNS} - {"fit"}
    assert ("profile", "simulated") in OF_THE_DOCUMENTS and ("model", "one of eight") not in OF_THE_DOCUMENTS


def run(cold: Cold, folder: Path, command: str, *, ready: bool = False) -> str:
    """What a command that must end well says."""
    done = cold.run(folder, command, ready=ready)
    printed = f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, printed
    assert "Traceback (most recent call last)" not in done.stderr, printed
    assert done.stdout or done.stderr, command
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "way"), [each for each in itertools.product(RUNS, WAYS) if each not in LEFT_OUT], ids=str
)
def test_scripts(cold: Cold, tmp_path: Path, name: str, way: str) -> None:
    (tmp_path / "train.py").write_bytes(TRAIN.read_bytes())
    options = WAYS[way]
    if name == "fit":
        options = options.replace("--device sim", "")
    if name == "advise" and way == "cpu":
        options = "--device cpu"  # without it a GPU is simulated
    # The other subcommands run bare once among the commands of the documents.
    run(cold, tmp_path, RUNS[name].format(options=options), ready=name != "fit")
    left = sorted(path.name for path in tmp_path.glob("*.ampmem"))
    files = {"compare": 2, "watch": 1}.get(name, 0)
    assert len(left) == files * len(RECORDED[way][0].split())


@pytest.mark.parametrize("way", WAYS)
def test_profile(cold: Cold, tmp_path: Path, way: str) -> None:
    files, command = RECORDED[way]
    cold.copy(tmp_path, command, "*")
    assert sorted(path.name for path in tmp_path.glob("*.ampmem")) == sorted(files.split())


@pytest.mark.parametrize(
    ("name", "way"),
    [each for each in itertools.product(READS, WAYS) if each not in LEFT_OUT and each[0] != "import"],
    ids=str,
)
def test_recordings(cold: Cold, tmp_path: Path, name: str, way: str) -> None:
    files, command = RECORDED[way]
    cold.copy(tmp_path, command, "*.ampmem")
    first = files.split()[0]
    job = f"{first.partition('.')[0]}.ampmem"
    if name == "diff":
        changed = command.replace("train.py", "-o changed.ampmem train.py")
        cold.copy(tmp_path, f"{CHANGED} && {changed}", "changed*")
    run(cold, tmp_path, READS[name].format(files=files, first=first, job=job))
    if name == "export":
        run(cold, tmp_path, READS["import"])
        assert "peak" in run(cold, tmp_path, "ampmem show imported.ampmem")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(cold: Cold, tmp_path: Path, shell: str) -> None:
    assert "_AMPMEM_COMPLETE" in run(cold, tmp_path, f"ampmem completion {shell}")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_extension(cold: Cold, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(TRAIN.read_bytes())
    said = run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem extension")
    (library,) = tmp_path.glob("cache/ampmem/extension/*.so")
    assert str(library) in said.splitlines()
    assert "residual 0 B" in run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem profile train.py")
    run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem extension --remove")
    assert not library.exists()
