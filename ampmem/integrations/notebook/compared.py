"""One cell in every precision: each in a fresh process, with the cells before it that it needs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ampmem.errors import UsageError
from ampmem.integrations.notebook import output
from ampmem.integrations.notebook.needed import needed, untold
from ampmem.integrations.notebook.options import CellOptions
from ampmem.integrations.notebook.script import script_of
from ampmem.integrations.notebook.shell import display
from ampmem.output.files import check_output, sized
from ampmem.output.shown import Bundle
from ampmem.output.terminal import printable
from ampmem.recording import SUFFIX
from ampmem.vocabulary import FORCED_ARMS

if TYPE_CHECKING:
    from ampmem.api import Comparison

SEED = 0
_MODULE = "ampmem_cell"
_LINES = re.MULTILINE | re.DOTALL
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython", "display"})
"""Names of every notebook that no cell binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """What a cell has around it: the cells ``before`` it by number, those that ``failed``, the ``known`` names."""

    before: Mapping[int, str]
    failed: Collection[int]
    known: Sequence[str]


def compare_cell(options: CellOptions, code: str, notebook: Notebook, name: str) -> tuple[Comparison, Bundle]:
    """Record ``code`` in every precision, and show the comparison; returns it, and what was shown.

    Raises :class:`UsageError` where the cell cannot run by itself, or where no precision left a recording.
    """
    import ampmem.api

    if options.html is not None:
        check_output(options.html, force=options.force, option="--html")
    with tempfile.TemporaryDirectory(prefix="ampmem-") as folder:
        reached = Path(folder) / "reached"
        try:
            chosen = _chosen(options, code, notebook)
            script = script_of(
                code, name, {number: notebook.before[number] for number in chosen}, reached, notebook.failed
            )
        except SyntaxError as error:
            raise UsageError(f"%%ampmem --compare runs the cell as a script, and it is none: {error.msg}") from error
        prefix = str(options.output or Path(folder) / "cell").removesuffix(SUFFIX)
        text = _run(options, script, prefix, Path(folder), name)
        paths = [path for arm in FORCED_ARMS if (path := Path(f"{prefix}.{arm}{SUFFIX}")).exists()]
        if not paths:
            raise UsageError(f"%%ampmem --compare: no precision left a recording\n{_once(text)}")
        _check_steps(reached, options.skip, chosen)
        comparison = ampmem.api.compare(*paths)
        said = _said(chosen, untold(code, notebook.before, chosen), name, paths if options.output is not None else [])
        shown = output.bundle(said, paths, comparison._repr_mimebundle_())
        display(shown)
        if len(paths) < len(FORCED_ARMS):
            print(text, file=sys.stderr)
        if options.html is not None:
            from ampmem.reporters.html import write

            write(paths, options.html, force=options.force)
            print(f"ampmem: wrote {sized(options.html)}", file=sys.stderr)
    return comparison, shown


def _chosen(options: CellOptions, code: str, notebook: Notebook) -> tuple[int, ...]:
    """The cells that run first."""
    if options.cells is not None:
        unknown = [number for number in options.cells if number not in notebook.before]
        if unknown:
            raise UsageError(f"%%ampmem: --cells: there is no In [{unknown[0]}]")
        return options.cells
    known = [name for name in notebook.known if name not in _OF_IPYTHON and not name.startswith("_")]
    found = needed(code, notebook.before, known)
    if found.missing:
        raise UsageError(
            f"%%ampmem --compare runs the cell in fresh processes, and no cell's code binds "
            f"{', '.join(found.missing)}: bind it in this cell, or name with --cells the cells that are to run first"
        )
    return found.cells


def _check_steps(reached: Path, skip: int, chosen: Sequence[int]) -> None:
    """Raise :class:`UsageError` where the steps that were recorded are those of the cells before."""
    made = int(reached.read_text(encoding="ascii")) if reached.exists() else None
    if made is not None and made <= skip:
        return
    cells = _listed([f"In [{number}]" for number in chosen])
    raise UsageError(
        f"%%ampmem --compare: the cells that run first train, too ({cells}): the steps that were recorded are theirs. "
        + ("Train in a cell of its own" if made is None else f"They make {made} steps: --skip {made} lets these pass")
        + ", or name with --cells the cells that are to run first"
    )


def _once(text: str) -> str:
    """What ``ampmem compare`` said of runs that all failed; what is the same of all of them is said once."""
    failures: dict[str, list[str]] = {}
    for said in re.split(r"^(?=\d+ of \d+: )", text, flags=re.MULTILINE):
        found = re.match(r"\d+ of \d+: ([\w-]+): (.*?)(?:, about \d+ (?:s|min) left)?$(.*)", said, _LINES)
        if found is not None:
            failures.setdefault(found[2] + found[3].rstrip(), []).append(found[1])
    return "\n".join(f"{_listed(arms)}: {failure}" for failure, arms in failures.items()) or text


def _run(options: CellOptions, script: str, prefix: str, folder: Path, name: str) -> str:
    """Run ``ampmem compare`` on ``script``, which recordings call ``name``; returns what it said."""
    (folder / f"{_MODULE}.py").write_text(script, encoding="utf-8")
    words = ["compare", "--no-times", "--seed", str(SEED), "--steps", str(options.steps), "--device", options.device]
    words += ["--named", name, "--skip", str(options.skip)]
    words += ["--step-on", options.step_on] if options.step_on is not None else []
    words += ["--gpu", options.gpu] if options.gpu is not None else []
    words += ["--force"] if options.force else []
    # As in the notebook, modules beside it can be imported.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd()), *filter(None, sys.path)])}
    process = subprocess.Popen(
        [sys.executable, "-m", "ampmem", *words, "-o", prefix, "-m", _MODULE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C is for us to hand on, once
    )
    try:
        _, said = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
        raise
    return "\n".join(printable(line) for line in said.splitlines())


def _said(chosen: Sequence[int], beside: Mapping[int, Sequence[str]], name: str, kept: Sequence[Path]) -> list[str]:
    """What was done, for whoever reads the comparison; ``beside`` is what the cells may do that was not done."""
    cells = [f"In [{number}]" for number in chosen]
    return [
        f"Each precision ran {_listed([*cells, name])} in a fresh process, with seed {SEED}.",
        "Nothing of it is in this notebook.",
        *_left_out(chosen, beside),
        *([f"The recordings are {', '.join(map(sized, kept))}."] if kept else []),
    ]


def _left_out(chosen: Sequence[int], beside: Mapping[int, Sequence[str]]) -> list[str]:
    cells = {number: f"In [{number}] ({', '.join(what)})" for number, what in beside.items()}
    without = [text for number, text in cells.items() if number in chosen]
    not_run = {number: text for number, text in cells.items() if number not in chosen}
    said = [f"Magics did not run: {_listed(without)}."] if without else []
    if not_run:
        numbers = ",".join(map(str, sorted({*chosen, *not_run})))
        said.append(
            f"Not run: {_listed(list(not_run.values()))}. What they changed was not there; "
            f"--cells {numbers} has them run, too."
        )
    return said


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
