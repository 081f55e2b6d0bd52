"""Options that several commands share: the script to run and how to record it, and ``--schema``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ampmem.allocator.gpus import DEFAULT_GPU, GPUS, gpu_to_simulate
from ampmem.analysis.jsonable import Json
from ampmem.errors import UsageError
from ampmem.output import Terminal
from ampmem.recorder import script
from ampmem.recorder.marker import FORMS, step_on_of
from ampmem.recorder.options import Asked
from ampmem.recorder.script import Target
from ampmem.recording import rank_file, taken_for_script
from ampmem.units import parse_bytes
from ampmem.vocabulary import (
    ASSUMABLE,
    AutocastDtype,
    Device,
    Files,
    Forced,
    ForcedOption,
    Form,
    Precision,
    StepOn,
    forced_options,
)

if TYPE_CHECKING:
    from ampmem.reporters.text.layout import Layout
    from ampmem.simulator.assumed import Assumed


def assumed_data(device: Device, assume: tuple[str, ...]) -> Assumed | None:
    """The assumptions that ``--assume`` gives; ``None`` for a real device. Raises :class:`UsageError`."""
    if device != Device.SIMULATED:
        if assume:
            raise UsageError("--assume is for a simulated GPU only: give --device sim or --gpu, too")
        return None
    from ampmem.simulator.assumed import OPTION, assumed_of

    return assumed_of(assume, OPTION)


_Command = TypeVar("_Command", bound=Callable[..., object])


def schema_option(
    schema: Callable[[], dict[str, Json]], name: str = "--schema", *, of: str = "--json"
) -> Callable[[_Command], _Command]:
    """A flag that prints ``schema`` and ends the command; ``of`` names the options whose output it describes."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            click.echo(json.dumps(schema(), indent=2))
            context.exit()

    return click.option(
        name,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=f"Print the JSON Schema of what {of} prints, and nothing else.",
    )


_DEVICES = (Device.AUTO, Device.CUDA, Device.CPU, Device.SIMULATED)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def choices(words: Iterable[StrEnum]) -> tuple[str, ...]:
    """``words`` as plain texts: click would show the names of an enumeration's members, not their values."""
    return tuple(word.value for word in words)


def _layout(_: click.Context, __: click.Parameter, form: str) -> Layout:
    from ampmem.reporters.text.layout import layout_for

    return layout_for(sys.stdout, form=Form(form))


layout_option = click.option(
    "--format",
    "layout",
    type=click.Choice(choices(Form)),
    default=Form.TEXT.value,
    show_default=True,
    callback=_layout,
    help="Print text, or only its tables, to be pasted: as Markdown, LaTeX (booktabs) or CSV.",
)


def precision_option(text: str) -> Decorator:
    """``--precision`` for a command that forces one precision, with the help ``text``."""
    return click.option(
        "--precision",
        "precision",
        type=click.Choice(choices(Precision)),
        default=Precision.AS_IS.value,
        show_default=True,
        help=text,
    )


def precisions_option(default: Iterable[Precision], text: str) -> Decorator:
    """``--precision`` for a command that runs the script in several precisions, with the help ``text``."""
    return click.option(
        "--precision",
        "precisions",
        default=",".join(default),
        show_default=True,
        metavar="PRECISION,...",
        help=text,
    )


seed_of_runs = click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of every run's random numbers."
)


