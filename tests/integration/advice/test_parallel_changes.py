"""Changes of how training is spread over ranks, forced and written: the allocator's events are the same, one by one."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.commands import ampmem

from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings import findings
from ampmem.events import Recording
from ampmem.recording import read

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(100, 400), nn.Linear(400, 100)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

dist.init_process_group("nccl")
device = f"cuda:{os.environ['LOCAL_RANK']}"
torch.cuda.set_device(device)
model = nn.Sequential(*(Block() for _ in range(3))).to(device)
def before():
    pass
WRAP
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    before()
    model(torch.randn(64, 100, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = "model = DistributedDataParallel(model{})"
FSDP2 = "for each in (*model, model): fully_shard(each{})"
FSDP1 = "model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([Block]){})"
KEPT, RESHARDED = ", reshard_after_forward=False", ", reshard_after_forward=True"
VIEWS, ZERO2 = ", gradient_as_bucket_view=True", ", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP"
BF16 = "(param_dtype=torch.bfloat16, reduce_dtype=torch.float32"
RESULTS = "output_dtype=torch.float32)"
TWICE = """
def before():
    model.set_requires_gradient_sync(False)
    model(torch.randn(64, 100, device=device)).square().mean().backward()
    model.set_requires_gradient_sync(True)
"""
TWICE_FSDP1 = """
def before():
    with model.no_sync():
        model(torch.randn(64, 100, device=device)).square().mean().backward()
