"""The one way to replace something in torch and to put it back, with a registry of all replacements.

Every replacement returns its undo. Undos may be called in any order and more than once; :class:`contextlib.ExitStack`
runs several in reverse order.
"""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

_FunctionT = TypeVar("_FunctionT")
_GivenP = ParamSpec("_GivenP")
Undo = Callable[[], None]
"""A function that restores the original; a second call does nothing."""


class InPlace(NamedTuple):
    """A replacement in torch: attribute ``name`` of ``owner``, or something registered there under that name."""

    owner: str
    name: str


SIMULATED_MODE = InPlace("dispatch modes", "SimulatedMode")
"""The entry of the simulated device, while there is one."""


class Handle(Protocol):
    """A hook's handle, as torch returns it."""

    def remove(self) -> None:
        """Take the hook away."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An entry of the registry. ``owner`` is ``None`` unless the entry is a patch of that object's attribute."""

    what: InPlace
    owner: Any = None
    replacement: Any = None
    former: Any = None


_RESUME, _NOP = dis.opmap["RESUME"], dis.opmap["NOP"]
_ABSENT = object()
"""Stands for an attribute that the owner does not have itself: it is inherited or computed."""

_entries: dict[int, _Entry] = {}
_numbers = count()


def in_place() -> list[InPlace]:
    """All current replacements, the oldest first."""
    return [entry.what for entry in _entries.values()]


def is_simulating() -> bool:
    """Whether this process simulates a device now."""
    return SIMULATED_MODE in in_place()


def replaced() -> list[tuple[Any, Any]]:
    """(original, replacement) of each current patch, without attributes that were inherited."""
    return [
        (entry.former, entry.replacement)
        for entry in _entries.values()
        if entry.owner is not None and entry.former is not _ABSENT
    ]


@contextmanager
def suspended() -> Iterator[None]:
    """A block in which all patches of attributes are out of place, for imports: a module keeps what it finds."""
    patches = [entry for entry in _entries.values() if entry.owner is not None]
    present = [vars(entry.owner).get(entry.what.name, _ABSENT) for entry in patches]
    for entry in reversed(patches):
        _set(entry, entry.former)
    try:
        yield
    finally:
        for entry, value in zip(patches, present, strict=True):
            _set(entry, value)


def patch(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Undo:
    """Replace ``owner.name``, which ``owner`` itself must have, by ``wrapper(original)``."""
    return _put(owner, name, unseen(wrapper(vars(owner)[name])))


def patch_call(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Undo:
    """:func:`patch` by a function that calls the original; it gets the original's name, docstring and attributes."""
    original = vars(owner)[name]
    return _put(owner, name, unseen(functools.update_wrapper(wrapper(original), original)))


def unseen(function: _FunctionT) -> _FunctionT:
    """Make stacks, tracebacks and warnings leave out the frames of ``function``, which passes calls on to the script.

    Python leaves out a frame that has not begun yet: its instruction ``RESUME`` is still to come. So that instruction
    goes to the end of the code. The function may not use what asks for the frame that runs (``super()`` without
    arguments, ``globals``, ``locals``), and signal handlers may run in it: it keeps no exception from the script.
    """
    if isinstance(function, FunctionType):
        code = function.__code__
        instructions = code.co_code
        begins = instructions[::2].index(_RESUME) * 2
        if begins != len(instructions) - 2:  # else it is there already, and dynamo knows this code object
            moved = instructions[begins : begins + 2]
            rest = instructions[begins + 2 :]
            function.__code__ = code.replace(co_code=instructions[:begins] + bytes((_NOP, 0)) + rest + moved)
    return function


def undone_together(install: Callable[_GivenP, Iterator[Undo]]) -> Callable[_GivenP, Undo]:
    """``install``, which yields undos, as a function that returns one undo for all of them, the last one first.

    If ``install`` fails, what it has installed is undone.
    """

    @functools.wraps(install)
    def installed(*args: _GivenP.args, **kwargs: _GivenP.kwargs) -> Undo:
        return together(install(*args, **kwargs))

    return installed


@undone_together
def replace_all(owners: tuple[Any, ...], values: Mapping[str, Any]) -> Iterator[Undo]:
    """Put ``values`` into all ``owners``, by name, except names that this version of torch does not have."""
    for owner in owners:
        for name, value in values.items():
            if name in vars(owner) or hasattr(owner, name):
                yield _put(owner, name, value)


def in_place_of(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which gets ``original`` first, with its name and signature.

    Not a ``partial``: only a function becomes a method when it is put into a class.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def put_in(owner: Any, name: str, value: Any) -> Undo:
    """Set ``owner.name`` to ``value``, whether ``owner`` has the attribute or not."""
    return _put(owner, name, value)


def hook(register: Callable[..., Handle], *arguments: Any, **how: Any) -> Undo:
    """Register a hook by torch's function ``register`` with ``arguments`` and ``how``."""
    handle = register(*arguments, **how)
    return added(register.__module__, register.__name__, handle.remove)


def added(owner: str, name: str, remove: Callable[[], object]) -> Undo:
    """Note something that was added to a list or stack of torch's; ``remove`` takes it away."""
    return _enter(_Entry(what=InPlace(owner, name)), remove)


def together(undos: Iterable[Undo]) -> Undo:
    """One undo for all of ``undos``, the last one first; if making one of them fails, those before it are undone."""
    with ExitStack() as stack:
        for undo in undos:
            stack.callback(undo)
        return stack.pop_all().close


def set_variables(variables: Mapping[str, str]) -> Undo:
    """Set environment variables."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)

    def restore() -> None:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return added("environment", ", ".join(variables), restore)


def _put(owner: Any, name: str, replacement: Any) -> Undo:
    entry = _Entry(
        what=InPlace(_name_of(owner), name),
        owner=owner,
        replacement=replacement,
        former=vars(owner).get(name, _ABSENT),
    )
    setattr(owner, name, replacement)
    return _enter(entry, lambda: _put_back(entry))


def _enter(entry: _Entry, remove: Callable[[], object]) -> Undo:
    number = next(_numbers)
    _entries[number] = entry

    def undo() -> None:
        if _entries.pop(number, None) is not None:
            remove()

    return undo


def _put_back(entry: _Entry) -> None:
    """Restore the original, unless other code has patched over ours: that patch reaches the original through ours."""
    owner, name = entry.owner, entry.what.name
    if vars(owner).get(name, _ABSENT) is not entry.replacement:
        for other in _entries.values():  # a patch of ours over this one must not restore it
            if other.owner is owner and other.what.name == name and other.former is entry.replacement:
                other.former = entry.former
    else:
        _set(entry, entry.former)


def _set(entry: _Entry, value: Any) -> None:
    if value is not _ABSENT:
        setattr(entry.owner, entry.what.name, value)
    elif entry.what.name in vars(entry.owner):
        delattr(entry.owner, entry.what.name)


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else type(owner).__name__
