"""The user's assumptions about data, which a simulated device does not have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampmem.errors import UsageError
from ampmem.vocabulary import ASSUMABLE

OPTION = "--assume "
_LINE = re.compile(r"(?:\./)?(?P<place>.+:[1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The user's assumptions about data.

    ``fractions`` has the fraction of elements that an op finds, by the name of an op whose result depends on the data;
    ``numbers`` has the number that the script reads from the device, by ``FILE:LINE``; ``uncompiled`` says that code
    for ``torch.compile`` runs uncompiled. ``option`` is how the user gives them, for messages.
    """

    fractions: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    uncompiled: bool = False
    option: str = OPTION

    @property
    def named(self) -> str:
        """The name of the option."""
        return self.option.strip()

    def advice(self, text: str) -> str:
        """``text`` as the user gives it: ``--assume nonzero=0.5``, or ``assume=["nonzero=0.5"]`` in Python."""
        return f"{self.option}{text}" if self.option == OPTION else f'{self.option}["{text}"]'

    def number(self, line: str) -> tuple[str, float] | None:
        """The number assumed for ``line``, and the line as the user named it: the end of the path is enough."""
        for named, number in self.numbers.items():
            if line == named or line.endswith(os.sep + named):
                return named, number
        return None


NOTHING = Assumed()
_COMPILE = "compile"


def assumed_of(texts: Sequence[str], option: str = "assume=") -> Assumed:
    """The assumptions in ``texts``, such as ``nonzero=0.5``, ``train.py:12=7`` or ``compile=eager``.

    A single text may be given as it is. ``option`` begins error messages. Raises :class:`UsageError` for invalid texts.
    """
    fractions: dict[str, float] = {}
    numbers: dict[str, float] = {}
    uncompiled = False
    for text in (texts,) if isinstance(texts, str) else texts:
        name, _, given = text.partition("=")
        line = _LINE.fullmatch(name)
        if name in fractions or (line is not None and line["place"] in numbers) or (uncompiled and name == _COMPILE):
            raise UsageError(f"{option.strip()}: {name} is given twice")
        if name == _COMPILE:
            if given != "eager":
                raise UsageError(f"{option}{text}: give compile=eager, which runs compiled code uncompiled")
            uncompiled = True
        elif line is not None:
            numbers[line["place"]] = _number(option + text, given)
        else:
            fractions[name] = _fraction(option + text, name, given)
    return Assumed(fractions=fractions, numbers=numbers, uncompiled=uncompiled, option=option)


def _number(text: str, given: str) -> float:
    try:
        # A whole number stays one: it may be a size.
        return float(given) if "." in given or "e" in given else int(given)
    except ValueError:
        raise UsageError(f"{text}: give the number that the line reads, such as train.py:12=7") from None


def _fraction(text: str, op: str, given: str) -> float:
    if op not in ASSUMABLE:
        raise UsageError(
            f"{text}: --assume does not know {op!r}; give {', '.join(ASSUMABLE)}, a line of the script that reads a "
            "number, such as train.py:12=7, or compile=eager"
        )
    try:
        fraction = float(given)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise UsageError(f"{text}: give a fraction of the elements, from 0 to 1, such as {op}=0.5")
    return fraction
