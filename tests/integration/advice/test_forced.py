"""Changes forced on a script allocate what the same changes do that are written in it, event by event."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.commands import ampmem
from torch.utils.checkpoint import checkpoint

from ampmem.analysis.summary import summarize
from ampmem.events import Action, Recording
from ampmem.recorder.steering.changes import ForcedChanges
from ampmem.recording import read
from ampmem.vocabulary import Forced

pytestmark = pytest.mark.slow

SCRIPT = """
{first}
import functools
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)
    def forward(self, x, *, scale=1.0):
        return x + scale * self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range({blocks})), nn.Linear(64, 8)
    def forward(self, x):
        for block in self.blocks:
            x = {call}
        return self.head(x)

model = Model().cuda()
{setup}
optimizer = {optimizer}
for step in {batches}:
    {in_step}
    loss = model({batch}).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("the script ends")
"""
PLAIN = {
    "blocks": "4",
    "call": "block(x, scale=0.5)",
    "setup": "",
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "in_step": "",
    "first": "",
    "batches": "range(3)",
    "batch": 'torch.randn(512, 64, device="cuda")',
}
WRITTEN = {
    "--force-checkpoint blocks.0,blocks.[23]": {
        "setup": "for i in (0, 2, 3): model.blocks[i].forward = "
        "functools.partial(checkpoint, model.blocks[i].forward, use_reentrant=False)"
    },
    "--force-offload": {
        "setup": "forward = model.forward\n"
        "def moved(x):\n    with torch.autograd.graph.save_on_cpu(): return forward(x)\n"
        "model.forward = moved"
    },
    "--force-offload --force-checkpoint blocks.*": {
        "setup": "forward = model.forward\n"
        "def moved(x):\n    with torch.autograd.graph.save_on_cpu(): return forward(x)\n"
        "model.forward = moved\n"
        "for block in model.blocks: "
        "block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    },
    "--force-foreach false": {"optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)"},
    "--force-foreach true": {"optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)"},
    "--force-fused": {"optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)"},
}
"""Options, and the same change written in the script."""


@contextmanager
def forcing(forced: Forced, notes: list[str] | None = None) -> Iterator[ForcedChanges]:
    """The changes while they are in place; ``notes`` gets what is said of them."""
    changes = ForcedChanges(forced, [].append if notes is None else notes.append)
    undo = changes.install()
    try:
        yield changes
    finally:
        undo()


def run(folder: Path, name: str, options: str, device: str = "sim", **parts: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT.format(**(PLAIN | parts)))
    command = ("profile", "--device", device, "--steps", "2", "--seed", "0", "--quiet", "-o", f"{name}.ampmem")
    done = ampmem(folder, *command, *options.split(), "train.py")
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The script as it is."""
    return recorded(tmp_path_factory.mktemp("plain"), "plain", "")


def recorded(folder: Path, name: str, options: str, **parts: str) -> Recording:
    code, said = run(folder, name, options, **parts)
    assert code == 0, said
    return read(folder / f"{name}.ampmem")


def events(recording: Recording) -> list[tuple[int, int]]:
    found = recording.events
    return list(zip(found.action.tolist(), found.bytes.tolist(), strict=True))


@pytest.mark.parametrize("options", WRITTEN)
def test_a_forced_change_allocates_what_the_written_one_does(tmp_path: Path, options: str, plain: Recording) -> None:
    forced = recorded(tmp_path, "forced", options)
    written = recorded(tmp_path, "written", "", **WRITTEN[options])
    assert events(forced) == events(written)
    # foreach is what torch takes on a GPU that is not told: forcing it changes nothing
    assert (events(forced) == events(plain)) == (options == "--force-foreach true")
    assert any(note.startswith("forced: ") for note in forced.remarks)
    assert not any("forced: " in note for note in written.remarks)


