"""Forced changes of compiled code allocate what the same changes do that are written in the script."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ampmem
from support.compiled import needs_the_compiler
from support.page_reader import page_data
from support.ready_python import Kind, ready_python
from torch import nn

from ampmem.analysis.summary import summarize
from ampmem.recorder.steering.changes import ForcedChanges
from ampmem.recording import read
from ampmem.reporters.text.difference import CHANGES
from ampmem.units import format_bytes
from ampmem.vocabulary import Forced

pytestmark = [pytest.mark.slow, needs_the_compiler]

SCRIPT = """
import functools
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(64, 64)
    def forward(self, x, y):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return {loss}

model = Model().cuda()
{change}
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(512, 64, device="cuda"), torch.randint(64, (512,), device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOSS = "F.cross_entropy(self.head(x), y)"
CHUNKED = (
    "torch.stack([checkpoint(F.cross_entropy, *part, reduction='sum', use_reentrant=False) "
    "for part in zip(self.head(x).chunk(4), y.chunk(4))]).sum() / (y != -100).sum()"
)
IN_PLACE, WRAPPED = "model.compile()", "model = torch.compile(model)"
CHECKPOINTS = (
    "for block in model.blocks: block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)\n"
)
BUDGET = "import torch._functorch.config; torch._functorch.config.activation_memory_budget = 0.5\n"
PAIRS = {
    "--force-compile false": ("model = torch.compile(model, mode='reduce-overhead')", "", LOSS),
    "--force-activation-memory-budget 0.5": (WRAPPED, BUDGET + WRAPPED, LOSS),
    "--force-compile true --force-checkpoint blocks.*": ("", CHECKPOINTS + IN_PLACE, LOSS),
    "--force-checkpoint _orig_mod.blocks.* --force-chunked-loss 4": (WRAPPED, CHECKPOINTS + WRAPPED, CHUNKED),
}
"""Options, with the change of the script that they are given for; the change that is written instead, and the loss."""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of compiled code for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def write(folder: Path, change: str, loss: str = LOSS) -> None:
    (folder / "train.py").write_text(SCRIPT.format(change=change, loss=loss))


def recorded(folder: Path, options: str, change: str, loss: str = LOSS) -> tuple[Counter[Any], list[Any], list[str]]:
    """The allocations and frees, the peaks and what is left after forward of each step, and the notes."""
    write(folder, change, loss)
    command = ("profile", "--gpu", "h100", "--seed", "0", "--steps", "2", "--quiet", "--force", "-o", "run.ampmem")
    done = ampmem(folder, *command, *options.split(), "train.py")
    assert done.returncode == 0, done.stderr
    recording = read(folder / "run.ampmem")
    steps = [(step.peak.said, step.marks.after_forward) for step in summarize(recording).steps]
    events = Counter(zip(recording.events.action.tolist(), recording.events.bytes.tolist(), strict=True))
    return events, steps, list(recording.remarks)


@pytest.mark.parametrize("options", PAIRS)
def test_a_forced_change_allocates_what_the_written_one_does(tmp_path: Path, options: str) -> None:
    given, written, loss = PAIRS[options]
    forced, expected = recorded(tmp_path, options, given), recorded(tmp_path, "", written, loss)
    assert forced[:2] == expected[:2]
    assert len([note for note in forced[2] if note.startswith("forced: ")]) == options.count("--")
    graphs = [[note for note in notes if note.startswith("torch.compile made")] for _, _, notes in (forced, expected)]
    assert graphs[0] == graphs[1]
    assert ("torch.compile made 1 graph" in graphs[0]) == (options != "--force-compile false")


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ("--force-compile true", WRAPPED, "the script calls torch.compile itself"),
        ("--force-compile false", "", "the script compiles nothing"),
        ("--force-activation-memory-budget 0.5", "", "the script compiles nothing with Inductor"),
    ],
)
def test_a_change_that_is_not_made_is_said(tmp_path: Path, options: str, change: str, reason: str) -> None:
    write(tmp_path, change)
    done = ampmem(tmp_path, "profile", "--gpu", "h100", "--quiet", *options.split(), "train.py")
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]


def test_compiled_code_that_keeps_less_is_advised_with_the_flops_that_it_computes_again(tmp_path: Path) -> None:
    write(tmp_path, IN_PLACE)
    done = ampmem(tmp_path, "advise", "--json", "--gpu", "h100", "--allow", "compile,memory-budget", "train.py")
    assert done.returncode == 0, done.stderr
    runs = {run["change"]: run for run in json.loads(done.stdout)["runs"]}
    plain = runs.pop("the script as it is")
    assert runs.keys() == {f"activation_memory_budget {share}" for share in (0.75, 0.5, 0.25)}
    for run in runs.values():
        # The same products and others again: what is executed with the change less what is without.
        assert run["recomputed_flops"] == run["step_flops"] - plain["step_flops"]
    least = runs["activation_memory_budget 0.25"]
    up = 2 * 512 * 64 * 256
    assert (plain["recomputed_flops"], least["recomputed_flops"] % up) == (0, 0)
    assert least["recomputed_flops"] >= up
    assert f"recomputes {least['recomputed_flops'] / plain['step_flops']:.1%}".replace("%", " %") in least["cost"]


