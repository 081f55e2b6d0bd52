"""Options that the commands share which run a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ampmem.allocator.gpus import DEFAULT_GPU, GPUS, GpuSpec, gpu_to_simulate
from ampmem.errors import UsageError
from ampmem.recorder import script
from ampmem.recorder.marker import FORMS, step_on_of
from ampmem.recorder.script import Target
from ampmem.recording import rank_file, taken_for_script
from ampmem.vocabulary import ASSUMABLE, AutocastDtype, Device

_DEVICES = (Device.AUTO, Device.CUDA, Device.CPU, Device.SIMULATED)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def choices(words: Iterable[StrEnum]) -> tuple[str, ...]:
    """``words`` as click is to show them: of members of an enumeration it would show the names."""
    return tuple(word.value for word in words)


def _complete_script(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: a file, unless it is to be a module."""
    return [] if context.params.get("as_module") else [CompletionItem(incomplete, type="file")]


def _complete_argument(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: a file is what it would complete by itself."""
    return [CompletionItem(incomplete, type="file")]


def _complete_gpu(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: the GPUs that are known."""
    return [CompletionItem(name) for name in GPUS if name.startswith(incomplete)]


class ScriptCommand(click.Command):
    """A command that runs a script: what follows the script's name is the script's."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """For a shell: ampmem's options, up to the script's name."""
        return [] if ctx.params.get("script_or_module") else super().shell_complete(ctx, incomplete)


_SHARED: tuple[Decorator, ...] = (
    click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does."),
    click.option(
        "--dtype",
        type=click.Choice(choices(AutocastDtype)),
        help="What autocast casts to.  [default: what the script says]",
    ),
    click.option(
        "--device",
        type=click.Choice(choices(_DEVICES)),
        default=Device.AUTO.value,
        show_default=True,
        help="Whose memory to record; auto takes the GPU where torch sees one, sim simulates the one that --gpu names.",
    ),
    click.option(
        "--gpu",
        metavar="NAME|BYTES",
        shell_complete=_complete_gpu,
        help=f"The GPU to simulate ({', '.join(GPUS)}), or its memory, such as 24GiB.  [default: {DEFAULT_GPU}]",
    ),
    click.option(
        "--assume",
        multiple=True,
        metavar="OP=FRACTION|FILE:LINE=NUMBER|compile=eager",
        help="On a simulated device, which has no data: the fraction of the elements that an op finds "
        f"({' or '.join(ASSUMABLE)}), or the number that a line of the script reads; compile=eager runs uncompiled "
        "what torch.compile compiles. May be repeated.",
    ),
    click.option(
        "--world-size",
        type=click.IntRange(min=1),
        help="With --device sim: let the script run as one rank of so many; collectives return at once.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        help="Which rank of --world-size that is.  [default: 0]",
    ),
    click.option(
        "--sync/--no-sync",
        "synchronize",
        default=True,
        show_default=True,
        help="On a GPU, wait for it at the end of each step.",
    ),
    click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="How many steps to record."),
    click.option(
        "--step-on",
        metavar="WHAT",
        help=f"What ends a step: {FORMS}.  [default: updates, put together where several optimizers take turns; "
        "backward where there is no optimizer]",
    ),
    click.option("--named", metavar="NAME", hidden=True, help="What recordings call the script, for ampmem."),
    click.option("--skip", type=click.IntRange(min=0), default=0, show_default=True, help="Steps to let pass before."),
    click.option("--stacks/--no-stacks", default=True, show_default=True, help="Record the Python stack of every op."),
    click.option("--force", is_flag=True, help="Replace files that exist."),
    click.option(
        "--nproc-per-node",
        type=click.IntRange(min=1),
        metavar="N",
        help="Run N processes of the script on this machine, as torchrun does, and record each into a file of its own: "
        f"{rank_file(Path('train'), 0, 2)}.",
    ),
    click.argument("script_or_module", metavar="SCRIPT|-m MODULE", shell_complete=_complete_script),
    click.argument(
        "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=_complete_argument
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """The script to run and how to record it: the options that :func:`shared_options` adds to a command."""

    script_or_module: str
    as_module: bool
    arguments: tuple[str, ...]
    dtype: AutocastDtype | None
    device: Device = Device.AUTO
    gpu: str | None
    assume: tuple[str, ...]
    world_size: int | None = None
    rank: int | None = None
    synchronize: bool = True
    steps: int
    step_on: str | None = None
    skip: int
    stacks: bool = True
    force: bool
    nproc_per_node: int | None = None
    named: str | None = None

    @property
    def name(self) -> str:
        """What is run, without its arguments."""
        return self.named or ("-m " if self.as_module else "") + self.script_or_module

    @property
    def title(self) -> str:
        """What is run, as recordings say it."""
        return " ".join((self.name, *self.arguments))

    def find(self) -> Target:
        """What to run. Raises :class:`UsageError` when there is no such thing."""
        if self.as_module:
            return script.find_module(self.script_or_module, self.arguments)
        path = Path(self.script_or_module)
        mistaken = taken_for_script(path) if path.is_file() else None
        if mistaken is not None:
            raise UsageError(mistaken)
        return script.find_script(self.script_or_module)


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the script to run and how to record it, as the argument ``options``."""
    names = {field.name for field in fields(ScriptOptions)}

    @wraps(command)
    def with_options(**given: Any) -> Any:
        shared = {name: given.pop(name) for name in names & given.keys()}
        dtype = shared.pop("dtype")
        shared |= {"dtype": None if dtype is None else AutocastDtype(dtype)}
        shared |= {"device": Device(shared["device"])} if "device" in shared else {}
        step_on_of(shared.get("step_on"))  # what is wrong with it is said before anything runs
        return command(options=ScriptOptions(**shared), **given)

    decorated: Callable[..., Any] = with_options
    for decorate in reversed(_SHARED):
        decorated = decorate(decorated)
    return decorated


def simulated_gpu(device: Device, gpu: str | None) -> GpuSpec | None:
    """The GPU to simulate; ``None`` for another device.

    Raises :class:`UsageError` for one that nobody knows, and for one with nothing left for the script.
    """
    if device != Device.SIMULATED:
        if gpu is not None:
            raise UsageError("--gpu names the GPU to simulate, so it needs --device sim")
        return None
    return gpu_to_simulate(gpu, "--gpu ")


def check_world(device: Device, world_size: int | None, rank: int | None) -> None:
    """Raises :class:`UsageError` for ranks of a real device, and for a rank that there is not."""
    name = "--world-size" if world_size is not None else "--rank"
    if device != Device.SIMULATED and (world_size, rank) != (None, None):
        raise UsageError(
            f"{name} says which ranks to simulate, so it needs --device sim; real ones start with torchrun"
        )
    if rank is not None and world_size is None:
        raise UsageError(f"--rank {rank} needs --world-size N")
    if rank is not None and world_size is not None and rank >= world_size:
        raise UsageError(f"--rank {rank}: the ranks of --world-size {world_size} are 0 to {world_size - 1}")
