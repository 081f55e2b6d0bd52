"""What scripts do on a simulated GPU beside plain training: to the byte where it works, else a stop with the line."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.command_line import refused
from support.commands import ampmem
from support.torch_version import older_than

from ampmem.recording import read

pytestmark = pytest.mark.slow

HEAD = """
import copy, json, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 8, device="cuda")
def train(y=x):
    optimizer.zero_grad()
    model(y).sum().backward()
    optimizer.step()
def requested(which="current"):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
train()
"""
"""The first step asks for the libraries' workspaces, so that what follows differs by tensors alone."""

ADAGRAD = 'cost("adagrad", lambda: fused(torch.optim.Adagrad))\n'
NO_ADAGRAD = older_than("2.12")
"""Torch 2.11 has a fused Adagrad, but not for CUDA."""
WORKS = (
    HEAD
    + """
found, kept = {}, []
def cost(name, make):
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    kept.append(make())
    found[name] = [requested() - before, requested("peak") - before]

mask = x > 0
cost("nonzero", lambda: mask.nonzero())
cost("mask", lambda: x[mask])
cost("masked_select", lambda: torch.masked_select(x, mask))
cost("unique", lambda: torch.unique(x, return_inverse=True, return_counts=True))
cost("unique_dim", lambda: torch.unique(x, dim=0))
cost("unique_consecutive", lambda: torch.unique_consecutive(x))
cost("output_size", lambda: torch.repeat_interleave(x, torch.ones(4, device="cuda").long(), dim=0, output_size=6))

cell, layer = nn.GRUCell(8, 8).cuda(), nn.GRU(8, 8, batch_first=True).cuda()
cost("gru_cell", lambda: cell(x))
kept.pop().sum().backward()
found["gru_gradients"] = [sum(p.grad.nbytes for p in cell.parameters())] * 2
padded = torch.ones(4, 5, 8, device="cuda")
cost("pack", lambda: pack_padded_sequence(padded, torch.tensor([5, 4, 3, 2]), batch_first=True).data)
packed = pack_padded_sequence(padded, [2, 5, 3, 4], batch_first=True, enforce_sorted=False)
out, _ = pad_packed_sequence(layer(packed)[0], batch_first=True)
assert out.shape == (4, 5, 8)
train(out)

def fused(kind, **how):
    each = kind(model.parameters(), lr=0.1, fused=True, **how)
    each.step()
    return each
cost("sgd", lambda: fused(torch.optim.SGD))
cost("sgd_momentum", lambda: fused(torch.optim.SGD, momentum=0.9))
"""
    + ADAGRAD * (not NO_ADAGRAD)
    + """
chosen = model(x)[model(x) > 0]
chosen.sum().backward()

generator = torch.Generator("cuda")
assert generator.device == torch.device("cuda", 0) and isinstance(generator, torch.Generator)
assert isinstance(torch.default_generator, torch.Generator) and torch.Generator().device.type == "cpu"
assert generator.manual_seed(7).initial_seed() == 7
cost("generator", lambda: torch.randn(4, 8, generator=generator, device="cuda").normal_(generator=generator))

torch.save(nn.Linear(3, 3).state_dict(), "real.pt")
on_gpu = None
def load():
    global on_gpu
    on_gpu = torch.load("real.pt", map_location="cuda")
cost("load", load)
assert on_gpu["weight"].is_cuda
again = torch.load("real.pt")
assert not again["weight"].is_cuda and again["weight"].abs().sum().item() > 0
assert torch.load("real.pt", map_location=lambda storage, place: storage)["bias"].device.type == "cpu"

assert torch.isfinite(x).all() and not torch.isnan(x).any()
assert torch.equal(x, x) and not torch.equal(x, x[:1]) and torch.allclose(x, x)
assert (f"{x.sum():.2f}", x.sum().item(), x[0].tolist(), x.cpu().numpy().sum()) == ("1.00", 1.0, [1.0] * 8, 32.0)
assert torch.ones(1024, 1024, device="cuda").cpu().numpy().shape == (1024, 1024)
print(x, model.weight)
try:
    x.numpy()
except TypeError as error:
    assert "can't convert cuda" in str(error)

torch.backends.cudnn.benchmark = True
data = torch.utils.data.TensorDataset(torch.ones(8, 8))
for (batch,) in torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True):
    assert batch.sum().item() == 32
    train(batch.cuda(non_blocking=True))
average = copy.deepcopy(model)
cost("average", lambda: copy.deepcopy(model))
torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
for reentrant in (True, False):
    hidden = x.clone().requires_grad_()
    dropped = checkpoint(lambda y: nn.functional.dropout(model(y), 0.1), hidden, use_reentrant=reentrant)
    dropped.sum().backward()
    assert hidden.grad.shape == hidden.shape
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
parallel = nn.DataParallel(model)
assert parallel(x).shape == parallel(torch.ones(4, 8)).shape == (4, 8)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
torch.Stream(device="cuda").record_event(torch.Event(device="cuda"))
with torch.cuda.stream(side):
    assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
    (x * 2).record_stream(torch.cuda.default_stream())
torch.cuda.memory._record_memory_history()
torch.cuda.memory._dump_snapshot("snapshot.pickle")
with torch.profiler.profile():
    train()
torch.cuda.set_per_process_memory_fraction(0.25)
assert torch.cuda.get_per_process_memory_fraction() == 0.25
try:
    torch.empty(21 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    assert "This process may use 19.8 GiB" in str(error), error
else:
    raise SystemExit("the fraction is ignored")
train()
with open("found.json", "w") as file:
    json.dump(found, file)
"""
)
MASK = 16 * 2 * 8
"""Half of 32 elements of a matrix, two int64 indices each."""
FINDING = MASK + 4 + 1023
"""Beside the indices a count and CUB's storage, which PyTorch's CUDA build asks for to find them among 32 elements."""
STATE = (8 * 8 + 8) * 4
"""One FP32 number per parameter."""
GRU = 4 * (24 + 24 + 40 + 8 + 8) * 4
"""Per row: the gates of both kinds and the kernel's workspace, which autograd keeps, the first state and the new."""
EXACT = {
    "nonzero": (MASK, FINDING),
    "mask": (16 * 4, FINDING),
    "masked_select": (16 * 4, FINDING),
    "unique": (8 * 4 + 32 * 8 + 8 * 8, 8 * 4 + 32 * 8 + 8 * 8),
    "unique_dim": (8 * 4, 8 * 4),
    "unique_consecutive": (8 * 4, 8 * 4),
    "gru_cell": (GRU, GRU),
    "gru_gradients": (2 * 24 * 9 * 4, 2 * 24 * 9 * 4),
    "sgd": (0, 0),
    "sgd_momentum": (STATE, STATE),
    "adagrad": (STATE + 2 * 4, STATE + 2 * 4),
    "generator": (128, 128),
    "load": (12 * 4, 12 * 4),
    "average": (2 * STATE, 2 * STATE),
}
"""Bytes that stay, and bytes at the peak."""


