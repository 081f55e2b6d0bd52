"""Runs a script or module as ``__main__``, as Python itself does."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import os
import pkgutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

from ampmem.errors import UsageError
from ampmem.own_code import OP_CALLER, OWN_FOLDERS, RUNNER, RUNNER_LINE, is_torch

STDIN = "-"
"""The argument for standard input, as of Python itself."""
_STDIN_FILE = "<stdin>"
_WHAT = ("-c", "-m")
"""Options of Python after which the code or the module to run follows."""

# The script's exception classes may override these names.
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_CAUSE: Any = vars(BaseException)["__cause__"]
_CONTEXT: Any = vars(BaseException)["__context__"]


class StopScript(BaseException):
    """Raised inside the script, at a step's end, to stop it once the recording is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A script or module, compiled but not started. ``argv0`` and ``path0`` are the values that Python would set."""

    code: CodeType
    file: str
    argv0: str
    path0: str
    spec: ModuleSpec | None
    title: str

    @property
    def sha256(self) -> str:
        """The SHA-256 digest of the script's file; empty if there is no file, as for standard input."""
        file = Path(self.file)
        return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    @property
    def calls_below(self) -> int:
        """Depth of Python's stack below the script: ``runpy`` runs a module, and older versions call that from C."""
        if self.spec is None:
            return 0
        return 3 if sys.version_info < (3, 12) else 2


