"""Budgets: the keys, how limits are written, and the table ``[tool.ampmem.budgets]`` of a pyproject.toml."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ampmem.analysis.jsonable import Name
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.errors import UsageError
from ampmem.names import nearest
from ampmem.units import MOST_BYTES, parse_bytes

PEAK, ALLOCATED, RESERVED, DEVICE = "peak", "allocated", "reserved", "device"
COPIES, GROWTH, MODULES = "precision_copies", "growth", "modules"

KEYS: tuple[str, ...] = (PEAK, ALLOCATED, RESERVED, DEVICE, *map(str, CATEGORIES), COPIES, GROWTH)
"""The keys of a whole run; :data:`OF_MODULE` has those of a module."""

OF_MODULE: tuple[str, ...] = tuple(item.name for item in fields(ModuleMemory) if item.name != "name")
"""The keys of a module: ``modules.encoder.activations``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit in bytes for the memory that ``key`` names; for ``growth`` in bytes per step."""

    key: Name
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The allowed increase over the baseline: a fraction of it, or a number of bytes.

    A fraction of a small or absent category allows nothing, so each category may also grow by :data:`FLOOR` of the same
    fraction of the baseline's peak.
    """

    fraction: Fraction = Fraction(0)
    bytes: int = 0
    text: str = ""

    def limit(self, before: int, peak: int) -> int:
        """The most bytes allowed where the baseline has ``before`` bytes; ``peak`` is the baseline's peak in bytes."""
        return before + self.bytes + int(max(before * self.fraction, peak * self.fraction * FLOOR))


FLOOR = Fraction(1, 10)
"""The share of the peak's allowance that every category may grow by."""


NONE_ALLOWED = Allowance()
_LONGEST = 50
"""Maximum characters of an allowance."""


def budget_of(key: str, limit: str | int) -> Budget:
    """The budget for ``key``; ``limit`` is in bytes or a text such as ``20GiB``.

    Raises :class:`UsageError` for an unknown key, naming the nearest one, and for a limit that is not a size.
    """
    key = key.strip()
    check_key(key)
    if isinstance(limit, int) and limit > MOST_BYTES:  # Python does not even print some of these
        raise UsageError(f"{key}: the limit is larger than any memory; write bytes as 24GiB, 512MiB or 1073741824")
    if isinstance(limit, bool) or not isinstance(limit, str | int) or (isinstance(limit, int) and limit < 0):
        raise UsageError(f"{key}: {limit!r:.60} is not a size; write bytes as 24GiB, 512MiB or 1073741824")
    try:
        return Budget(key=key, limit=limit if isinstance(limit, int) else parse_bytes(limit))
    except ValueError as error:
        raise UsageError(f"{key}: {error}") from None


def parse_budget(text: str) -> Budget:
    """The budget in a text such as ``peak=20GiB``. Raises :class:`UsageError` as :func:`budget_of` does."""
    key, equals, limit = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r:.60} is not a budget; write KEY=SIZE, such as peak=20GiB")
    return budget_of(key, limit)


def budgets_of(limits: Mapping[str, str | int]) -> tuple[Budget, ...]:
    """The budgets of a mapping from keys to limits.

    Raises :class:`UsageError` as :func:`budget_of` does, and for anything but a mapping.
    """
    if not isinstance(limits, Mapping):
        raise UsageError(f"budgets must be a mapping from keys to limits, such as {{'peak': '20GiB'}}, not {limits!r}")
    return tuple(budget_of(key, limit) for key, limit in limits.items())


def parse_allowance(text: str | int, option: str = "--allow") -> Allowance:
    """The allowance in a text such as ``1%`` or ``10MiB``, or in bytes; ``option`` is its name in messages.

    Raises :class:`UsageError` for anything else, such as ``0.01``.
    """
    given = str(text).strip()
    try:
        if len(given) > _LONGEST or "e" in given.lower().removesuffix("b"):
            raise ValueError(given)  # with an exponent a short text can be a number of millions of digits
        if given.isdecimal() and not isinstance(text, bool):
            return Allowance(bytes=parse_bytes(f"{given}B"), text=f"{given} B")
        if given[-1:].isalpha():  # 0.01 might be meant as a share
            return Allowance(bytes=parse_bytes(given), text=given)
        if not given.endswith("%"):
            raise ValueError(given)
        fraction = Fraction(given[:-1].strip()) / 100
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{option}: {given!r:.60} is neither a share, such as 1%, nor a size, such as 10MiB") from None
    if fraction < 0:
        raise UsageError(f"{option}: {given} is negative; give 0 or more (a smaller peak never fails)")
    return Allowance(fraction=fraction, text=given)


