"""Records a cell in this process, or once per precision in child processes, and shows the result below it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ampmem.errors import AmpmemError, UsageError
from ampmem.integrations.notebook.cells import REACHED, cells_needed, script_of_cell, untold
from ampmem.integrations.notebook.shell import display
from ampmem.output import Bundle, check_output, printable, sized
from ampmem.recorder.marker import FORMS, step_on_text
from ampmem.recorder.options import Asked, asked_in_python
from ampmem.recording import SUFFIX
from ampmem.reporters.html.notebook import MOST, Card, frame, html_of
from ampmem.reporters.html.small_timeline import small_timeline
from ampmem.units import counted, format_bytes
from ampmem.vocabulary import FORCED_PRECISIONS, Device, Precision

if TYPE_CHECKING:
    from ampmem.api import Comparison, Profile


def framed_bundle(said: Sequence[str], recordings: Sequence[Path], tables: Bundle, *, light: bool) -> Bundle:
    """The sentences ``said``, then the page of ``recordings``, or ``tables`` where a page is not shown or too large.

    ``light`` asks for pictures and the tables instead of the page.
    """
    text = "\n".join(["ampmem: " + " ".join(said), "", tables["text/plain"]])
    if light:
        below = "".join([*map(small_timeline, recordings), tables.get("text/html", "")])
        return {"text/plain": text, "text/html": _head(said) + below}
    framed = frame(recordings, "ampmem: the report of this cell")
    if framed is None:
        remark = f"The page is larger than {format_bytes(MOST)} and is not kept in the notebook: --html FILE writes it."
        below = tables.get("text/html", "")
        return {"text/plain": text, "text/html": _head([*said, remark]) + below}
    return {"text/plain": text, "text/html": _head(said) + framed}


def _head(said: Sequence[str]) -> str:
    return html_of(Card(headline="", facts=(), remarks=[("ampmem", " ".join(said))]))


STEPS = 3
"""The default number of recorded steps, as for ``ampmem profile``; the rest of the cell runs on."""

_DEVICES = (Device.AUTO, Device.CUDA, Device.CPU, Device.SIMULATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """The options of a cell. ``cells`` are the earlier cells that a comparison runs first; ``None`` to find them."""

    asked: Asked
    compare: bool
    cells: tuple[int, ...] | None
    output: Path | None
    html: Path | None
    light: bool
    last: bool
    help: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ampmem: {message} (%%ampmem --help lists the options)")


def parse(line: str) -> CellOptions:
    """The options in ``line``. Raises :class:`UsageError`, in one line, for an unknown option."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%ampmem: {error}") from error
    given: dict[str, Any] = vars(_parser().parse_args(words))
    given["cells"] = None if given["cells"] is None else _numbers(given["cells"])
    asked = {name: given.pop(name) for name in ("device", "gpu", "steps", "skip", "step_on", "precision", "force")}
    options = CellOptions(asked=_asked_of_options(**asked), **given)
    if options.compare and options.asked.precision != Precision.AS_IS:
        raise UsageError("%%ampmem: --compare runs every precision; leave --precision out")
    if options.compare and options.last:
        raise UsageError(
            "%%ampmem: --last shows the last recording, and --compare makes new ones; give only one of them"
        )
    if options.cells is not None and not options.compare:
        raise UsageError("%%ampmem: --cells names the cells that --compare runs first; without --compare leave it out")
    return options


def _asked_of_options(*, gpu: str | None, device: str, **given: Any) -> Asked:
    """The recording that the options ask for. Raises :class:`UsageError`."""
    if gpu is not None and device not in (Device.AUTO, Device.SIMULATED):
        raise UsageError(
            f"%%ampmem: --gpu simulates a GPU, and --device {device} records a real device: leave one of them out"
        )
    try:
        return asked_in_python(gpu=gpu, device=device, **given)
    except UsageError as error:
        raise UsageError(f"%%ampmem: {error}") from error


