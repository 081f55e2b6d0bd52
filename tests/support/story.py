"""Longer recordings than those of the unit tests, and hostile ones."""

import random
from collections.abc import Mapping
from dataclasses import replace

from ampmem.allocator.blocks import Block, CallKind
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.settings import Settings
from ampmem.analysis.fit import FitResult, Memory, Points, Vary, fit_result
from ampmem.events import Fact, Phase, Recording, SegmentAction
from ampmem.vocabulary import SourceKind
from support.build import AMP, RUN, Story

MIB = 1 << 20
LAYERS = 40
CODE = "train.py:20 main\nmodel.py:7 Net.forward"


def long_run(*, steps: int, precision: str = "amp", layers: int = LAYERS, batch: int = 3) -> Recording:
    """A deep network: sawtooth activations, cast copies under autocast, temporaries in every op."""
    story = Story()
    for layer in range(layers):
        story.parameter(0x10000 + layer * 0x100, f"layers.{layer}.linear.weight", 1000 + layer)
    for step in range(steps):
        _step(story, step, precision, layers, batch)
    return story.recording(precision=replace(AMP, name=precision, dtype="bfloat16" if precision == "amp" else None))


def _step(story: Story, step: int, precision: str, layers: int, batch: int) -> None:
    story.begin(step, Phase.DATA)
    story.alloc(0x1, 4096, op="aten::randn", stack="train.py:12 load")
    story.enter(Phase.FORWARD)
    for layer in range(layers):
        where = f"layers.{layer}.linear"
        if precision == "amp":
            story.tensor(
                Fact.CAST_COPY,
                0x20000 + layer,
                2000 + 2 * layer,
                f"{where}.weight",
                module=where,
                op="aten::_to_copy",
                stack=CODE,
            )
        for part in range(batch):
            address = 0x30000 + layer * 0x10 + part
            story.tensor(
                Fact.SAVED,
                address,
                700 + 13 * layer + part + step,
                "MmBackward0",
                module=where,
                op="aten::mm",
                stack=CODE,
            )
            _scratch(story, 64 + 8 * part, where)
    story.enter(Phase.BACKWARD)
    for layer in reversed(range(layers)):
        gradient = 0x50000 + layer
        story.alloc(gradient, 4 * (1000 + layer), op="MmBackward0", module=f"layers.{layer}.linear")
        story.fact(Fact.GRADIENT, gradient, f"layers.{layer}.linear.weight")
        story.free(*(0x30000 + layer * 0x10 + part for part in range(batch)))
        if precision == "amp":
            story.free(0x20000 + layer)
        _scratch(story, 32, "")
    story.enter(Phase.OPTIMIZER)
    for layer in range(layers):
        if step == 0:
            story.tensor(
                Fact.OPTIMIZER_STATE,
                0x60000 + layer,
                8 * (1000 + layer),
                f"exp_avg of layers.{layer}.linear.weight",
                op="AdamW.step",
                stack="train.py:30 main",
            )
        for _ in range(4):
            _scratch(story, 1500, "")
    story.end(loss=2.5 - step / 10)
    story.enter(Phase.BETWEEN)
    story.free(*(0x50000 + layer for layer in range(layers)), 0x1)


def _scratch(story: Story, size: int, module: str) -> None:
    story.scratch(0x2, size, op="aten::add", module=module, stack=CODE)


LAUNCHER = "<frozen runpy>:198 _run_module_as_main"
WRAPPERS = ("/home/me/train.py:90 <module>", "/home/me/cli.py:12 main", "/home/me/train.py:88 run")
LIBRARY = "/venv/lib/python3.11/site-packages/torch/nn/functional.py:2987 linear"


def deep_run(*, layers: int = 200) -> Recording:
    """A network of many equal layers but for the first, which has more activations; stacks with frames of all sorts."""
    story = Story()
    for layer in range(layers):
        story.parameter(0x100000 + layer * 0x100, f"net.layers.{layer}.fc.weight", 1000)
        story.parameter(0x200000 + layer * 0x100, f"net.layers.{layer}.norm.weight", 50)
    story.parameter(0x300000, "net.head.weight", 20_000)
    story.begin(0, Phase.FORWARD)
    callers = "\n".join((LAUNCHER, *WRAPPERS, "/home/me/train.py:40 train"))
    for layer in range(layers):
        where = f"net.layers.{layer}.fc"
        stack = f"{callers}\n/home/me/net.py:7 Net.forward\n{LIBRARY}"
        story.tensor(
            Fact.SAVED,
            0x400000 + layer,
            9000 if layer == 0 else 3000,
            "MmBackward0",
            module=where,
            op="aten::mm",
            stack=stack,
        )
    story.tensor(
        Fact.SAVED, 0x500000, 70_000, "MmBackward0", op="aten::mm", stack=f"{callers}\n/home/me/net.py:9 Net.loss"
    )
    story.alloc(0x600000, 5000, op="aten::empty", stack=LIBRARY)
    story.enter(Phase.BACKWARD)
    story.alloc(0x700000, 4000, op="MmBackward0", module="net.layers.0.fc")
    story.fact(Fact.GRADIENT, 0x700000, "net.layers.0.fc.weight")
    story.free(*(0x400000 + layer for layer in range(layers)), 0x500000, 0x600000)
    story.end(Phase.OPTIMIZER)
    story.enter(Phase.BETWEEN)
    story.free(0x700000)
    return story.recording()