def find_script(name: str) -> Target:
    """The script at path ``name``: a file, ``-`` for standard input, a folder or a zip file with a ``__main__.py``.

    Raises :class:`UsageError` if it is none of these.
    """
    if name == STDIN:
        text = standard_input()
        return Target(
            code=_compiled(text, "standard input", _STDIN_FILE),
            file=_STDIN_FILE,
            argv0=name,
            path0="",
            spec=None,
            title="stdin",
        )
    path = Path(name)
    if not path.exists():
        raise UsageError(f"script not found: {name}")
    file = name if path.is_absolute() else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  # as it is named
    if path.is_dir() or zipfile.is_zipfile(path):
        return _find_application(name, path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    code = _compiled(text, name, file)
    return Target(code=code, file=file, argv0=name, path0=str(path.resolve().parent), spec=None, title=path.stem)


@functools.cache
def standard_input() -> bytes:
    """The whole of standard input, which can be read only once."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, so no script can be read from it")
    return sys.stdin.buffer.read()


def _compiled(text: bytes, name: str, file: str) -> CodeType:
    try:
        return compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} is not a Python script: {error}") from error


def _find_application(name: str, path: Path) -> Target:
    """The ``__main__.py`` in the folder or zip file at ``path``, which Python runs as a module."""
    place = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  # as Python makes it
    kind = "directory" if path.is_dir() else "zip file"
    try:
        finder = pkgutil.get_importer(place)
        spec = None if finder is None else finder.find_spec("__main__")
        code = None if spec is None or spec.loader is None else spec.loader.get_code("__main__")  # type: ignore[attr-defined]
    except (ImportError, SyntaxError, ValueError) as error:
        raise UsageError(f"the __main__.py of {name} is not a Python script: {error}") from error
    if spec is None or code is None or spec.origin is None:
        raise UsageError(f"{name} is a {kind} without a __main__.py; name the script in it, or use -m for a package")
    return Target(code=code, file=spec.origin, argv0=name, path0=place, spec=spec, title=path.resolve().stem)


def find_module(name: str, arguments: Sequence[str] = ()) -> Target:
    """The module ``name``, as ``python -m`` finds it; for a package its ``__main__``.

    Its parent packages are imported for that, with ``arguments`` in ``sys.argv`` as under ``python -m``.
    """
    here, argv = str(Path.cwd()), list(sys.argv)
    sys.path.insert(0, here)
    sys.argv[:] = ["-m", *arguments]
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
        sys.argv[:] = argv
        sys.path.remove(here)
    if spec is None or code is None or spec.origin is None:
        raise UsageError(f"module {name} cannot be run: it is neither installed nor below this directory")
    return Target(code=code, file=spec.origin, argv0=spec.origin, path0=here, spec=spec, title=name.rpartition(".")[2])


def prepare(target: Target, arguments: Sequence[str]) -> ModuleType:
    """Set all that Python sets before it runs ``target``; returns the module that is to be its ``__main__``.

    ``sys.argv``, ``sys.path`` and ``sys.modules['__main__']`` stay the script's afterwards: its exit handlers and
    threads may still use them.
    """
    main = _new_main(target)
    sys.modules["__main__"] = main
    module = "__main__" if target.spec is None else target.spec.name
    what = [target.argv0] if module == "__main__" else ["-m", module.removesuffix(".__main__")]
    sys.orig_argv[:] = [*_interpreter(sys.orig_argv), *what, *arguments]
    sys.argv[:] = [target.argv0, *arguments]
    sys.path[: not sys.flags.safe_path] = [target.path0]
    return main


def _new_main(target: Target) -> ModuleType:
    """A new ``__main__`` whose attributes are in the order in which Python makes them."""
    main = ModuleType("__main__")
    spec = target.spec
    main.__package__ = None if spec is None else spec.parent
    if spec is not None:
        main.__loader__ = spec.loader
    else:
        typed = target.file == _STDIN_FILE
        main.__loader__ = BuiltinImporter if typed else SourceFileLoader("__main__", target.file)
    main.__spec__ = spec
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    main.__file__ = target.file
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None if spec is None else spec.cached
    return main


def _interpreter(command: Sequence[str]) -> list[str]:
    """The start of ``command``, which started Python: the executable and Python's own options."""
    options = 1
    while options < len(command) and command[options].startswith("-") and not command[options].startswith(_WHAT):
        options += 2 if command[options] in ("-W", "-X") else 1
    return list(command[:options])


def _runner() -> Callable[[CodeType, ModuleType], None]:
    """A function that executes the script from a frame like Python's own.

    A warning about the script's caller names that frame's file.
    """
    run = lambda code, main: exec(code, main.__dict__)  # noqa: E731
    code = run.__code__.replace(
        co_filename=RUNNER, co_firstlineno=RUNNER_LINE, co_name="<module>", co_qualname="<module>"
    )
    return FunctionType(code, {"__name__": "sys", "__builtins__": builtins})


execute = _runner()
"""Runs a target's code in its ``__main__``; errors propagate."""


def own_traceback(error: BaseException) -> TracebackType | None:
    """``error``'s traceback without ampmem's frames; removes them from all linked errors, too."""
    seen: dict[int, BaseException] = {}
    pending = [error]
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            pending += _linked(each)
            _TRACEBACK.__set__(each, _own(_TRACEBACK.__get__(each)))
    own: TracebackType | None = _TRACEBACK.__get__(error)
    return own


def script_alone(error: BaseException) -> TracebackType | None:
    """``error``, which stopped the simulation, without its context and without torch's frames."""
    error.__cause__ = error.__context__ = None
    entries = _entries(own_traceback(error))
    _TRACEBACK.__set__(error, _linked_up([each for each in entries if not is_torch(each.tb_frame.f_code.co_filename)]))
    return error.__traceback__


def cause_of(error: BaseException) -> BaseException | None:
    """The error that ``error`` was raised from."""
    cause: BaseException | None = _CAUSE.__get__(error)
    return cause


def _linked(error: BaseException) -> list[BaseException]:
    """The errors linked to ``error``: its cause, its context, and the members of a group."""
    linked = [_CAUSE.__get__(error), _CONTEXT.__get__(error)]
    if isinstance(error, BaseExceptionGroup):
        linked += BaseExceptionGroup.exceptions.__get__(error)
    return [each for each in linked if each is not None]


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _own(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without ampmem's frames."""
    entries = list(_entries(trace))
    started = [i for i, entry in enumerate(entries) if entry.tb_frame.f_code is execute.__code__]
    return _linked_up(_without_ours(entries[started[-1] + 1 :] if started else entries))


def _linked_up(entries: Sequence[TracebackType]) -> TracebackType | None:
    rebuilt: TracebackType | None = None
    for entry in reversed(entries):
        # A signal may come at an instruction that belongs to no line; Python has no line number then.
        line: int | None = entry.tb_lineno
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, -1 if line is None else line)
    return rebuilt


def _without_ours(entries: list[TracebackType]) -> list[TracebackType]:
    """``entries`` without the recorder's frames, and without the frame of torch's op call that leads to them."""
    kept: list[TracebackType] = []
    after_ours = False
    for entry in entries:
        file = entry.tb_frame.f_code.co_filename
        ours = file.startswith(OWN_FOLDERS)
        if not ours and not (after_ours and file.endswith(OP_CALLER)):
            kept.append(entry)
        after_ours = ours
    return kept


def stops_in(error: BaseException | None) -> int:
    """Number of :class:`StopScript` in ``error``: itself, and those raised while the script was unwinding."""
    seen: set[int] = set()
    stops = 0
    while error is not None and id(error) not in seen:
        stops += isinstance(error, StopScript)
        seen.add(id(error))
        error = _CONTEXT.__get__(error)
    return stops


def texts_in(code: CodeType) -> Iterator[str]:
    """The names and the texts in ``code``, and in the functions and classes in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from texts_in(constant)
        elif isinstance(constant, str):
            yield constant