LATE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(512, 64, device="cuda")).square().mean()
    {zero}
    loss.backward()
    optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    "zero", ["optimizer.zero_grad()", "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)"]
)
def test_gradients_that_are_freed_after_the_update_are_freed_as_by_zero_grad_there(tmp_path: Path, zero: str) -> None:
    def made(name: str, *options: str, after: str = "") -> Recording:
        (tmp_path / "late.py").write_text(LATE.format(zero=zero, after=after))
        done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "-o", f"{name}.ampmem", *options, "late.py")
        assert done.returncode == 0, done.stderr
        return read(tmp_path / f"{name}.ampmem")

    written, forced = made("written", after="optimizer.zero_grad()"), made("forced", "--force-free-gradients")
    # What is written runs after the last update no more: the script is stopped there.
    last = [(Action.FREE, 4 * size) for size in (64 * 512, 512, 512 * 8, 8)]
    assert events(forced) == [*events(written), *last]
    assert "forced: gradients are set to None after each update of AdamW" in forced.remarks


def test_gradients_that_a_script_never_zeroes_are_not_freed(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE.format(zero="", after=""))
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--force-free-gradients", "late.py")
    assert done.returncode == 1
    assert "the script calls no zero_grad(), so gradients may add up over several updates" in done.stderr


EXPANDABLE = "--force-allocator expandable_segments:True"


def test_a_forced_setting_of_the_allocator_reserves_what_the_written_one_does(tmp_path: Path, plain: Recording) -> None:
    forced = recorded(tmp_path, "forced", EXPANDABLE)
    line = "import os; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'"
    written = recorded(tmp_path, "written", "", first=line)
    assert events(plain) == events(forced) == events(written)
    assert reserved(forced) == reserved(written) != reserved(plain)
    assert forced.segments.expandable.all() and not plain.segments.expandable.any()


def test_forced_workspaces_are_those_of_the_environment(tmp_path: Path, plain: Recording) -> None:
    forced = recorded(tmp_path, "forced", "--force-workspace :16:8")
    line = "import os; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'"
    written = recorded(tmp_path, "written", "", first=line)
    assert events(forced) == events(written)
    sizes = [{size for action, size in events(each) if action == Action.ALLOC} for each in (plain, forced)]
    assert [8_519_680 in each for each in sizes] == [True, False]  # that of an A100


def test_workspaces_that_cannot_be_forced_are_said_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(config: str, device: str = "sim") -> str:
        code, text = run(tmp_path, "run", f"--force-workspace {config}", device)
        assert code == 2
        return text

    assert "write :KiB:COUNT, once or several times, such as :4096:2:16:8" in said("16MiB")
    assert "cuBLAS's workspaces, which the CPU does not use; leave it out" in said(":16:8", "cpu")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    assert "CUBLAS_WORKSPACE_CONFIG is already :4096:2" in said(":16:8")


def reserved(recording: Recording) -> list[tuple[int, int, int]]:
    found = recording.segments
    return list(zip(found.position.tolist(), found.action.tolist(), found.bytes.tolist(), strict=True))


LOSS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.nn.functional import cross_entropy as imported

def in_chunks(logits, target, *, ignored=-100, mean=True):
    parts = zip(logits.chunk(3), target.chunk(3))
    how = dict(ignore_index=ignored, reduction="sum", use_reentrant=False)
    sums = [checkpoint(F.cross_entropy, *part, **how) for part in parts]
    total = torch.stack(sums).sum()
    return total / (target != ignored).sum() if mean else total

