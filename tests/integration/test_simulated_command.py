"""``ampmem profile --device sim``: what a script sees of the GPU, what is said at the end, and what is refused."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.command_line import refused
from support.commands import ampmem

from ampmem.allocator.settings import MIB
from ampmem.analysis.summary import summarize
from ampmem.names import RAN_ON_FAILED, RAN_ON_PREDICTED
from ampmem.recording import read
from ampmem.reporters.text.table import render
from ampmem.units import format_bytes

TRAINING = """
import torch, copy, sys
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model = model.to(device)
assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in model.parameters())
data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
scaler = torch.amp.GradScaler("cuda")
for x, y in DataLoader(data, 16, shuffle=True, pin_memory=True):
    assert x.abs().sum().item() > 1  # what is on the CPU is real
    x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
    assert out.dtype == torch.float16
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss:.2f} {norm:.2f}", (out.argmax(-1) == y).sum().item(), out.detach().cpu().numpy().shape)
    print(torch.cuda.max_memory_allocated() > 0, torch.cuda.memory_stats()["reserved_bytes.all.peak"] > 0)
assert scaler.get_scale() == 65536.0
copy.deepcopy(model)
torch.save(model.state_dict(), "model.pt")
torch.cuda.synchronize()
model.load_state_dict(model.state_dict())
"""
MODEL = """
import torch
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def profile(folder: Path, script: str, *options: str) -> CompletedProcess[str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    return ampmem(folder, "profile", *options, "--quiet", "train.py")


def test_an_unmodified_cuda_script_runs(tmp_path: Path) -> None:
    done = profile(tmp_path, TRAINING, "--device", "sim", "--gpu", "rtx4090", "--steps", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NVIDIA GeForce RTX 4090 (8, 9)\n")
    assert "Warning" not in done.stderr
    assert "NVIDIA GeForce RTX 4090 (simulated): peak" in done.stderr
    assert "it fits, with" in done.stderr
    found = read(tmp_path / "train.ampmem")
    assert len(found.steps) == 4
    assert [optimizer.implementation for optimizer in found.optimizers] == ["fused"]
    assert found.run.device_name == "NVIDIA GeForce RTX 4090"
    assert not (tmp_path / "model.pt").exists()
    read_accuracy = "choices that the script read from the device were made up"
    assert any(note.startswith(read_accuracy) and "train.py:" in note for note in found.notes)


def test_out_of_memory_is_the_devices_own_error(tmp_path: Path) -> None:
    script = (
        MODEL + "try:\n    torch.empty(1 << 28, device='cuda')\nexcept torch.cuda.OutOfMemoryError as e: print(e)\n"
    )
    script += "torch.cuda.empty_cache()\nmodel(torch.zeros(1 << 25, 8).cuda()).sum().backward()\n"
    done = profile(tmp_path, script, "--device", "sim", "--gpu", "592MiB")
    assert done.returncode == 1
    assert done.stdout.startswith("CUDA out of memory. Tried to allocate 1.0 GiB. ")
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "it does not fit" in done.stderr


def test_a_gpu_with_next_to_nothing_left_runs_out_in_the_script(tmp_path: Path) -> None:
    done = profile(tmp_path, MODEL, "--device", "sim", "--gpu", "81MiB")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "cannot simulate" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = torch.ones(8, device='cuda'); x[x > 0]", ("aten.nonzero", "depends on the data", "masked_fill")),
        ("torch.compile(model, mode='max-autotune')", ("max-autotune", "leave torch.compile out")),
    ],
)
def test_what_cannot_be_simulated_is_named_with_its_line(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    done = profile(tmp_path, MODEL + line + "\n", "--device", "sim")
    assert done.returncode == 1
    message = done.stderr.partition("NotSimulated: ")[2]
    assert message.startswith(f"{tmp_path / 'train.py'}:6: ")
    assert all(word in message for word in words)
    assert "it fits" not in done.stderr


EXPANDABLE = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
model = torch.nn.Linear(2048, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(torch.cuda.memory_reserved() >> 20)
torch.cuda.memory._set_allocator_settings("expandable_segments:False")
for _ in range(2):
    model(torch.ones(4, 2048, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_settings_that_the_script_makes_are_in_force(tmp_path: Path) -> None:
    done = profile(tmp_path, EXPANDABLE, "--device", "sim")
    assert done.returncode == 0, done.stderr
    # 8 MiB and 4 KiB: of expandable segments pages of 20 MiB and of 2 MiB are mapped.
    assert done.stdout == "22\n"
    allocator = read(tmp_path / "train.ampmem").allocator
    assert allocator is not None
    assert (allocator.variable, allocator.settings) == (
        "torch.cuda.memory._set_allocator_settings",
        "expandable_segments:False",
    )


def test_an_allocator_that_the_script_chooses_is_refused(tmp_path: Path) -> None:
    script = EXPANDABLE.replace("expandable_segments:True", "backend:cudaMallocAsync")
    done = profile(tmp_path, script, "--device", "sim")
    assert done.returncode == 1
    message = done.stderr.partition("NotSimulated: ")[2].splitlines()[0]
    assert message == (
        f"{tmp_path / 'train.py'}:5: PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: the backend 'cudaMallocAsync' "
        "cannot be modelled: only PyTorch's own caching allocator (backend:native) can"
    )


DUMPS = (
    MODEL
    + """
torch.cuda.memory._record_memory_history()
for _ in range(3):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.memory._dump_snapshot("s.pickle")
"""
)


@pytest.mark.parametrize("options", [("--steps", "9"), ("--steps", "1", "--run-to-end"), ("--steps", "1")])
def test_a_file_that_is_not_written_is_told_where_the_script_gets_there(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = profile(tmp_path, DUMPS, "--device", "sim", *options)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "nothing" in line or "was empty" in line]
    why = "a simulated device has no snapshot; ampmem profile --snapshot FILE writes one from the recording"
    begun = (
        f"torch.cuda.memory._record_memory_history has no effect at {tmp_path / 'train.py'}:7, and _dump_snapshot "
        f"writes nothing: {why}"
    )
    dumped = f"torch.cuda.memory._dump_snapshot wrote nothing at {tmp_path / 'train.py'}:11: {why}"
    noted = [note for note in read(tmp_path / "train.ampmem").notes if "nothing" in note]
    assert (told.pop(0), noted.pop(0)) == (f"ampmem: {begun}", begun)
    # With one step and no more the script is stopped before it gets there.
    assert (told, noted) == (([], []) if options == ("--steps", "1") else ([f"ampmem: {dumped}"], [dumped]))
    assert not (tmp_path / "s.pickle").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--world-size", "16", "--rank", "9"), ()], ids=["one rank", "alone"])
def test_a_script_runs_from_an_interpreter_that_has_imported_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = MODEL + (
        "import torch.distributed.optim\n"  # some of it is compiled by TorchScript
        "for _ in range(2):\n    model(torch.ones(4, 8, device='cuda')).sum().backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(script)
    done = ampmem(tmp_path, "profile", "--device", "sim", *options, "--quiet", "train.py", fresh=True)
    assert done.returncode == 0, done.stderr
    assert "recorded 2 steps" in done.stderr


@pytest.mark.slow
def test_data_parallel_training_makes_no_number_up_on_any_rank(tmp_path: Path) -> None:
    script = MODEL + (
        "torch.distributed.init_process_group('nccl')\n"
        "parallel = nn.parallel.DistributedDataParallel(model)\n"
        "parallel(torch.ones(4, 8, device='cuda')).sum().backward()\noptimizer.step()\n"
    )
    for rank in ("0", "8"):  # each has the GPU cuda:0 of its machine
        done = profile(tmp_path, script, "--device", "sim", "--world-size", "16", "--rank", rank)
        assert done.returncode == 0, done.stderr
        assert "the values that the script copied to the CPU" not in done.stderr, rank


def test_a_parameter_that_cannot_be_moved_is_the_last_line(tmp_path: Path) -> None:
    script = "import torch\nmodel = torch.nn.Linear(8, 8)\nscripted = torch.jit.script(model)\nmodel.cuda()\n"
    done = profile(tmp_path, script, "--device", "sim")
    assert done.returncode == 1
    trace, _, message = done.stderr.partition("NotSimulated: ")
    assert message.startswith(
        f"{tmp_path / 'train.py'}:4: a parameter cannot be moved to a simulated device while a scripted module has it"
    )
    assert trace.splitlines()[-3:-1] == [f'  File "{tmp_path / "train.py"}", line 4, in <module>', "    model.cuda()"]
    assert "Couldn't swap" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "sim", "--gpu", "voodoo"), "unknown GPU 'voodoo'"),
        (("--device", "cpu", "--gpu", "h100"), "--device cpu records a real device: leave one of them out"),
    ],
)
def test_a_gpu_that_cannot_be_meant_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").write_text(MODEL)
    assert message in refused(tmp_path, "profile", *options, "--quiet", "train.py")
    assert not (tmp_path / "train.ampmem").exists()


def test_a_gpu_s_name_alone_simulates_it_where_torch_sees_none(tmp_path: Path) -> None:
    done = profile(
        tmp_path,
        MODEL + "model(torch.ones(2, 8).cuda()).sum().backward()\noptimizer.step()\n",
        "--gpu",
        "4090",
        "--steps",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "ampmem: simulating the GPU that --gpu names (NVIDIA GeForce RTX 4090), because torch sees no GPU\n"
        "ampmem: recording to train.ampmem\n"
        "ampmem: NVIDIA GeForce RTX 4090 (simulated): peak "
    )
    assert read(tmp_path / "train.ampmem").run.source == "simulated"


@pytest.mark.slow
def test_compare_runs_all_precisions_on_the_simulated_device(tmp_path: Path) -> None:
    options = ("--device", "sim", "--gpu", "a100-40", "--steps", "1")
    done = ampmem(tmp_path, "compare", *options, "-m", "ampmem.workloads.reuse", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA A100-SXM4-40GB" in done.stdout
    copies = {}
    for precision in ("fp32", "amp", "amp-nocache"):
        found = read(tmp_path / f"reuse.{precision}.ampmem")
        assert found.precision.name == precision and found.plain_step_ns == ()
        copies[precision] = sum("_to_copy" in found.texts[op] for op in found.events.op.tolist())
    assert copies["fp32"] < copies["amp"] < copies["amp-nocache"]


GROWING = """
import sys

import torch

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in (1, 2, 4, 8, 64):
    model(torch.randn(batch * 1024, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(int(sys.argv[1]) if sys.argv[1] != "fail" else "no data is left")
"""


@pytest.mark.parametrize("end", ["0", "fail"])
def test_a_run_that_goes_on_after_its_steps_says_what_is_of_all_of_it(tmp_path: Path, end: str) -> None:
    """The first line, the tables and the recording name the same peaks: that of the run, and that of the steps."""
    (tmp_path / "train.py").write_text(GROWING)
    # Parameters, the batch and its result, cuBLAS's workspace; requests are whole blocks but for the bias's.
    layer, workspace = (512 * 512 + 512) * 4, 64 << 20
    of_steps, of_run = (layer + 2 * batch * 1024 * 512 * 4 + workspace for batch in (4, 64))
    options = ("--device", "sim", "--gpu", "h100", "--run-to-end", "-o", "run.ampmem", "train.py", end)
    done = ampmem(tmp_path, "profile", *options)
    assert done.returncode == (1 if end == "fail" else 0)
    recording = read(tmp_path / "run.ampmem")
    summary = summarize(recording)
    assert 0 <= summary.peak.bytes - of_steps < MIB
    assert summary.prediction is not None
    whole = summary.prediction.at_peak_allocated.allocated
    assert 0 <= whole - of_run < MIB
    assert (RAN_ON_FAILED if end == "fail" else RAN_ON_PREDICTED) in summary.notes
    first = next(line for line in done.stderr.splitlines() if "(simulated): peak" in line)
    assert f"peak {format_bytes(whole)} allocated" in first
    text = " ".join(render(summary, recording.notes).split())
    assert (
        f"The peak of the recorded steps is {format_bytes(summary.peak.bytes)} allocated, in forward of step 2" in text
    )
    same = first.removeprefix("ampmem: ").replace(" allocated, ", " allocated outside the recorded steps, ")
    assert (same if end == "fail" else f"The whole run: {same}") in text
    assert ("up to where the script failed" in first) is (end == "fail") is (recording.run.failure is not None)
    assert ("79.2 GiB, for the whole run" in text) is (end != "fail")
