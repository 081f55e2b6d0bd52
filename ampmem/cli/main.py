"""The command ``ampmem``: finds the subcommand, and turns errors into one line and an exit code.

Nothing heavy is imported before a subcommand is chosen, so ``ampmem --help`` answers at once and
``ampmem show`` and ``ampmem report`` work where torch cannot be loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from errno import ENOSPC
from importlib import import_module
from io import StringIO
from keyword import iskeyword
from typing import NoReturn

import click
from click.shell_completion import CompletionItem, shell_complete

from ampmem.errors import AmpmemError
from ampmem.output import Terminal
from ampmem.version import __version__

PROGRAM = "ampmem"

COMPLETION = "_AMPMEM_COMPLETE"
"""The environment variable with which a shell asks for completions."""

INTERRUPTED = 130
"""The exit code for a command ended by Ctrl-C, as a shell reports it."""

SUBCOMMANDS = {
    "profile": "Record where the memory of a training script goes.",
    "watch": "Record a whole run, one row per step, and explain why memory ran out.",
    "top": "Show live what a watched run does.",
    "compare": "Record a script in each precision, and compare them side by side.",
    "fit": "Find the largest batch size that fits on a GPU; no GPU is needed.",
    "estimate": "Predict what training a model takes, without a script.",
    "advise": "Find changes that make a script fit, each tested by a run.",
    "check": "Fail if a run takes more memory than its budgets or its baseline.",
    "show": "Print recordings as tables, or as JSON.",
    "diff": "Show where memory differs between two runs of changed code.",
    "report": "Write recordings to one HTML page that works offline.",
    "model": "Compare the published formulas of static memory.",
    "import": "Convert a PyTorch memory snapshot into a recording.",
    "export": "Write a recording in a format that other tools read, or a picture.",
    "docs": "Print the documentation: a page, a finding, a heading.",
    "extension": "Compile a C++ extension that makes recording cheaper.",
    "completion": "Print a script that makes a shell complete ampmem's commands and options.",
}
"""Name and first help line of each subcommand. ``profile`` is ``profile`` in ``ampmem.cli.profile``.

One whose name is a keyword of Python has a trailing underscore there: ``import_`` of ``ampmem.cli.import_``.
"""

_GROUPS = {
    "Measure": ("profile", "watch", "top", "compare"),
    "Predict": ("fit", "estimate", "model"),
    "Change": ("advise",),
    "Continuous integration": ("check", "diff"),
    "Files": ("show", "report", "import", "export"),
    "Help": ("docs", "extension", "completion"),
}
"""The subcommands by what people want, in the order of ``ampmem --help``."""

_EXAMPLES = """\b
Examples:
  ampmem profile train.py                # what this machine's GPU or CPU holds
  ampmem profile --gpu rtx4090 train.py  # what another GPU would hold
  ampmem advise --budget 24GiB train.py  # what to change so that it fits
"""


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(import_module(f"ampmem.cli.{name}"), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"ampmem.cli.{name}.{name} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command as click does, with the nearest command in the error message."""
        if args[0] in SUBCOMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        ctx.fail(f"No such command {args[0]!r}.{_meant(args[0])}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete subcommands without importing them; after a subcommand click asks that one."""
        found = [CompletionItem(name, help=help) for name, help in SUBCOMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``ampmem --help``, written from :data:`SUBCOMMANDS` so that nothing is imported for it."""
        widest = max(map(len, SUBCOMMANDS))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), SUBCOMMANDS[name]) for name in names])


def _meant(word: str) -> str:
    """A suggestion for ``word``, which is not a command."""
    if word.endswith(".py"):
        return f" Did you mean '{PROGRAM} profile {word}'?"
    if word.endswith(".ampmem"):
        return f" Did you mean '{PROGRAM} show {word}'?"
    near = get_close_matches(word, SUBCOMMANDS, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@click.group(cls=LazyGroup, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Where did my training memory go, and what did mixed precision really change?"""


def main() -> NoReturn:
    """Run the command line and exit; this is the one place where ampmem's errors become messages.

    Exit codes: 0 ok, 1 the tool or a check failed, 2 wrong usage, 130 Ctrl-C. Exceptions of a profiled script are not
    ampmem's errors and pass through unchanged.
    """
    terminal = Terminal(sys.stderr)
    try:
        asked = os.environ.get(COMPLETION)
        code = run(sys.argv[1:]) if asked is None else shell_complete(group, {}, PROGRAM, COMPLETION, asked)
        # Flushed here, as at interpreter exit a closed pipe could only be complained about. A script run in this
        # process has raised its own end already, and its output is left to Python.
        if sys.stdout is not None:
            sys.stdout.flush()
    except AmpmemError as error:
        terminal.say(str(error))
        code = error.exit_code
    except click.ClickException as error:
        terminal.show(_usage_text(error))
        code = error.exit_code
    except KeyboardInterrupt:
        terminal.say("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        code = 1
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        terminal.say(f"cannot write: {error.strerror}")
        _discard_output()
        code = 1
    raise SystemExit(code)


def _usage_text(error: click.ClickException) -> str:
    """Click's message without tabs; for an unknown option only the nearest one is suggested."""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        near = get_close_matches(error.option_name, error.possibilities, n=1)
        error = click.UsageError(f"{error.message}{f' Did you mean {near[0]!r}?' if near else ''}", error.ctx)
    said = StringIO()
    error.show(said)
    return said.getvalue().rstrip("\n").expandtabs(4)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; exceptions of the subcommand pass through.

    Stands in for ``group.main``, which would turn a profiled script's ``EOFError`` and ``KeyboardInterrupt`` into an
    abort of its own.
    """
    try:
        with group.make_context(PROGRAM, list(arguments)) as context:
            group.invoke(context)
    except click.exceptions.Exit as request:
        return request.exit_code
    return 0


def _discard_output() -> None:
    """Send buffered output to nowhere if its reader has gone away (``ampmem show | head``)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
