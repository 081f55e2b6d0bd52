"""What ``golden.py`` runs: the recordings that are made anew, and what is put out for a set of recordings."""

import os
import pickle
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ampmem.cli.main import SUBCOMMANDS

WORKLOADS = ("accumulate", "bert", "checkpointed", "gan", "gpt", "lm", "resnet", "reuse")
PRECISIONS = ("fp32", "amp", "amp-nocache")
CPU, SIMULATED = ("--device", "cpu"), ("--device", "sim", "--gpu", "h100")
DEVICES = {"cpu": CPU, "sim": SIMULATED}
EXPORTED = (
    "gpt.cpu.amp-nocache",
    "gan.sim.amp-nocache",
    "oom_",
    "lm2700m_ctx512",
    "lm_",
    "resnet50",
    "course",
    "cnn",
    "old",
)
FORMATS = {"snapshot": ".pickle", "perfetto": ".pftrace", "csv": ".csv"}

SCRIPTS = {
    "fails.py": """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    if step == 1:
        raise ValueError("this script fails in its second step")
""",
    "no_model.py": "import torch\nprint(torch.ones(1000).sum().item())\n",
    "with_api.py": """
import torch
import ampmem
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
with ampmem.profile(model, optimizer, output="with_api.ampmem", device="cpu") as prof:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(16, 64)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(prof.summary().to_json())
""",
}

API = """
import dataclasses, hashlib, json, sys
import ampmem
def shown(value):
    return value.tolist() if hasattr(value, "tolist") else dict(value) if hasattr(value, "keys") else str(value)
def tell(label, item):
    for name, value in dataclasses.asdict(item).items():
        text = json.dumps(value, default=shown)
        print(label, name, text if len(text) < 5000 else hashlib.sha256(text.encode()).hexdigest())
for path in sys.argv[1:]:
    tell(path, ampmem.load(path))
tell("compared", ampmem.compare(*sys.argv[1:]))
"""