def profile(folder: Path, script: str, *options: str) -> CompletedProcess[str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    return ampmem(folder, "profile", "--device", "sim", "--files", "write", *options, "--quiet", "train.py")


@functools.cache
def works() -> tuple[tempfile.TemporaryDirectory[str], dict[str, list[int]]]:
    folder = tempfile.TemporaryDirectory()
    options = ("--assume", "nonzero=0.5", "--assume", "unique=0.25", "--steps", "99")
    done = profile(Path(folder.name), WORKS, *options)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((Path(folder.name) / "found.json").read_text())


@pytest.mark.parametrize("name", EXACT)
def test_what_it_takes_to_the_byte(name: str) -> None:
    if name == "adagrad" and NO_ADAGRAD:
        pytest.skip("this torch has no fused Adagrad for CUDA")
    _, found = works()
    assert tuple(found[name]) == EXACT[name]


def test_a_packed_sequence_has_the_rows_of_its_lengths() -> None:
    """Two of the four pieces that are put together are copied first: the batch is not the whole of the padded one."""
    _, found = works()
    stays, peak = found["pack"]
    assert stays == (5 + 4 + 3 + 2) * 8 * 4
    assert peak > stays


def test_everything_that_was_taken_for_granted_is_noted_with_its_lines() -> None:
    folder, _ = works()
    notes = read(Path(folder.name) / "train.ampmem").notes
    script = str(Path(folder.name) / "train.py")
    for beginning in (
        "assumed: nonzero finds 0.5 of the elements, as --assume says, at ",
        "assumed: unique finds 0.25 of the elements, as --assume says, at ",
        "a yes-or-no question to the device was answered no at ",
        "a yes-or-no question to the device was answered yes at ",
        "a number that the script read from the device was taken as 1.0 at ",
        "the values that the script copied to the CPU were taken as 1.0 at ",
        "two tensors on the device were taken as equal at ",
        "a large tensor without values became a numpy array of zeros at ",
        "torch.cuda.memory._dump_snapshot wrote nothing",
        "assumed: the device keeps up with the script, so a block used on other streams",
    ):
        (note,) = [note for note in notes if note.startswith(beginning)]
        assert script in note or "stream" in note


STOPS = {
    "nonzero": ("x[x > 0]", "give their fraction with --assume nonzero=FRACTION, or avoid it"),
    "masked_select": ("torch.masked_select(x, x > 0)", "--assume nonzero=FRACTION"),
    "unique": ("torch.unique(x)", "--assume unique=FRACTION, or compute it on the CPU"),
    "repeat_interleave": ("torch.repeat_interleave(x, torch.ones(4, device='cuda').long(), dim=0)", "output_size="),
    "graph": ("torch.cuda.CUDAGraph()", "leave the graph out"),
    "graphed": ("torch.cuda.make_graphed_callables(model, (x,))", "a CUDA graph keeps its own memory pool"),
    "capture": ("torch.cuda.graph(None)", "a CUDA graph keeps its own memory pool"),
    "graph_pool": ("torch.cuda.graph_pool_handle()", "a CUDA graph keeps its own memory pool"),
    "pool": ("torch.cuda.MemPool()", "the script's own memory pools are not simulated"),
    "in_pool": ("torch.cuda.use_mem_pool(None)", "the script's own memory pools are not simulated"),
    "allocator": ("torch.cuda.memory.CUDAPluggableAllocator('a.so', 'a', 'f')", "leave the other allocator out"),
    "change": ("torch.cuda.memory.change_current_allocator(None)", "leave the other allocator out"),
    "raw": ("torch.cuda.caching_allocator_alloc(8)", "leave the other allocator out"),
    "raw_delete": ("torch.cuda.caching_allocator_delete(8)", "leave the other allocator out"),
    "nccl": ("torch.distributed.init_process_group('nccl')", "run the script without torch.distributed"),
    "ddp": ("nn.parallel.DistributedDataParallel(model)", "run the script without torch.distributed"),
    "second": ("torch.ones(4, device='cuda:1')", "only one GPU is simulated, cuda:0, and the script uses cuda:1"),
    "second_to": ("model.to('cuda:1')", "run the script on one device"),
    "second_set": ("torch.cuda.set_device(1)", "run the script on one device"),
    "second_stream": ("torch.cuda.Stream(device=1)", "run the script on one device"),
    "mesh": ("torch.distributed.init_device_mesh('cuda', (1,))", "run the script without torch.distributed"),
    "compile": ("torch.compile(model, mode='reduce-overhead')", 'CUDA graphs (mode="reduce-overhead"), whose own'),
    "compiled_call": (
        "torch.compile(torch.relu, options={'max_autotune': True})(x)",
        "what Inductor measures on the GPU (max_autotune), which decides which buffers there are",
    ),
    "decorated": ("torch.compile(mode='max-autotune')(torch.relu)(x)", "--assume compile=eager runs it uncompiled"),
    "of_module": ("net = nn.Linear(8, 8).cuda(); net.compile(mode='max-autotune'); net(x)", "leave torch.compile out"),
    "aot": ("torch.compile(model, backend='aot_eager')", 'depends on the backend "aot_eager", which does not run'),
    "dynamo": ("torch._dynamo.optimize('aot_eager')(torch.nn.functional.gelu)(x)", "--assume compile=eager"),
    "flex": ("flex_attention(*[torch.ones(1, 1, 128, 16, device='cuda')] * 3)", "--assume compile=eager"),
    "cond": ("torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))", "cond takes functions"),
    "sparse": ("nn.Embedding(9, 8, sparse=True).cuda()(x.long())", "leave sparse=True out"),
    "sparse_input": ("torch.eye(4).to_sparse().cuda()", "sparse tensors cannot be simulated; make them dense"),
    "sparse_made": ("torch.sparse_coo_tensor(size=(4, 4), device='cuda')", "sparse tensors cannot be simulated"),
    "to_sparse": ("x.to_sparse()", "sparse tensors cannot be simulated"),
    "quantized": ("torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8).cuda()", "quantized tensors"),
    "saved": ("torch.save(model.state_dict(), 'm.pt')", "torch.save would write made-up numbers"),
    "geqrf": ("torch.geqrf(x)", "has no meta kernel"),
}


@functools.cache
def stopped() -> dict[str, str]:
    """Run all of them in one process; the message of each."""
    script = HEAD + "from torch.nn.attention.flex_attention import flex_attention\nfound = {}\n"
    for name, (line, _) in STOPS.items():
        script += f"try: {line}\nexcept RuntimeError as error: found[{name!r}] = str(error)\n"
    script += "with open('found.json', 'w') as file: json.dump(found, file)\n"
    with tempfile.TemporaryDirectory() as name:
        done = profile(Path(name), script)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads((Path(name) / "found.json").read_text())
    lines = script.splitlines()
    for message in found.values():
        place, _, said = message.partition(": ")
        assert said and lines[int(place.rpartition(":")[2]) - 1].startswith("try: "), message
    return found


@pytest.mark.parametrize("name", STOPS)
def test_what_is_not_simulated_stops_with_its_line_and_a_remedy(name: str) -> None:
    assert STOPS[name][1] in stopped()[name]


CLASSES = """
import inspect
stopping = (torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.MemPool, torch.cuda.memory.CUDAPluggableAllocator)
print(*[kind | None for kind in stopping], isinstance(model, stopping), hasattr(torch.cuda.CUDAGraph, "replay"))
class Mine(torch.cuda.CUDAGraph):
    def __init__(self, size):
        super().__init__()
try: Mine(4)
except RuntimeError as error: print(error)
print(torch.cuda.make_graphed_callables.__name__, list(inspect.signature(torch.cuda.use_mem_pool).parameters))
@torch.compile
def unused(x):
    "what it does"
@torch.compile(dynamic=True)
class Unused(nn.Module):
    pass
print(unused.__name__, unused.__doc__, Unused.__name__, torch.compile(model, disable=True) is model)
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
"""


def test_what_is_not_simulated_can_be_named_and_stops_when_it_is_used(tmp_path: Path) -> None:
    done = profile(tmp_path, HEAD + CLASSES)
    assert done.returncode == 0, done.stderr
    kinds, mine, functions, compiled = done.stdout.splitlines()[-4:]
    kinds = kinds.replace("torch.cuda.", "").replace(" | None", "")
    assert kinds == "graphs.CUDAGraph graphs.graph memory.MemPool memory.CUDAPluggableAllocator False True"
    line = (HEAD + CLASSES).splitlines().index("try: Mine(4)") + 1
    assert mine.startswith(f"{tmp_path / 'train.py'}:{line}: a CUDA graph keeps its own memory pool")
    assert functions == "make_graphed_callables ['pool', 'device']"
    assert compiled == "unused what it does Unused True"


COMPILED = """
import gc
import torch._dynamo
from torch.nn.attention.flex_attention import flex_attention
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.outer(nn.functional.gelu(self.inner(x)))
Whole = torch.compile(type("Whole", (Net,), {}))
def method(net):
    net.compile(dynamic=True)
    return net
def staged(net):
    torch.compiler.set_stance("default")
    return torch.compile(net, fullgraph=True)
ways = {
    "plain": lambda net: net,
    "module": lambda net: torch.compile(net, fullgraph=True, mode="max-autotune"),
    "function": lambda net: torch.compile(lambda x: net(x), backend="inductor"),
    "decorator": lambda net: torch.compile(mode="reduce-overhead")(net),
    "method": method,
    "class": lambda net: setattr(net, "__class__", Whole) or net,
    "dynamo": lambda net: torch._dynamo.optimize("eager")(net),
    "stance": staged,
}
found = {}
for name, make in ways.items():
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    net = Net().cuda()
    run, sgd = make(net), torch.optim.AdamW(net.parameters())
    for _ in range(2):
        run(x).sum().backward()
        sgd.step()
    found[name] = [requested() - before, requested("peak") - before]
    if name == "module":
        found["attributes"] = [type(run).__name__, run._orig_mod is net, list(run.state_dict())[:1]]
    del net, run, sgd, make
    gc.collect()
q, k, v = torch.ones(3, 2, 4, 1024, 64, device="cuda", requires_grad=True)
before = requested()
torch.cuda.reset_peak_memory_stats()
out = torch.compile(flex_attention)(q, k, v)
found["flex"] = [requested() - before, requested("peak") - before]
out.sum().backward()
print(json.dumps(found))
"""


def test_compiled_code_runs_uncompiled_where_that_is_assumed(tmp_path: Path) -> None:
    done = profile(tmp_path, HEAD + COMPILED, "--assume", "compile=eager", "--steps", "99")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("attributes") == ["OptimizedModule", True, ["_orig_mod.inner.weight"]]
    heads, scores = 2 * 4 * 1024, 2 * 4 * 1024 * 1024 * 4
    stays, peak = found.pop("flex")
    assert heads * (64 + 1 + 1) * 4 <= stays <= peak < scores
    ways = list(found)
    assert {tuple(found[way]) for way in ways} == {tuple(found["plain"])}
    parameters = (8 * 32 + 32 + 32 * 8 + 8) * 4
    assert found["plain"][0] == 4 * parameters  # gradients and moments, too
    (said,) = [note for note in read(tmp_path / "train.ampmem").notes if "compiled code" in note]
    assert said.startswith("not modelled: compiled code, which ran uncompiled, as --assume compile=eager says")
    assert said in " ".join(ampmem(tmp_path, "show", "train.ampmem", "--all").stdout.split())


BACKWARD = """
class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * torch.unique(grad).sum()
print("so far")
Custom.apply(model(x)).sum().backward()
"""


def test_it_stops_in_backward_too(tmp_path: Path) -> None:
    done = profile(tmp_path, HEAD + BACKWARD)
    assert done.returncode == 1
    assert done.stdout == "so far\n"
    line = (HEAD + BACKWARD).splitlines().index("        return grad * torch.unique(grad).sum()") + 1
    assert (
        f"NotSimulated: {tmp_path / 'train.py'}:{line}: the number of elements that aten.unique finds depends on"
        in done.stderr
    )
    assert len(read(tmp_path / "train.ampmem").steps) == 1


def test_an_error_of_the_scripts_own_comes_out_of_backward(tmp_path: Path) -> None:
    script = BACKWARD.replace("grad * torch.unique(grad).sum()", "1 / 0").replace(
        "Custom.apply(model(x)).sum().backward()",
        "try:\n    Custom.apply(model(x)).sum().backward()\nexcept ZeroDivisionError:\n    print('caught')",
    )
    done = profile(tmp_path, HEAD + script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "so far\ncaught\n"


def test_a_loop_that_waits_for_a_number_is_told_of(tmp_path: Path) -> None:
    script = HEAD + "count = 0\nwhile x.sum().item() > 0.5 and count < 10_000:\n    count += 1\n"
    done = profile(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has asked 10000 times") == 1
    assert f"{tmp_path / 'train.py'}:17 has asked" in done.stderr
    assert "Ctrl-C" in done.stderr


@pytest.mark.parametrize("command", ["profile", "compare"])
def test_an_assumption_that_cannot_be_meant_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(HEAD)
    for options, message in (
        (("--assume", "nonzero=0.5"), "--assume is for a simulated GPU only"),
        (("--device", "sim", "--assume", "sort=0.5"), "--assume does not know 'sort'; give nonzero, unique"),
        (("--device", "sim", "--assume", "nonzero=half"), "from 0 to 1, such as nonzero=0.5"),
    ):
        assert message in refused(tmp_path, command, *options, "train.py")
