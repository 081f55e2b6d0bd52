"""The argument of a script that ``ampmem fit`` varies, as it is written on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.fit import Vary
from ampmem.errors import UsageError

OPTION = "--vary"

_SPEC = re.compile(r"(?P<name>[^\s=]+)(?P<separator>=|\s+)(?P<range>\S*)")
_POSITIONAL = re.compile(r"(?P<name>)(?P<range>\d+:\d*)", re.ASCII)
_RANGE = re.compile(r"(?P<low>\d{1,15}):(?P<high>\d{0,15})", re.ASCII)
_FORMS = (
    f"such as {OPTION} --batch-size=1:64, or --batch-size=1: to raise it until it does not fit, or {OPTION} 1:64 for "
    "a positional argument"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedArguments:
    """The script's arguments, with a gap for the one that differs."""

    vary: Vary
    before: tuple[str, ...]
    after: tuple[str, ...]

    def at(self, value: int) -> tuple[str, ...]:
        """All arguments of a run with ``value``."""
        return (*self.before, *self.vary.words(value), *self.after)


def varied_arguments(options: Sequence[str], arguments: Sequence[str]) -> VariedArguments:
    """Find the argument to vary in ampmem's own ``options`` or among the script's ``arguments``.

    Given among ampmem's options, it comes last. A positional argument stands where the option stands. Raises
    :class:`UsageError`.
    """
    specs, before, after = list(options), tuple(arguments), tuple[str, ...]()
    for i, argument in enumerate(arguments):
        if argument == OPTION:
            specs.append(arguments[i + 1] if i + 1 < len(arguments) else "")
            before, after = tuple(arguments[:i]), tuple(arguments[i + 2 :])
            break
        if argument.startswith(f"{OPTION}="):
            specs.append(argument.removeprefix(f"{OPTION}="))
            before, after = tuple(arguments[:i]), tuple(arguments[i + 1 :])
            break
    if not specs:
        raise UsageError(f"say which argument of the script to vary, {_FORMS}")
    if len(specs) > 1 or any(each == OPTION or each.startswith(f"{OPTION}=") for each in after):
        raise UsageError(f"one argument can be varied; {OPTION} is there more than once")
    vary = _parse(specs[0], len(before) + 1)
    for argument in (*before, *after):
        if argument == vary.name or argument.startswith(f"{vary.name}="):
            raise UsageError(f"{vary.name} is given twice: remove {argument} from the script's arguments")
    return VariedArguments(vary=vary, before=before, after=after)


def _parse(spec: str, position: int) -> Vary:
    """``spec`` taken apart; ``position`` is which of the script's arguments it is where it has no name, from 1 on."""
    found = _POSITIONAL.fullmatch(spec.strip()) or _SPEC.fullmatch(spec.strip())
    if found is None:
        raise UsageError(f"{OPTION} needs an argument of the script with the values to try, {_FORMS}; not {spec!r}")
    numbers = _RANGE.fullmatch(found["range"])
    if numbers is None:
        raise UsageError(f"{OPTION}: the values are whole numbers LOW:HIGH, {_FORMS}; not {found['range']!r}")
    low, high = int(numbers["low"]), int(numbers["high"]) if numbers["high"] else None
    if low < 1:
        raise UsageError(f"{OPTION}: the smallest value is 1, not {low}")
    if high is not None and high < low:
        raise UsageError(f"{OPTION}: there is nothing from {low} to {high}; the smaller value comes first")
    if not found["name"]:
        return Vary(name=f"argument {position}", separator="", low=low, high=high)
    separator = "=" if found["separator"] == "=" else " "
    return Vary(name=found["name"], separator=separator, low=low, high=high)
