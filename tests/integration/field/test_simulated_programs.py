"""Programs on a simulated device that has nothing of them, or whose sizes depend on data that it has not."""

import json
from pathlib import Path

import pytest
from support.command_line import refused
from support.commands import ampmem
from support.field import PROGRAMS, record

pytestmark = pytest.mark.slow

CLASSES = PROGRAMS / "classes_from_data.py"
COMPILES = PROGRAMS / "tries_to_compile.py"
SPARSE = PROGRAMS / "sparse_inputs.py"
WITHOUT_GPU = str(PROGRAMS / "without_gpu.py")
ELSEWHERE = "the model is on cpu: none of its 2 parameters was on the simulated GPU"
GROWS = """
import torch
from torch import nn
model = nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for rows in (1, 1 << 30):
    model(torch.ones(rows, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "does the script need its option --accel?"),
        (("--half-way",), "does the script need its option --accel?"),
        (("--half-way", "--accel"), None),
    ],
)
def test_a_model_that_is_not_on_the_gpu_is_an_error(
    tmp_path: Path, arguments: tuple[str, ...], said: str | None
) -> None:
    how = ("--run-to-end",) if said is None else ()
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", *how, WITHOUT_GPU, *arguments)
    if said is None:
        assert done.returncode == 0
        assert json.loads(done.stdout) == ["cuda:0"] * 2
        assert "it fits" in done.stderr
        return
    assert done.returncode == 1
    assert f"ampmem: {ELSEWHERE}; {said}\n" in done.stderr
    assert "fits" not in done.stderr
    assert not (tmp_path / "without_gpu.ampmem").exists()


def test_no_precision_of_a_comparison_has_anything_to_show(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "compare", "--device", "sim", "--precision", "fp32,amp", WITHOUT_GPU)
    assert done.returncode == 1
    assert done.stdout.count(ELSEWHERE) == 2
    assert not list(tmp_path.iterdir())


def test_nothing_is_said_of_what_fits(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "fit", "--gpu", "2GiB", "--precision", "fp32", WITHOUT_GPU, "--vary", "--batch-size=1:8")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{ELSEWHERE}; does the script need its option --accel?" in done.stderr
    assert "so ampmem cannot say what fits" in done.stderr


def line_of(program: Path, code: str) -> int:
    return next(i for i, line in enumerate(program.read_text(encoding="utf-8").splitlines(), 1) if code in line)


def test_numbers_that_sizes_depend_on_are_asked_for_before_the_tables(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", str(CLASSES))
    assert done.returncode == 0, done.stderr
    head = " ".join(done.stderr.partition("the prediction for")[0].split())
    for code in ("labels.max().item()", "int(lengths.max())"):
        line = line_of(CLASSES, code)
        assert f"WARNING {CLASSES}:{line}: an integer that the script read from the device was taken as 1" in head
        assert f"--assume {CLASSES.name}:{line}=NUMBER" in head
    assert head.count("WARNING ") == 2  # what is counted after backward is no size
    quiet = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--force", str(CLASSES))
    assert quiet.stderr.count("ampmem: warning: ") == 2


def test_numbers_that_are_given_are_those_of_the_real_run(tmp_path: Path) -> None:
    given = {"labels.max().item()": 999, "int(lengths.max())": 48}
    assume = [f"--assume={CLASSES.name}:{line_of(CLASSES, code)}={number}" for code, number in given.items()]
    ran = record(tmp_path, CLASSES.stem, "--device", "sim", *assume)
    assert ran.counted["classes"] == 1000
    assert ran.last["after_optimizer"]["parameters"] == ran.counted["parameters"]
    step = ran.summary["steps"][-1]
    assert step["marks"]["after_forward"]["activations"] >= ran.counted["outputs"] * 64 * 4
    assert "warning" not in ran.said.lower()
    assert "assumed: 999 is read at classes_from_data.py" in ran.said


def test_an_assumption_of_a_line_that_reads_nothing_is_told_of(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--assume", f"{CLASSES.name}:3=7", str(CLASSES))
    assert f"ampmem: warning: --assume for {CLASSES.name}:3 changed nothing" in done.stderr


def test_what_fits_is_said_with_the_warning(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"import sys\nsys.argv.pop()\n{CLASSES.read_text()}", encoding="utf-8")
    options = ("--gpu", "2GiB", "--precision", "fp32", "--points", "0")
    done = ampmem(tmp_path, "fit", *options, "train.py", "--vary", "--n=1:2")
    assert done.returncode == 0, done.stderr
    head = done.stdout.partition("peak of each run")[0]
    assert head.count("\nwarning ") == done.stdout.count("warning") == 2


def test_sparse_inputs_stop_with_the_scripts_line(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", str(SPARSE))
    assert done.returncode == 1
    line = line_of(SPARSE, "adjacency.to(device)")
    assert f"NotSimulated: {SPARSE}:{line}: sparse tensors cannot be simulated; make them dense" in done.stderr
    assert "fits" not in done.stderr


def test_what_a_script_does_without_when_it_is_refused_is_told_of(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", str(COMPILES), "2")
    assert done.returncode == 0, done.stderr
    line = line_of(COMPILES, "torch.compile(model, ")
    (warned,) = [said for said in done.stderr.splitlines() if said.startswith("ampmem: warning: ")]
    assert f"{COMPILES}:{line}: the memory of compiled code" in warned
    assert warned.endswith("(the script caught this and went on)")


def test_of_one_step_it_is_said_that_it_began_without_state(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--steps", "1", str(COMPILES), "2")
    assert "ampmem: warning: only one step was recorded: what its update left on the device" in done.stderr
    again = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--force", "--skip", "1", str(COMPILES), "2")
    assert "recorded 1 step" in again.stderr
    assert "one step was recorded" not in again.stderr


def test_of_a_second_step_without_room_it_is_not_said_that_there_was_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROWS, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "2GiB", "--quiet", "train.py")
    assert "CUDA out of memory" in done.stderr
    assert "one step was recorded" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.py:12=x", "give the number that the line reads, such as train.py:12=7"),
        ("train.py:0=1", "--assume does not know 'train.py:0'"),
    ],
)
def test_an_assumption_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    for command in ("profile", "compare"):
        assert message in refused(tmp_path, command, "--device", "sim", "--assume", text, "train.py")


def test_parameters_that_stay_on_the_cpu_are_told_of(tmp_path: Path) -> None:
    ran = record(tmp_path, "partly_on_gpu", "--device", "sim")
    assert ran.exit_code == 0
    assert ran.last["after_optimizer"]["parameters"] == ran.counted["parameters"]
    assert "2 of 4 parameters were never on cuda (such as Linear.weight, on cpu)" in " ".join(ran.said.split())


def test_layers_of_other_ranks_are_none_of_the_runs_parameters(tmp_path: Path) -> None:
    ran = record(tmp_path, "layers_of_others", "--device", "sim")
    assert ran.exit_code == 0
    assert ran.summary["parameters"]["bytes"] == ran.counted["parameters"] == ran.last["after_optimizer"]["parameters"]
    said = " ".join(ran.said.split())
    assert "the rule of thumb plus the named differences equals what was measured, to the byte" in " ".join(
        said.split()
    )
    assert "4 of 8 parameters were never on cuda" in said