def test_precisions_are_compared_with_compile_and_without(tmp_path: Path) -> None:
    write(tmp_path, WRAPPED)
    command = ("--gpu", "h100", "--precision", "fp32", "--compile", "-o", "run", "train.py")
    done = ampmem(tmp_path, "compare", "--html", "run.html", *command)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.ampmem")} == {"run.fp32.ampmem", "run.fp32-uncompiled.ampmem"}
    compiled, uncompiled = (read(tmp_path / f"run.{name}.ampmem") for name in ("fp32", "fp32-uncompiled"))
    assert (compiled.precision.name, summarize(compiled).steps[-1].marks.after_forward["cast_copies"]) == ("fp32", 0)
    before, after = (sum(summarize(each).steps[-1].peak.categories.values()) for each in (uncompiled, compiled))
    _, _, found = done.stdout.partition("what compiling changes: fp32\n")
    (total,) = (line.split("  ") for line in found.splitlines() if line.startswith("total "))
    assert [each.strip() for each in total if each][1:3] == [format_bytes(before), format_bytes(after)]
    _, _, changes = found.partition("what changed\n")
    assert "  activations  blocks." in changes
    assert "_orig_mod" not in changes
    printed = ampmem(tmp_path, "compare", "--json", "--force", *command)
    assert printed.returncode == 0, printed.stderr
    *summaries, difference = json.loads(printed.stdout)
    assert [each["schema"] for each in summaries] == ["ampmem.summary/1"] * 2
    assert (difference["label_before"], difference["label_after"]) == ("fp32 uncompiled", "fp32")
    assert (difference["before"], difference["after"]) == (before, after)
    assert sum(each["after"] - each["before"] for each in difference["changes"]) == after - before
    (tmp_path / "run.json").write_text(printed.stdout, encoding="utf-8")
    assert ampmem(tmp_path, "report", "run.json", "-o", "printed.html").returncode == 0
    for page in ("run.html", "printed.html"):
        ((title, rows),) = page_data((tmp_path / page).read_text(encoding="utf-8"))["comparison"]["compiling"]
        assert title == "What compiling changes: fp32"
        assert all(" ".join(row) in " ".join(changes.split()) for row in rows[:CHANGES])


def test_a_mode_that_is_refused_is_a_line_and_the_rest_is_compared(tmp_path: Path) -> None:
    write(tmp_path, "model = torch.compile(model, mode='reduce-overhead')")
    command = ("compare", "--gpu", "h100", "--precision", "fp32", "--compile", "-o", "run", "train.py")
    done = ampmem(tmp_path, *command)
    assert done.returncode == 1
    assert [path.name for path in tmp_path.glob("*.ampmem")] == ["run.fp32-uncompiled.ampmem"]
    (refused,) = (line for line in done.stderr.splitlines() if line.startswith("1 of 2: fp32: failed: "))
    assert "reduce-overhead" in refused
    assert "2 of 2: fp32 uncompiled: 3 steps, peak" in done.stderr


COUNTED = """
from torch._dynamo.utils import counters
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


def test_of_two_runs_at_once_one_compiles_each_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path, WRAPPED)
    with (tmp_path / "train.py").open("a") as file:
        file.write(COUNTED)
    command = [ready_python(kind=Kind.SIMULATED), "-m", "ampmem", "profile", "--gpu", "h100", "--quiet", "--run-to-end"]
    running = [
        subprocess.Popen(
            [*command, "-o", f"{name}.ampmem", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    counted = sorted(child.communicate()[0].splitlines()[-1] for child in running)
    assert counted == ["0 2", "2 0"]


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dynamo compile by a backend that makes nothing."""
    real: Callable[..., Any] = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: real(model, backend="eager"))


def test_nothing_of_a_forced_change_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)
    places = [(torch, "compile"), (nn.Module, "compile"), (nn.Module, "__call__"), (nn.functional, "cross_entropy")]
    before = [vars(owner)[name] for owner, name in places]
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    attributes = [set(vars(each)) for each in model.modules()]
    notes: list[str] = []
    forced = ForcedChanges(Forced(compile=True, checkpoint=("0",), loss_chunks=2), notes.append)
    undo = forced.install()
    for _ in range(2):
        nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    assert forced.unmet() == []
    assert len(notes) == 3
    assert "_compiled_call_impl" in vars(model)
    undo()
    assert [set(vars(each)) for each in model.modules()] == attributes
    assert [vars(owner)[name] for owner, name in places] == before
    torch.compiler.reset()
