"""The user's choice of what ends a step: a kind of event, or the return of a function of the script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from ampmem.errors import UsageError
from ampmem.vocabulary import StepOn

FORMS = "backward, optimizer, forward, evaluation, or a function as FILE.py:FUNCTION or MODULE.FUNCTION"
_LOCALS = "<locals>."


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A function whose returns end steps; it is in ``file``, or else in a module."""

    text: str
    file: tuple[str, ...]
    """The last parts of the path of the function's file."""
    name: str
    """The function's name in that file, or its full dotted name."""

    @property
    def function(self) -> str:
        """The function's name alone."""
        return self.name.rpartition(".")[2]

    def is_in(self, code: CodeType, module: str) -> bool:
        """Whether ``code``, which runs in ``module``, is the function's."""
        qualified = code.co_qualname.replace(_LOCALS, "")
        if not self.file:
            return self.name in (f"{module}.{qualified}", f"{code.co_filename}.{qualified}")
        same_file = Path(code.co_filename).parts[-len(self.file) :] == self.file
        return same_file and self.name in (qualified, code.co_name)


def step_on_text(step_on: StepOn | Marker) -> str | None:
    """``step_on`` as the user writes it; ``None`` for steps that ampmem finds. :func:`step_on_of` reads it."""
    if isinstance(step_on, Marker):
        return step_on.text
    return None if step_on is StepOn.FOUND else step_on.value


def step_on_of(text: str | None, option: str = "--step-on ") -> StepOn | Marker:
    """The event or function that ``--step-on TEXT`` names; without a text, ampmem finds the steps.

    ``option`` begins the error message. Raises :class:`UsageError` if the text names neither an event nor a function.
    """
    if text is None:
        return StepOn.FOUND
    if text in tuple(StepOn) and text != StepOn.FOUND:
        return StepOn(text)
    file, colon, name = text.rpartition(":")
    parts = tuple(part for part in Path(file).parts if part != ".") if colon else ()
    names = name.split(".")
    said = file.endswith(".py") if colon else len(names) > 1 and names[-1] != "py"
    if not said or not all(map(str.isidentifier, names)):
        raise UsageError(f"{option}{text}: give {FORMS}")
    return Marker(text=text, file=parts, name=name)
