"""Budgets in ``pyproject.toml``: ``[tool.ampmem.budgets]``, and a table in it for each script that has its own."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ampmem.analysis.budgets.budget import KEYS, MODULES, Budget, budget_of, nearest
from ampmem.errors import UsageError

NAME = "pyproject.toml"
TABLE = "tool.ampmem.budgets"

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


def merged(*several: tuple[Budget, ...]) -> tuple[Budget, ...]:
    """All of them; of those with the same key the last wins."""
    return tuple({budget.key: budget for budgets in several for budget in budgets}.values())


def find_budgets(folder: Path) -> BudgetFile | None:
    """The budgets of the nearest ``pyproject.toml`` with a table of ampmem's, from ``folder`` upwards.

    Raises :class:`UsageError` for a file that is no TOML, or in which there is something else than budgets.
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
        raise UsageError(f"{path} is no TOML: {error}") from error


def _table(of: _Toml, key: str, path: Path) -> _Toml:
    found = of.get(key, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {key} is no table")
    return found


def _budget_file(path: Path, ampmem: object) -> BudgetFile:
    if not isinstance(ampmem, dict):
        raise UsageError(f"{path}: tool.ampmem is no table")
    for key in ampmem:
        if key != "budgets":
            raise UsageError(f"{path}: there is no tool.ampmem.{key}{nearest(key, ['budgets'])}; there is {TABLE}")
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
                raise UsageError(f'{key}: {limit!r} is no size; write bytes as "24GiB"')
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
    if script.startswith("-m "):
        return name.removeprefix("-m ").strip() == script.removeprefix("-m ").strip()
    wanted, there = PurePosixPath(name).parts, PurePosixPath(script).parts
    return bool(wanted) and there[-len(wanted) :] == wanted


def _quoted(key: str) -> str:
    return f'"{key}"'
