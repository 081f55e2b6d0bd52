"""The page's ES modules as one classic script.

A page that allows scripts by their hash cannot import modules, so they are put one after the other inside one
function. That is right for modules of a simple form, and every other form is refused:

* imports are ``import { a, b } from "./x.js";``, each on one line, without renaming, and of names that are exported;
  other folders are ``"./data/x.js"`` and ``"../data/x.js"``, and nothing is above the folder of the entry;
* exports are the word ``export`` before a declaration;
* names at the top level differ over all modules, and imports make no cycle.

Comments on lines of their own are left out: they are a fourth of the modules, and the page has no use for them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PATH = r"(?:\./|(?:\.\./)+)(?:[\w-]+/)*[\w.-]+\.js"
_IMPORT = re.compile(rf'import \{{ ([\w$]+(?:, [\w$]+)*,?) \}} from "({_PATH})";(?: *//.*)?')
_DECLARATION = re.compile(r"(?P<export>export )?(?:async )?(?:function\*?|class|const|let|var) (?P<name>[\w$]+)")
_MODULE_WORD = re.compile(r"\s*(?:import|export)\b")
_COMMENT = re.compile(r"^[ \t]*(?:/\*\*(?:(?!\*/).)*\*/|//[^\n]*)[ \t]*\n", re.DOTALL | re.MULTILINE)
"""A comment on lines of its own."""
_NEVER = re.compile(r"</script|<!--|\bimport\s*\(|\bimport\.meta\b", re.IGNORECASE)


class BundleError(Exception):
    """A module has a form that cannot be put into one script: a fault of ampmem's, not of its user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """One file: ``name`` is its path from the entry's folder, ``names`` are those at its top level, ``exports`` some.

    ``imports`` are names of modules, each with what is taken from it.
    """

    name: str
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    names: tuple[str, ...]
    exports: frozenset[str]
    body: str


def bundle(entry: Path) -> str:
    """``entry`` and all that it imports, each module after those that it imports itself."""
    modules: dict[str, _Module] = {}
    _collect(entry.parent, entry.name, modules, ())
    _check(modules.values())
    bodies = "\n".join(f"// {module.name}\n{module.body}" for module in modules.values())
    return f'(async () => {{\n"use strict";\n{bodies}\n}})();\n'


def _collect(folder: Path, name: str, modules: dict[str, _Module], above: tuple[str, ...]) -> None:
    if name in above:
        raise BundleError(f"{' -> '.join((*above, name))}: these modules import each other in a cycle")
    if name in modules:
        return
    if not (folder / name).is_file():
        raise BundleError(f"{' -> '.join((*above, name))}: no such module")
    module = _parse(folder, name)
    for imported, _ in module.imports:
        _collect(folder, imported, modules, (*above, name))
    modules[name] = module


def _resolved(name: str, path: str) -> str:
    """The name of the module that ``name`` imports by ``path``."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if found.startswith("../"):
        raise BundleError(f"{name}: {path} is outside of the folder of the modules")
    return found


def _parse(folder: Path, name: str) -> _Module:
    text = (folder / name).read_text(encoding="utf-8")
    never = _NEVER.search(text)
    if never:
        raise BundleError(f"{name}: {never[0]!r} cannot stand in the page's script")
    imports, lines = [], []
    names: list[str] = []
    exports: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        found, declared = _IMPORT.fullmatch(line), _DECLARATION.match(line)
        if found:
            imports.append((_resolved(name, found[2]), tuple(found[1].rstrip(",").split(", "))))
            continue
        if declared:
            names.append(declared["name"])
            if declared["export"]:
                exports.add(declared["name"])
                line = line.removeprefix("export ")
        elif _MODULE_WORD.match(line):
            raise BundleError(f"{name}:{number}: this form of import or export is not supported: {line.strip()}")
        lines.append(line)
    return _Module(
        name=name,
        imports=tuple(imports),
        names=tuple(names),
        exports=frozenset(exports),
        body=_COMMENT.sub("", "\n".join(lines)),
    )


def _check(modules: Iterable[_Module]) -> None:
    by_name = {module.name: module for module in modules}
    owner: dict[str, str] = {}
    for module in by_name.values():
        for name in module.names:
            if name in owner:
                raise BundleError(f"{module.name}: the name {name} is in {owner[name]} already")
            owner[name] = module.name
        for imported, wanted in module.imports:
            missing = [name for name in wanted if name not in by_name[imported].exports]
            if missing:
                raise BundleError(f"{module.name}: {imported} does not export {', '.join(missing)}")