def check_key(key: str) -> None:
    """Raise :class:`UsageError` for an unknown key."""
    if key in KEYS:
        return
    found = module_in(key)
    first, _, name = key.partition(".")
    if first == MODULES and name and "." not in name:
        raise UsageError(f"{key}: say what to limit in the module, such as {key}.activations")
    if found is None:
        raise UsageError(
            f"unknown budget {key!r:.100}{nearest(key.lower(), (*KEYS, f'{MODULES}.')) or '.'}"
            f" There are {', '.join(KEYS)} and {MODULES}.NAME.KEY"
        )
    if found[1] not in OF_MODULE:
        meant, known = nearest(found[1], OF_MODULE) or ".", ", ".join(OF_MODULE)
        raise UsageError(f"{key}: a module does not have a budget {found[1]!r}{meant} There are {known}")


def module_in(key: str) -> tuple[str, str] | None:
    """The module's name and the key in a key such as ``modules.encoder.activations``; ``None`` for the whole run."""
    first, _, rest = key.partition(".")
    name, dot, what = rest.rpartition(".")
    return (name, what) if first == MODULES and dot and name and what else None


# Budgets in ``pyproject.toml``: ``[tool.ampmem.budgets]``, with a table inside for each script that has its own.

NAME = "pyproject.toml"
TABLE = "tool.ampmem.budgets"

_MODULE = "-m "
_MOST_FILES = 50_000
"""Folders with more files are not searched for scripts, which would take seconds."""
_NOT_OF_THE_PROJECT = {"node_modules", "__pycache__", "site-packages"}

_Toml: TypeAlias = "Mapping[str, object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFile:
    """The budgets in the file ``path``: ``budgets`` of all scripts, and ``scripts`` of single scripts by name."""

    path: Path
    budgets: tuple[Budget, ...]
    scripts: Mapping[str, tuple[Budget, ...]]

    def budgets_of_script(self, script: str | None) -> tuple[Budget, ...]:
        """The budgets of ``script`` (``train.py`` or ``-m package.train``); its own ones override the common ones.

        Where two names fit, such as ``train.py`` and ``small/train.py``, the longer one counts.
        """
        fitting = [name for name in self.scripts if script is not None and _is_name_of(name, script)]
        own = self.scripts[max(fitting, key=len)] if fitting else ()
        return merged(self.budgets, own)

    def misnamed_tables(self, script: str | None) -> Iterator[str]:
        """A message for each table that names neither ``script`` nor any script or module of the project.

        The project is the folder of :attr:`path` with all below it.
        """
        others = [name for name in self.scripts if script is None or not _is_name_of(name, script)]
        if not others:
            return
        there = _files(self.path.parent)
        for name in others:
            if there is None or not _is_there(name, self.path.parent, there):
                meant = _meant(name, _names_like(name, [] if there is None else there, script))
                if meant or there is not None:
                    yield f"[{TABLE}.{_quoted(name)}] in {self.path} does not name a script or a module{meant}"


def merged(*several: tuple[Budget, ...]) -> tuple[Budget, ...]:
    """All budgets of ``several``; of budgets with the same key the last one counts."""
    return tuple({budget.key: budget for budgets in several for budget in budgets}.values())


def find_budgets(folder: Path) -> BudgetFile | None:
    """The budgets of the nearest ``pyproject.toml`` with a table of ampmem's, from ``folder`` upwards.

    Raises :class:`UsageError` for a file that is not TOML, or that has something else than budgets in the table.
    """
    for place in (folder, *folder.parents):
        path = place / NAME
        if path.is_file():
            table = _table(_read(path), "tool", path).get("ampmem")
            if table is not None:
                return _budget_file(path, table)
    return None


def _read(path: Path) -> _Toml:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a number may have more digits than Python reads
        raise UsageError(f"{path} is not a TOML file: {error}") from error


