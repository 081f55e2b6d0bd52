"""What overhead.py measures, in a process of its own: programs on one device, in turns.

    python tests/benchmarks/overhead_turns.py cpu|emulated|gpu PROGRAM/STEPS...
                                               [--rounds N] [--parts | --long N [--at-once]]

overhead.py starts it, ``emulated`` on PyTorch's own CUDA build (tests/emulated/run.py). Without ``--parts`` and
``--long`` it prints one line of JSON for each PROGRAM/STEPS, such as gpt/20.
"""

import os

# Before torch is imported: its profiler would write to stderr, and waiting threads would burn CPU time.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import gc
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, process_time_ns
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import ampmem
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.recorder.sources import extension
from ampmem.workloads import gpt, resnet
from ampmem.workloads.common import Sizes

SMALL_GPT = Sizes(vocabulary=512, length=64, layers=2, heads=4, width=96, batch_size=4)
NARROW_GPT = Sizes(vocabulary=512, length=16, layers=12, heads=4, width=96, batch_size=2)
WIDER_GPT = Sizes(vocabulary=512, length=128, layers=12, heads=4, width=192, batch_size=4)
GPT_2 = Sizes(vocabulary=50257, length=128, layers=12, heads=12, width=768, batch_size=4)
SHORT_RESNET = resnet.Config(layers=(2, 2, 2, 2), width=16, classes=10, image=32, batch_size=2)
RESNET_50 = resnet.Config(layers=(3, 4, 6, 3), width=64, classes=1000, image=224, batch_size=8)

Loss = Callable[[], Tensor]
Parts = tuple[nn.Module, Optimizer, Loss]


def _gpt(config: Sizes) -> Parts:
    model = gpt.GPT(config)
    text = torch.randint(config.vocabulary, (config.batch_size, config.length + 1))
    inputs, targets = text[:, :-1], text[:, 1:].flatten()
    return model, AdamW(model.parameters()), lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets)


def _resnet(config: resnet.Config) -> Parts:
    model = resnet.ResNet(config)
    images = torch.randn(config.batch_size, 3, config.image, config.image)
    labels = torch.randint(config.classes, (config.batch_size,))
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), lambda: F.cross_entropy(model(images), labels)


def _mlp() -> Parts:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, labels = torch.randn(32, 64), torch.randint(10, (32,))
    return model, AdamW(model.parameters()), lambda: F.cross_entropy(model(inputs), labels)


GPT_2S = {"cpu": NARROW_GPT, "emulated": GPT_2, "gpu": gpt.PRESETS["full"]}
RESNETS = {"cpu": SHORT_RESNET, "emulated": RESNET_50, "gpu": resnet.PRESETS["full"]}
PROGRAMS: dict[str, Callable[[str], Parts]] = {
    "mlp": lambda _: _mlp(),
    "gpt": lambda _: _gpt(SMALL_GPT),
    "gpt-amp": lambda _: _gpt(SMALL_GPT),
    "gpt2": lambda device: _gpt(GPT_2S[device]),
    "resnet": lambda device: _resnet(RESNETS[device]),
    "gpt2-300ms": lambda _: _gpt(WIDER_GPT),
}
"""Each program, for the device it is to run on."""


class Training:
    """A program that has trained one step: its first update makes the optimizer's state."""

    def __init__(self, program: str, device: str) -> None:
        self.device = "cpu" if device == "cpu" else "cuda"
        self._amp = program.endswith("-amp")
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model, self.optimizer, self.loss = PROGRAMS[program](device)
        self.run(1)

    def run(self, steps: int) -> None:
        """Train so many steps, and wait for the device."""
        for _ in range(steps):
            self.backward()
            self.update()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def backward(self) -> None:
        """One batch, forward and backward."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self._amp):
            loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """One update of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


Precision = Callable[[Training], AbstractContextManager[object]]
"""What a precision does around the steps."""


@contextmanager
def memory_history(training: Training) -> Iterator[None]:
    """PyTorch's own record, with Python stacks, and one snapshot at the end."""
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        yield
        torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)


