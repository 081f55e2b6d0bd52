"""Runs a launcher such as torchrun, so that each process that it starts is ``ampmem profile`` of the script.

The launcher itself runs in this process, as ``python -m`` would run it, and is not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, NoReturn

from ampmem.analysis.jsonable import like
from ampmem.cli.options import ScriptOptions
from ampmem.cli.processes.children import profile_arguments
from ampmem.cli.processes.plan import Plan, names_in, ranks_left
from ampmem.cli.processes.script_run import end_as, run_plainly
from ampmem.cli.processes.starting import worker_command
from ampmem.errors import NothingRecorded, UsageError
from ampmem.output import Terminal
from ampmem.recorder.script import STDIN, find_module
from ampmem.vocabulary import Device

if TYPE_CHECKING:
    from argparse import ArgumentParser

TORCHRUN = "torch.distributed.run"
_PARSERS: Mapping[str, Callable[[], ArgumentParser]] = {
    TORCHRUN: lambda: import_module(TORCHRUN).get_args_parser(),
    "accelerate.commands.launch": lambda: import_module("accelerate.commands.launch").launch_command_parser(),
}
"""The known launchers, and the functions that read their command lines."""
_HOW = ("-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path")
"""Launchers' options for the way of starting the script; ampmem replaces them by ``--no-python``."""
_ALONE = (
    "a simulated GPU needs no other processes: run the script in one process, and give the number of ranks with "
    "--world-size"
)
_COMMANDS = {"torchrun": TORCHRUN, "accelerate": "accelerate.commands.launch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A launcher's command line: its own ``options``, and the script to start."""

    options: tuple[str, ...]
    script: str
    as_module: bool
    arguments: tuple[str, ...]


def launches(script: ScriptOptions) -> bool:
    """Whether ``script`` is run in several processes, or is a launcher."""
    return script.nproc_per_node is not None or (script.as_module and script.script_or_module in _PARSERS)


def check_processes(script: ScriptOptions, command: str) -> None:
    """Raise :class:`UsageError` if ``command`` cannot run the script in several processes."""
    if script.nproc_per_node is not None and script.device is Device.SIMULATED:
        raise UsageError(_ALONE)
    if script.nproc_per_node is None and launches(script):
        raise UsageError(
            f"{command} cannot wrap a launcher ({script.script_or_module}); "
            f"use: ampmem {command} --nproc-per-node N SCRIPT"
        )


def check_ranks(plan: Plan) -> None:
    """Raise :class:`UsageError` for options of ``plan`` that do not work with several processes."""
    script = plan.script
    if not script.as_module and script.script_or_module in _COMMANDS and not Path(script.script_or_module).exists():
        raise UsageError(
            f"{script.script_or_module} is a launcher: use ampmem profile -m {_COMMANDS[script.script_or_module]} …, "
            f"or {script.script_or_module} … -m ampmem profile …"
        )
    if plan.launched is None and not launches(script):
        return
    if not script.as_module and script.script_or_module == STDIN:
        raise UsageError("several processes cannot read one script from standard input; save it to a file")
    if script.device is Device.SIMULATED:
        raise UsageError(_ALONE)
    if plan.html is not None:
        raise UsageError("--html works for one process only; with several, run ampmem report FILES -o PAGE afterwards")
    if plan.snapshot is not None:
        raise UsageError(
            "--snapshot works for one process only; with several, run ampmem export --format snapshot afterwards"
        )
    if plan.launched is not None and launches(script):
        raise UsageError("already running under a launcher; drop --nproc-per-node")
    if script.nproc_per_node is not None and script.as_module and script.script_or_module in _PARSERS:
        raise UsageError(
            f"{script.script_or_module} has its own option --nproc-per-node: write it after {script.script_or_module}"
        )


def launch_ranks(plan: Plan) -> NoReturn:
    """Run the script of ``plan`` in several processes, and end as the launcher ends."""
    script = plan.script
    if script.nproc_per_node is None:
        module, given = script.script_or_module, split(script.script_or_module, script.arguments)
    else:
        options = ("--standalone", "--nproc-per-node", str(script.nproc_per_node))
        module, given = TORCHRUN, like(CommandLine, script, options=options, script=script.script_or_module)
    target = find_module(module, given.options)
    plan = plan.protect(plan.output or Path("of the ranks"))
    plan.protected.pass_on()
    with NamedTemporaryFile(prefix="ampmem-") as names:  # made now: its folder may be covered
        worker = worker_command(given.script, _worker(plan, given, Path(names.name)))
        failure = run_plainly(target, (*given.options, "--no-python", *worker))
        files = names_in(Path(names.name))
    told = plan.keep_written()
    if plan.report_to is None:
        for line in filter(None, (told, *ranks_left(files, plan.protected))):
            Terminal(sys.stderr).say(line)
    if failure is None and not any(file.exists() for file in files) and plan.times_into is None:
        raise NothingRecorded("no process of the script left a recording")
    end_as(failure)


def split(module: str, arguments: Sequence[str]) -> CommandLine:
    """The launcher's command line, parsed. Raises :class:`UsageError` if it has no script."""
    parser = _PARSERS[module]()
    parser.prog = f"python -m {module}"
    given = parser.parse_args(list(arguments))
    rest = list(given.training_script_args)
    own = list(arguments[: len(arguments) - len(rest)])
    if not own or own.pop() != given.training_script:
        raise UsageError(
            f"cannot tell which script {module} should start; write the options of {module} before the script"
        )
    if given.no_python:
        raise UsageError("--no-python starts any program, but only Python scripts can be recorded; leave it out")
    options = tuple(option for option in own if option not in (*_HOW, "--"))
    return CommandLine(
        options=options, script=given.training_script, as_module=bool(given.module), arguments=tuple(rest)
    )


def _worker(plan: Plan, given: CommandLine, names: Path) -> list[str]:
    """The arguments of ``ampmem profile`` in each process."""
    script = replace(
        plan.script,
        script_or_module=given.script,
        as_module=given.as_module,
        arguments=given.arguments,
        nproc_per_node=None,
    )
    script.find()  # an error in it is reported once, before anything is started
    options = ["--names-into", str(names)]
    options += ["--run-to-end"] if plan.run_to_end else []
    for name, value in (("-o", plan.output), ("--report-to", plan.report_to), ("--times-into", plan.times_into)):
        options += [] if value is None else [name, str(value)]
    return profile_arguments(script, *options)
