"""Runs a script or module as ``__main__``, as Python itself would."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from ampmem.errors import UsageError
from ampmem.own_code import OWN_FOLDERS

_OP_CALLER = str(Path("torch", "_ops.py"))


class StopScript(BaseException):
    """Raised inside the script, at a step's end, to stop it once the recording is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to run: compiled, but not started. ``argv0`` and ``path0`` are what Python would set."""

    code: CodeType
    file: str
    argv0: str
    path0: str
    spec: ModuleSpec | None
    title: str


def find_script(name: str) -> Target:
    """The script at path ``name``. Raises :class:`UsageError` when it is no Python file."""
    path = Path(name)
    if not path.exists():
        raise UsageError(f"there is no script {name}")
    if path.is_dir():
        raise UsageError(f"{name} is a directory; name the script in it, or use -m for a package")
    try:
        code = compile(path.read_bytes(), path.absolute(), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} is not a Python script: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    return Target(
        code=code, file=str(path.absolute()), argv0=name, path0=str(path.resolve().parent), spec=None, title=path.stem
    )


def find_module(name: str) -> Target:
    """The module ``name``, as ``python -m`` finds it; a package's ``__main__`` for a package."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    except (ImportError, ValueError, AttributeError) as error:
        raise UsageError(f"cannot find module {name}: {error}") from error
    except SyntaxError as error:
        raise UsageError(f"module {name} is not Python: {error}") from error
    finally:
        sys.path.remove(here)
    if spec is None or code is None or spec.origin is None:
        raise UsageError(f"there is no module {name} that can be run; is it installed, or below this directory?")
    return Target(code=code, file=spec.origin, argv0=spec.origin, path0=here, spec=spec, title=name.rpartition(".")[2])


def run(target: Target, arguments: Sequence[str]) -> None:
    """Execute ``target`` as ``__main__``; whatever it raises comes out.

    ``sys.argv``, ``sys.path`` and ``sys.modules['__main__']`` stay the script's afterwards: its
    exit handlers and threads may still look at them.
    """
    main = ModuleType("__main__")
    main.__file__ = target.file
    main.__spec__ = target.spec
    main.__package__ = target.spec.parent if target.spec is not None else None
    main.__loader__ = (
        target.spec.loader if target.spec is not None else importlib.machinery.SourceFileLoader("__main__", target.file)
    )
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv[:] = [target.argv0, *arguments]
    sys.path[: not sys.flags.safe_path] = [target.path0]
    _execute(target.code, main)


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code, main.__dict__)


def own_traceback(error: BaseException) -> TracebackType | None:
    """``error``'s traceback as it would be without ampmem, which also leaves its causes so."""
    for linked in (error.__cause__, error.__context__):
        if linked is not None:
            linked.__traceback__ = own_traceback(linked)
    entries = []
    trace = error.__traceback__
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    started = [i for i, entry in enumerate(entries) if entry.tb_frame.f_code is _execute.__code__]
    kept = _without_ours(entries[started[0] + 1 :] if started else entries)
    rebuilt: TracebackType | None = None
    for entry in reversed(kept):
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt


def _without_ours(entries: list[TracebackType]) -> list[TracebackType]:
    """Leave out the recorder's frames, and the frame of torch's op caller that they go through."""
    kept: list[TracebackType] = []
    after_ours = False
    for entry in entries:
        file = entry.tb_frame.f_code.co_filename
        ours = file.startswith(OWN_FOLDERS)
        if not ours and not (after_ours and file.endswith(_OP_CALLER)):
            kept.append(entry)
        after_ours = ours
    return kept


def stops_in(error: BaseException | None) -> int:
    """How many of our stops are in ``error``: it is one, or came up while the script was unwinding from one."""
    seen: set[int] = set()
    stops = 0
    while error is not None and id(error) not in seen:
        stops += isinstance(error, StopScript)
        seen.add(id(error))
        error = error.__context__
    return stops
