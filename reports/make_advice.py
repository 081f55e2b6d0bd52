"""Makes reports/advice.json and reports/advice.md: what ``ampmem advise`` finds, and how close it is to the best.

python reports/make_advice.py

runs ``ampmem advise`` on five scripts for a GPU of 24 GiB (simulated), and three choices of what to recompute in small
models (real runs on the CPU): ampmem's, that of ``torch.distributed._tools.sac_ilp`` (which needs ``pulp`` and
``pwlf``) and that of ``activation_memory_budget`` of ``torch.compile``, beside every set of blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from advice_peers import BLOCKS, EVERY, Choice, every_choice, flops_of, inductor, sac_milp
from advice_train import NAMES, build, checkpointed
from tabulate import tabulate

from ampmem.units import format_bytes
from ampmem.version import __version__

REPORTS = Path(__file__).parent
MEMORY = "24GiB"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of the peak that ``sac_milp`` estimates."""
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Values of ``activation_memory_budget``."""
DECODER = """
from ampmem.workloads import gpt
gpt.PRESETS["full"] = gpt.Sizes(vocabulary=50257, length=2048, layers=32, heads=32, width=4096, batch_size=1)
gpt.main(["--preset", "full", "--device", "cuda"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script for ``ampmem advise``."""

    name: str
    command: tuple[str, ...]


def _workload(module: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"ampmem.workloads.{module}", "--preset", "full", "--device", "cuda", *arguments)


SCRIPTS = (
    Script(name="GPT, 124 million parameters, batch 24", command=_workload("gpt", "--tied", "--batch-size", "24")),
    Script(name="decoder of 7 billion parameters, batch 1", command=("decoder.py",)),
    Script(name="ResNet-50, batch 320", command=_workload("resnet", "--batch-size", "320")),
    Script(name="BERT base, batch 96", command=_workload("bert", "--batch-size", "96")),
    Script(name="LSTM, batch 8192", command=(str(REPORTS / "atlas_train.py"), "LSTM", "--batch", "8192")),
)


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("scripts", "choices"), help="make one half anew, and keep the other")
    parser.add_argument("--json", type=Path, default=REPORTS / "advice.json", metavar="FILE")
    parser.add_argument("--md", type=Path, default=REPORTS / "advice.md", metavar="FILE")
    options = parser.parse_args()
    document: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    document = {"scripts": [], "choices": {}} | document
    document["about"] = {"ampmem": __version__, "torch": torch.__version__, "memory": MEMORY}
    if options.only != "choices":
        document["scripts"] = [advised(script) for script in SCRIPTS]
    for name in NAMES if options.only != "scripts" else ():
        document["choices"][name] = [asdict(choice) for choice in choices_of(name)]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.md.write_text(text_of(document), encoding="utf-8")


def advised(script: Script) -> dict[str, Any]:
    """The output of ``ampmem advise --json`` for ``script``."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "decoder.py").write_text(DECODER)
        found = advise(folder, "--gpu", MEMORY, *script.command)
    found["script"] = found["script"].replace(f"{REPORTS}/", "reports/")
    return {"name": script.name, "advice": found}


def advise(folder: str, *arguments: str) -> dict[str, Any]:
    """The output of ``ampmem advise --json``, which exits with 1 if nothing fits."""
    command = [sys.executable, "-m", "ampmem", "advise", "--json", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def choices_of(name: str) -> Iterator[Choice]:
    """The choices of each tool for one of the small models."""
    every = []
    for choice in every_choice(name):
        every.append(choice)
        yield choice
    most, least = max(each.peak for each in every), min(each.peak for each in every)
    yield from ampmems(name, [least + (most - least) * quarter // 4 for quarter in (3, 2, 1)])
    yield from sac_milp(name, SHARES)
    yield from inductor(name, BUDGETS)


def ampmems(name: str, budgets: Sequence[int]) -> Iterator[Choice]:
    """The first checkpointing in the table of ``ampmem advise --device cpu``, for each budget."""
    plain = flops_of(partial(build, name))
    for budget in budgets:
        with TemporaryDirectory() as folder:
            allowed = ("--device", "cpu", "--allow", "checkpoint", "--budget", str(budget))
            found = advise(folder, *allowed, str(REPORTS / "advice_train.py"), name)
        best = next(run for run in found["runs"] if run["allocated_bytes"] is not None)
        blocks = blocks_of(best["options"])
        again = flops_of(partial(checkpointed, name, blocks)) - plain
        setting = ", ".join(map(str, blocks)) or "none"
        yield Choice(tool="ampmem advise", setting=setting, peak=best["allocated_bytes"], recomputed=again)


def blocks_of(options: Sequence[str]) -> list[int]:
    """The blocks in ``--force-checkpoint`` of a run."""
    if "--force-checkpoint" not in options:
        return []
    names = options[options.index("--force-checkpoint") + 1].split(",")
    return list(BLOCKS) if names == ["blocks.*"] else sorted(int(each.rpartition(".")[2]) for each in names)


def text_of(document: dict[str, Any]) -> str:
    """The text of reports/advice.md."""
    scripts = "\n".join(map(_script_text, document["scripts"]))
    choices = "\n".join(_choices_text(name, found) for name, found in document["choices"].items())
    about = document["about"]
    return f"{HEAD.format(**about)}\n{scripts}\n{MIDDLE}\n{choices}"


HEAD = """# What makes it fit

Written by `python reports/make_advice.py` with ampmem {ampmem} and torch {torch}; the numbers are in
[advice.json](advice.json).

## Five scripts on a GPU of 24 GiB

`ampmem advise --gpu {memory}`: every row is a simulated run of the unmodified script with that change.
"""
MIDDLE = """## Beside other tools, and beside the best choice

Two small GPTs of six blocks, in real runs on the CPU: in one all blocks are alike, in the other their hidden layers are
1, 8, 2, 6, 3 and 4 times as wide as the model. *Peak* is the peak of all tensors in two steps, as ampmem records it.
*Recomputed* is how many FLOPs ran again, as a share of a step's. *Best set of blocks* is the least that any of the 64
sets of checkpointed blocks recomputes with no higher a peak: all 64 were run. *Difference* is what a tool recomputes
more than that. It is negative where a tool recomputes parts of blocks, which no set of blocks can do.

- `ampmem advise --device cpu --allow checkpoint`, for three budgets between the sets' lowest and highest peak.
- `sac_milp` of `torch.distributed._tools.sac_ilp`, with its policy for the ops of each chosen block, for five shares of
  the peak that it estimates. Its cost model asks for a GPU: it was given FLOPs, as they are what is compared.
- `activation_memory_budget` of `torch.compile`, for five budgets. The compiled graphs run op by op, not fused. The
  FLOPs are those of the graphs.

ampmem checkpoints whole blocks, and only as many as the budget asks for. The other two recompute parts of blocks, most
of which count no FLOPs, such as a GELU: so for the same peak they mostly recompute less.
"""


def _script_text(found: dict[str, Any]) -> str:
    rows = [
        [
            run["change"],
            _bytes(run["allocated_bytes"]),
            _bytes(run["highest_device_used_bytes"]),
            run["failure"] or ("yes" if run["meets"] else "no"),
            run["cost"],
        ]
        for run in found["advice"]["runs"]
    ]
    table = tabulate(rows, ("change", "peak allocated", "device at most", "fits", "cost"), tablefmt="github")
    return f"### {found['name']}\n\n{table}\n"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _choices_text(name: str, found: Sequence[dict[str, Any]]) -> str:
    every = [each for each in found if each["tool"] == EVERY]
    plain = flops_of(partial(build, name))
    rows = []
    for choice in found:
        again = [each["recomputed"] for each in every if each["peak"] <= choice["peak"]]
        share = choice["recomputed"] / plain
        best = f"{min(again) / plain:.1%}" if again else "none has so low a peak"
        more = f"{share - min(again) / plain:+.1%}" if again else "-"
        if choice not in every:
            rows.append([choice["tool"], choice["setting"], format_bytes(choice["peak"]), f"{share:.1%}", best, more])
    headers = ("tool", "setting", "peak", "recomputed", "best set of blocks", "difference")
    peaks = [each["peak"] for each in every]
    between = f"The peaks of the 64 sets lie between {format_bytes(min(peaks))} and {format_bytes(max(peaks))}."
    return f"### {name}\n\n{between}\n\n{tabulate(rows, headers, tablefmt='github', disable_numparse=True)}\n"


if __name__ == "__main__":
    main()
