"""Probes that are scripts: run plainly, and under the command line, as their users would."""

from collections import Counter
from pathlib import Path

import children
from results import FAILED, PASSED, Fact, Row

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.events import Fact as Seen
from ampmem.events import Recording
from ampmem.recording import read

_EACH = 60
"""Seconds that one script may take."""

_TRAINING = """
def train(where, autocast):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(autocast, init_scale=2.0)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(autocast, dtype=torch.float16 if autocast == "cuda" else torch.bfloat16):
            loss = model(torch.ones(4, 64)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        del loss
    print("trained on", next(model.parameters()).device.type)
"""
DEFAULTS = {
    "with torch.device": f"import torch\n{_TRAINING}\nwith torch.device(DEVICE):\n    train(DEVICE, DEVICE)\n",
    "set_default_device, and a function mode": f"""
import torch
from torch.overrides import TorchFunctionMode
{_TRAINING}
calls = 0
class Counts(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        global calls
        calls += 1
        return func(*args, **(kwargs or {{}}))
torch.set_default_device(DEVICE)
with Counts():
    train(DEVICE, DEVICE)
print("calls", calls)
""",
}

ILLEGAL = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, table = torch.randn(32, 64, device="cuda"), torch.zeros(64, device="cuda")
try:
    wild = torch.cuda._compile_kernel('extern "C" __global__ void wild(float* p) { p[1ull << 40] = 1.0f; }', "wild")
    breaks = lambda: wild(grid=(1, 1, 1), block=(1, 1, 1), args=[table])
    print("by an illegal access", flush=True)
except Exception:
    far = torch.full((1,), 10**6, device="cuda")
    breaks = lambda: table[far]
    print("by a device-side assert", flush=True)
for step in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if step == 1:
        torch.cuda._sleep(400_000_000)  # nobody knows of the error before the step is over
        breaks()
    optimizer.step()
torch.cuda.synchronize()
"""

RECORD_STREAM = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
for _ in range(7):
    with torch.cuda.stream(side):
        x = torch.randn(64, 512, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    x.record_stream(torch.cuda.current_stream())
    torch.cuda._sleep(20_000_000)
    del x
    optimizer.step()
"""

REENTRANT = """
import torch
from collections import OrderedDict
from torch.utils.checkpoint import checkpoint
class Block(torch.nn.Sequential):
    def __init__(self):
        super().__init__(OrderedDict(
            linear=torch.nn.Linear(96, 96), norm=torch.nn.LayerNorm(96), act=torch.nn.GELU(), drop=torch.nn.Dropout(0.1)
        ))
blocks = torch.nn.ModuleList(Block() for _ in range(3))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = torch.nn.Linear(96, 96), blocks
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x
net = Net().to(DEVICE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(64, 96, device=DEVICE)).square().mean().backward()
    optimizer.step()
"""
NODES_OF = {
    "linear": ("addmm", "mm", "linear", "transpose", "t", "sum", "view", "accumulategrad"),
    "first": ("addmm", "mm", "linear", "transpose", "t", "sum", "view", "accumulategrad"),
    "norm": ("nativelayernorm", "native_layer_norm", "layer_norm", "accumulategrad"),
    "act": ("gelu",),
    "drop": ("nativedropout", "native_dropout", "dropout", "empty_like", "mul", "bernoulli_", "div_"),
}
"""Of each layer the ops and nodes that its memory can come from, as far as their names say."""
_AROUND = "checkpointfunction"
"""The node around all that a checkpointed block does in backward."""


def default_device(device: str, folder: Path) -> Row:
    """Scripts that make everything on the device by default: the same end and output as without ampmem."""
    facts: dict[str, Fact] = {}
    wrong = []
    for number, (name, text) in enumerate(DEFAULTS.items()):
        script = folder / f"default{number}.py"
        script.write_text(text.replace("DEVICE", repr(device)), encoding="utf-8")
        plain = children.follow((str(script),), _EACH, folder=folder)
        profile = ("-m", "ampmem", "profile", "--device", device, "--quiet", "--run-to-end", "--force", script.name)
        under = children.follow(profile, _EACH, folder=folder)
        steps = _steps(folder / f"default{number}.ampmem")
        facts[name] = {"plain": plain.code, "ampmem": under.code, "steps": steps, "said": list(under.lines[-3:])}
        same = (under.code, _own(under.lines)) == (plain.code, _own(plain.lines))
        if not (same and plain.code == 0 and steps == 3):
            wrong.append(name)
    detail = f"differs: {', '.join(wrong)}" if wrong else f"{len(DEFAULTS)} scripts end as without ampmem"
    return Row(name="default-device", outcome=FAILED if wrong else PASSED, detail=detail, facts=facts)


def _own(lines: tuple[str, ...]) -> list[str]:
    """What the script printed."""
    return [line for line in lines if line.startswith(("trained on", "calls"))]


def _steps(path: Path) -> int:
    return sum(step.finished for step in read(path).steps) if path.exists() else 0


_FAILS = {
    "EMULATED_CUDA_LATE": "sync",
    "EMULATED_CUDA_FAIL": "cudaLaunchKernel:wild@1=illegal!,cudaLaunchKernel:index_elementwise@1=assert!",
}
"""For the emulated runtime, whose kernels do nothing; a GPU does not know them."""


