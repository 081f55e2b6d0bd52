"""Texts of a recording that ampmem parses again: names of layers and optimizer states, shapes, notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

_OF = " of "
_Item = TypeVar("_Item")

_LAYER = re.compile(r"(?<![^.\s])\d+(?![^.\s])")
"""A number that is a whole part of a name, such as a module's in a list."""
_DIGITS = re.compile(r"(\d+)")
_ALIKE = 0.01
"""Sizes that differ by at most this share count as equal layers'."""


def of_all_layers(name: str) -> str:
    """``name`` with ``*`` for each layer's number: ``blocks.*.mlp.up``."""
    return _LAYER.sub("*", name)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key for names, which puts ``h.2`` before ``h.10``."""
    parts = _DIGITS.split(name)
    return tuple((int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts))


def layers(
    items: Iterable[_Item], *, what: Callable[[_Item], Sequence[str | None]], sizes: Callable[[_Item], Sequence[int]]
) -> list[list[_Item]]:
    """``items`` in groups of equal layers, which differ in the numbers of layers only; each group in natural order.

    Layers are equal if the texts in ``what`` are the same except for these numbers, and the ``sizes`` differ by at most
    1 %. A group is at the place of its first item.
    """
    found: dict[tuple[str | None, ...], list[list[_Item]]] = {}
    groups: list[list[_Item]] = []
    for item in items:
        same = found.setdefault(tuple(text and of_all_layers(text) for text in what(item)), [])
        group = next((each for each in same if _near(sizes(each[0]), sizes(item))), None)
        if group is None:
            group = []
            same.append(group)
            groups.append(group)
        group.append(item)
    for group in groups:
        group.sort(key=lambda item: [natural(text or "") for text in what(item)])
    return groups


def _near(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in zip(one, other, strict=True))


def layers_named(names: Sequence[str], *, more: bool = False) -> str:
    """The name of a group of equal layers: ``blocks.*.mlp.up (12)``; a single layer keeps its name.

    ``more`` says that there may be further layers.
    """
    if len(names) == 1 and not more:
        return names[0]
    name = names[0] if len(set(names)) == 1 else of_all_layers(names[0])
    return f"{name} ({len(names):,}{' or more' if more else ''})"


def nearest(word: str, words: Iterable[str]) -> str:
    """``; did you mean 'peak'?`` with the nearest of ``words``; empty where none is near."""
    near = get_close_matches(word, list(map(str, words)), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """The name of a tensor of optimizer state: the optimizer's key, and the parameter, empty if there is none."""

    state: str
    parameter: str

    def __str__(self) -> str:
        """The name as recordings have it: ``exp_avg of blocks.0.weight``."""
        return f"{self.state}{_OF}{self.parameter}" if self.parameter else self.state

    @classmethod
    def read(cls, text: str) -> StateName:
        """The name in a recording's ``text``."""
        before, of, after = text.rpartition(_OF)
        return cls(state=before, parameter=after) if of else cls(state=text, parameter="")


_MOST_DIMENSIONS = 64
"""No kernel of torch's takes more dimensions."""
_SHAPE = re.compile(r"\[(?:\d{1,19}(?:, \d{1,19})*)?\]", re.ASCII)


INPUT = "(input)"
"""The name for the gradient of an input."""

MAPPED = "mapped memory"
"""The op of mapped memory: a file, or memory that processes share."""


def shape_text(shape: Sequence[object]) -> str:
    """A shape as text: ``[8, 128]``; empty if it is not known in numbers."""
    known = len(shape) <= _MOST_DIMENSIONS and all(type(size) is int for size in shape)
    return f"[{', '.join(map(str, shape))}]" if known else ""


def shape_of(text: str) -> tuple[int, ...] | None:
    """The shape in a recording's ``text``; ``None`` if it is not a shape."""
    if _SHAPE.fullmatch(text) is None or text.count(",") >= _MOST_DIMENSIONS:
        return None
    return tuple(map(int, text[1:-1].split(", "))) if text != "[]" else ()


def not_modelled(what: str) -> str:
    """The note of a simulated run that its numbers leave out ``what``."""
    return f"not modelled: {what}"


CUDNN_TRIALS = "the workspaces that torch.backends.cudnn.benchmark tries"
"""The name of a simulated run's bound for the trials of cuDNN, which take only free memory and return it at once."""