def torch_profiler(training: Training, *, with_stack: bool = False) -> AbstractContextManager[object]:
    """torch.profiler as people use it to look for memory; its trace is collected and not written."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=with_stack)


@contextmanager
def mem_tracker(training: Training) -> Iterator[None]:
    """MemTracker, whose module statistics have to be reset after each step."""
    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: tracker.reset_mod_stats())
    try:
        with tracker:
            yield
    finally:
        handle.remove()


def ampmem_profile(
    training: Training, *, stacks: bool = True, observed: bool = False
) -> AbstractContextManager[object]:
    """A recording of the block, on disk; ``observed`` by the compiled extension instead of torch.profiler."""
    os.environ[extension.VARIABLE] = "on" if observed else "off"
    return ampmem.profile(training.model, training.optimizer, device=training.device, stacks=stacks)


@contextmanager
def ampmem_without_sync(training: Training) -> Iterator[None]:
    """A recording as ``ampmem profile --no-sync`` makes it, for which the context manager has no argument."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        session = Session(Options(path=path, script="benchmark", device="cuda", synchronize=False))
        session.start()
        try:
            yield
        finally:
            session.close()


PRECISIONS: dict[str, Precision] = {
    "plain": lambda _: nullcontext(),
    "memory history": memory_history,
    "torch.profiler": torch_profiler,
    "torch.profiler, stacks": functools.partial(torch_profiler, with_stack=True),
    "MemTracker": mem_tracker,
    "ampmem": ampmem_profile,
    "ampmem, extension": functools.partial(ampmem_profile, observed=True),
    "ampmem, no stacks": functools.partial(ampmem_profile, stacks=False),
    "ampmem, no sync": ampmem_without_sync,
}
PROFILERS = ("torch.profiler", "torch.profiler, stacks")
ON: dict[str, tuple[str, ...]] = {
    "cpu": ("plain", *PROFILERS, "MemTracker", "ampmem", "ampmem, extension"),
    "emulated": ("plain", "memory history", *PROFILERS, "ampmem", "ampmem, extension"),
    "gpu": tuple(PRECISIONS),
}
"""The precisions on each device, in the order of a round."""
MOST_STEPS = {"MemTracker": 5}
"""A precision that takes no part in longer turns: it would take most of the time, and costs the same in each step."""


def precisions_of(device: str, steps: int, *, observed: bool) -> list[str]:
    """The precisions that take turns of so many steps on the device, in the order of a round."""
    precisions = [precision for precision in ON[device] if steps <= MOST_STEPS.get(precision, steps)]
    return precisions if observed else [precision for precision in precisions if precision != "ampmem, extension"]