model = nn.Linear(64, 5000, bias=False).cuda()  # autocast frees several copies in any order
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled={autocast}):
        logits, target = model(torch.randn(1000, 64, device="cuda")), torch.randint(5000, (1000,), device="cuda")
        loss = {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOSSES = {
    "F.cross_entropy(logits, target)": "in_chunks(logits, target)",
    "imported(logits, target, reduction='sum')": "in_chunks(logits, target, mean=False)",
    "nn.CrossEntropyLoss(ignore_index=7)(logits, target)": "in_chunks(logits, target, ignored=7)",
}
"""Losses, and the same in three chunks written in the script."""
IN_CHUNKS = "--force-chunked-loss 3"


def lossy(folder: Path, name: str, options: str, loss: str, *, autocast: bool = True) -> tuple[int, str]:
    (folder / "train.py").write_text(LOSS.format(loss=loss, autocast=autocast))
    command = ("profile", "--device", "sim", "--steps", "2", "--seed", "0", "--quiet", "-o", f"{name}.ampmem")
    done = ampmem(folder, *command, *options.split(), "train.py")
    return done.returncode, done.stderr


@pytest.mark.parametrize(("loss", "autocast"), zip(LOSSES, (True, False, True), strict=True))
def test_a_forced_loss_in_chunks_allocates_what_the_written_one_does(tmp_path: Path, loss: str, autocast: bool) -> None:
    made = (("plain", "", loss), ("forced", IN_CHUNKS, loss), ("written", "", LOSSES[loss]))
    for name, options, each in made:
        code, said = lossy(tmp_path, name, options, each, autocast=autocast)
        assert code == 0, said
    plain, forced, written = (read(tmp_path / f"{name}.ampmem") for name, _, _ in made)
    assert events(forced) == events(written) != events(plain)
    assert "forced: cross_entropy in 3 chunks, each under activation checkpointing" in forced.remarks
    # backward of the plain one has the log-softmax and its gradient of all rows, that in chunks of a third of them
    rows = 4 * 5000 * 1000
    assert summarize(plain).whole.bytes - summarize(forced).whole.bytes > rows


NOT_IN_CHUNKS = {
    "F.cross_entropy(logits, target, weight=torch.ones(50))": "gives cross_entropy class weights",
    "F.cross_entropy(logits, target, label_smoothing=0.1)": "gives cross_entropy label_smoothing",
    "F.cross_entropy(logits, target, reduction='none').mean()": "reduction='none', which keeps a value for each row",
    "F.cross_entropy(logits, target, size_average=False)": "size_average or reduce, which torch has deprecated",
    "F.cross_entropy(logits.view(2, 10, -1).transpose(1, 2), target.view(2, 10))": "the logits have 3 dimensions",
    "F.cross_entropy(logits, logits.detach().softmax(1))": "the targets are probabilities, not classes",
    "F.cross_entropy(logits[:2], target[:2])": "the logits have 2 rows, fewer than chunks",
    "checkpoint(F.cross_entropy, logits, target, use_reentrant=False)": "the loss under torch.utils.checkpoint itself",
    "logits.log_softmax(1).mean()": "the script did not call F.cross_entropy with gradients on",
    "logits.mean() + 0 * F.cross_entropy(logits.detach(), target)": "did not call F.cross_entropy with gradients on",
}
"""Losses that are not computed in chunks, and why."""


@pytest.mark.parametrize("loss", NOT_IN_CHUNKS)
def test_a_loss_that_is_no_sum_of_chunks_is_left_as_it_is(loss: str) -> None:
    logits, target = torch.randn(20, 50, requires_grad=True), torch.randint(50, (20,))
    names = {"torch": torch, "F": torch.nn.functional, "checkpoint": checkpoint, "logits": logits, "target": target}
    expected = eval(loss, names)
    with forcing(Forced(loss_chunks=3)) as changes:
        found = eval(loss, names)
        found.backward()
    (said,) = changes.unmet()
    assert said.startswith(f"{IN_CHUNKS}: ") and NOT_IN_CHUNKS[loss] in said
    assert torch.equal(found, expected) and type(found.grad_fn) is type(expected.grad_fn)


def test_a_loss_that_is_left_as_it_is_fails_the_run_and_allocates_the_same(tmp_path: Path) -> None:
    loss, reason = "F.cross_entropy(logits, target, label_smoothing=0.1)", "gives cross_entropy label_smoothing"
    code, said = lossy(tmp_path, "refused", IN_CHUNKS, loss)
    assert code == 1, said
    assert said.splitlines()[-1].startswith(f"ampmem: {IN_CHUNKS}: ") and reason in said.splitlines()[-1]
    assert lossy(tmp_path, "plain", "", loss)[0] == 0
    assert events(read(tmp_path / "refused.ampmem")) == events(read(tmp_path / "plain.ampmem"))


def test_the_loss_and_the_gradients_in_chunks_are_those_of_the_whole() -> None:
    logits, target = torch.randn(50, 7, dtype=torch.float64), torch.randint(7, (50,))
    target[3:20] = -100
    cross_entropy = torch.nn.functional.cross_entropy
    for how in ("mean", "sum"):
        whole, parts = (logits.clone().requires_grad_() for _ in range(2))
        expected = cross_entropy(whole, target, reduction=how)
        expected.backward()
        with forcing(Forced(loss_chunks=8)) as changes:
            wrapped = torch.nn.functional.cross_entropy
            loss = wrapped(parts, target, reduction=how)
            loss.backward()
            assert changes.unmet() == []
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(parts.grad, whole.grad)
        assert torch.nn.functional.cross_entropy is cross_entropy
        weight = torch.ones(7, dtype=torch.float64)
        again = wrapped(logits.clone().requires_grad_(), target, weight=weight, reduction=how)
        torch.testing.assert_close(again, expected)
        assert changes.unmet() == [], "what the script has imported does nothing of ours any more"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_is_in_chunks_too(backend: str) -> None:
    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, target)

    torch.compiler.reset()
    with forcing(Forced(loss_chunks=4)) as changes:
        logits, target = torch.randn(50, 7, requires_grad=True), torch.randint(7, (50,))
        torch.compile(loss_of, backend=backend, fullgraph=True)(logits, target).backward()
        assert changes.unmet() == []
    torch.compiler.reset()