NOT_KNOWN = "not known"
"""Stands for a name that a snapshot does not have, such as the class of an optimizer seen only in frames."""

NO_TIMES = "the snapshot has no times: events are a microsecond apart"
"""The note of a recording whose times only order its events."""


def has_times(notes: Sequence[str]) -> bool:
    """Whether a recording with these ``notes`` has measured times."""
    return NO_TIMES not in notes


LEFT_OVER = (
    "are alive throughout and have no gradient and no cast: buffers, inputs, frozen parameters, workspaces, or results "
    "of an earlier forward that a variable holds, such as logits; they are in other"
)
"""The end of the note that a snapshot may have more parameters than were recognised."""

TAKEN_FOR_PARAMETERS = (
    "that are alive throughout were taken for parameters; buffers, inputs and what an earlier forward left may be "
    "among them"
)
"""The end of the note that some of the recognised parameters may be something else."""


def parameters_left_over(notes: Sequence[str]) -> bool:
    """Whether a recording with these ``notes`` may have more parameters than were recognised."""
    return any(note.endswith(LEFT_OVER) for note in notes)


CASTS_OPEN = "more than these are not counted as weights' copies"
"""The end of the note that it is unknown which casts in a snapshot are of parameters."""


def casts_open(notes: Sequence[str]) -> bool:
    """Whether a recording with these ``notes`` may have more copies of parameters than were recognised."""
    return any(note.endswith(CASTS_OPEN) for note in notes)


def buffers_counted(notes: Sequence[str]) -> bool:
    """Whether a recording with these ``notes`` may have fewer parameters than were recognised."""
    return any(note.endswith(TAKEN_FOR_PARAMETERS) for note in notes)


CASTS_COMPILED = (
    "compiled code ran under autocast: casts inside its graphs are not seen as casts; what they make counts as "
    "activations or temporaries"
)
"""The note that there may be more casts than were seen."""


COMPILED_BACKWARD = "CompiledFunctionBackward"
"""The node of autograd that runs the backward of compiled code."""


def trains_compiled(texts: Iterable[str]) -> bool:
    """Whether a recording with these ``texts`` has a backward of compiled code."""
    return COMPILED_BACKWARD in texts


def casts_compiled(notes: Sequence[str]) -> bool:
    """Whether a recording with these ``notes`` may lack casts made in compiled code."""
    return CASTS_COMPILED in notes


FUNCTIONAL = (
    "gradients were computed by torch.func: they are the script's own tensors, and tensors that forward keeps for "
    "them cannot be distinguished from its other results"
)
"""The note of a recording that does not know all saved tensors and gradients."""

_RAN_ON = "the script ran on after the recorded steps"
RAN_ON = f"{_RAN_ON}: what came then is in none of these numbers (--steps records more)"
RAN_ON_PREDICTED = (
    f"{_RAN_ON}: the prediction is of the whole run, all else of the recorded steps (--steps records more)"
)
RAN_ON_FAILED = f"{_RAN_ON} and then failed: the prediction is of the run up to there, all else of the recorded steps"
"""The notes of a recording that ended before its script."""
EVALUATED = "the first evaluation after the recorded steps is in {file}"


def ran_on(notes: Sequence[str]) -> bool:
    """Whether the script ran on after the steps of a recording with these ``notes``."""
    return any(note in notes for note in (RAN_ON, RAN_ON_PREDICTED, RAN_ON_FAILED))


_WARNING = "warning: "


def warning(what: str) -> str:
    """The note that ``what`` makes the numbers doubtful, which is shown before them."""
    return f"{_WARNING}{what}"


def is_warning(note: str) -> bool:
    """Whether ``note`` is a warning."""
    return note.startswith(_WARNING)


def warning_text(warning: str) -> str:
    """The text of a note made by :func:`warning`."""
    return warning.removeprefix(_WARNING)


NOT_ENDED = warning(
    "this recording was not ended: its process was killed or crashed, or its machine went away. It has all steps that "
    "had ended by then"
)
"""The note of a recording whose writer was never closed."""

STILL_WRITTEN = "this recording is still being written: it has the steps that have ended so far"
"""The note of a recording that another process is still writing."""
