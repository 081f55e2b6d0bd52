"""What the commands share that run a script in child processes: the arms, and each child's arguments."""

from __future__ import annotations

import click

from ampmem.cli.options.shared import ScriptOptions
from ampmem.cli.processes.launch import Ended
from ampmem.errors import UsageError
from ampmem.vocabulary import Arm

USAGE = 2
"""The exit code of a command line that was used wrongly."""


def chosen_arms(text: str, dtype: str | None) -> tuple[Arm, ...]:
    """The arms that ``--arms`` lists. Raises :class:`UsageError`, also for a ``dtype`` that none of them uses."""
    names = tuple(name.strip() for name in text.split(","))
    for i, name in enumerate(names):
        if name not in tuple(Arm):
            raise UsageError(f"--arms: unknown precision {name!r}; there are {', '.join(Arm)}")
        if name in names[:i]:
            raise UsageError(f"--arms: {name} is there twice")
    arms = tuple(map(Arm, names))
    if dtype is not None and not any(arm.autocast for arm in arms):
        raise UsageError(f"--dtype is what autocast casts to, so it needs amp or amp-nocache, not {text}")
    return arms


def profile_arguments(script: ScriptOptions, arm: Arm, seed: int | None, *options: str) -> list[str]:
    """The arguments of ``ampmem profile`` that run ``script`` in ``arm``; ``options`` are further ones."""
    arguments = [*options, "--arm", arm, "--steps", str(script.steps), "--skip", str(script.skip)]
    if seed is not None:
        arguments += ["--seed", str(seed)]
    if script.nproc_per_node is not None:
        arguments += ["--nproc-per-node", str(script.nproc_per_node)]
    arguments += ["--device", script.device, "--sync" if script.synchronize else "--no-sync"]
    arguments.append("--stacks" if script.stacks else "--no-stacks")
    if script.step_on is not None:
        arguments += ["--step-on", script.step_on]
    if script.named is not None:
        arguments += ["--named", script.named]
    if script.gpu is not None:
        arguments += ["--gpu", script.gpu]
    if script.world_size is not None:
        arguments += ["--world-size", str(script.world_size)]
    if script.rank is not None:
        arguments += ["--rank", str(script.rank)]
    for assumption in script.assume:
        arguments += ["--assume", assumption]
    if script.dtype is not None and arm.autocast:
        arguments += ["--dtype", script.dtype]
    if script.force:
        arguments.append("--force")
    if script.as_module:
        arguments.append("-m")
    return [*arguments, "--", script.script_or_module, *script.arguments]


def misplaced(script: ScriptOptions, ended: Ended) -> str:
    """As :func:`misplaced_option` says it of a child that ended with 2; the last line that it printed is the reason."""
    return misplaced_option(script, ended.tail[-1]) if ended.code == USAGE and ended.tail else ""


def misplaced_option(script: ScriptOptions, reason: str) -> str:
    """``; --arms is an option of ampmem's: write it before train.py``, where the script ended for not knowing it.

    ``reason`` is why the script ended, in its own words: they name an option of the command that is running, and which
    is among the script's arguments. Empty where that is not so.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return ""
    options = [param for param in context.command.params if isinstance(param, click.Option) and not param.hidden]
    ours = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    given = {argument.partition("=")[0] for argument in script.arguments if argument.startswith("-")}
    told = (word.strip("'\"[](),.").partition("=")[0] for word in reason.split())
    name = next((word for word in told if word in ours & given), None)
    return "" if name is None else f"; {name} is an option of ampmem's: write it before {script.name}"
