"""How large the HTML report of long recordings gets, what it takes to write, and how soon a browser shows it.

Run it: ``python tests/benchmarks/report.py [usual|million|scattered|ten-million]...``, all but the last by default.
It fails when a page is larger, slower or hungrier than :data:`CASES` allows. Writing is measured in seconds of the
processor. In Chromium, by the clock, the median of five: ``first`` is from opening the page to its first contentful
paint, ``ready`` to its first complete picture, and ``zoom`` from a key to the new picture. They are left out where
playwright or Chromium is missing.
"""

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ampmem.events import (
    Action,
    Column,
    EventColumns,
    Fact,
    FactColumns,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    PrecisionRecord,
    RunRecord,
    StepRecord,
)
from ampmem.recording import Batch, Description, RecordingWriter
from ampmem.reporters.html import write
from ampmem.vocabulary import SourceKind

EVENTS_PER_STEP = 20_000
BLOCKS = 48
OPS = 60
STACKS = 400
STEP_NS = 1_000_000_000
SHARES = (
    (Phase.DATA, 0.0),
    (Phase.FORWARD, 0.02),
    (Phase.BACKWARD, 0.4),
    (Phase.OPTIMIZER, 0.85),
    (Phase.BETWEEN, 0.99),
)
COLUMNS = "{:<12} {:>12} {:>9} {:>9} {:>10} {:>10} {:>8} {:>8} {:>8}  {}"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VIEWS = 5
WATCH = """
new MutationObserver(() => {
  if (document.documentElement.hasAttribute("data-ready")) window.ready ??= performance.now();
}).observe(document, {attributes: true, subtree: true});
"""
FIRST = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
ZOOM = """
key => new Promise(done => {
  const chart = document.querySelector("#chart .js-plotly-plot") ?? document.querySelector("#chart");
  const start = performance.now();
  chart.once("plotly_afterplot", () => done(performance.now() - start));
  document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One page: how many events, how much of each step differs from the others, and what it may take."""

    events: int
    scatter: float
    megabytes: float
    seconds: float | None = None
    gibibytes: float | None = None
    first_s: float | None = None
    ready_s: float | None = None
    zoom_s: float | None = None


CASES = {
    "usual": Case(events=10_000, scatter=0.02, megabytes=1.0, first_s=0.5, ready_s=1.5),
    "million": Case(
        events=1_000_000,
        scatter=0.05,
        megabytes=5.0,
        seconds=5.0,
        gibibytes=1.5,
        first_s=0.5,
        ready_s=2.5,
        zoom_s=0.3,
    ),
    "scattered": Case(events=1_000_000, scatter=1.0, megabytes=12.0),
    "ten-million": Case(events=10_000_000, scatter=0.05, megabytes=12.0),
}