def turn(precision: str, training: Training, steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of the steps under a precision, and of all from before its entry to after its exit."""
    gc.collect()
    begins = clock()
    manager = PRECISIONS[precision](training)  # held until the time is taken: what dies with it is not in it
    with manager:
        began = clock()
        training.run(steps)
        ended = clock()
    return ended - began, clock() - begins


def measure(
    device: str, program: str, steps: Sequence[int], rounds: int, *, observed: bool = False
) -> Iterator[dict[str, Any]]:
    """The turns of each number of steps, by precision, and what they ran on. On a GPU the time is the wall's.

    ``observed`` if there is a compiled extension, whose precision takes part then.
    """
    training = Training(program, device)
    clock = perf_counter if device == "gpu" else process_time
    for precision in precisions_of(
        device, min(steps), observed=observed
    ):  # what happens only once in a process is nobody's overhead
        turn(precision, training, min(steps), clock)
    for count in steps:
        turns: dict[str, list[tuple[float, float]]] = {
            precision: [] for precision in precisions_of(device, count, observed=observed)
        }
        for _ in range(rounds):
            for precision, taken in turns.items():
                taken.append(turn(precision, training, count, clock))
        facts = {"torch": torch.__version__, "python": platform.python_version()}
        yield {"device": device, "program": program, "steps": count, "turns": turns, **facts}


def own_precision() -> str:
    """The precision of ampmem whose cost is divided: with the extension if AMPMEM_EXTENSION=on is set."""
    return "ampmem, extension" if os.environ.get(extension.VARIABLE) == "on" else "ampmem"


PARTS: dict[str, str] = {
    "start: the session and its hooks": """block:Profile.__enter__ recorder.session:Session.__init__
        recorder.session:Session.start recorder.session:Session._begin""",
    "start: the tensors that are alive": "recorder.session:live_at_start recorder.sources.storages:Storages.add",
    "torch's profiler, or its memory history, on and off": """recorder.sources.window:Window.start
        recorder.sources.window:Window.take recorder.sources.cuda.device:TorchCuda.history
        recorder.sources.cuda.nodes:NodeRecorder.start""",
    "dispatch mode: ampmem's, around each op": "recorder.hooks.forward:ForwardMode.__torch_dispatch__",
    "dispatch mode: before each op": "recorder.hooks.forward:ForwardMode._before",
    "dispatch mode: what ops return": "recorder.hooks.forward:ForwardMode._note_result",
    "dispatch mode: Python frames": "recorder.models.stacks:Stacks.capture",
    "dispatch mode: the log": "recorder.facts.log:Log.op",
    "dispatch mode: tags of events": "recorder.sources.cuda.source:CudaSource._stamp",
    "the extension: forward's ops": """recorder.hooks.ops:OpRecorder.start recorder.hooks.ops:OpRecorder.stop
        recorder.hooks.ops:OpRecorder.take""",
    "the extension: the allocator's trace": """recorder.sources.cuda.tracker:Tracker.take_counted
        recorder.sources.cuda.tracker:Tracker.new_stacks""",
    "saved tensors": """recorder.hooks.forward:SavedByNodes.read recorder.hooks.forward:SavedByNodes.returned
        recorder.hooks.forward:SavedTensors.pack recorder.hooks.forward:SavedTensors.unpack""",
    "casts": "recorder.hooks.casts:CastHooks.made recorder.hooks.casts:CastHooks.used",
    "hooks of modules": """recorder.hooks.modules:ModuleHooks._before_forward
        recorder.hooks.modules:ModuleHooks._forward_ended
        recorder.hooks.modules:ModuleHooks._starts_inside recorder.hooks.modules:ModuleHooks._ends_inside""",
    "hooks of backward": """recorder.hooks.backward:BackwardHooks._note_start
        recorder.hooks.backward:BackwardHooks._note_end
        recorder.hooks.backward:GradientHooks._note recorder.hooks.backward:GradientHooks.watch""",
    "hooks of the update": """recorder.hooks.optimizers:OptimizerHooks._before_step
        recorder.hooks.optimizers:OptimizerHooks._after_step recorder.hooks.optimizers:OptimizerHooks.note_gradients
        recorder.hooks.optimizers:OptimizerHooks.note_state""",
    "names of the model": "recorder.models.models:Models.note",
    "the script's variables": "recorder.models.holders:Variables._note",
    "who holds what: the objects that are alive": "recorder.models.live:live_tensors",
    "who holds what: their owners": "recorder.models.holders:holders_of",
    "who holds what: the rest": """recorder.models.holders:HolderLog.note recorder.models.holders:HolderLog.note_rest
        recorder.hooks.optimizers:OptimizerHooks.note_idle""",
    "marks: the allocator's statistics": "recorder.sources.cuda.source:CudaSource.mark",
    "numbers read later": """recorder.sources.cuda.late:LateNumber.__init__
        recorder.sources.cuda.late:LateNumber.value""",
    "step's end: the wait": "recorder.sources.cuda.device:TorchCuda.synchronize",
    "step's end: the profiler's tree": """recorder.sources.cpu:ProfilerSource._settle
        recorder.sources.cuda.nodes:NodeRecorder.take""",
    "step's end: the allocator's snapshot": "recorder.sources.cuda.device:TorchCuda.snapshot",
    "step's end: reading the trace": "recorder.sources.cuda.events:History.read",
    "step's end: settling events": """recorder.sources.ledger:Ledger.settle recorder.sources.cuda.events:History.settle
        recorder.sources.cuda.events:History.follow""",
    "step's end: the rest of the source": """recorder.sources.cuda.source:TracePeaks.note
        recorder.sources.cuda.source:CudaSource._drain_trace""",
    "step's end: joining events": "recorder.writing:Joiner.join",
    "step's end: the log as columns": """recorder.facts.log:Log.take_facts recorder.facts.log:Log.take_ops
        recorder.facts.log:Log.take_phases recorder.facts.log:Log.take_modules""",
    "following the script's phases": """recorder.script_listener:ScriptListener.forward_started
        recorder.script_listener:ScriptListener.forward_ended recorder.script_listener:ScriptListener.backward_started
        recorder.script_listener:ScriptListener.backward_ended recorder.script_listener:ScriptListener.optimizer_started
        recorder.script_listener:ScriptListener.updated""",
    "step's end: what is known of the run": """recorder.writing:Describer.description
        recorder.writing:Describer.changed""",
    "SQLite: the file made and closed": "recording:RecordingWriter.__init__ recording:RecordingWriter.close",
    "SQLite: steps written": "recording:RecordingWriter.append",
    "end of the session": """block:Profile.__exit__ recorder.session:Session.close recorder.session:Session._end
        recorder.session:Session._end_recording""",
}
"""Functions of ampmem, by what they are for."""
OPS = "the script's ops, inside of the dispatch mode"
COLLECTIONS = "Python's garbage collections"


class Clock:
    """Adds up the CPU time of each part while it runs and no other does inside of it.

    What asking for the time takes, 2 us where it is a call of the kernel, is measured and left out.
    """

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside: list[int] = []
        """Of each part that is running, the time of the parts inside of it, outermost first."""
        self._starts: list[int] = []
        self._within, self._around = 0, 0
        empty = self.timed("", lambda: None)
        begins = process_time_ns()
        for _ in range(2000):
            empty()
        self._around = (process_time_ns() - begins) // 2000
        self._within = self.taken.pop("") // 2000

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time is that of ``part``."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            try:
                return function(*args, **kwargs)
            finally:
                self._end(part)

        return run

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """What ``gc.callbacks`` calls: a collection is a part, whoever's allocations set it off."""
        if phase == "start":
            self._begin()
        else:
            self._end(COLLECTIONS)

    def _begin(self) -> None:
        self._inside.append(0)
        self._starts.append(process_time_ns())

    def _end(self, part: str) -> None:
        whole = process_time_ns() - self._starts.pop() - self._within
        self.calls[part] += 1
        self.taken[part] += whole - self._inside.pop()
        if self._inside:
            self._inside[-1] += whole + self._around


class _Nothing(TorchDispatchMode):
    """What torch's dispatch mode costs by itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def print_parts(device: str, program: str, steps: int, rounds: int) -> None:
    """Print one row per part: the least of all rounds, of each part for itself.

    A part is its functions' own time: what another part takes inside of them is that part's. Timing thousands of calls
    takes more than what is left out for it, so parts with many calls come out too large by some tenths.
    """
    training = Training(program, device)
    loss = training.loss

    def under_mode() -> Tensor:
        with _Nothing():  # type: ignore[no-untyped-call]
            return loss()

    def least(precision: str) -> float:
        turn(precision, training, steps, process_time)  # what happens only once in a process is nobody's overhead
        return min(turn(precision, training, steps, process_time)[1] for _ in range(rounds)) * 1e3

    own = own_precision()
    plain, whole = least("plain"), least(own)
    alone = {}
    if own == "ampmem":  # the extension pushes no mode
        training.loss = under_mode
        alone["torch's dispatch mode itself"] = least("plain") - plain
        training.loss = loss
    clock = Clock()
    named = [(part, f"ampmem.{name}") for part, names in PARTS.items() for name in names.split()]
    for part, name in (*named, (OPS, "torch._ops:OpOverload.__call__")):
        module, _, path = name.partition(":")
        *owners, last = path.split(".")
        try:
            owner = functools.reduce(getattr, owners, import_module(module))
            setattr(owner, last, clock.timed(part, getattr(owner, last)))
        except (ImportError, AttributeError):
            print(f"{name} is not there: {part!r} lacks it", file=sys.stderr)
    taken = dict.fromkeys((*PARTS, COLLECTIONS, OPS), float("inf"))
    profiled = PRECISIONS[own]

    def collections_timed(trained: Training) -> AbstractContextManager[object]:
        gc.callbacks.append(clock.collecting)  # not before: each turn begins with a collection that is not in its time
        return profiled(trained)

    PRECISIONS[own] = collections_timed
    for _ in range(rounds):
        clock.taken.clear()
        clock.calls.clear()
        turn(own, training, steps, process_time)
        gc.callbacks.remove(clock.collecting)
        taken = {part: min(time, clock.taken[part] / 1e6) for part, time in taken.items()}
    del taken[OPS]
    parts = {part: time for part, time in taken.items() if time} | alone
    added = whole - plain
    parts["the rest; below 0, what timing the parts took"] = added - sum(parts.values())
    rows = [(part, f"{time:.1f}", f"{time / added:.0%}", clock.calls[part] or "") for part, time in parts.items()]
    print(f"{device}/{program}/{steps}: {whole:.1f} ms, of which {plain:.1f} plain; {added:.1f} are divided:\n")
    print(
        tabulate(rows, ["part", "CPU ms", "share", "calls"], tablefmt="github", disable_numparse=True),
        end="\n\n",
        flush=True,
    )


def print_long(device: str, program: str, events: int, at_once: bool) -> None:
    """Print what recording one step of about ``events`` entries of the allocator's trace costs.

    They are those of all batches, or of one backward of the sum of all losses where that is to be at once.
    """
    training = Training(program, device)
    own = own_precision()
    with PRECISIONS[own](training):
        training.run(1)
    torch.cuda.memory._record_memory_history("all", context=None)
    loss = training.loss()
    forward = len(torch.cuda.memory._snapshot()["device_traces"][0])
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    entries = len(torch.cuda.memory._snapshot()["device_traces"][0]) - (forward if at_once else 0)
    torch.cuda.memory._record_memory_history(None)
    training.optimizer.zero_grad()
    batches = max(1, events // entries)
    times = []
    for precision in ("plain", own):
        before, start = getrusage(RUSAGE_SELF).ru_maxrss, process_time()
        with PRECISIONS[precision](training):
            if at_once:
                torch.stack([training.loss() for _ in range(batches)]).sum().backward()
            else:
                for _ in range(batches):
                    training.backward()
            training.update()
        times.append((process_time() - start, (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024))
    (plain_s, _), (own_s, own_mib) = times
    what = "one backward" if at_once else "one step"
    print(f"{what} of {batches} batches, about {batches * entries:,} entries of the trace:")
    print(f"plain {plain_s:.1f} CPU s; {own} {own_s:.1f} CPU s, and {own_mib:.0f} MiB more at the most")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=ON)
    parser.add_argument("runs", nargs="+", metavar="PROGRAM/STEPS", help="such as gpt/3")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--long", type=int, metavar="EVENTS")
    parser.add_argument("--at-once", action="store_true")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"{options.device} needs a CUDA device")
    if not extension.path().exists():
        extension.build()
    steps: dict[str, list[int]] = {}
    for run in options.runs:
        program, _, count = run.partition("/")
        steps.setdefault(program, []).append(int(count))
    for program, counts in steps.items():
        if options.long is not None:
            print_long(options.device, program, options.long, options.at_once)
            continue
        if options.parts:
            for count in counts:
                print_parts(options.device, program, count, options.rounds)
            continue
        for row in measure(options.device, program, counts, options.rounds, observed=True):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