def help_text() -> str:
    """The text of ``%%ampmem --help``."""
    return _parser().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%ampmem",
        description="Record the training steps of this cell, and show their memory below it. The cell runs in this "
        "notebook, as it would without this line; with --compare it runs in a fresh process for each precision "
        "instead. A line %ampmem inside a cell records the lines after it. The last recording is _ampmem.",
        epilog="%%ampmem --device sim --gpu h100\n%%ampmem --compare --steps 2\n%ampmem --last",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--device",
        choices=[device.value for device in _DEVICES],
        default=Device.AUTO.value,
        help="which device's memory to record",
    )
    add("--gpu", metavar="NAME|BYTES", help="the GPU to simulate; if torch sees no GPU, --device sim is not needed")
    add("--steps", type=_count, default=STEPS, metavar="N", help=f"how many steps to record [default: {STEPS}]")
    add(
        "--skip",
        type=lambda text: 0 if text == "0" else _count(text),
        default=0,
        metavar="N",
        help="how many steps to skip first [default: 0]",
    )
    add("--step-on", metavar="WHAT", help=f"what ends a step: {FORMS} [default: found automatically]")
    precisions = [precision.value for precision in (*FORCED_PRECISIONS, Precision.AS_IS)]
    add("--precision", choices=precisions, default=Precision.AS_IS.value, help="the precision to force on the cell")
    add(
        "--compare",
        action="store_true",
        help=f"run the cell in {', '.join(FORCED_PRECISIONS)}, each in a fresh process with the same seed, and compare "
        "them side by side; the cells that define its names run first",
    )
    add(
        "--cells",
        metavar="1,3-5",
        help="with --compare: which cells (In [n]) run first [default: the cells that define the names]",
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="keep the recording in this file; with --compare, the beginning of the files' names",
    )
    add("--html", type=Path, metavar="FILE", help="also write the page here")
    add("--light", action="store_true", help="show a picture and the table, some 20 KB, instead of the page")
    add("--force", action="store_true", help="replace existing files")
    add("--last", action="store_true", help="in a line %%ampmem: show the last recording or comparison again")
    add("-h", "--help", action="store_true", help="show this help")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    """``1,3-5`` as numbers, in order."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"%%ampmem: --cells {text}: give numbers and ranges, such as 1,3-5")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


class RecordedCell:
    """Records from now until :meth:`end`. Raises :class:`UsageError`, without effect, if it cannot record."""

    def __init__(self, options: CellOptions, name: str) -> None:
        from ampmem.api import Profile

        if options.output is not None:
            check_output(options.output, force=options.asked.force)
        if options.html is not None:
            check_output(options.html, force=options.asked.force, option="--html")
        self._options = options
        self._name = name
        self.profile: Profile = Profile(options.asked, output=options.output, script=name)
        self.profile.__enter__()

    def end(self, error: BaseException | None) -> bool:
        """End the recording, of a cell that failed with ``error`` or not, and show it; returns whether there is one."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trace = None if error is None else error.__traceback__
            self.profile.__exit__(None if error is None else type(error), error, trace)
        ours = [text for one in said if (text := str(one.message)).startswith("ampmem: ")]
        if ours:
            _say(ours[0].removeprefix("ampmem: "))
            return False
        shown = False
        try:
            display(self.bundle(error=error))
            shown = True
            if self._options.html is not None:
                self.profile.report(self._options.html, force=self._options.asked.force)
                _say(f"wrote {sized(self._options.html)}")
        except AmpmemError as problem:
            _say(str(problem))
        return shown

    def bundle(self, *, error: BaseException | None = None) -> Bundle:
        """The recording as shown. Raises :class:`NothingRecorded` and what reading a recording raises."""
        recording = self.profile.recording()
        tables = recording._repr_mimebundle_()
        return framed_bundle(
            list(self._said(len(recording.steps), error)), [self.profile.path], tables, light=self._options.light
        )

    def _said(self, steps: int, error: BaseException | None) -> list[str]:
        """The sentences above the page: the recorded steps, the forced precision, the simulated GPU, and the file."""
        options, count = self._options, counted(steps, "step")
        which = (
            f"of {self._name}" if not options.asked.skip else f"of {self._name}, after the first {options.asked.skip},"
        )
        were = "was" if steps == 1 else "were"
        ended = "was stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        then = "" if error is None else f"; then it {ended}"
        if steps == options.asked.steps:
            said = [f"The first {count} {which} {were} recorded (--steps {steps}){then}."]
        elif error is not None:
            said = [f"{count} {which} had finished when it {ended}, and {were} recorded."]
        else:
            said = [f"All {count} {which} {were} recorded."]
        if options.asked.precision != Precision.AS_IS:
            said.append(f"ampmem forced the precision {options.asked.precision} on the cell.")
        if options.asked.device is Device.SIMULATED or options.asked.gpu is not None:
            said.append(
                "The GPU was simulated: tensors that the cell left on it have no values, and other cells "
                "cannot use them."
            )
        if options.output is not None:
            said.append(f"The recording is {sized(options.output)}.")
        return [*said, "_ampmem has it: _ampmem.summary(), _ampmem.report(FILE)."]


