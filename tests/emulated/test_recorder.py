"""The CUDA recorder on PyTorch's own allocator, engine and profiler: whole programs, with ampmem and without.

Each program prints what ``torch.cuda.memory_stats()`` says at its end; so one run shows that the output and the exit
code are the same, that as many allocations of as many bytes were made, and that the recording's peaks are torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.commands import ampmem, python
from torch.torch_version import TorchVersion

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Recording
from ampmem.recording import read
from ampmem.recording.watched_file import read_watched

ON_GPU = not os.environ.get("EMULATED_CUDA")
"""Whether a real GPU is asked; conftest.py says when."""
PROGRAMS_OF_THE_FIELD = Path(__file__).parents[1] / "integration/field/programs"
HEAD = """
import os, threading
import torch
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
def net(device="cuda"):
    return nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.LayerNorm(700), nn.Linear(700, 300)).to(device)
def batch(rows=64, device="cuda"):
    return torch.randn(rows, 300, device=device)
"""
LOOP = """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
def step(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
OWN = """
extern int cudaMalloc(void **, unsigned long);
extern int cudaFree(void *);
void *take(long size, int device, void *stream) { void *place = 0; cudaMalloc(&place, size); return place; }
void give(void *place, long size, int device, void *stream) { cudaFree(place); }
"""
"""An allocator of the script's own, in C."""
TAIL = """
import gc
gc.collect()
torch.cuda.synchronize()
for device in range(torch.cuda.device_count()):
    stats = torch.cuda.memory_stats(device)
    print("MADE", device, stats.get("allocation.all.allocated", 0), stats.get("allocated_bytes.all.allocated", 0))
    print("PEAK", device, stats.get("allocated_bytes.all.peak", 0))
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """``plain_peaks`` says whether a run without ampmem has the same peaks: not where threads race, or where the wait
    at a step's end frees what awaits a stream."""

    text: str
    steps: int
    options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    plain_peaks: bool = True
    ooms: int = 0
    code: int = 0


PROGRAMS: dict[str, Program] = {
    "plain": Program(text="for _ in range(4):\n    print(step(batch()).item())", steps=4),
    "a long step": Program(
        text="""
for _ in range(700):
    model(batch()).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
step(batch())
""",
        steps=2,
    ),
    "sizes that change": Program(text="for i in range(6):\n    step(batch(64 << i))", steps=6),
    "peaks that are reset": Program(
        text="""
for i in range(6):
    step(batch(64 << (5 - i)))
    torch.cuda.empty_cache()
""",
        steps=6,
    ),
    "expandable segments": Program(
        text="for i in range(6):\n    step(batch(64 << i))",
        steps=6,
        settings={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "other settings of the allocator": Program(
        text="""
torch.cuda.set_per_process_memory_fraction(0.02)
for i in (1, 5, 3, 8, 2, 9, 4, 7):
    step(batch(700 * i))
""",
        steps=8,
        settings={
            "PYTORCH_CUDA_ALLOC_CONF": (
                "roundup_power2_divisions:4,garbage_collection_threshold:0.6,max_split_size_mb:64"
            )
        },
    ),
    "a memory pool of the script's": Program(
        text="""
pool = torch.cuda.MemPool()
for _ in range(4):
    with torch.cuda.use_mem_pool(pool):
        x = batch()
    step(x)
""",
        steps=4,
    ),
    "another device than the first": Program(
        text="""
torch.cuda.set_device(1)
model = net()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    step(batch())
""",
        steps=4,
    ),
    "checkpoints of both kinds": Program(
        text="""
from torch.utils.checkpoint import checkpoint
class Kept(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = net(), reentrant
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)
for reentrant in (True, False):
    model = Kept(reentrant)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step(batch().requires_grad_())
""",
        steps=6,
    ),
    "activations that wait on the host": Program(
        text="""
for _ in range(4):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        steps=4,
        settings={"EMULATED_CUDA_LATE": "30"},
    ),
    "a thread that loads": Program(
        text="""
import queue
ready = queue.Queue(2)
def load():
    for i in range(30):
        ready.put(torch.randn(64 + i % 7, 300).cuda() * 1.0)
    ready.put(None)
thread = threading.Thread(target=load)
thread.start()
while (x := ready.get()) is not None:
    step(x)
thread.join()
""",
        steps=30,
        plain_peaks=False,
    ),
    "a thread that trains": Program(
        text="""
other = net()
others = torch.optim.SGD(other.parameters(), lr=0.1)
def work():
    for i in range(40):
        other(batch(32 + i % 5)).square().mean().backward()
        others.step()
        others.zero_grad()
thread = threading.Thread(target=work)
step(batch())  # the first backward starts the engine, which fails where two threads do it at the same time
thread.start()
for _ in range(14):
    step(batch())
thread.join()
""",
        steps=15,
        plain_peaks=False,
    ),
    "the engine's threads of two devices": Program(
        text="""
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = net("cuda:0"), net("cuda:1")
    def forward(self, x):
        return self.b(self.a(x).to("cuda:1")).sum() + self.b(2 * x.to("cuda:1")).sum() + self.a(x).sum().to("cuda:1")
both = Both()
update = torch.optim.AdamW(both.parameters())
for _ in range(6):
    both(batch(device="cuda:0")).backward()
    update.step()
    update.zero_grad()
""",
        steps=6,
    ),
    "a model that moves to another device after a trial": Program(
        text="""
model(batch()).sum().backward()
model.zero_grad()
model.to("cuda:1")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    step(batch(device="cuda:1"))
""",
        steps=4,
    ),
    "DataParallel": Program(
        text="""
model = nn.DataParallel(model)
for _ in range(4):
    step(batch())
""",
        steps=4,
        plain_peaks=False,
    ),
    "record_stream": Program(
        text="""
side = torch.cuda.Stream()
for _ in range(8):
    with torch.cuda.stream(side):
        x = batch()
    torch.cuda.current_stream().wait_stream(side)
    loss = model(x).square().mean()
    loss.backward()
    x.record_stream(torch.cuda.current_stream())
    del x, loss
    optimizer.step()
    optimizer.zero_grad()
""",
        steps=8,
        options=("--no-sync",),
        settings={"EMULATED_CUDA_LATE": "150"},
    ),
    "losses and scales that are read late": Program(
        text="""
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(scaler.get_scale())
""",
        steps=5,
        settings={"EMULATED_CUDA_LATE": "sync"},
    ),
    "pinned batches": Program(
        text="""
from torch.utils.data import DataLoader, TensorDataset
for x, in DataLoader(TensorDataset(torch.randn(640, 300)), 64, pin_memory=True):
    step(x.cuda(non_blocking=True))
""",
        steps=10,
        settings={"EMULATED_CUDA_LATE": "40"},
    ),
    "a captured step": Program(
        text="""
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
x = batch()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step(x)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step(x)
for _ in range(3):
    graph.replay()
""",
        steps=4,
    ),
    "a thread that captures while steps end": Program(
        text="""
begun, ends, failed = threading.Event(), threading.Event(), []
def captures():
    x, stream = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            y = x * 2
            begun.set()
            ends.wait()
            y + 1
    except RuntimeError as error:
        failed.append(str(error).splitlines()[0])
x = batch()  # not anew while a graph is captured: torch 2.11 refuses random numbers on any thread then
step(x)
thread = threading.Thread(target=captures, daemon=True)
thread.start()
begun.wait()
for _ in range(2):
    step(x)
ends.set()
thread.join()
step(x)
print(failed)
""",
        steps=4,
    ),
    "an LSTM": Program(
        text="""
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.LSTM(300, 128, 2, bidirectional=True, dropout=0.1), nn.Linear(256, 10)
    def forward(self, x):
        return self.outer(self.inner(x)[0])
model = Recurrent().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    step(torch.randn(20, 8, 300, device="cuda"))
""",
        steps=4,
    ),
    "convolutions with workspaces": Program(
        text="""
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    step(torch.randn(8, 3, 32, 32, device="cuda"))
""",
        steps=4,
        settings={"EMULATED_CUDA_CUDNN_WORKSPACE": "7M"},
    ),
    "DDP": Program(
        text="""
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model)
for _ in range(4):
    step(batch())
torch.cuda.synchronize()
dist.destroy_process_group()
""",
        steps=4,
        plain_peaks=False,  # NCCL's watchdog frees what it likes when it likes
    ),
    "FSDP2": Program(
        text="""
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for part in (model[0], model[3], model):
    fully_shard(part, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    step(batch())
torch.cuda.synchronize()
dist.destroy_process_group()
""",
        steps=4,
    ),
    "an allocation that fails and is tried again by PyTorch": Program(
        text="for i in range(6):\n    step(batch(64 << i))",
        steps=6,
        settings={"EMULATED_CUDA_FAIL": "cudaMalloc@4=memory"},
    ),
    "out of memory, caught": Program(
        text="""
rows = 1 << 10
for _ in range(10):
    try:
        step(batch(rows))
        rows *= 4
    except torch.OutOfMemoryError as error:
        print(rows, str(error).partition("GPU")[0])
        rows //= 8
        optimizer.zero_grad()
""",
        steps=7,
        settings={"EMULATED_CUDA_MEMORY": "1G"},
        ooms=3,
    ),
    "out of memory in backward, in a thread and in a capture": Program(
        text="""
def asks():
    try:
        torch.empty(1 << 42, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError:
        print("out of memory")
class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        asks()
        return gradient
step(batch())
Asks.apply(model(batch())).sum().backward()
optimizer.step()
thread = threading.Thread(target=asks)
thread.start()
thread.join()
step(batch())
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    batch().square_()
    asks()
step(batch())
""",
        steps=4,
        ooms=3,
    ),
    "a device that is only tried": Program(
        text="""
try:
    torch.empty(1 << 40, device="cuda:1", dtype=torch.uint8)
except torch.OutOfMemoryError:
    print("too much")
for _ in range(4):
    step(batch())
""",
        steps=4,
        ooms=1,
    ),
    "a pool with an allocator of the script's": Program(
        text="""
import subprocess
subprocess.run(["gcc", "-shared", "-fPIC", "own.c", "-o", "own.so"], check=True)
own = torch.cuda.memory.CUDAPluggableAllocator("./own.so", "take", "give")
with torch.cuda.use_mem_pool(torch.cuda.MemPool(own.allocator())):
    x = batch(700)
for _ in range(4):
    step(x)
""",
        steps=4,
    ),
    "out of memory on another device": Program(
        text="""
for _ in range(4):
    step(batch())
torch.empty(1 << 40, device="cuda:1", dtype=torch.uint8)
""",
        steps=4,
        ooms=1,
        code=1,
    ),
}


def recorded(folder: Path, program: Program, patch: pytest.MonkeyPatch) -> tuple[str, Recording]:
    """What ``program`` printed under ampmem, which is what it prints without, and the recording.

    Skips what a real GPU cannot do.
    """
    wanted = {"EMULATED_CUDA_FAIL", "EMULATED_CUDA_MEMORY"} & set(program.settings)
    second = "cuda:1" in program.text or "set_device(1)" in program.text
    if ON_GPU and (wanted or (second and torch.cuda.device_count() < 2)):
        pytest.skip("only the emulation can do this")
    for name, value in program.settings.items():
        patch.setenv(name, value)
    (folder / "program.py").write_text(HEAD + LOOP + program.text + TAIL, encoding="utf-8")
    (folder / "own.c").write_text(OWN, encoding="utf-8")
    plain = python(folder, "program.py")
    options = ("--device", "cuda", "--run-to-end", "--steps", "99", "--quiet", *program.options)
    under = ampmem(folder, "profile", *options, "program.py")
    assert (plain.returncode, under.returncode) == (program.code, program.code), plain.stderr + under.stderr
    lines = [
        [line for line in done.stdout.splitlines() if program.plain_peaks or not line.startswith("PEAK")]
        for done in (plain, under)
    ]
    assert lines[0] == lines[1]
    return under.stdout, read(folder / "program.ampmem")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_recorded_to_the_byte(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    printed, recording = recorded(tmp_path, program, monkeypatch)
    summary = summarize(recording)
    assert summary.conservation.residual_bytes == 0
    assert summary.conservation.reserved_residual_bytes == 0
    assert sum(step.finished for step in recording.steps) == program.steps
    assert len(recording.ooms) == program.ooms
    peaks = [int(line.split()[2]) for line in printed.splitlines() if line.startswith("PEAK")]
    if program.code == 0:
        assert recording.allocator is not None
        assert list(recording.allocator.peaks) == peaks


NOT_ON_A_DEFAULT_DEVICE = {
    *("catches_everything", "generate", "infer", "tries_to_compile", "two_optimizers"),  # have arguments, or no step
    *(
        "graph",
        "mapped_weights",
        "partly_on_gpu",
        "sharded",
        "spawned",
        "without_gpu",
    ),  # choose their devices themselves
    *("loaded_by_threads", "worker_batches"),  # make tensors where there is no default device
}
RACES = {"ddp_buckets"}
"""Threads of gloo's free what they like when they like: two runs without ampmem differ in their peaks, too."""
FIELD = {path.stem for path in PROGRAMS_OF_THE_FIELD.glob("*.py")} - NOT_ON_A_DEFAULT_DEVICE


@pytest.mark.parametrize("name", sorted(FIELD))
def test_a_field_program_is_recorded_to_the_byte(name: str, tmp_path: Path) -> None:
    text = (
        (PROGRAMS_OF_THE_FIELD / f"{name}.py")
        .read_text(encoding="utf-8")
        .replace("from __future__ import annotations", "")
    )
    (tmp_path / "field.py").write_text(
        f"import torch\ntorch.set_default_device('cuda')\ntorch.manual_seed(0)\n{text}{TAIL}", encoding="utf-8"
    )
    plain = python(tmp_path, "field.py")
    under = ampmem(tmp_path, "profile", "--device", "cuda", "--run-to-end", "--steps", "99", "--quiet", "field.py")
    assert (plain.returncode, under.returncode) == (0, 0), plain.stderr + under.stderr
    lines = [
        [line for line in done.stdout.splitlines() if name not in RACES or not line.startswith("PEAK")]
        for done in (plain, under)
    ]
    assert lines[0] == lines[1]
    recording = read(tmp_path / "field.ampmem")
    summary = summarize(recording)
    assert (summary.conservation.residual_bytes, summary.conservation.reserved_residual_bytes) == (0, 0)
    assert recording.allocator is not None
    peaks = [int(line.split()[2]) for line in under.stdout.splitlines() if line.startswith("PEAK")]
    assert list(recording.allocator.peaks) == peaks


def test_cublas_workspaces_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the script's thread and one of the engine's, 32 MiB each here; torch 2.15 takes one for each call."""
    _, recording = recorded(tmp_path, PROGRAMS["plain"], monkeypatch)
    analysis = analyse(recording)
    large = analysis.lifetimes.bytes == 32 << 20
    for_a_call = TorchVersion(torch.__version__) >= "2.15"
    assert large.sum() == (12 if for_a_call else 2)
    assert analysis.classes.of(Category.TEMPORARIES if for_a_call else Category.WORKSPACE)[large].all()


ATTENTION = """
import torch.nn.attention
from torch.backends import cuda
checkpoint = {"model": {"weight": torch.ones(1 << 20, device="cuda")}}
layers = nn.ModuleList([nn.Linear(288, 288) for _ in range(2)]).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    x, mask = torch.randn(2, 256, 288, device="cuda"), torch.ones(2, 1, 256, 256, dtype=torch.bool, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for layer in layers:
            q = layer(x).unflatten(2, (8, 36)).transpose(1, 2)
            with nn.attention.sdpa_kernel([nn.attention.SDPBackend.MATH, nn.attention.SDPBackend.FLASH_ATTENTION]):
                y = nn.functional.scaled_dot_product_attention(q, q, q, mask)
            x = x + y.transpose(1, 2).flatten(2)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
params = cuda.SDPAParams(q, q, q, mask, 0.0, False, False)
fused = cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention
print("FUSED", *(can(params) for can in fused))
"""


def test_who_holds_memory_and_why_attention_was_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, recording = recorded(tmp_path, Program(text=ATTENTION, steps=3), monkeypatch)
    assert "FUSED False False False" in printed
    summary = summarize(recording)
    held = {each.holder: each.bytes for each in summary.holders}
    assert held["checkpoint['model']['weight']"] == 4 << 20
    (said,) = (each for each in summary.findings if each.code == "attention-kernel")
    assert said.bytes == 2 * 2 * 8 * 256 * 256 * 4
    assert "a multiple of 8, and it is 36; the script disabled the memory-efficient and cuDNN kernels" in said.message


RANK = """
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = net()
for part in (model[0], model[3], model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
print("PEAK", dist.get_rank(), torch.cuda.max_memory_allocated(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("emulated_only")
def test_ranks_that_nccl_connects(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(HEAD + RANK, encoding="utf-8")
    options = ("--device", "cuda", "--run-to-end", "--steps", "99", "--quiet", "--nproc-per-node", "2")
    done = ampmem(tmp_path, "profile", *options, "rank.py", fresh=True)
    assert done.returncode == 0, done.stderr
    peaks = {int(line.split()[1]): int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("PEAK")}
    for rank in range(2):
        recording = read(tmp_path / f"rank.rank{rank}-of-2.ampmem")
        assert summarize(recording).conservation.residual_bytes == 0
        assert recording.allocator is not None
        assert (recording.allocator.device, recording.allocator.peaks[rank]) == (rank, peaks[rank])


OTHER_ALLOCATORS = {
    "another backend": (
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'",
        "the script sets an allocator backend",
    ),
    "a pluggable allocator": (
        "own = torch.cuda.memory.CUDAPluggableAllocator('./own.so', 'take', 'give')\n"
        "torch.cuda.memory.change_current_allocator(own)",
        "nothing was recorded: torch uses the allocator 'pluggable', which keeps no memory history",
    ),
    "no cache": (
        "torch.cuda.init()\ntorch.cuda.caching_allocator_enable(False)",
        "nothing was recorded: PyTorch's caching allocator allocated nothing on a CUDA device",
    ),
}


@pytest.mark.parametrize("name", OTHER_ALLOCATORS)
def test_an_allocator_that_the_script_chooses_itself_is_refused(name: str, tmp_path: Path) -> None:
    """No recording of zeros is left."""
    line, reason = OTHER_ALLOCATORS[name]
    if name == "a pluggable allocator":
        (tmp_path / "own.c").write_text(OWN, encoding="utf-8")
        subprocess.run(("gcc", "-shared", "-fPIC", "own.c", "-o", "own.so"), cwd=tmp_path, check=True)
    text = f"{HEAD}{line}\n{LOOP}for _ in range(4):\n    step(batch())\n"
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "cuda", "program.py", to_the_end=True)
    assert done.returncode == 1
    assert f"ampmem: {reason}" in done.stderr or f"; {reason}" in done.stderr
    assert not (tmp_path / "program.ampmem").exists()


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize(
    ("failure", "words"),
    [("illegal", "an illegal memory access was encountered"), ("assert", "device-side assert triggered")],
)
def test_a_failure_of_the_device_is_the_scripts_own(
    failure: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is first seen at a step's end, by ampmem: the script still ends with its own error, and not with an abort."""
    monkeypatch.setenv("EMULATED_CUDA_LATE", "sync")
    monkeypatch.setenv("EMULATED_CUDA_FAIL", f"cudaLaunchKernel@150={failure}!")
    (tmp_path / "program.py").write_text(
        HEAD + LOOP + "for _ in range(6):\n    step(batch())\n" + TAIL, encoding="utf-8"
    )
    plain = python(tmp_path, "program.py", to_the_end=True)
    under = ampmem(tmp_path, "profile", "--device", "cuda", "--run-to-end", "program.py", to_the_end=True)
    assert (plain.returncode, under.returncode) == (1, 1)
    for done in (plain, under):
        assert f"CUDA error: {words}" in done.stderr
    recording = read(tmp_path / "program.ampmem")
    assert any(step.finished for step in recording.steps)
    assert summarize(recording).conservation.residual_bytes == 0


def test_compiled_autograd_may_initialize_cuda_inside_backward(tmp_path: Path) -> None:
    """A model on the CPU: dynamo looks at CUDA's random numbers, and torch says nothing of what began there."""
    program = """
from torch._dynamo import compiled_autograd
model = net("cpu")
for _ in range(3):
    with compiled_autograd._enable(torch.compile(backend="eager")):
        model(batch(device="cpu")).sum().backward()
print("initialized", torch.cuda.is_initialized())
"""
    (tmp_path / "program.py").write_text(HEAD + program, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--run-to-end", "program.py", to_the_end=True)
    assert done.stdout == "initialized True\n"
    assert "the model is on cpu" in done.stderr
    assert all(line.startswith("ampmem: ") for line in done.stderr.splitlines())


def test_an_out_of_memory_on_another_device_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, recording = recorded(tmp_path, PROGRAMS["out of memory on another device"], monkeypatch)
    failure = summarize(recording).out_of_memory
    assert failure is not None
    assert (failure.device, failure.recorded, failure.asked, failure.reserved) == (1, False, 1 << 40, 0)
    assert recording.allocator is not None and recording.allocator.device == 0


WATCHED = """
import json
model = net()
optimizer = torch.optim.AdamW(model.parameters())
peaks, since = [], []
for i in range(30):
    torch.cuda.reset_peak_memory_stats()
    model(batch(64 + 512 * (i == 20))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    peaks.append(torch.cuda.max_memory_allocated())
    since.append(torch.accelerator.max_memory_allocated())
torch.cuda.reset_peak_memory_stats()
for i in range(10):
    model(batch(2048 << (i % 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    since.append(torch.cuda.max_memory_allocated())
print(json.dumps([peaks, since]))
"""


def test_a_watched_run_has_torchs_own_peaks_and_moves_none(tmp_path: Path) -> None:
    """Each row's peak is what a script reads that resets it; what the script reads is what it reads without ampmem."""
    (tmp_path / "program.py").write_text(HEAD + WATCHED + TAIL, encoding="utf-8")
    plain = python(tmp_path, "program.py")
    done = ampmem(tmp_path, "watch", "--every", "15", "program.py")
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert done.stdout == plain.stdout
    peaks, since = json.loads(done.stdout.splitlines()[0])
    rows = read_watched(tmp_path / "program-watch.ampmem").rows
    assert [row.peak for row in rows[:30]] == peaks
    assert [max(row.peak for row in rows[30 : 31 + i]) for i in range(10)] == since[30:]
    assert rows[20].batch == "576x300 float32"
    assert len({row.peak for row in rows[30:]}) >= 4, "a row has its own peak, not that since the reset"


def test_a_longer_batch_in_a_watched_run_is_named_with_its_line(tmp_path: Path) -> None:
    text = HEAD + LOOP + "for i in range(400):\n    step(batch(64 if i < 300 else 10_000_000))\n"
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    done = ampmem(tmp_path, "watch", "program.py")
    assert done.returncode == 1
    run = read_watched(tmp_path / "program-watch.ampmem")
    ending = run.ending
    assert ending is not None and ending.out_of_memory and len(run.rows) == 300
    assert (ending.step, ending.phase, ending.batch) == (300, "forward", "10000000x300 float32")
    held = {each.what: each.bytes for each in ending.held}
    sizes = [300 * 700, 700, 700, 700, 700 * 300, 300]
    assert held["parameters"] == sum(-(-4 * size // 512) * 512 for size in sizes)
    line = next(i for i, code in enumerate(text.splitlines(), start=1) if "loss = model(x)" in code)
    made = [each for each in ending.held if each.what.endswith(f"program.py:{line}")]
    assert made and made[0].bytes >= 10_000_000 * 700 * 4
    assert "in most steps before it was 64x300 float32" in " ".join(done.stderr.split())