def _table(of: _Toml, key: str, path: Path) -> _Toml:
    found = of.get(key, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {key} is not a table")
    return found


def _budget_file(path: Path, ampmem: object) -> BudgetFile:
    if not isinstance(ampmem, dict):
        raise UsageError(f"{path}: tool.ampmem is not a table")
    for key in (key for key in ampmem if key != "budgets"):
        meant = nearest(key, ["budgets"])
        raise UsageError(f"{path}: unknown table tool.ampmem.{key}{meant}; the only table is {TABLE}")
    general: list[Budget] = []
    scripts: dict[str, tuple[Budget, ...]] = {}
    for key, value in _table(ampmem, "budgets", path).items():
        if isinstance(value, dict) and key != MODULES:
            # A table that is not named like a script may be a misspelled key.
            if not key.strip() or (nearest(key, KEYS) and not key.endswith(".py")):
                raise UsageError(f"{path}: [{TABLE}.{_quoted(key)}] would be the table of a script{nearest(key, KEYS)}")
            scripts[key] = tuple(_budgets(path, f"{TABLE}.{_quoted(key)}", value))
        else:
            general += _budgets(path, TABLE, {key: value})
    return BudgetFile(path=path, budgets=tuple(general), scripts=scripts)


def _budgets(path: Path, table: str, limits: _Toml) -> Iterator[Budget]:
    for key, limit in _flat(limits):
        try:
            if not isinstance(limit, str | int):
                raise UsageError(f'{key}: {limit!r:.60} is not a size; write bytes as "24GiB"')
            yield budget_of(key, limit)
        except UsageError as error:
            raise UsageError(f"{path}: [{table}] {error}") from None


def _flat(limits: _Toml) -> Iterator[tuple[str, object]]:
    """The keys of nested TOML tables, such as ``modules.encoder.activations``, with their limits."""
    left = [*limits.items()][::-1]
    while left:  # without recursion: the tables may be nested deeper than Python's stack
        key, value = left.pop()
        if isinstance(value, dict) and value:
            left += [(f"{key}.{name}", each) for name, each in reversed(value.items())]
        else:
            yield key, value


def _is_name_of(name: str, script: str) -> bool:
    """Whether ``name`` is ``script`` or the end of its path; a module's name fits with and without ``-m``."""
    if script.startswith(_MODULE):
        return name.removeprefix(_MODULE).strip() == script.removeprefix(_MODULE).strip()
    return _is_end_of(PurePosixPath(name).parts, PurePosixPath(script).parts)


def _is_end_of(wanted: tuple[str, ...], there: tuple[str, ...]) -> bool:
    return bool(wanted) and there[-len(wanted) :] == wanted


def _files(folder: Path) -> list[tuple[str, ...]] | None:
    """The files below ``folder``, each as the parts of its path; ``None`` if there are too many.

    Hidden folders, Python environments and npm's folders are left out.
    """
    found: list[tuple[str, ...]] = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if here != folder and "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_OF_THE_PROJECT]
        found += [(*here.relative_to(folder).parts, name) for name in files]
        if len(found) > _MOST_FILES:
            return None
    return found


def _is_there(name: str, folder: Path, files: Iterable[tuple[str, ...]]) -> bool:
    """Whether a script or module ``name`` exists below ``folder``, or can be imported from elsewhere."""
    if not name.startswith(_MODULE):
        wanted = PurePosixPath(name).parts
        # ``exists`` follows links, which the list of files does not
        if any(_is_end_of(wanted, file) for file in files) or (folder / name).exists():
            return True
        if name.endswith(".py"):
            return False
    parts = tuple(name.removeprefix(_MODULE).strip().split("."))
    if not all(part.isidentifier() for part in parts):
        return False
    ends = (*parts[:-1], f"{parts[-1]}.py"), (*parts, "__main__.py")
    if any(_is_end_of(end, file) for end in ends for file in files):
        return True
    is_ours = any(parts[0] in file[:-1] or file[-1] == f"{parts[0]}.py" for file in files)
    return not is_ours and (parts[0] in sys.modules or find_spec(parts[0]) is not None)


def _meant(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'train.py'?``; the common ending ``.py`` does not make names alike."""
    stem, *stems = (each.removeprefix(_MODULE).removesuffix(".py") for each in (name, *names))
    by_stem = dict(zip(stems, names, strict=True))
    near = get_close_matches(stem, list(by_stem), n=1)
    return f"; did you mean {by_stem[near[0]]!r}?" if near else ""


def _names_like(name: str, files: Iterable[tuple[str, ...]], script: str | None) -> list[str]:
    """Candidates for ``name``: the ends of paths with as many parts, or modules with as many dots."""
    paths = [file for file in files if file[-1].endswith(".py")]
    if script is not None and not script.startswith(_MODULE):
        paths.append(PurePosixPath(script).parts)
    prefix = _MODULE if name.startswith(_MODULE) else ""
    module = name.removeprefix(_MODULE).strip()
    if not prefix and ("/" in name or name.endswith(".py") or "." not in name):
        count = len(PurePosixPath(name).parts)
        return sorted({"/".join(path[-count:]) for path in paths if len(path) >= count})
    count = module.count(".") + 1
    dotted = [(*path[:-1], path[-1].removesuffix(".py")) for path in paths if path[-1] != "__main__.py"]
    dotted += [path[:-1] for path in paths if path[-1] == "__main__.py"]
    said = [] if script is None or not script.startswith(_MODULE) else [script.removeprefix(_MODULE).strip()]
    return [f"{prefix}{each}" for each in sorted({*said, *(".".join(p[-count:]) for p in dotted if len(p) >= count)})]


def _quoted(key: str) -> str:
    return f'"{key}"'