DAMAGE = {
    "version": "PRAGMA user_version = 99",
    "action": "UPDATE event SET action = 9 WHERE rowid = 7",
    "text": "UPDATE event SET op = 100000 WHERE rowid = 7",
    "no_table": "DROP TABLE fact",
    "no_meta": "DELETE FROM meta WHERE key = 'run'",
    "no_steps": "DELETE FROM step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One call of Python with ``arguments``; ``output`` is the file that it writes, ``recordings`` what it records."""

    name: str
    arguments: tuple[str, ...]
    output: str = ""
    recordings: tuple[str, ...] = ()


def ampmem(name: str, *arguments: str, suffix: str = "", recordings: Sequence[str] = ()) -> Command:
    """An ampmem command line; one that writes a file has a ``suffix``, and ``-o`` with its name is added."""
    output = f"{name}{suffix}" if suffix else ""
    rest = ("-o", output) if output else ()
    return Command(
        name=name, arguments=("-m", "ampmem", *arguments, *rest), output=output, recordings=tuple(recordings)
    )


def profile(name: str, *options: str) -> Command:
    """A recording ``NAME.ampmem``."""
    arguments = ("-m", "ampmem", "profile", "-o", f"{name}.ampmem", *options)
    return Command(name=name, arguments=arguments, recordings=(f"{name}.ampmem",))


def workload(name: str, *options: str, script: str = "gpt", arguments: Sequence[str] = ()) -> Command:
    """A recording of a workload in its tiny preset."""
    return profile(name, "--seed", "0", *options, "-m", f"ampmem.workloads.{script}", "--preset", "tiny", *arguments)


def snapshots() -> list[Path]:
    """PyTorch's snapshots in the folder AMPMEM_SNAPSHOTS."""
    return sorted(Path(os.environ["AMPMEM_SNAPSHOTS"]).glob("*.pickle")) if "AMPMEM_SNAPSHOTS" in os.environ else []


def fresh() -> list[Command]:
    """All that is recorded anew; runs in a folder that has :data:`SCRIPTS`."""
    commands = []
    for kind, device in DEVICES.items():
        for script in WORKLOADS:
            for precision in PRECISIONS:
                commands.append(
                    workload(f"{script}.{kind}.{precision}", *device, "--precision", precision, script=script)
                )
        commands += [
            workload(f"as-is.{kind}", *device, arguments=("--precision", "amp", "--tied")),
            workload(f"float16.{kind}", *device, "--precision", "amp", "--dtype", "fp16"),
            workload(f"skip.{kind}", *device, "--skip", "1", "--steps", "2", "--no-stacks", script="gan"),
            workload(f"to_end.{kind}", *device, "--run-to-end", "--quiet", script="accumulate"),
            profile(f"fails.{kind}", *device, "fails.py"),
            profile(f"no_model.{kind}", *device, "no_model.py"),
            compare_precisions(f"compare.{kind}", *device),
        ]
    commands += [
        workload("scaler.sim", *SIMULATED, arguments=("--precision", "amp", "--dtype", "fp16")),
        workload("oom_setup.sim", "--device", "sim", "--gpu", "550MiB", arguments=("--preset", "small")),
        workload("oom_backward.sim", "--device", "sim", "--gpu", "566MiB", script="reuse"),
        workload("oom_forward.sim", "--device", "sim", "--gpu", "560MiB", arguments=("--batch-size", "64")),
        workload("too_small.sim", "--device", "sim", "--gpu", "100MiB"),
        workload("usage", "--device", "cpu", "--gpu", "h100"),
        Command(name="with_api", arguments=("with_api.py",), recordings=("with_api.ampmem",)),
        ampmem("compare_fails", "compare", "--no-times", "--precision", "fp32,amp", *CPU, "fails.py"),
        fit("fit", "1:64"),
        fit("fit_json", "1:4", "--json"),
    ]
    for path in snapshots():
        name = path.stem
        arguments = ("import", str(path), "-o", f"{name}.ampmem")
        commands.append(ampmem(f"import.{name}", *arguments, recordings=[f"{name}.ampmem"]))
    return commands


def compare_precisions(name: str, *device: str) -> Command:
    """``ampmem compare`` of the three precisions of a small GPT."""
    arguments = ("compare", "--no-times", "-o", name, *device, "-m", "ampmem.workloads.gpt", "--preset", "tiny")
    return ampmem(name, *arguments, recordings=[f"{name}.{precision}.ampmem" for precision in PRECISIONS])


def fit(name: str, values: str, *options: str) -> Command:
    """``ampmem fit`` of the batch size of a small GPT, in two precisions."""
    how = ("--jobs", "1", "--points", "2", "--precision", "fp32,amp", "--gpu", "570MiB")
    script = ("-m", "ampmem.workloads.gpt", "--preset", "tiny", "--vary", f"--batch-size={values}")
    return ampmem(name, "fit", *how, *options, *script)


def fill_inputs(inputs: Path, work: Path) -> None:
    """Keep the recordings in ``work`` as ``inputs``, with damaged ones beside them."""
    inputs.mkdir(parents=True)
    for path in sorted(work.glob("*.ampmem")):
        if not path.name.startswith("compare."):  # those are recordings of the three precisions once more
            shutil.copy(path, inputs)
    whole = (work / "gpt.cpu.amp.ampmem").read_bytes()
    (inputs / "damaged_empty.ampmem").write_bytes(b"")
    (inputs / "damaged_words.ampmem").write_text("This is no recording.\n")
    (inputs / "damaged_half.ampmem").write_bytes(whole[: len(whole) // 2])
    for name, statement in DAMAGE.items():
        path = inputs / f"damaged_{name}.ampmem"
        path.write_bytes(whole)
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)
    (inputs / "damaged_words.pickle").write_text("This is no snapshot.\n")
    (inputs / "damaged_class.pickle").write_bytes(pickle.dumps({"segments": [Path("x")], "device_traces": []}))
    (inputs / "damaged_shape.pickle").write_bytes(pickle.dumps({"segments": 1, "device_traces": [[{"action": 5}]]}))


def same(inputs: Path) -> list[Command]:
    """All that is put out for the recordings in ``inputs``, which the commands see as ``in/NAME``."""
    in_precisions = {
        f"{script}.{kind}.{precision}" for script in WORKLOADS for kind in DEVICES for precision in PRECISIONS
    }
    commands = []
    for group in sorted({name.rpartition(".")[0] for name in in_precisions}):
        precisions = files(*(f"{group}.{precision}" for precision in PRECISIONS))
        commands += [
            ampmem(f"{group}.each", "show", "--each", "--casts", "--steps", *precisions),
            ampmem(f"{group}.json", "show", "--json", *precisions),
            ampmem(f"{group}.precisions", "report", *precisions, suffix=".html"),
        ]
    for name in sorted(path.stem for path in inputs.glob("*.ampmem")):
        if name.startswith("damaged_"):
            commands += [ampmem(f"{name}.show", "show", *files(name))]
            commands += [ampmem(f"{name}.report", "report", *files("gpt.cpu.fp32", name), suffix=".html")]
        elif name not in in_precisions:
            commands += shown(name)
        if name.startswith(EXPORTED):
            commands += exported(name)
    for path in sorted(inputs.glob("*.pickle")):
        commands.append(ampmem(f"{path.stem}.import", "import", f"in/{path.name}", suffix=".ampmem"))
    for subcommand in SUBCOMMANDS:
        commands.append(ampmem(f"help_{subcommand}", subcommand, "--help"))
    for optimizer in ("sgd", "adamw", "adafactor", "adam-8bit"):
        commands.append(ampmem(f"model_{optimizer}", "model", "--params", "350M", "--optimizer", optimizer))
    for recipe in ("amp-textbook", "autocast", "half-master-fp32-accumulation", "pure-half"):
        commands.append(ampmem(f"model_{recipe}", "model", "--params", "7e9", "--recipe", recipe))
    loaded = files("gpt.cpu.fp32", "gpt.sim.amp", "oom_backward.sim")
    return [
        *commands,
        Command(name="api", arguments=("-c", API, *loaded)),
        ampmem("help", "--help"),
        ampmem("version", "--version"),
        ampmem("missing", "show", *files("missing")),
        ampmem("folder", "show", "in"),
    ]


def shown(name: str) -> list[Command]:
    """One recording as tables, as JSON and as a page."""
    return [
        ampmem(f"{name}.show", "show", *files(name)),
        ampmem(f"{name}.json", "show", "--json", *files(name)),
        ampmem(f"{name}.report", "report", *files(name), suffix=".html"),
    ]


def exported(name: str) -> list[Command]:
    """One recording in other formats, beside the published formulas, and under other settings of the allocator."""
    commands = [ampmem(f"{name}.model", "model", *files(name))]
    for format, suffix in FORMATS.items():
        commands.append(ampmem(f"{name}.{format}", "export", "--format", format, *files(name), suffix=suffix))
    if ".cpu" not in name:
        settings = ("--what-if", "expandable_segments", "--what-if", "max_split_size_mb=128")
        commands.append(ampmem(f"{name}.what_if", "show", *settings, *files(name)))
    return commands


def files(*names: str) -> tuple[str, ...]:
    """The recordings called so, as the commands see them."""
    return tuple(f"in/{name}.ampmem" for name in names)
