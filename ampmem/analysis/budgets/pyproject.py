"""Budgets in ``pyproject.toml``: ``[tool.ampmem.budgets]``, and a table in it for each script that has its own."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ampmem.analysis.budgets.budget import KEYS, MODULES, Budget, budget_of, nearest
from ampmem.errors import UsageError

NAME = "pyproject.toml"
TABLE = "tool.ampmem.budgets"

_MODULE = "-m "
_MOST_FILES = 50_000
"""A folder with more files is not searched for scripts: that would take seconds."""
_NOT_OF_THE_PROJECT = {"node_modules", "__pycache__", "site-packages"}

_Toml: TypeAlias = "Mapping[str, object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFile:
    """The budgets of ``path``: those of every script, and those of some, by the names that it gives them."""

    path: Path
    budgets: tuple[Budget, ...]
    scripts: Mapping[str, tuple[Budget, ...]]

    def of(self, script: str | None) -> tuple[Budget, ...]:
        """The budgets of ``script``, as ``train.py`` or ``-m package.train``; where it has its own, these win.

        Of names that both fit, such as ``train.py`` and ``small/train.py``, the longer one is meant.
        """
        fitting = [name for name in self.scripts if script is not None and _is_name_of(name, script)]
        own = self.scripts[max(fitting, key=len)] if fitting else ()
        return merged(self.budgets, own)

    def of_no_script(self, script: str | None) -> Iterator[str]:
        """What is wrong with each table that is neither of ``script`` nor of any other script or module of the project.

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
                    yield f"[{TABLE}.{_quoted(name)}] of {self.path} is of no script and of no module{meant}"


def merged(*several: tuple[Budget, ...]) -> tuple[Budget, ...]:
    """All of them; of those with the same key the last wins."""
    return tuple({budget.key: budget for budgets in several for budget in budgets}.values())


def find_budgets(folder: Path) -> BudgetFile | None:
    """The budgets of the nearest ``pyproject.toml`` with a table of ampmem's, from ``folder`` upwards.

    Raises :class:`UsageError` for a file that is not TOML, or in which there is something else than budgets.
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
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from error


def _table(of: _Toml, key: str, path: Path) -> _Toml:
    found = of.get(key, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {key} is not a table")
    return found


def _budget_file(path: Path, ampmem: object) -> BudgetFile:
    if not isinstance(ampmem, dict):
        raise UsageError(f"{path}: tool.ampmem is not a table")
    for key in ampmem:
        if key != "budgets":
            raise UsageError(f"{path}: unknown table tool.ampmem.{key}{nearest(key, ['budgets'])}; there is {TABLE}")
    general: list[Budget] = []
    scripts: dict[str, tuple[Budget, ...]] = {}
    for key, value in _table(ampmem, "budgets", path).items():
        if isinstance(value, dict) and key != MODULES:
            _require_script(path, key)
            scripts[key] = tuple(_budgets(path, f"{TABLE}.{_quoted(key)}", value))
        else:
            general += _budgets(path, TABLE, {key: value})
    return BudgetFile(path=path, budgets=tuple(general), scripts=scripts)


def _budgets(path: Path, table: str, limits: _Toml) -> Iterator[Budget]:
    for key, limit in _flat(limits):
        try:
            if not isinstance(limit, str | int):
                raise UsageError(f'{key}: {limit!r} is not a size; write bytes as "24GiB"')
            yield budget_of(key, limit)
        except UsageError as error:
            raise UsageError(f"{path}: [{table}] {error}") from None


def _flat(limits: _Toml, before: str = "") -> Iterator[tuple[str, object]]:
    """``modules.encoder.activations``, which are tables in TOML, as the keys that they are."""
    for key, value in limits.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _require_script(path: Path, key: str) -> None:
    """A table is of a script; what is not called like one may be a key that is misspelled."""
    if not key.strip() or (nearest(key, KEYS) and not key.endswith(".py")):
        raise UsageError(f"{path}: [{TABLE}.{_quoted(key)}] is a table of a script{nearest(key, KEYS)}")


def _is_name_of(name: str, script: str) -> bool:
    """Whether ``name`` is that of ``script``, or the end of its path; a module is so with and without its ``-m``."""
    if script.startswith(_MODULE):
        return name.removeprefix(_MODULE).strip() == script.removeprefix(_MODULE).strip()
    return _is_end_of(PurePosixPath(name).parts, PurePosixPath(script).parts)


def _is_end_of(wanted: tuple[str, ...], there: tuple[str, ...]) -> bool:
    return bool(wanted) and there[-len(wanted) :] == wanted


def _files(folder: Path) -> list[tuple[str, ...]] | None:
    """The files below ``folder`` by the parts of their paths; ``None`` where there are too many.

    Folders that are not the project's own are left out: hidden ones, environments of Python and what npm installs.
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
    """Whether a script or a module called ``name`` is below ``folder``, or a module elsewhere that can be imported."""
    if not name.startswith(_MODULE):
        wanted = PurePosixPath(name).parts
        if any(_is_end_of(wanted, file) for file in files) or (folder / name).exists():  # where a link leads
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
    """``; did you mean 'train.py'?``; that both end with ``.py`` makes names no more alike."""
    by_stem = {_stem(each): each for each in names}
    near = get_close_matches(_stem(name), list(by_stem), n=1)
    return f"; did you mean {by_stem[near[0]]!r}?" if near else ""


def _stem(name: str) -> str:
    return name.removeprefix(_MODULE).removesuffix(".py")


def _names_like(name: str, files: Iterable[tuple[str, ...]], script: str | None) -> list[str]:
    """What could be meant by ``name``: the ends of paths that are as long, or modules with as many dots."""
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