def illegal_access(device: str, folder: Path) -> Row:
    """An error of the device that is first seen at a step's end: it comes out of the script's own next call."""
    script = folder / "illegal.py"
    script.write_text(ILLEGAL, encoding="utf-8")
    plain = children.follow((str(script),), _EACH, folder=folder, variables=_FAILS)
    profile = ("-m", "ampmem", "profile", "--device", device, script.name)
    under = children.follow(profile, _EACH, folder=folder, variables=_FAILS)
    return illegal_verdict(plain, under, _steps(folder / "illegal.ampmem"))


def illegal_verdict(plain: children.Ended, under: children.Ended, steps: int) -> Row:
    """Exit code 1 and the script's own traceback, with what had been recorded; never an abort (134, or -6)."""
    said = any("CUDA error" in line for line in under.lines)
    own = any("illegal.py" in line for line in under.lines)
    good = under.code == 1 and said and own and steps > 0
    facts: dict[str, Fact] = {
        "plain": plain.code,
        "ampmem": under.code,
        "how": next((line for line in under.lines if line.startswith("by ")), ""),
        "error": next((line for line in under.lines if "CUDA error" in line), ""),
        "in_the_script": own,
        "steps": steps,
    }
    detail = f"exit code {under.code}, {plain.code} without ampmem; {steps} steps kept"
    return Row(name="illegal-access", outcome=PASSED if good else FAILED, detail=detail, facts=facts)


def record_stream(device: str, folder: Path) -> Row:
    """Recording begins in the middle, while blocks wait for a stream that lags: the sums are the allocator's."""
    recording = _recorded("record_stream", RECORD_STREAM, device, folder, "--skip", "2", "--steps", "3", "--no-sync")
    summary = summarize(recording)
    residual = summary.conservation.residual_bytes
    reserved = summary.conservation.reserved_residual_bytes
    marks: dict[str, Fact] = {
        f"{row.step} {row.mark}": [row.requested, row.allocated, row.active] for row in recording.layers
    }
    facts: dict[str, Fact] = {
        "residual": residual,
        "reserved_residual": reserved,
        "awaiting_at_marks": sum(row.active > row.allocated for row in recording.layers),
        "streams": len(set(recording.events.stream.tolist())),
        "marks": marks,
        "notes": list(recording.notes),
    }
    good = residual == 0 and reserved == 0
    detail = f"residual {residual} B, of reserved memory {reserved} B"
    return Row(name="record-stream", outcome=PASSED if good else FAILED, detail=detail, facts=facts)


def reentrant(device: str, folder: Path) -> Row:
    """What a reentrant checkpoint computes again, on the engine's thread, has the names of its own layers."""
    text = REENTRANT.replace("DEVICE", repr("cpu" if device == "cpu" else "cuda"))
    recording = _recorded("reentrant", text, device, folder)
    lives = analyse(recording).lifetimes
    texts = recording.texts
    pairs = zip(
        (texts[each] for each in lives.op.tolist()), (texts[each] for each in lives.module.tolist()), strict=True
    )
    recomputed = int((recording.facts.fact == Seen.RECOMPUTED).sum())
    return names_verdict(Counter(pairs), recomputed, summarize(recording).conservation.residual_bytes)


def names_verdict(pairs: Counter[tuple[str, str]], recomputed: int, residual: int | None) -> Row:
    """No allocation of a layer comes from an op that the layer does not have; ``pairs`` are ops and modules."""
    layers = {pair: count for pair, count in pairs.items() if _layer(pair[1]) in NODES_OF and pair[0]}
    foreign = {pair: count for pair, count in layers.items() if not _fits(*pair)}
    again = sum(count for (op, module), count in layers.items() if module.startswith("blocks."))
    good = not foreign and recomputed > 0 and again > 0 and residual == 0
    facts: dict[str, Fact] = {
        "named": sum(layers.values()),
        "foreign": {f"{op} in {module}": count for (op, module), count in foreign.items()},
        "recomputed": recomputed,
        "residual": residual,
        "names": {f"{op} in {module}": count for (op, module), count in sorted(layers.items())},
    }
    detail = f"{sum(layers.values())} allocations of layers, {sum(foreign.values())} with an op that is not theirs"
    return Row(name="reentrant", outcome=PASSED if good else FAILED, detail=detail, facts=facts)


def _layer(module: str) -> str:
    return module.rpartition(".")[2]


def _fits(op: str, module: str) -> bool:
    name = op.rpartition("::")[2].lower()
    stem = name.partition("backward")[0]
    known = {each.strip("_") for each in NODES_OF[_layer(module)]} | ({_AROUND} if "." in module else set())
    return stem.strip("_") in known


def _recorded(name: str, text: str, device: str, folder: Path, *options: str) -> Recording:
    script = folder / f"{name}.py"
    script.write_text(text, encoding="utf-8")
    on = ("--device", device, *(("--gpu", "h200") if device == "sim" else ()))
    ended = children.follow(("-m", "ampmem", "profile", *on, "--quiet", *options, script.name), _EACH, folder=folder)
    if ended.code != 0:
        raise RuntimeError(f"{ended.how}: {' '.join(ended.lines[-3:])}")
    return read(folder / f"{name}.ampmem")