def _complete_script(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of the script: files, but not after ``-m``."""
    return [] if context.params.get("as_module") else [CompletionItem(incomplete, type="file")]


def _complete_argument(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of an argument: left to the shell, which completes files."""
    return [CompletionItem(incomplete, type="file")]


def _complete_gpu(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of ``--gpu``: the known GPUs."""
    return [CompletionItem(name) for name in GPUS if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Options that ``--help`` lists together, by parameter name, with an example.

    The first of ``examples`` whose options the command has is shown. A ``rare`` group is listed by ``--help-all`` only.
    """

    title: str
    names: frozenset[str]
    examples: tuple[str, ...]
    rare: bool


def _group(title: str, names: str, *examples: str, rare: bool = False) -> _Group:
    return _Group(title=title, names=frozenset(names.split()), examples=examples, rare=rare)


_GROUPS = (
    _group("Search", "specs points jobs resume", "--points 9 --jobs 2", "--jobs 2 --resume runs.jsonl"),
    _group("Changes", "budget changes prove", "--budget 24GiB --allow checkpoint"),
    _group("Limits", "budgets baseline allow update_baseline", "--baseline main.json"),
    _group(
        "Script and precision",
        "as_module precision precisions dtype seed compiles",
        "--precision fp32,amp --times",
        "--precision fp32,amp --points 9",
        "--precision amp --dtype fp16",
    ),
    _group(
        "Forced changes",
        " ".join(map("force_{}".format, forced_options())),
        "--gpu h100 --force-checkpoint 'blocks.*'",
        rare=True,
    ),
    _group("GPU", "device device_option gpu assume", "--gpu h100"),
    _group(
        "Steps",
        "steps skip every keep step_on phase synchronize stacks run_to_end times",
        "--steps 5 --skip 2",
        "--every 200",
    ),
    _group("Ranks", "nproc_per_node world_size rank", "--nproc-per-node 2", "--gpu h100 --world-size 8 --rank 0"),
    _group("Files of the script", "files keep_files files_limit", "--gpu h100 --keep-files written", rare=True),
    _group(
        "Output",
        "output html snapshot quiet layout as_json schema force",
        "--html page.html",
        "--json",
        "-o run.ampmem",
    ),
)
"""The groups in the order of ``--help``; options in no group come last."""

_REST = {"check": "--budget peak=20GiB train.py", "fit": "train.py --vary --batch-size=1:64"}
"""By command, the end of an example's command line, if it is not just the script."""

_COLUMN = 24
"""The width of the column of options in ``--help``; the description of a longer option starts on a new line."""


_ALL = f"{__name__}.all"
"""The key in a context's ``meta`` that has ``--help`` list all options."""


def _help_all(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class ScriptCommand(click.Command):
    """A command that runs a script: arguments after the script's name are the script's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="Show all options and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of ``--help`` in groups, each with an example."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = [(option.name, record) for option in options if (record := option.get_help_record(ctx))]
        flags = {flag for option in options for flag in option.opts}
        for group in _GROUPS:
            records = [record for name, record in shown if name in group.names]
            if not records or (group.rare and _ALL not in ctx.meta):
                continue
            with formatter.section(group.title):
                formatter.write_dl(records, col_max=_COLUMN)
                known = (each for each in group.examples if flags.issuperset(re.findall(r"--[a-z-]+", each)))
                rest = _REST.get(self.name or "", "train.py")
                example = next((f"{each} {rest}" for each in known), "-m package.train")
                formatter.write_text(f"e.g. {ctx.command_path} {example}")
        listed = frozenset[str]().union(*(group.names for group in _GROUPS))
        with formatter.section("Other"):
            formatter.write_dl([record for name, record in shown if name not in listed], col_max=_COLUMN)

        titles = [group.title for group in _GROUPS if group.rare and any(name in group.names for name, _ in shown)]
        if titles and _ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"More options, with {ctx.command_path} --help-all: {', '.join(titles).lower()}.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Shell completion of ampmem's options, up to the script's name."""
        return [] if ctx.params.get("script_or_module") else super().shell_complete(ctx, incomplete)


gpu_option = click.option(
    "--gpu",
    metavar="NAME|BYTES",
    shell_complete=_complete_gpu,
    help=f"The GPU to simulate: {', '.join(GPUS)}, or its memory, such as 24GiB.  [default: {DEFAULT_GPU}]",
)

_SHARED: tuple[Decorator, ...] = (
    click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does."),
    click.option(
        "--dtype",
        type=click.Choice(choices(AutocastDtype)),
        help="The type that autocast casts to.  [default: the script's]",
    ),
    click.option(
        "--device",
        type=click.Choice(choices(_DEVICES)),
        default=Device.AUTO.value,
        show_default=True,
        help="Which device's memory to record: auto is the GPU if torch sees one, otherwise the CPU; sim simulates "
        "the GPU given by --gpu (if torch sees no GPU, --gpu alone is enough).",
    ),
    gpu_option,
    click.option(
        "--assume",
        multiple=True,
        metavar="WHAT=VALUE",
        help="What to assume on a simulated GPU, whose tensors have no values: OP=FRACTION is the fraction of the "
        f"elements that an op ({' or '.join(ASSUMABLE)}) finds, FILE:LINE=NUMBER is the number that a line reads, and "
        "compile=eager runs uncompiled what torch.compile would compile. May be given several times.",
    ),
    click.option(
        "--world-size",
        type=click.IntRange(min=1),
        metavar="N",
        help="On a simulated GPU: run the script as one rank of N; collectives return immediately.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="Which rank of --world-size to run as.  [default: 0]",
    ),
    click.option(
        "--sync/--no-sync",
        "synchronize",
        default=True,
        show_default=True,
        help="Synchronize the GPU at the end of each step.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        metavar="N",
        default=3,
        show_default=True,
        help="How many steps to record.",
    ),
    click.option(
        "--step-on",
        metavar="WHAT",
        help=f"What ends a step: {FORMS}.  [default: updates of the optimizers, or backward if there is no optimizer]",
    ),
    click.option(
        "--phase",
        type=click.Choice([StepOn.EVALUATION.value]),
        help="Record this phase alone: the first evaluation of a script that trains, one step for each batch.",
    ),
    click.option("--named", metavar="NAME", hidden=True, help="What recordings call the script, for ampmem."),
    click.option(
        "--skip",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="How many steps to skip first.",
    ),
    click.option("--stacks/--no-stacks", default=True, show_default=True, help="Record the Python stack of every op."),
    click.option("--force", is_flag=True, help="Replace existing files."),
    click.option(
        "--files",
        type=click.Choice(choices(Files)),
        help="What happens to files that the script writes, renames or deletes: with protect your files stay as they "
        "are, and what the script writes is in memory until its end.  [default: protect on a simulated GPU, and for "
        "every command that runs the script to compare or to search; write for profile and watch on a real device]",
    ),
    click.option(
        "--keep-files",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Copy what the script has written under --files protect to DIR; each of several runs has a folder 1, 2 …",
    ),
    click.option(
        "--files-limit",
        metavar="BYTES",
        default="2GiB",
        show_default=True,
        help="How much the script may write under --files protect; tensors without values take no space.",
    ),
    click.option(
        "--nproc-per-node",
        type=click.IntRange(min=1),
        metavar="N",
        help="Run the script in N processes here, as torchrun does; each is recorded into its own file: "
        f"{rank_file(Path('train'), 0, 2)}.",
    ),
    click.argument("script_or_module", metavar="SCRIPT|-m MODULE", shell_complete=_complete_script),
    click.argument(
        "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=_complete_argument
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions(Asked):
    """The script and how to record it: the options that :func:`shared_options` adds to a command."""

    script_or_module: str
    as_module: bool
    arguments: tuple[str, ...]
    steps: int = 3
    world_size: int | None = None
    rank: int | None = None
    files: Files | None = None
    keep_files: Path | None = None
    files_limit: str = "2GiB"
    nproc_per_node: int | None = None
    named: str | None = None

    @property
    def name(self) -> str:
        """The script's name, without its arguments."""
        return self.named or ("-m " if self.as_module else "") + self.script_or_module

    @property
    def title(self) -> str:
        """The script's name and arguments, as recordings have them."""
        return " ".join((self.name, *self.arguments))

    @property
    def protects(self) -> bool:
        """Whether the user's files are protected from the script: ``--files protect``, the default in simulation."""
        return self.files is Files.PROTECT or (self.files is None and self.device is Device.SIMULATED)

    def find(self) -> Target:
        """The target to run. Raises :class:`UsageError` if it does not exist."""
        if self.as_module:
            return script.find_module(self.script_or_module, self.arguments)
        path = Path(self.script_or_module)
        mistaken = taken_for_script(path) if path.is_file() else None
        if mistaken is not None:
            raise UsageError(mistaken)
        return script.find_script(self.script_or_module)


def advised_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--advised`` to ``command``, which leaves out what ``ampmem advise`` has disproved."""
    return click.option(
        "--advised",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Leave out findings whose change was tested for the same script by ampmem advise --resume FILE and saved "
        "nothing; a note names them.",
    )(command)


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the script and the options to record it to ``command``, as its argument ``options``."""
    return _with(command, _SHARED)


def shared_options_but(*names: str) -> Decorator:
    """Like :func:`shared_options`, without the named options."""
    return lambda command: _with(command, [each for each in _SHARED if _name_of(each) not in names])


def script_options(*names: str) -> Decorator:
    """Like :func:`shared_options`, with only the named options, the script and its arguments."""
    wanted = {*names, "script_or_module", "arguments"}
    return lambda command: _with(command, [each for each in _SHARED if _name_of(each) in wanted])


def _name_of(decorate: Decorator) -> str | None:
    """The name of the parameter that ``decorate`` adds to a command."""

    def command() -> None: ...

    parameters: list[click.Parameter] = vars(decorate(command))["__click_params__"]
    return parameters[0].name


_READ: dict[str, Callable[[str], object]] = {
    "precision": Precision,
    "dtype": AutocastDtype,
    "device": Device,
    "gpu": lambda text: gpu_to_simulate(text, "--gpu "),
    "files": Files,
}
"""By option, the function that converts its text."""


def _with(command: Callable[..., Any], decorators: Sequence[Decorator]) -> Callable[..., Any]:
    names = {field.name for field in fields(ScriptOptions)}

    @wraps(command)
    def with_options(**given: Any) -> Any:
        shared = {name: given.pop(name) for name in names & given.keys()}
        shared |= {name: read(shared[name]) for name, read in _READ.items() if shared.get(name) is not None}
        shared["step_on"] = step_on_of(
            given.pop("phase", None) or shared.get("step_on")
        )  # an invalid value fails before anything runs
        return command(options=ScriptOptions(**shared), **given)

    decorated: Callable[..., Any] = with_options
    for decorate in reversed(decorators):
        decorated = decorate(decorated)
    return decorated


def force_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the ``--force-…`` options to ``command``, which gets their values as its argument ``forced``."""
    own = {name: option for name, option in forced_options().items() if option.help}

    @wraps(command)
    def with_forced(**given: Any) -> Any:
        values = {name: given.pop(f"force_{name}") for name in own}
        forced = Forced(**{name: _forced_value(own[name], value) for name, value in values.items() if value})
        return command(forced=forced, **given)

    decorated: Callable[..., Any] = with_forced
    for name, option in reversed(own.items()):
        decorated = click.option(
            option.words[0],
            f"force_{name}",
            type=_type_of(option),
            is_flag=not (option.metavar or option.choices),
            metavar=option.metavar or None,
            help=option.help,
        )(decorated)
    return decorated


def _type_of(option: ForcedOption) -> click.ParamType[Any] | None:
    if option.choices:
        return click.Choice(option.choices)
    if option.share:
        return click.FloatRange(0, 1, min_open=True, max_open=True)
    return None if option.least is None else click.IntRange(min=option.least)


def _forced_value(option: ForcedOption, given: Any) -> Any:
    """The value for the option's field of :class:`Forced`, from the value ``given`` on the command line."""
    if option.choices:
        return given == "true"
    if not option.metavar.endswith(",..."):
        return given
    names = tuple(each.strip() for each in given.split(","))
    if not all(names):
        raise UsageError(f"{option.words[0]} needs names of modules, separated by commas, such as 'blocks.*'")
    return names


def settled(script: ScriptOptions) -> ScriptOptions:
    """``script`` with the device that its options ask for: ``--gpu`` alone means a simulated one.

    Raises :class:`UsageError` for a simulated device's options with another device, and for invalid values. With
    ``--gpu`` but without ``--device``, torch is imported to look for a real GPU.
    """
    device, gpu = script.device, script.gpu
    if device is Device.AUTO and gpu is not None:
        from ampmem.recorder.sources.choose import meant_device

        device = meant_device(device, gpu, option="--gpu", remedy="--device sim")
        Terminal(sys.stderr).say(f"simulating the GPU that --gpu names ({gpu.name}), because torch sees no GPU")
    if gpu is not None and device is not Device.SIMULATED:
        raise UsageError(f"--gpu simulates a GPU, and --device {device} records a real device: leave one of them out")
    assumed_data(device, script.assume)
    settled = replace(script, device=device)
    check_files(settled)
    check_world(device, script.world_size, script.rank)
    return settled


def check_dtype(script: ScriptOptions, *precisions: Precision) -> None:
    """Raise :class:`UsageError` for a ``--dtype`` that none of ``precisions`` uses."""
    if script.dtype is not None and not any(precision.autocast for precision in precisions):
        raise UsageError(
            "--dtype is the type that autocast casts to: give --precision amp or amp-nocache, not "
            + ",".join(precisions)
        )


def check_files(script: ScriptOptions) -> None:
    """Make the folder of ``--keep-files``. Raises :class:`UsageError` if it cannot be made, or not be used."""
    parse_size(script.files_limit, "--files-limit")
    keep = script.keep_files
    if keep is None:
        return
    if not script.protects:
        raise UsageError("--keep-files is for --files protect: without it the script writes its files in their places")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep-files {keep}: the folder cannot be made: {error.strerror}") from error


def parse_size(text: str, option: str) -> int:
    """The bytes in ``text``, such as ``24GiB``, which was given for ``option``. Raises :class:`UsageError`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def check_world(device: Device, world_size: int | None, rank: int | None) -> None:
    """Raise :class:`UsageError` for ranks of a real device, and for a rank outside of the world."""
    name = "--world-size" if world_size is not None else "--rank"
    if device != Device.SIMULATED and (world_size, rank) != (None, None):
        raise UsageError(
            f"{name} is for simulated ranks only: give --device sim or --gpu, too; start real ranks with torchrun"
        )
    if rank is not None and world_size is None:
        raise UsageError(f"--rank {rank} needs --world-size N")
    if rank is not None and world_size is not None and rank >= world_size:
        raise UsageError(f"--rank {rank}: the ranks of --world-size {world_size} are 0 to {world_size - 1}")