def loader(size: str) -> dict[str, str]:
    data = f"torch.utils.data.DataLoader(torch.randn(1024, 64), {size}, shuffle=True)"
    return {"batches": data, "batch": "step.cuda()"}


def test_a_forced_batch_allocates_what_the_written_one_does(tmp_path: Path) -> None:
    plain = recorded(tmp_path, "plain", "", **loader("256"))
    forced = recorded(tmp_path, "forced", "--force-batch-size 64", **loader("256"))
    written = recorded(tmp_path, "written", "", **loader("batch_size=64"))
    assert events(forced) == events(written) != events(plain)
    assert [step.batch_size for step in forced.steps] == [64] * 2
    assert "forced: DataLoader(batch_size=64) instead of 256" in forced.remarks


GPU_OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)"
REFUSED = {
    "no such module": ("--force-checkpoint layers.*", {}, "the model that ran has no module with such a name"),
    "a list": ("--force-checkpoint blocks", {}, "blocks is a ModuleList, which has no forward of its own"),
    "batch norm": (
        "--force-checkpoint blocks.*",
        {"setup": "model.blocks[1].norm = nn.BatchNorm1d(64).cuda()"},
        "blocks.1 has a BatchNorm1d inside, whose running statistics a second forward would change",
    ),
    "checkpointed": (
        "--force-checkpoint blocks.0",
        {"call": "checkpoint(block, x, use_reentrant=False)"},
        "the script checkpoints blocks.0 itself",
    ),
    "a forward of its own": (
        "--force-checkpoint blocks.0",
        {"setup": "model.blocks[0].forward = model.blocks[0].forward"},
        "blocks.0 has a forward that the script or a library has replaced",
    ),
    "hooks of its own": (
        "--force-offload",
        {"in_step": "torch.autograd.graph.save_on_cpu().__enter__()"},
        "the script has its own saved-tensor hooks around Model",
    ),
    "a model's forward of its own": (
        "--force-offload",
        {"setup": "model.forward = model.forward"},
        "Model has a forward that the script or a library has replaced",
    ),
    "chosen": ("--force-foreach false", {"optimizer": GPU_OPTIMIZER}, "the script set foreach=True for AdamW itself"),
    "chosen, not fused": (
        "--force-fused",
        {"optimizer": GPU_OPTIMIZER},
        "the script set foreach=True for AdamW itself",
    ),
    "for a group": (
        "--force-foreach false",
        {"optimizer": "torch.optim.AdamW([dict(params=model.parameters(), foreach=True)], lr=1e-3)"},
        "the script set foreach itself for a parameter group of AdamW",
    ),
    "never fused": (
        "--force-fused",
        {"optimizer": "torch.optim.RMSprop(model.parameters(), lr=1e-3)"},
        "RMSprop has no fused implementation",
    ),
    "undone": (
        "--force-foreach false",
        {"in_step": "optimizer.param_groups[0]['foreach'] = None"},
        "the script has changed foreach of AdamW back",
    ),
    "other settings": (
        EXPANDABLE,
        {"first": "import os; os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:64'"},
        "the script has set the allocator to max_split_size_mb:64",
    ),
    "no loader": ("--force-batch-size 4", {}, "the script created no DataLoader with a larger batch size"),
    "small batches": (
        "--force-batch-size 512",
        loader("256"),
        ("the script created no DataLoader with a larger batch size"),
    ),
    "a sampler": (
        "--force-batch-size 4",
        {
            "batches": "torch.utils.data.DataLoader(torch.randn(8, 64), batch_sampler=[[0, 1], [2, 3], [4, 5]])",
            "batch": "step.cuda()",
        },
        "a DataLoader takes its batches from the script's own batch_sampler",
    ),
    "no batches": (
        "--force-batch-size 4",
        {"batches": "torch.utils.data.DataLoader(torch.randn(4, 8, 64), batch_size=None)", "batch": "step.cuda()"},
        "a DataLoader of the script makes no batches (batch_size=None)",
    ),
    "statistics of a batch": (
        "--force-batch-size 64",
        loader("256") | {"setup": "model.blocks[1].norm = nn.BatchNorm1d(64).cuda()"},
        "the model has BatchNorm1d, whose statistics depend on the batch",
    ),
}
"""Options, what the script has, and why the change is not made."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_is_not_made_is_an_error(tmp_path: Path, case: str) -> None:
    options, parts, reason = REFUSED[case]
    code, said = run(tmp_path, "refused", options, **{"blocks": "2"} | parts)
    assert code == 1, said
    assert said.splitlines()[-1].startswith(f"ampmem: {options}: ") and reason in said.splitlines()[-1]
    assert "Traceback" not in said
    assert (tmp_path / "refused.ampmem").exists()


def test_fused_and_foreach_exclude_each_other(tmp_path: Path) -> None:
    code, said = run(tmp_path, "both", "--force-fused --force-foreach false")
    assert code == 2 and "exclude each other" in said
    code, said = run(tmp_path, "none", "--force-checkpoint a,")
    assert code == 2 and "--force-checkpoint needs names of modules" in said


def test_settings_that_cannot_be_forced_are_said_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = run(tmp_path, "cpu", EXPANDABLE, device="cpu")
    assert (
        code == 2
        and "--force-allocator sets the CUDA caching allocator, which the CPU does not use; leave it out" in said
    )
    code, said = run(tmp_path, "unknown", "--force-allocator no_such:True")
    assert code == 2 and "--force-allocator no_such:True: unknown allocator option 'no_such'" in said
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert recorded(tmp_path, "beside", EXPANDABLE).allocator.settings == (  # type: ignore[union-attr]
        "max_split_size_mb:64,expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    code, said = run(tmp_path, "taken", EXPANDABLE)
    assert code == 2 and "PYTORCH_CUDA_ALLOC_CONF already has expandable_segments" in said


def test_what_torch_cannot_fuse_is_left_as_it_is() -> None:
    notes: list[str] = []
    before = {kind: dict(vars(kind)) for kind in (torch.optim.Optimizer, torch.optim.Adam, torch.optim.AdamW)}
    with forcing(Forced(fused=True), notes) as changes:
        parameters = [torch.nn.Parameter(torch.zeros(2))]
        assert torch.optim.AdamW(iter(parameters)).defaults["fused"] is True
        assert changes.unmet() == [] and notes == ["forced: AdamW(fused=True)"]
        assert torch.optim.AdamW(parameters, differentiable=True).defaults["fused"] is None
        (reason,) = changes.unmet()
        assert reason == "--force-fused: the script set differentiable=True for AdamW, which torch does not fuse"
    # torch itself marks the first optimizer of a class on its step
    assert {kind: vars(kind)["__init__"] for kind in before} == {
        kind: names["__init__"] for kind, names in before.items()
    }


def test_a_copy_of_a_model_has_nothing_of_ours_and_all_is_undone() -> None:
    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    model = torch.nn.Sequential(Block(4, 4), torch.nn.Linear(4, 4))
    forward = Block.forward, torch.nn.Linear.forward
    with forcing(Forced(checkpoint=("*",))) as changes:
        loss = model(torch.ones(2, 4)).sum()
        copied = copy.deepcopy(model)
        assert (Block.forward, torch.nn.Linear.forward) != forward
        loss.backward()
    assert changes.unmet() == []
    assert (Block.forward, torch.nn.Linear.forward) == forward
    assert all("forward" not in vars(each) for each in (*model.modules(), *copied.modules()))
    first = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    again = [each.grad for each in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


RESULTS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    print(loss.item(), *(each.grad.double().sum().item() for each in model.parameters()), torch.rand(1).item())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_results_and_the_random_numbers_are_those_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESULTS)
    printed = []
    for options in ((), ("--force-checkpoint", "2"), ("--force-foreach", "false"), ("--force-offload",)):
        command = ("profile", "--device", "cpu", "--run-to-end", "--quiet", "--force", *options, "train.py")
        done = ampmem(tmp_path, *command)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(printed[0].splitlines()) == 3
    assert set(printed) == {printed[0]}


class Two(torch.nn.Module):
    """Calls the second block only."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([first, second])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called: torch.Tensor = self.blocks[1](x)
        return called