PAYLOADS = (
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=2>",
    "\"><svg onload='window.pwned=3'>",
    "' onmouseover='window.pwned=4' x='",
    "javascript:window.pwned=5",
    "<a href='javascript:window.pwned=6'>click</a>",
    "<!--<script>window.pwned=7",
    "${window.pwned=8}{{7*7}}{% raw %}",
    "%{customdata}<extra></extra><b>bold</b>",
    "__proto__",
    "constructor",
    "toString",
    "\u202egnp.exe\u2066",
    "\ud800 lone",
    "\x00\x1b[2J\r\n\u2028",
    "&lt;img src=x onerror=window.pwned=9&gt;",
    "]]><script>window.pwned=10</script>",
    "</title></style></textarea><script>window.pwned=11</script>",
    "m" * 8_000,  # about the longest name that a recording may have
)


def hostile_run() -> Recording:
    """Every text that a script chooses is a payload; a recording cannot hold lone surrogates."""
    story = Story()
    payloads = tuple(payload for payload in PAYLOADS if "\ud800" not in payload)
    count = len(payloads)
    for number, payload in enumerate(payloads):
        story.parameter(0x1000 + number, f"{payload}.weight", 10 + number)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        for number, payload in enumerate(payloads):
            other, third = payloads[(number + 1) % count], payloads[(number + 2) % count]
            one_line = payload.replace("\n", " ")
            story.tensor(
                Fact.SAVED,
                0x3000 + number,
                5000 + number,
                payload,
                module=payload,
                op=other,
                stack=f"{one_line}.py:{number + 1} {third.splitlines()[0]}\n{one_line}",
                dtype=payload,
            )
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x8000, 77, f"{payloads[0]}.weight")
        story.free(*(0x3000 + number for number in range(count)), 0x8000)
        story.end(Phase.OPTIMIZER)
    run = replace(RUN, script=payloads[0], arguments=payloads, device_name=payloads[1])
    return story.recording(run=run, notes=payloads)


def gpu_run(*, steps: int, expandable: bool = False) -> Recording:
    """Random sizes through the model of the allocator, which gives memory back between the steps."""
    chance = random.Random(7)
    allocator = DeviceCachingAllocator(Settings(expandable_segments=expandable), total_memory=1 << 34)
    story = Story()
    told = 0

    def segments() -> None:
        nonlocal told
        for call in allocator.driver.calls[told:]:
            pages = call.call in (CallKind.SEGMENT_MAP, CallKind.SEGMENT_UNMAP)
            takes = call.call in (CallKind.SEGMENT_ALLOC, CallKind.SEGMENT_MAP)
            action = SegmentAction.RESERVE if takes else SegmentAction.RELEASE
            story.segment(call.address, call.size, action, small=call.size == 2 << 20, expandable=pages)
        told = len(allocator.driver.calls)

    def malloc(size: int, op: str) -> Block:
        block = allocator.malloc(size)
        segments()
        story.alloc(block.address, size, block=block.size, op=op, module=f"layers.{size % 5}", stack=CODE)
        story.fact(Fact.OUTPUT, block.address, op, dtype="uint8", shape=f"[1, {size}]")
        return block

    def free(block: Block) -> None:
        story.free(block.address)
        allocator.free(block)
        segments()

    weight = allocator.malloc(4096)
    segments()
    story.parameter(weight.address, "layers.0.weight", 1024)
    kept = [malloc(chance.choice((3000, 700_000, 5 << 20)), "aten::randn") for _ in range(20)]
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        live = [malloc(chance.randrange(1, 6 << 20), "aten::mm") for _ in range(200)]
        for block in live[::2]:
            story.fact(Fact.SAVED, block.address, "MmBackward0")
        for block in live[1::2]:
            free(block)
        story.enter(Phase.BACKWARD)
        for block in live[::2]:
            free(malloc(chance.randrange(1, 30 << 20), "MmBackward0"))
            free(block)
        story.enter(Phase.OPTIMIZER)
        free(malloc(12 << 20, "AdamW.step"))
        story.end()
        story.enter(Phase.BETWEEN)
        allocator.empty_cache()
        segments()
    free(kept[0])
    run = replace(RUN, source=SourceKind.SIMULATED, device_type="cuda", device_name="a GPU")
    return story.recording(run=run)


def memory(mebibytes: int) -> Memory:
    return Memory(allocated=mebibytes * MIB, reserved=(mebibytes + 6) * MIB, used=(mebibytes + 518) * MIB)


def made(total: int = 800 * MIB, precisions: tuple[str, ...] = ("amp",)) -> FitResult:
    fp32 = {value: memory(20 + 10 * value) for value in (1, 2, 3, 4, 16, 24)}
    amp = {**{value: memory(45 + 2 * value) for value in fp32}, 64: memory(173), 128: None}
    points = {"fp32": {**fp32, 25: None, 64: None}, **{precision: dict(amp) for precision in precisions}}
    return fit_of(points, total)


def fit_of(points: Mapping[str, Points], total: int, gpu: str = "a GPU") -> FitResult:
    """The result of runs over a batch size."""
    vary = Vary(name="--batch-size", separator="=", low=1, high=64)
    return fit_result(points, script="train.py", vary=vary, gpu=gpu, total=total, steps=2, notes=("a note",))