def _say(message: str) -> None:
    print(f"ampmem: {printable(message)}", file=sys.stderr)


SEED = 0
_MODULE = "ampmem_cell"
_LINES = re.MULTILINE | re.DOTALL
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython", "display"})
"""The names in every notebook that no cell binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """The notebook around a cell: the cells ``before`` it by number, the ``failed`` ones, and the ``known`` names."""

    before: Mapping[int, str]
    failed: Collection[int]
    known: Sequence[str]


def compare_cell(options: CellOptions, code: str, notebook: Notebook, name: str) -> tuple[Comparison, Bundle]:
    """Record ``code`` in every precision and show the comparison; returns the comparison and what was shown.

    Raises :class:`UsageError` if the cell cannot run by itself, or if no precision left a recording.
    """
    import ampmem.api

    if options.html is not None:
        check_output(options.html, force=options.asked.force, option="--html")
    with tempfile.TemporaryDirectory(prefix="ampmem-") as folder, ExitStack() as undo:
        reached = Path(f"{folder}{REACHED}")  # in a folder that a child reaches whose files are protected
        undo.callback(reached.unlink, missing_ok=True)
        try:
            chosen = _earlier_cells(options, code, notebook)
            script = script_of_cell(
                code, name, {number: notebook.before[number] for number in chosen}, reached, notebook.failed
            )
        except SyntaxError as error:
            raise UsageError(
                f"%%ampmem --compare runs the cell as a script, but the cell is not a valid script: {error.msg}"
            ) from error
        prefix = str(options.output or Path(folder) / "cell").removesuffix(SUFFIX)
        text = _run_compare(options, script, prefix, Path(folder), name)
        paths = [path for precision in FORCED_PRECISIONS if (path := Path(f"{prefix}.{precision}{SUFFIX}")).exists()]
        if not paths:
            raise UsageError(f"%%ampmem --compare: no precision left a recording\n{_once(text)}")
        _check_steps(reached, options.asked.skip, chosen)
        comparison = ampmem.api.compare(*paths)
        said = _said(chosen, untold(code, notebook.before, chosen), name, paths if options.output is not None else [])
        shown = framed_bundle(said, paths, comparison._repr_mimebundle_(), light=options.light)
        display(shown)
        if len(paths) < len(FORCED_PRECISIONS):
            print(text, file=sys.stderr)
        if options.html is not None:
            from ampmem.reporters.html import write

            write(paths, options.html, force=options.asked.force)
            print(f"ampmem: wrote {sized(options.html)}", file=sys.stderr)
    return comparison, shown


def _earlier_cells(options: CellOptions, code: str, notebook: Notebook) -> tuple[int, ...]:
    """The earlier cells that run first."""
    if options.cells is not None:
        unknown = [number for number in options.cells if number not in notebook.before]
        if unknown:
            raise UsageError(f"%%ampmem: --cells: there is no In [{unknown[0]}]")
        return options.cells
    known = [name for name in notebook.known if name not in _OF_IPYTHON and not name.startswith("_")]
    found = cells_needed(code, notebook.before, known)
    if found.missing:
        raise UsageError(
            "%%ampmem --compare runs the cell in fresh processes, and no cell's code defines "
            f"{', '.join(found.missing)}: define it in this cell, or name the cells to run first with --cells"
        )
    return found.cells


def _check_steps(reached: Path, skip: int, chosen: Sequence[int]) -> None:
    """Raise :class:`UsageError` if the recorded steps belong to the cells before."""
    made = int(reached.read_text(encoding="ascii")) if reached.exists() else None
    if made is not None and made <= skip:
        return
    cells = _enumeration([f"In [{number}]" for number in chosen])
    raise UsageError(
        f"%%ampmem --compare: the cells that run first train, too ({cells}): the recorded steps are theirs. "
        + ("Train in a separate cell" if made is None else f"They make {made} steps: --skip {made} skips them")
        + ", or name the cells to run first with --cells"
    )


def _once(text: str) -> str:
    """The errors of ``ampmem compare`` for runs that all failed, with equal ones only once."""
    failures: dict[str, list[str]] = {}
    for said in re.split(r"^(?=\d+ of \d+: )", text, flags=re.MULTILINE):
        found = re.match(r"\d+ of \d+: ([\w-]+): (.*?)(?:, about \d+ (?:s|min) left)?$(.*)", said, _LINES)
        if found is not None:
            failures.setdefault(found[2] + found[3].rstrip(), []).append(found[1])
    return "\n".join(f"{_enumeration(precisions)}: {failure}" for failure, precisions in failures.items()) or text


def _run_compare(options: CellOptions, script: str, prefix: str, folder: Path, name: str) -> str:
    """Run ``ampmem compare`` on ``script``, which recordings call ``name``; returns its output."""
    (folder / f"{_MODULE}.py").write_text(script, encoding="utf-8")
    asked, step_on = options.asked, step_on_text(options.asked.step_on)
    words = ["compare", "--no-times", "--seed", str(SEED), "--steps", str(asked.steps), "--device", asked.device]
    words += ["--named", name, "--skip", str(asked.skip)]
    words += ["--step-on", step_on] if step_on is not None else []
    words += ["--gpu", asked.gpu.name] if asked.gpu is not None else []
    words += ["--force"] if asked.force else []
    # The script can import modules next to the notebook.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd()), *filter(None, sys.path)])}
    process = subprocess.Popen(
        [sys.executable, "-m", "ampmem", *words, "-o", prefix, "-m", _MODULE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C is passed on by us, once
    )
    try:
        _, said = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
        raise
    return "\n".join(printable(line) for line in said.splitlines())


def _said(chosen: Sequence[int], beside: Mapping[int, Sequence[str]], name: str, kept: Sequence[Path]) -> list[str]:
    """The sentences below a comparison: the cells that ran, and the effects of cells and magics that did not run.

    ``beside`` are these effects, by cell (:func:`~ampmem.integrations.notebook.cells.untold`).
    """
    cells = [f"In [{number}]" for number in chosen]
    return [
        f"Each precision ran {_enumeration([*cells, name])} in a fresh process, with seed {SEED}.",
        "Their variables are not in this notebook.",
        *_left_out(chosen, beside),
        *([f"The recordings are {', '.join(map(sized, kept))}."] if kept else []),
    ]


def _left_out(chosen: Sequence[int], beside: Mapping[int, Sequence[str]]) -> list[str]:
    cells = {number: f"In [{number}] ({', '.join(what)})" for number, what in beside.items()}
    without = [text for number, text in cells.items() if number in chosen]
    not_run = {number: text for number, text in cells.items() if number not in chosen}
    said = [f"Magics did not run: {_enumeration(without)}."] if without else []
    if not_run:
        numbers = ",".join(map(str, sorted({*chosen, *not_run})))
        said.append(
            f"Not run: {_enumeration(list(not_run.values()))}. Their changes were missing; --cells {numbers} runs "
            "them, too."
        )
    return said


def _enumeration(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