def unmet_after(model: torch.nn.Module, pattern: str, *, grad: bool = True, calls: int = 1) -> list[str]:
    """What is said of checkpointing the modules of ``model`` that ``pattern`` names, once it has run."""
    with forcing(Forced(checkpoint=(pattern,))) as changes, torch.set_grad_enabled(grad):
        for _ in range(calls):
            model(torch.ones(2, 4))
    return changes.unmet()


def compiled_in_place() -> torch.nn.Module:
    module = torch.nn.Linear(4, 4)
    module.compile()
    return module


UNTOUCHABLE: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "torch.compile": (lambda: torch.compile(torch.nn.Linear(4, 4)), "is compiled"),  # type: ignore[return-value]
    "module.compile": (compiled_in_place, "is compiled"),
    "torch.jit.script": (lambda: torch.jit.script(torch.nn.Linear(4, 4)), "is a ScriptModule"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", UNTOUCHABLE)
def test_what_has_no_forward_in_python_is_refused(how: str) -> None:
    make, reason = UNTOUCHABLE[how]
    (said,) = unmet_after(Two(make(), torch.nn.Linear(4, 4)), "blocks.0")
    assert said.startswith(f"--force-checkpoint blocks.0: blocks.0 {reason}")


def test_what_runs_without_gradients_is_not_offloaded() -> None:
    with forcing(Forced(offload=True)) as changes:
        with torch.no_grad():
            torch.nn.Linear(4, 4)(torch.ones(2, 4))
        assert changes.unmet() == ["--force-offload: no model ran forward with gradients on"]
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        assert changes.unmet() == []


def test_modules_that_run_without_gradients_only_are_not_checkpointed() -> None:
    model = Two(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    reason = "none of the modules ran forward with gradients on"
    assert unmet_after(model, "blocks.*", grad=False) == [f"--force-checkpoint blocks.*: {reason}"]
    assert unmet_after(model, "blocks.0") == [f"--force-checkpoint blocks.0: {reason}"]
    assert unmet_after(model, "blocks.*") == []


class Counting(torch.nn.Linear):
    """Counts its calls in a buffer, from the second on."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(4, 4)
        self.in_place, self.warm = in_place, False
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.warm and self.in_place:
            self.calls += 1
        elif self.warm:
            self.calls = self.calls + 1
        self.warm = True
        return super().forward(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_forward_that_changes_a_buffer_is_noticed(in_place: bool) -> None:
    changed = "blocks.1 changes its buffer counter.calls in forward, and recomputation would change it again"
    for calls, expected in ((1, []), (2, [f"--force-checkpoint blocks.*: {changed}"])):
        block = torch.nn.Sequential()
        block.add_module("counter", Counting(in_place=in_place))
        assert unmet_after(Two(torch.nn.Linear(4, 4), block), "blocks.*", calls=calls) == expected


def test_batch_norm_that_trains_only_later_is_noticed() -> None:
    block = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), block).eval()
    assert unmet_after(model, "1") == []
    (said,) = unmet_after(model.train(), "1")
    assert "has a BatchNorm1d inside" in said
    with forcing(Forced(checkpoint=("1",))) as changes:
        model.eval()(torch.ones(2, 4))
        model.train()(torch.ones(2, 4))
    (said,) = changes.unmet()
    assert "1 changes its buffer 0." in said
