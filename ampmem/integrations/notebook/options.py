"""What can be written after ``%%ampmem``."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ampmem.errors import UsageError
from ampmem.recorder.marker import FORMS
from ampmem.vocabulary import FORCED_ARMS, Arm, Device

STEPS = 3
"""So many steps of a cell are recorded by default, as by ``ampmem profile``; the rest of the cell runs on."""

_DEVICES = (Device.AUTO, Device.CUDA, Device.CPU, Device.SIMULATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """How a cell is recorded. ``cells`` are the earlier ones that a comparison runs first; ``None`` to find them."""

    device: str
    gpu: str | None
    steps: int
    skip: int
    step_on: str | None
    arm: Arm
    compare: bool
    cells: tuple[int, ...] | None
    output: Path | None
    html: Path | None
    force: bool
    last: bool
    help: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ampmem: {message} (%%ampmem --help says what there is)")


def parse(line: str) -> CellOptions:
    """The options in ``line``. Raises :class:`UsageError`, in one line, for what is none."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%ampmem: {error}") from error
    given: dict[str, Any] = vars(_parser().parse_args(words))
    given["cells"] = None if given["cells"] is None else _numbers(given["cells"])
    options = CellOptions(**given | {"arm": Arm(given["arm"])})
    if options.compare and options.arm != Arm.AS_IS:
        raise UsageError("%%ampmem: --compare runs every precision, so --arm says nothing beside it")
    if options.compare and options.last:
        raise UsageError(
            "%%ampmem: --last shows what was recorded last and --compare makes new recordings; say one of them"
        )
    if options.cells is not None and not options.compare:
        raise UsageError("%%ampmem: --cells are those that --compare runs first; a cell that runs here needs none")
    if options.gpu is not None and options.device not in (Device.AUTO, Device.SIMULATED):
        raise UsageError(
            f"%%ampmem: --gpu simulates a GPU, and --device {options.device} records a real device: leave one of them "
            "out"
        )
    return options


def help_text() -> str:
    """What ``%%ampmem --help`` prints."""
    return _parser().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%ampmem",
        description="Record the training steps of this cell, and show their memory under it. The cell runs here, as it "
        "would without this line. With --compare it does not run here: it runs in a fresh process for each precision. "
        "%ampmem as a line of a cell records what follows it. The last recording is _ampmem.",
        epilog="%%ampmem --device sim --gpu h100\n%%ampmem --compare --steps 2\n%ampmem --last",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=[device.value for device in _DEVICES], default=Device.AUTO.value, help="whose memory")
    add("--gpu", metavar="NAME|BYTES", help="the GPU to simulate; without --device where torch sees no GPU")
    add("--steps", type=_count, default=STEPS, metavar="N", help=f"how many steps to record [default: {STEPS}]")
    add("--skip", type=_count_or_none, default=0, metavar="N", help="let so many steps pass first [default: 0]")
    add("--step-on", metavar="WHAT", help=f"what ends a step: {FORMS} [default: found by itself]")
    add("--arm", choices=[arm.value for arm in Arm], default=Arm.AS_IS.value, help="the precision to force on the cell")
    add(
        "--compare",
        action="store_true",
        help=f"run the cell in {', '.join(FORCED_ARMS)}, each in a fresh process with the same seed, and lay them side "
        "by side; the cells that made its names run first",
    )
    add("--cells", metavar="1,3-5", help="with --compare: which cells (In [n]) run first [default: those]")
    add(
        "-o", "--output", type=Path, metavar="FILE", help="keep the recording; with --compare what its files begin with"
    )
    add("--html", type=Path, metavar="FILE", help="also write the page here")
    add("--force", action="store_true", help="replace files that exist")
    add("--last", action="store_true", help="of %%ampmem as a line: show the last recording or comparison again")
    add("-h", "--help", action="store_true", help="this")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _numbers(text: str) -> tuple[int, ...]:
    """``1,3-5`` as numbers, in order."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"%%ampmem: --cells {text}: say numbers and ranges of them, such as 1,3-5")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
