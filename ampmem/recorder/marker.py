"""What ends a step when the user says so: a kind of event, or the return of a function of the script's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from ampmem.errors import UsageError
from ampmem.vocabulary import StepOn

FORMS = "backward, optimizer, forward, or a function as FILE.py:FUNCTION or MODULE.FUNCTION"
_LOCALS = "<locals>."


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A function, each return of which ends a step: in ``file`` where that is given, or else in a module."""

    text: str
    file: tuple[str, ...]
    """The last parts of its file's path."""
    name: str
    """Its name in that file, or its full dotted name."""

    @property
    def function(self) -> str:
        """Its name alone."""
        return self.name.rpartition(".")[2]

    def is_in(self, code: CodeType, module: str) -> bool:
        """Whether ``code``, which runs in ``module``, is the function's."""
        qualified = code.co_qualname.replace(_LOCALS, "")
        if not self.file:
            return self.name in (f"{module}.{qualified}", f"{code.co_filename}.{qualified}")
        same_file = Path(code.co_filename).parts[-len(self.file) :] == self.file
        return same_file and self.name in (qualified, code.co_name)


def step_on_of(text: str | None, option: str = "--step-on ") -> StepOn | Marker:
    """What ``--step-on TEXT`` says; without one, ampmem finds the steps. ``option`` is what a message says before it.

    Raises :class:`UsageError` for what says nothing that there is.
    """
    if text is None:
        return StepOn.FOUND
    if text in (StepOn.BACKWARD, StepOn.OPTIMIZER, StepOn.FORWARD):
        return StepOn(text)
    file, colon, name = text.rpartition(":")
    parts = tuple(part for part in Path(file).parts if part != ".") if colon else ()
    names = name.split(".")
    said = file.endswith(".py") if colon else len(names) > 1 and names[-1] != "py"
    if not said or not all(map(str.isidentifier, names)):
        raise UsageError(f"{option}{text}: it takes {FORMS}")
    return Marker(text=text, file=parts, name=name)