def _column(values: object) -> Column:
    return np.ascontiguousarray(values, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The allocations of one step: ``born`` and ``died`` are shares of the step, ``kind`` says everything else."""

    born: np.ndarray
    died: np.ndarray
    kind: np.ndarray


def program(random: np.random.Generator, count: int) -> Program:
    """What a step does: activations of the forward pass die in backward, in reverse; the rest at once."""
    born = np.sort(random.uniform(0.02, 0.99, count))
    saved = (born < 0.4) & (random.random(count) < 0.5)
    died = np.where(saved, 0.85 - (born - 0.02) / 0.38 * 0.45, born + random.exponential(0.0005, count))
    return Program(born=born, died=np.minimum(died, 0.995), kind=random.integers(0, 4 * BLOCKS * OPS, count))


def events_of(random: np.random.Generator, base: Program, step: int, scatter: float) -> EventColumns:
    """The events of ``step``: ``base``, with a share of its allocations replaced by others."""
    count = len(base.born)
    other = program(random, count)
    new = random.random(count) < scatter
    born, died, kind = (
        np.where(new, there, here)
        for here, there in ((base.born, other.born), (base.died, other.died), (base.kind, other.kind))
    )
    size = np.where(new & (random.random(count) < scatter), random.integers(1, 1 << 22, count), 512 * (1 + kind % 977))
    at = np.concatenate([born, died])
    order = np.argsort(at, kind="stable")
    which, free = order % count, order >= count
    time_ns = step * STEP_NS + np.sort((at * STEP_NS).astype(np.int64))
    borders = [share * STEP_NS for _, share in SHARES]
    phase = np.array([int(phase) for phase, _ in SHARES])[np.searchsorted(borders, time_ns % STEP_NS, side="right") - 1]
    zero = np.zeros(2 * count, dtype=np.int64)
    return EventColumns(
        time_ns=_column(time_ns),
        step=_column(zero + step),
        phase=_column(phase),
        action=_column(np.where(free, Action.FREE, Action.ALLOC)),
        address=_column(0x7F0000000000 + which * 4096),
        bytes=_column(size[which]),
        block_bytes=_column(size[which]),
        stream=_column(zero),
        op=_column(np.where(free, 0, 1 + kind[which] % OPS)),
        module=_column(np.where(free, 0, 1 + OPS + kind[which] // OPS)),
        stack=_column(np.where(free, 0, 1 + OPS + 4 * BLOCKS + kind[which] % STACKS)),
        allocated=_column(np.cumsum(np.where(free, -1, 1) * size[which])),
    )


def facts_of(random: np.random.Generator, events: EventColumns) -> FactColumns:
    """Every fifth allocation was saved for backward."""
    births = np.flatnonzero(events.action == Action.ALLOC)
    about = births[random.random(len(births)) < 0.2]
    zero = np.zeros(len(about), dtype=np.int64)
    return FactColumns(
        time_ns=events.time_ns[about],
        address=events.address[about],
        fact=zero + int(Fact.SAVED),
        name=events.op[about],
        module=events.module[about],
        dtype=zero,
        shape=zero,
    )


def phases_of(step: int) -> PhaseColumns:
    """The phases of ``step``."""
    return PhaseColumns(
        time_ns=_column([step * STEP_NS + int(share * STEP_NS) for _, share in SHARES]),
        step=_column([step] * len(SHARES)),
        phase=_column([int(phase) for phase, _ in SHARES]),
    )


def texts() -> list[str]:
    """Ops, modules and stacks."""
    parts = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    modules = [f"transformer.blocks.{block}.{part}" for block in range(BLOCKS) for part in parts]
    stacks = [
        "\n".join(
            f"/home/user/train/model_{depth}.py:{10 + number // (1 + depth)} forward" for depth in range(12, 0, -1)
        )
        for number in range(STACKS)
    ]
    return [f"aten::op_{number}" for number in range(OPS)] + modules + stacks


def make(path: Path, case: Case) -> None:
    """Write the recording, one batch per step, as a run does."""
    random = np.random.default_rng(0)
    steps = max(3, case.events // EVENTS_PER_STEP)
    base = program(random, case.events // steps // 2)
    run = RunRecord(
        ampmem="0.1.0",
        torch="2.13.0",
        python="3.11",
        source=SourceKind.CUDA,
        device_type="cuda",
        device_name="a device",
        rank=0,
        world_size=1,
        script="train.py",
        arguments=(),
    )
    parameters = tuple(
        ParameterRecord(name=f"{text}.weight", elements=1000, bytes=4000, dtype="float32", trainable=True)
        for text in texts()[OPS : OPS + 4 * BLOCKS]
    )
    writer = RecordingWriter(path, run)
    writer.describe(
        Description(
            precision=PrecisionRecord(name="fp32", dtype=None, cache=None, scaler=False),
            parameters=parameters,
            optimizers=(OptimizerRecord(class_name="AdamW", implementation="foreach"),),
            notes=(),
        )
    )
    for step in range(steps):
        events = events_of(random, base, step, case.scatter)
        record = StepRecord(
            index=step,
            start_ns=step * STEP_NS,
            end_ns=(step + 1) * STEP_NS,
            skipped_update=False,
            loss=1.0,
            loss_scale=None,
        )
        new = texts() if step == 0 else []
        facts = facts_of(random, events)
        writer.append(Batch(texts=new, events=events, facts=facts, phases=phases_of(step), step=record))
    writer.close()


def measure(recording: Path, page: Path) -> tuple[float, float]:
    """Write the page; seconds of processor time and the most memory in GiB, those of this whole process."""
    write([recording], page, force=True)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), usage.ru_maxrss / (1 << 20)


def view(page: Path) -> tuple[float | None, float | None, float | None]:
    """Open the page in fresh browsers: seconds to its first paint, until ready, for a zoom; ``None`` without one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None, None, None
    if CHROMIUM is None:
        return None, None, None
    first, ready, zooms = [], [], []
    with sync_playwright() as playwright:
        for _ in range(VIEWS):
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1440, "height": 900})
            tab.add_init_script(WATCH)
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn]", state="attached")
            first.append(tab.evaluate(FIRST) / 1e3)
            ready.append(tab.evaluate("window.ready") / 1e3)
            zooms += [tab.evaluate(ZOOM, key) / 1e3 for key in ("p", "Home")]
            browser.close()
    return statistics.median(first), statistics.median(ready), statistics.median(zooms)


def report(name: str, folder: Path) -> bool:
    """Measure one case in a fresh process, which has no memory of the making; whether it kept within its bounds."""
    case, recording, page = CASES[name], folder / f"{name}.ampmem", folder / f"{name}.html"
    make(recording, case)
    command = [sys.executable, __file__, "--measure", str(recording), str(page)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, gibibytes = map(float, printed.split())
    recording.unlink()
    size = page.stat().st_size / 1e6
    text = page.read_text(encoding="utf-8")
    mode = "exact" if '"mode":"exact"' in text else "reduced"
    first, ready, zoom = view(page)
    found = (size, seconds, gibibytes, first, ready, zoom)
    bounds = (case.megabytes, case.seconds, case.gibibytes, case.first_s, case.ready_s, case.zoom_s)
    kept = all(bound is None or value is None or value <= bound for value, bound in zip(found, bounds, strict=True))
    row = (name, f"{case.events:,}", mode, f"{size:.2f} MB", f"{seconds:.2f} s", f"{gibibytes:.2f} GiB")
    shown = ["-" if value is None else f"{value * 1e3:.0f} ms" for value in (first, ready, zoom)]
    print(COLUMNS.format(*row, *shown, "ok" if kept else "TOO MUCH"), flush=True)
    return kept


def main() -> None:
    """Print a table, one row per case."""
    if "--help" in sys.argv[1:2]:
        print(__doc__)
        return
    if sys.argv[1:2] == ["--measure"]:
        print(*measure(Path(sys.argv[2]), Path(sys.argv[3])))
        return
    names = sys.argv[1:] or ["usual", "million", "scattered"]
    print(COLUMNS.format("case", "events", "mode", "page", "processor", "memory", "first", "ready", "zoom", ""))
    with tempfile.TemporaryDirectory() as folder:
        kept = [report(name, Path(folder)) for name in names]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