"""
UNREDUCED = "\nmodel.set_requires_gradient_sync(False)"
ALONE = "; each.set_modules_to_backward_prefetch([each])"
CHANGES = {
    "no prefetch": ("--force-no-prefetch", FSDP2.format(""), FSDP2.format("") + ALONE),
    "no prefetch of the older one": ("--force-no-prefetch", FSDP1.format(""), FSDP1.format(", backward_prefetch=None")),
    "a policy": ("--force-policy", FSDP2.format(""), FSDP2.format(f", mp_policy=MixedPrecisionPolicy{BF16})")),
    "a policy of the older one": (
        "--force-policy",
        FSDP1.format(""),
        FSDP1.format(f", mixed_precision=MixedPrecision{BF16})"),
    ),
    "the rest of a policy": (
        "--force-policy",
        FSDP2.format(f", mp_policy=MixedPrecisionPolicy({RESULTS}"),
        FSDP2.format(f", mp_policy=MixedPrecisionPolicy{BF16}, {RESULTS}"),
    ),
    "a view by default": ("--force-bucket-view", DDP.format(""), DDP.format(VIEWS)),
    "a view": ("--force-bucket-view", DDP.format(VIEWS.replace("True", "False")), DDP.format(VIEWS)),
    "kept": ("--force-reshard", FSDP2.format(KEPT), FSDP2.format(RESHARDED)),
    "kept by two": ("--force-reshard", FSDP2.format(KEPT.replace("False", "2")), FSDP2.format(RESHARDED)),
    "unreduced gradients": ("--force-gradient-sync", FSDP2.format("") + UNREDUCED, FSDP2.format("")),
    "unreduced gradients of the older one": (
        "--force-gradient-sync",
        FSDP1.format("") + TWICE_FSDP1,
        FSDP1.format("") + TWICE_FSDP1.replace("with model.no_sync():", "if True:"),
    ),
    "kept by the older one": ("--force-reshard", FSDP1.format(ZERO2), FSDP1.format("")),
}
"""Options, what the script has, and the same with the change written in it."""


def run(folder: Path, name: str, options: str, wrap: str, rank: int = 0) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT.replace("WRAP", wrap))
    place = ("--device", "sim", "--world-size", "4", "--rank", str(rank), "--steps", "2")
    done = ampmem(folder, "profile", *place, "--seed", "0", "--quiet", "-o", name, *options.split(), "train.py")
    return done.returncode, done.stderr


@functools.cache
def recorded(options: str, wrap: str, rank: int = 0) -> Recording:
    """The recording of a script: what is written in one case is what another changes."""
    with TemporaryDirectory() as folder:
        code, said = run(Path(folder), "run", options, wrap, rank)
        assert code == 0, said
        return read(Path(folder) / f"run.rank{rank}-of-4.ampmem")


def events(recording: Recording) -> list[tuple[int, int]]:
    found = recording.events
    return list(zip(found.action.tolist(), found.bytes.tolist(), strict=True))


@pytest.mark.parametrize("case", CHANGES)
def test_a_forced_change_allocates_what_the_written_one_does(case: str) -> None:
    options, wrap, written = CHANGES[case]
    rank = 3 if "FullyShardedDataParallel" in wrap else 0
    plain = recorded("", wrap, rank)
    forced = recorded(options, wrap, rank)
    assert events(forced) == events(recorded("", written, rank)) != events(plain)
    assert any(note.startswith("forced: ") for note in forced.remarks)
    assert not any(note.startswith("forced: ") for note in plain.remarks)


def test_gradients_that_are_views_of_the_buckets_save_what_is_computed() -> None:
    plain, views = (analyse(recorded("", DDP.format(how))) for how in ("", VIEWS))
    (said,) = (each for each in findings(plain) if each.code == "reduce-buckets")
    assert int(plain.timeline.total.max()) - int(views.timeline.total.max()) == said.off_peak
    assert said.bytes == 3 * 4 * (100 * 400 + 400 + 400 * 100 + 100)
    assert said.proof.endswith("--allow bucket-view --world-size 4 --rank 0 train.py")
    assert not [each for each in findings(views) if each.code == "reduce-buckets"]


def test_gradients_that_no_backward_reduces_are_whole() -> None:
    """The first of two micro-batches, or all; the change saves at least what is computed where gradients are used."""
    for more, used in ((UNREDUCED, False), (TWICE, True)):
        before = analyse(recorded("", FSDP2.format("") + more))
        after = analyse(recorded("--force-gradient-sync", FSDP2.format("") + more))
        (said,) = (each for each in findings(before) if each.code == "unreduced-gradients")
        assert said.bytes == 3 * 4 * (100 * 400 + 400 + 400 * 100 + 100)
        less = int(before.timeline.total.max()) - int(after.timeline.total.max())
        assert less >= (said.off_peak or 0) >= said.bytes // 2 * used
        assert said.proof.endswith("--allow gradient-sync --world-size 4 --rank 0 train.py") == used
        assert not [each for each in findings(after) if each.code == "unreduced-gradients"]


@pytest.mark.parametrize("wrap", [FSDP2.format(""), FSDP1.format(", use_orig_params=True")])
def test_master_copies_of_weights_in_bfloat16_are_those_of_the_ranks_shard(wrap: str) -> None:
    shard = 3 * (100 * 400 + 400 + 400 * 100 + 100) // 4
    said = f"computed: 4 B for each of the {shard:,} parameters of AdamW on this device"
    assert [note for note in recorded("--precision bf16", wrap).remarks if said in note]


REFUSED = {
    "no wrapper": ("--force-bucket-view", "", "the script does not call DistributedDataParallel"),
    "views already": (
        "--force-bucket-view",
        DDP.format(", gradient_as_bucket_view=True"),
        "the script already has DistributedDataParallel(gradient_as_bucket_view=True)",
    ),
    "a policy to another type": (
        "--force-policy",
        FSDP2.format(", mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)"),
        "the script has its own MixedPrecisionPolicy, to float16",
    ),
    "a policy already": (
        "--force-policy",
        FSDP1.format(", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"),
        "the script already has FullyShardedDataParallel(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16",
    ),
    "a prefetch of its own": (
        "--force-no-prefetch",
        FSDP2.format("") + "\nmodel[0].set_modules_to_forward_prefetch([model[1]])",
        "the script sets itself what is prefetched (set_modules_to_forward_prefetch)",
    ),
    "no prefetch already": (
        "--force-no-prefetch",
        FSDP1.format(", backward_prefetch=None"),
        "the script already has FullyShardedDataParallel(backward_prefetch=None)",
    ),
    "no FSDP": ("--force-reshard", DDP.format(""), "the script does not call fully_shard or FullyShardedDataParallel"),
    "resharded already": (
        "--force-reshard",
        FSDP2.format(", reshard_after_forward=True"),
        "the script already has fully_shard(reshard_after_forward=True)",
    ),
    "fully sharded already": (
        "--force-reshard",
        FSDP1.format(""),
        "the script already has FullyShardedDataParallel(sharding_strategy=ShardingStrategy.FULL_SHARD)",
    ),
}
"""Options, what the script has, and why the change is not made."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_is_not_made_is_an_error(tmp_path: Path, case: str) -> None:
    options, wrap, reason = REFUSED[case]
    code, said = run(tmp_path, "refused", options, wrap)
    assert code == 1, said
    assert said.splitlines()[-1].startswith(f"ampmem: {options}: {reason}")
    assert (tmp_path / "refused.rank0-of-4.ampmem").exists()
