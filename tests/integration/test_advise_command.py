"""``ampmem advise``: every peak is that of a script in which the change is written; what is refused is said."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.commands import ampmem
from support.page_reader import page_data
from support.ready_python import Kind, ready_python

from ampmem.analysis.changes import CHANGES
from ampmem.analysis.fit import memory_of
from ampmem.analysis.summary import summarize
from ampmem.cli.main import run
from ampmem.cli.processes.children import ChildEnd
from ampmem.cli.processes.messages import StepEnded
from ampmem.recording import read

pytestmark = pytest.mark.slow

advise_module = import_module("ampmem.cli.advise")
SCRIPT = """
import functools
import torch
import torch.utils.checkpoint
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.{norm}(512), nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

model = nn.Sequential(nn.Linear(64, 512), *(Block() for _ in range(4)), nn.Linear(512, 8)).cuda()
{change}
optimizer = torch.optim.AdamW(model.parameters(){argument})
for _ in range(3):
    model(torch.randn({rows}, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def write(folder: Path, *, norm: str = "LayerNorm", change: str = "", argument: str = "", rows: int = 8192) -> None:
    (folder / "train.py").write_text(SCRIPT.format(norm=norm, change=change, argument=argument, rows=rows))


def advised(folder: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    done = ampmem(folder, "advise", "--json", *options, "train.py")
    assert done.returncode == code, done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return json.loads(done.stdout), done.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search for what fits: its result, what it said, and its runs as ``--resume`` keeps them."""

    found: dict[str, Any]
    said: str
    runs: str


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    folder = tmp_path_factory.mktemp("searched")
    write(folder)
    done = ampmem(folder, "advise", *RESUMED, *SEARCH, "train.py")
    assert done.returncode == 0, done.stderr
    return Searched(found=json.loads(done.stdout), said=done.stderr, runs=(folder / "runs.jsonl").read_text())


RESUMED = ("--json", "--gpu", "h100", "--jobs", "2", "--resume", "runs.jsonl")
SEARCH = ("--allow", "checkpoint,foreach,fused", "--budget", "1500MiB")
NOT_COMPILED = ("--allow", ",".join(each.allow for each in CHANGES if each.allow not in ("compile", "memory-budget")))
"""All changes but those that take the compiler, which ``advice/test_compiling.py`` has."""


def assert_takes(folder: Path, made: dict[str, Any]) -> None:
    """The script in ``folder`` has the peaks of the run ``made``."""
    command = ("profile", "--device", "sim", "--gpu", "h100", "--seed", "0", "--steps", "2", "--quiet", "--force")
    done = ampmem(folder, *command, "-o", "written.ampmem", "train.py")
    assert done.returncode == 0, (made["change"], done.stderr)
    memory = memory_of(read(folder / "written.ampmem"))
    assert memory is not None
    assert (memory.allocated, memory.reserved) == (made["allocated_bytes"], made["reserved_bytes"]), made["change"]


def test_what_is_advised_is_what_the_change_takes_when_it_is_written(tmp_path: Path, searched: Searched) -> None:
    found, said = searched.found, searched.said
    best, *others = found["runs"]
    assert best["meets"] and best["change"] == "checkpoint 3 of 4 blocks"
    (less,) = [run for run in others if run["change"] == "checkpoint 2 of 4 blocks"]
    assert not less["meets"] and less["highest_device_used_bytes"] > 1500 << 20 >= best["highest_device_used_bytes"]
    assert said.count("run ") == len(found["runs"]) == len({tuple(run["options"]) for run in found["runs"]})
    plain = next(each for each in others if not each["options"])
    optimizers = [each for each in others if each["change"] in ("foreach=False", "fused=True")]
    for made in (best, less, plain, *optimizers):
        argument = next((", " + each.partition("..., ")[2][:-1] for each in made["code"] if "AdamW(" in each), "")
        write(tmp_path, change="\n".join(each for each in made["code"] if "AdamW(" not in each), argument=argument)
        assert_takes(tmp_path, made)
    assert len(optimizers) == 2
    assert best["saved_bytes"] == plain["allocated_bytes"] - best["allocated_bytes"] > 0
    product = 2 * 8192 * 512  # FLOPs for each column of a matrix product with 512 rows
    step = 2 * product * 64 + 4 * 6 * product * 2048 + 3 * product * 8
    assert (plain["step_flops"], plain["recomputed_flops"]) == (step, 0)
    again = 3 * product * 2048  # backward needs the input of each block's last product, not what that computes
    assert (best["step_flops"], best["recomputed_flops"]) == (step + again, again)
    assert best["cost"] == f"recomputes {again / step:.1%} of the step's FLOPs".replace("%", " %")


UNEQUAL = """
import functools
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(48, 256), nn.Linear(64, 300)
        self.ups = nn.ModuleList([Block(256), Block(128), Block(64)])
    def forward(self, x):
        x = self.ups[0](self.embed(x))
        x = self.ups[1](x.reshape(-1, 128).repeat(2, 1))
        x = self.ups[2](x.reshape(-1, 64).repeat(2, 1))
        return self.head(x)

model = Decoder().cuda()
{change}
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    logits, target = model(torch.randn(4096, 48, device="cuda")), torch.randint(300, (65536,), device="cuda")
    {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_blocks_that_save_most_for_a_flop_are_checkpointed_and_the_loss_is_in_chunks(tmp_path: Path) -> None:
    loss = "loss = F.cross_entropy(logits, target)"
    (tmp_path / "train.py").write_text(UNEQUAL.format(change="", loss=loss))
    found, _ = advised(tmp_path, "--gpu", "h100", "--budget", "1690MiB", "--allow", "checkpoint,loss")
    rows, widths = (65536, 16384, 4096), (64, 128, 256)
    assert found["blocks"] == [
        {
            "name": f"ups.{number}",
            # the norm's result and two numbers for each row, and what is before and after gelu, four times as wide
            "saved_bytes": 4 * count * (9 * width + 2),
            "flops": 2 * 2 * count * 4 * width * width,
        }
        for number, count, width in zip((2, 1, 0), rows, widths, strict=True)
    ]
    runs = {made["change"]: made for made in found["runs"]}
    best = found["runs"][0]
    assert best["meets"] and best["change"] == "checkpoint 1 of 3 blocks, loss in 8 chunks"
    assert best["checkpointed"] == ["ups.2"] and "map(model.get_submodule, ('ups.2',))" in best["code"][0]
    assert {"checkpoint 1 of 3 blocks", "checkpoint 2 of 3 blocks", "loss in 8 chunks"} < set(runs)
    assert not runs["loss in 8 chunks"]["meets"] and runs["loss in 8 chunks"]["saved_bytes"] > 0
    for made in (best, runs["loss in 8 chunks"], runs["checkpoint 2 of 3 blocks"]):
        of_loss = [line for line in made["code"] if line.startswith(("parts", "loss"))]
        changed = "\n".join(line for line in made["code"] if line not in of_loss)
        written = "\n    ".join(of_loss) or loss
        (tmp_path / "train.py").write_text(UNEQUAL.format(change=changed, loss=written))
        assert_takes(tmp_path, made)


SETTINGS = """
import os
{setting}
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Linear(700, 500), nn.GELU(), nn.Linear(500, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters())
for rows in torch.utils.data.DataLoader(torch.randn(16384, 64), {size}):
    {region}
        loss = model(rows.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AS_IS = {"setting": "", "size": "4096", "region": "if True:"}
WRITTEN = {
    "the script as it is": {},
    "expandable_segments": {"setting": "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'"},
    "autocast bfloat16": {"region": "with torch.autocast('cuda', dtype=torch.bfloat16):"},
    "batch size 2048 of 4096": {"size": "2048"},
}
"""The changes of settings, and how they are written in the script."""


def test_settings_take_what_they_take_when_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SETTINGS.format(**AS_IS))
    found, _ = advised(tmp_path, "--gpu", "h100", "--allow", "allocator,precision,batch")
    runs = {run["change"]: run for run in found["runs"]}
    assert set(runs) == set(WRITTEN)
    for change, parts in WRITTEN.items():
        (tmp_path / "train.py").write_text(SETTINGS.format(**AS_IS | parts))
        assert_takes(tmp_path, runs[change])
    assert runs["expandable_segments"]["saved_reserved_bytes"] > 10 << 20
    assert runs["autocast bfloat16"]["saved_bytes"] > 0 and runs["batch size 2048 of 4096"]["saved_bytes"] > 0


def test_what_offloading_moves_is_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SETTINGS.format(**AS_IS))
    found, _ = advised(tmp_path, "--gpu", "h100", "--allow", "offload")
    runs = {run["change"]: run for run in found["runs"]}
    batch = 4096 * 64
    assert runs["the script as it is"]["moved_bytes"] == 4 * batch
    saved = batch + 2 * 4096 * 700 + 2 * 4096 * 500 + 700 * 500 + 500 * 8  # inputs of layers, and weights but the first
    assert runs["offload saved tensors"]["moved_bytes"] == 4 * (batch + 2 * saved)
    assert runs["offload saved tensors"]["cost"].endswith(" move between GPU and CPU in each step")
    assert runs["offload saved tensors"]["saved_bytes"] > 0


def test_a_finding_that_advise_has_disproved_is_not_shown_again(tmp_path: Path) -> None:
    write(tmp_path, rows=64)
    done = ampmem(tmp_path, "advise", "--gpu", "h100", "--allow", "foreach,fused", "--resume", "runs", "train.py")
    assert done.returncode == 0, done.stderr
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "h100", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr

    def shown() -> tuple[list[str], list[str]]:
        done = ampmem(tmp_path, "show", "--json", "train.ampmem", "--advised", "runs")
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        notes = [note for note in summary["notes"] if "advise" in note or "runs" in note]
        return [finding["code"] for finding in summary["findings"]], notes

    assert "foreach-temporaries" in shown()[0] and not shown()[1]  # both changes save what the finding says
    first, plain, *others = (tmp_path / "runs").read_text().splitlines()
    memory = json.loads(plain)["trial"]["memory"]
    nothing = [json.dumps(run | {"trial": run["trial"] | {"memory": memory}}) for run in map(json.loads, others)]
    (tmp_path / "runs").write_text("\n".join((first, plain, *nothing)))
    said = "the finding foreach-temporaries is left out: ampmem advise ran its change for this script: "
    said += "foreach=False saved nothing, fused=True saved nothing"
    codes, notes = shown()
    assert "foreach-temporaries" not in codes and notes == [said]
    table = ampmem(tmp_path, "show", "train.ampmem", "--advised", "runs").stdout
    assert " ".join(table.split()).count(said) == 1 and table.count("foreach-temporaries") == 1
    assert ampmem(tmp_path, "report", "train.ampmem", "--advised", "runs", "-o", "page.html").returncode == 0
    told = page_data((tmp_path / "page.html").read_text())["runs"][0]["said"]
    assert said in told["notes"] and "foreach-temporaries" not in [each["code"] for each in told["findings"]]
    write(tmp_path, rows=65)
    again = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "h100", "--quiet", "--force", "train.py")
    assert again.returncode == 0, again.stderr
    codes, notes = shown()
    assert "foreach-temporaries" in codes
    assert notes == ["runs: its runs differ from this one (source of the script), so no finding is left out"]


def test_a_script_under_autocast_is_not_given_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SETTINGS.format(**AS_IS | WRITTEN["autocast bfloat16"]))
    found, _ = advised(tmp_path, "--allow", "precision")
    (refused,) = [run for run in found["runs"] if run["failure"] is not None]
    assert refused["failure"] == "the script already uses autocast, with bfloat16"
    found, _ = advised(tmp_path, "--allow", "precision", "--precision", "fp32")
    assert [run["failure"] for run in found["runs"]][1:] == ["every run already has the precision fp32"]


def test_after_an_out_of_memory_the_command_is_named_and_finds_what_fits(tmp_path: Path) -> None:
    write(tmp_path, rows=65536)
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "4GiB", "-o", "oom.ampmem", "train.py")
    assert done.returncode == 1
    assert "ampmem advise --gpu 4GiB train.py\n" in done.stderr
    (tmp_path / "oom.ampmem").unlink()
    found, _ = advised(tmp_path, "--gpu", "4GiB", *NOT_COMPILED)
    assert found["runs"][0]["meets"] and found["runs"][0]["options"][0] == "--force-checkpoint"
    plain = next(run for run in found["runs"] if not run["options"])
    assert plain["allocated_bytes"] is None and plain["failure"] is None
    changes = {run["change"]: run["failure"] for run in found["runs"]}
    assert {"offload saved tensors", "expandable_segments", "autocast bfloat16", "fused=True"} < set(changes)
    failed = {change for change, failure in changes.items() if failure is not None}
    assert failed == {"loss in 8 chunks", "smaller batches"}


UPDATED = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(2000, 64), nn.Flatten(), nn.Linear(64, 64)).to(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(){argument})
for _ in range(3):
    model(torch.randint(0, 2000, (8, 1)).to(sys.argv[1])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_finding_names_the_command_that_proves_its_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UPDATED.format(argument=""))
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "h100", "-o", "run.ampmem", "train.py", "cuda")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    named = said[said.index(next(line for line in said if line.endswith("run this to prove it:"))) + 1].split()
    assert named == ["ampmem", "advise", "--gpu", "h100", "--allow", "foreach,fused", "train.py", "cuda"]
    (told,) = [each for each in summarize(read(tmp_path / "run.ampmem")).findings if each.code == "foreach-temporaries"]
    assert told.proof.split() == named
    (tmp_path / "run.ampmem").unlink()
    proven = ampmem(tmp_path, *named[1:4], "--json", *named[4:])
    runs = {run["change"]: run for run in json.loads(proven.stdout)["runs"]}
    assert told.change == "AdamW(..., fused=True)"
    assert runs["fused=True"]["saved_bytes"] == pytest.approx(told.saved, rel=0.01)  # blocks are rounded

    (tmp_path / "train.py").write_text(UPDATED.format(argument=", foreach=True"))
    done = ampmem(tmp_path, "profile", "--device", "cpu", "-o", "run.ampmem", "train.py", "cpu")
    assert "foreach-temporaries" in done.stderr and "to prove it" not in done.stderr  # which simulates no CPU


def test_a_refused_change_is_said_and_nothing_that_fits_is_exit_code_1(tmp_path: Path) -> None:
    write(tmp_path, norm="BatchNorm1d", argument=", foreach=True")
    asked = ("--budget", "600MiB", "--allow", "checkpoint,foreach,fused,loss,batch")
    found, said = advised(tmp_path, "--gpu", "h100", *asked, code=1)
    failures = {run["change"]: run["failure"] for run in found["runs"] if run["failure"] is not None}
    assert "1 has a BatchNorm1d inside" in failures["checkpoint 4 of 4 blocks"]
    assert all(
        "the script set foreach=True for AdamW itself" in failures[each] for each in ("fused=True", "foreach=False")
    )
    assert failures["smaller batches"] == "no DataLoader was seen making the script's batches"
    assert failures["loss in 8 chunks"] == "no F.cross_entropy was seen"
    assert len(failures) == 5 and "refused or failed: --force-fused: " in said and ": not tried: no DataLoader" in said


def test_ctrl_c_prints_the_runs_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", ready_python(kind=Kind.SIMULATED))
    real, made = advise_module.run_child, []

    def interrupted(arguments: Sequence[str], on_step: Callable[[StepEnded], None], *how: Any, **more: Any) -> ChildEnd:
        made.append(arguments)
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(arguments, on_step, *how, **more)

    monkeypatch.setattr(advise_module, "run_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["advise", "--json", "--jobs", "1", "train.py"])
    printed = capsys.readouterr()
    ended = [each for each in json.loads(printed.out)["runs"] if each["failure"] is None]
    assert {each["change"] for each in ended} == {"the script as it is", "checkpoint 4 of 4 blocks"}
    assert printed.err.count(" allocated, ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_page_has_the_pages_of_the_script_as_it_is_and_with_the_best_change(
    tmp_path: Path, searched: Searched
) -> None:
    write(tmp_path)
    (tmp_path / "runs.jsonl").write_text(searched.runs)
    budget, resumed = ("--budget", "1500MiB"), ("--resume", "runs.jsonl")
    options = ("--gpu", "h100", "--allow", "fused,checkpoint", *budget, *resumed, "train.py")
    before = ampmem(tmp_path, "advise", "--json", *options)
    done = ampmem(tmp_path, "advise", "--json", "--html", "advise.html", *options)
    assert (done.returncode, done.stdout) == (0, before.stdout), done.stderr
    assert done.stderr.count(": reused: ") == 5 and done.stderr.count(": peak ") == 5 + 2, "two are made again"
    best, plain = (
        next(one for one in json.loads(done.stdout)["runs"] if bool(one["options"]) is it) for it in (True, False)
    )
    for name, made in (("advise.before.html", plain), ("advise.after.html", best)):
        (shown,) = page_data((tmp_path / name).read_text())["runs"]
        assert shown["summary"]["whole_peak"]["bytes"] == made["allocated_bytes"], name
        assert f"ampmem: wrote {name}" in done.stderr
    assert "advise.after.html" in (tmp_path / "advise.html").read_text()
    again = ampmem(tmp_path, "advise", "--html", "advise.html", *options)
    assert again.returncode == 2 and "advise.html" in again.stderr and again.stderr.count("\n") == 1
    assert ampmem(tmp_path, "advise", "--force", "--html", "advise.html", *options).returncode == 0


def test_a_real_device_is_measured_and_timed(tmp_path: Path) -> None:
    script = SCRIPT.format(norm="LayerNorm", change="", argument="", rows=1024).replace("cuda", "cpu")
    (tmp_path / "train.py").write_text(script.replace("512", "128").replace("2048", "512"))
    found, said = advised(tmp_path, "--device", "cpu", "--budget", "20MiB", "--steps", "3", *NOT_COMPILED)
    assert (found["device"], found["gpu_bytes"]) == ("cpu", None)
    refused = {one["change"]: one["failure"] for one in found["runs"] if one["failure"] is not None}
    assert "memory already" in refused["offload saved tensors"] and "CUDA's" in refused["expandable_segments"]
    assert "foreach" in refused["foreach=False"] and "no DataLoader" in refused["smaller batches"]
    assert "cross_entropy" in refused["loss in 8 chunks"] and len(refused) == 5
    made = [one for one in found["runs"] if one["failure"] is None]
    for one in made:
        assert one["step_ns"] > 0 and one["cost"].startswith("a step takes ")
        assert one["reserved_bytes"] is one["device_used_bytes"] is one["step_flops"] is None
        assert one["meets"] == (one["allocated_bytes"] <= 20 << 20)
    plain = next(one for one in made if not one["options"])
    whole = next(one for one in made if one["change"] == "checkpoint 4 of 4 blocks")
    for one in (plain, whole):
        command = ("profile", "--device", "cpu", "--seed", "0", "--steps", "3", "--quiet", "--force", *one["options"])
        done = ampmem(tmp_path, *command, "-o", "one.ampmem", "train.py")
        assert done.returncode == 0, done.stderr
        assert summarize(read(tmp_path / "one.ampmem")).whole.bytes == one["allocated_bytes"], one["change"]
    assert " (" not in plain["cost"] and all(" (" in one["cost"] for one in made if one["options"])
    assert whole["saved_bytes"] == plain["allocated_bytes"] - whole["allocated_bytes"] > 0
    assert "reserved" not in said and said.count(" allocated") == len(made)


def test_an_interrupted_search_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], searched: Searched
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", ready_python(kind=Kind.SIMULATED))
    real, made = advise_module.run_child, []

    def counted(arguments: Sequence[str], on_step: Callable[[StepEnded], None], *how: Any, **more: Any) -> ChildEnd:
        made.append(arguments)
        if len(made) == stops_at:
            raise KeyboardInterrupt
        return real(arguments, on_step, *how, **more)

    monkeypatch.setattr(advise_module, "run_child", counted)
    stops_at, command = 4, ["advise", *RESUMED, *SEARCH, "train.py"]
    with pytest.raises(KeyboardInterrupt):
        run(command)
    ended = {tuple(run["options"]) for run in json.loads(capsys.readouterr().out)["runs"]}
    before, stops_at = len(made), 0
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"forced": {"check')  # a process was killed
    run(command)
    printed = capsys.readouterr()
    whole = json.loads(printed.out)["runs"]
    assert {tuple(each["options"]) for each in whole} > ended and len(ended) >= 2
    assert len(made) - before == len(whole) - len(ended), "no run twice"
    assert printed.err.count("reused: ") == len(ended)
    made.clear()
    run(["advise", *RESUMED, "--allow", "fused,checkpoint", "train.py"])
    fewer = json.loads(capsys.readouterr().out)["runs"]
    known = {tuple(each["options"]): each for each in whole}
    again = [each for each in fewer if tuple(each["options"]) in known]
    assert len(made) == len(fewer) - len(again) < len(fewer)
    assert all(each["allocated_bytes"] == known[tuple(each["options"])]["allocated_bytes"] for each in again)
    assert searched.found["runs"] == whole, "the same, whatever was interrupted"


def test_runs_of_something_else_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine\n")
    done = ampmem(tmp_path, "advise", "--resume", "notes.txt", "train.py")
    assert done.returncode == 2 and "ampmem advise did not write this file" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
    done = ampmem(tmp_path, "advise", "--allow", "foreach", "--resume", "runs.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    write(tmp_path, rows=16)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    done = ampmem(tmp_path, "advise", "--gpu", "t4", "--resume", "runs.jsonl", "train.py")
    others = "another source, another GPU, another environment of libraries;"
    assert done.returncode == 2 and f"its runs were made with {others}" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (("--steps", "1", "train.py"), 2, "--steps must be at least 2"),
        (("--allow", "magic", "train.py"), 2, "--allow: unknown change 'magic'"),
        (("--budget", "much", "train.py"), 2, "--budget: 'much' is not a size"),
        (("--gpu", "t4", "--budget", "80GiB", "train.py"), 2, "is more memory than Tesla T4 has"),
        (("--device", "auto", "train.py"), 2, "'auto' is not one of 'sim', 'cuda', 'cpu'"),
        (("--device", "cpu", "--jobs", "2", "train.py"), 2, "on a real device runs are made one by one"),
        (("--device", "cpu", "--gpu", "h100", "train.py"), 2, "leave one of them out"),
        (("--dtype", "fp16", "train.py"), 2, "--dtype is the type that autocast casts to"),
        (("nowhere.py",), 2, "nowhere.py"),
        (("short.py",), 1, "the unchanged script failed, and not because memory ran out"),
    ],
)
def test_what_cannot_be_advised_is_one_line(tmp_path: Path, options: tuple[str, ...], code: int, reason: str) -> None:
    write(tmp_path)
    (tmp_path / "short.py").write_text("raise ValueError('not today')")
    done = ampmem(tmp_path, "advise", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr.replace("    Traceback", "")


def test_an_option_of_ampmem_after_the_script_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = ampmem(tmp_path, "advise", "train.py", "--gpu", "t4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "exit code 2; --gpu is an option of ampmem: write it before train.py" in done.stderr


PROVEN = """
import os, sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop, self.calls = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1), 0
    def forward(self, x):
        self.calls += 1
        return x + {scale} * self.drop(self.down(nn.functional.gelu(self.up(x))))

device = sys.argv[1]
{setup}
model = nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(3)), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = model(torch.randn(256, 16).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def proven(folder: Path, allowed: str, *, scale: str = "1", setup: str = "") -> dict[str, dict[str, Any]]:
    (folder / "train.py").write_text(PROVEN.format(scale=scale, setup=setup))
    done = ampmem(folder, "advise", "--json", "--prove", "--allow", allowed, "train.py", "cuda")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    return {run["change"]: run["proof"] for run in runs if run["proof"] is not None}


def test_a_change_that_computes_the_same_is_proven_so(tmp_path: Path) -> None:
    found = proven(tmp_path, "checkpoint,foreach,fused")
    proof = found["foreach=False"]
    assert (proof["equal"], proof["compared_with"], proof["losses"], proof["gradients"]) == (
        True,
        "foreach=True",
        3,
        48,
    )
    for change, proof in found.items():
        if change.startswith("checkpoint") and "fused" not in change:
            assert proof["equal"] and proof["compared_with"] == "the script as it is"
    fused = found["fused=True"]
    assert fused["equal"] or 0 < fused["gradient_difference"] < 1e-4 < fused["largest_gradient"]


def test_the_finding_on_a_float32_loss_names_the_command_that_proves_it(tmp_path: Path) -> None:
    with_autocast = CLASSIFIED.replace("    loss = ", "    with torch.autocast(device, torch.bfloat16): loss = ")
    (tmp_path / "train.py").write_text(
        with_autocast.replace("256", "4096").replace("64, 500)", "64, 5000, bias=False)")
    )
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "h100", "-o", "run.ampmem", "train.py", "cuda")
    assert done.returncode == 0, done.stderr
    (told,) = [each for each in summarize(read(tmp_path / "run.ampmem")).findings if each.code == "fp32-activations"]
    (tmp_path / "run.ampmem").unlink()
    assert told.proof == "ampmem advise --gpu h100 --allow loss train.py cuda" and told.saved > 0
    proven = ampmem(tmp_path, "advise", "--json", *told.proof.split()[2:])
    runs = {made["change"]: made for made in json.loads(proven.stdout)["runs"]}
    assert runs["loss in 8 chunks"]["saved_bytes"] >= told.saved, "what backward makes of all rows is saved as well"


CLASSIFIED = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

device = sys.argv[1]
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 500)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(256, 16).to(device)), torch.randint(500, (256,)).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loss_in_chunks_is_proven_as_near_as_its_sum_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLASSIFIED)
    done = ampmem(tmp_path, "advise", "--json", "--prove", "--allow", "loss", "train.py", "cuda")
    assert done.returncode == 0, done.stderr
    (proof,) = [made["proof"] for made in json.loads(done.stdout)["runs"] if made["change"] == "loss in 8 chunks"]
    assert (proof["compared_with"], proof["losses"], proof["gradients"]) == ("the script as it is", 3, 12)
    assert proof["failure"] is None and proof["gradient_difference"] < 1e-6 * proof["largest_gradient"]
    assert proof["loss_difference"] < 1e-5 < proof["largest_loss"]


@pytest.mark.parametrize(("change", "scale"), [("checkpoint", "self.calls"), ("precision", "1")])
def test_a_change_that_computes_something_else_is_said_to(tmp_path: Path, change: str, scale: str) -> None:
    (proof,) = proven(tmp_path, change, scale=scale).values()
    assert proof["equal"] is False and proof["gradient_difference"] > 1e-4
    assert proof["failure"] is None


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (
            "torch.manual_seed(int.from_bytes(os.urandom(4), 'big'))",
            "two runs of the script as it is on the CPU differ",
        ),
        ("device = 'cuda'", "the script as it is on the CPU: "),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, setup: str, reason: str) -> None:
    (proof,) = proven(tmp_path, "checkpoint", setup=setup).values()
    assert proof["equal"] is None and proof["failure"].startswith(reason)
