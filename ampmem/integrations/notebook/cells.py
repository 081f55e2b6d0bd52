"""The code of cells: its magics and names, the earlier cells that it needs, and how it runs as a script.

This module is separate from the recording of cells, as the child process that runs the script imports it.
"""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ampmem import output
from ampmem.errors import UsageError

_OF_CELLS = frozenset({"time", "capture", "prun", "timeit"})
"""Cell magics that run the code below them unchanged."""
_HARMLESS = frozenset({"ampmem", "autoreload", "conda", "config", "load_ext", "matplotlib", "pip", "reload_ext"})
"""Magics that bind no name and change no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A cell's ``code`` without its magics; every statement stays on its line.

    ``left_out`` are the removed magics, whose effect is unknown.
    """

    code: str
    left_out: tuple[str, ...]


def without_magics(code: str) -> Plain:
    """``code`` without statements that are only a magic or a shell command. Raises ``SyntaxError``."""
    source = code.encode()
    left_out: list[str] = []
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in reversed(ast.parse(code).body):
        found = _magic(statement)
        if found is None:
            continue
        kind, name, body = found
        if kind == "run_cell_magic" and name in _OF_CELLS and (plain := _parsed(body)) is not None:
            left_out += plain.left_out
            instead = b"\n" + plain.code.encode()  # the code's first line is the line below the magic
        else:
            left_out += [] if name in _HARMLESS else [_word(kind, name)]
            instead = b"pass" + b"\n" * ((statement.end_lineno or statement.lineno) - statement.lineno)
        begin = starts[statement.lineno - 1] + statement.col_offset
        end = starts[(statement.end_lineno or statement.lineno) - 1] + (statement.end_col_offset or 0)
        source = source[:begin] + instead + source[end:]
    return Plain(code=source.decode(), left_out=tuple(dict.fromkeys(reversed(left_out))))


def _parsed(body: str) -> Plain | None:
    try:
        return without_magics(body)
    except SyntaxError:  # the code has magics itself
        return None


def _magic(statement: ast.stmt) -> tuple[str, str, str] | None:
    """For a statement that is a magic: the shell's method, its first argument and its last; else ``None``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) else None
    owner = method.value if isinstance(method, ast.Attribute) else None
    if not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "get_ipython"):
        return None
    assert isinstance(call, ast.Call)
    assert isinstance(method, ast.Attribute)
    texts = [str(each.value) if isinstance(each, ast.Constant) else "" for each in call.args] or [""]
    return method.attr, texts[0], texts[-1]


def _word(kind: str, name: str) -> str:
    """The magic nearly as it was written: ``%cd``, ``%%bash``, ``!pip``."""
    return {"run_line_magic": f"%{name}", "run_cell_magic": f"%%{name}"}.get(kind, f"!{name.partition(' ')[0]}")


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HIDDEN = frozenset({"exec", "globals", "locals", "vars", "__main__"})
"""Names whose use may bind any other name."""
_LOOKS_ONLY = frozenset(
    {"bool", "dir", "display", "enumerate", "float", "getattr", "hasattr", "help", "id", "int", "isinstance", "iter"}
    | {"len", "list", "max", "min", "print", "range", "repr", "sorted", "str", "sum", "tuple", "type", "zip"}
)
"""Functions that do not change their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or class: the notebook's names that it ``reads`` and ``binds`` when called."""

    reads: frozenset[str]
    binds: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellNames:
    """The names that a cell ``binds`` (or deletes, or changes in part: ``a.b = c``), and those that it reads.

    It ``needs`` names that it reads before binding them; ``reads`` also has names that its functions read, whenever
    called. ``changes`` are names whose value it may change in place (``model.half()``, ``init(model)``). ``functions``
    are those that it defines, ``star`` says that it imports unknown names (``import *``), and ``hidden`` are uses that
    may bind any name.
    """

    binds: frozenset[str]
    needs: frozenset[str]
    reads: frozenset[str]
    changes: frozenset[str]
    functions: Mapping[str, Function]
    star: bool
    hidden: tuple[str, ...]


def names_of(code: str) -> CellNames:
    """The names that ``code`` uses and binds. Raises ``SyntaxError``."""
    plain = without_magics(code)
    tree = ast.parse(plain.code)
    reader = _Reader()
    reader.visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return CellNames(
        binds=frozenset(reader.binds | reader.parts),
        needs=frozenset(reader.needs),
        reads=frozenset(reader.needs | reader.later),
        changes=frozenset(_changed(tree)),
        functions=reader.functions,
        star=reader.star,
        hidden=(*plain.left_out, *sorted(used & _HIDDEN)),
    )


@dataclass(slots=True)
class _Reader(ast.NodeVisitor):
    """Walks over a cell in the order of execution."""

    binds: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    """Names that are changed in part: an attribute or an item is bound."""
    needs: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    """Names that functions read when called, and that may be bound anew by then."""
    functions: dict[str, Function] = field(default_factory=dict)
    star: bool = False

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read({node.id})
            return
        if isinstance(node.ctx, ast.Del):
            self._read({node.id})
        self.binds.add(node.id)

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load) and (root := _root(node)) is not None:
            self.parts.add(root)
        self.generic_visit(node)

    visit_Subscript = visit_Attribute

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit([*([node.value] if node.value else []), node.annotation])
        if node.value is not None:
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._read({node.target.id})
        self.visit(node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit([node.iter, node.target, *node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.binds |= {each.target.id for each in ast.walk(node) if isinstance(each, ast.NamedExpr)}
        self._read(_globals(node)[0])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit([*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)])
        self._define(node.name, node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._read(_globals(node)[0], later=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit([*node.decorator_list, *node.bases, *node.keywords])
        self._define(node.name, node)

    def visit_Import(self, node: ast.Import) -> None:
        self.binds |= _imported(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.star |= any(alias.name == "*" for alias in node.names)
        self.binds |= _imported(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        self.binds |= {node.name} if node.name else set()
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_ExceptHandler

    def _define(self, name: str, node: ast.AST) -> None:
        read, bound = _globals(node)
        parts = {root for one in ast.walk(node) if (root := _part(one)) is not None}
        known = self.functions.get(name, Function(reads=frozenset(), binds=frozenset()))
        self.functions[name] = Function(reads=known.reads | read, binds=known.binds | bound | (parts & read))
        self._read(read, later=True)
        self.binds |= {name} | bound

    def _read(self, names: set[str], *, later: bool = False) -> None:
        self.needs |= names - self.binds
        self.later |= names if later else set()

    def _visit(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).partition(".")[0] for alias in node.names} - {"*"}


def _root(node: ast.AST) -> str | None:
    """The name at the root of an expression: ``a`` of ``a.b[0].c()``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _part(node: ast.AST) -> str | None:
    """The name of which ``node`` changes a part."""
    bound = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return _root(node) if bound else None


def _globals(scope: ast.AST) -> tuple[set[str], set[str]]:
    """The notebook's names that a function, class or comprehension reads, and those that it binds."""
    tables = [symtable.symtable(ast.unparse(scope), "a cell", "exec")]
    symbols = [] if isinstance(scope, _DEFINITIONS) else [one for one in tables[0].get_symbols() if one.is_referenced()]
    while tables:
        children = tables.pop().get_children()
        symbols += [one for child in children for one in child.get_symbols() if one.is_global()]
        tables += children
    read = {one.get_name() for one in symbols if one.is_referenced()}
    return read, {one.get_name() for one in symbols if one.is_declared_global() and one.is_assigned()}


def _changed(tree: ast.AST) -> Iterator[str]:
    """The names whose values a cell may change in place, by calls outside of its functions."""
    for node in _running(tree):
        if isinstance(node, ast.Call):
            yield from _plain_names(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _looks_only(node.value):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _plain_names(call: ast.Call) -> Iterable[str]:
    """The function of a call, and its arguments that are plain names."""
    if _looks_only(call):
        return []
    handed = [call.func, *call.args, *(word.value for word in call.keywords)]
    return [node.id for node in handed if isinstance(node, ast.Name)]


def _looks_only(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _LOOKS_ONLY


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the cell runs, so without the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _FUNCTIONS):
            yield node
            yield from _running(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The numbers of the needed cells, in order; ``missing`` are names that no cell binds."""

    cells: tuple[int, ...]
    missing: tuple[str, ...]


def cells_needed(code: str, before: Mapping[int, str], known: Collection[str]) -> Needed:
    """The cells of ``before`` (code by number, in order) that bind names which ``code`` or these cells read.

    All cells that bind a name are needed, not only the last, whose code may be in a branch that is not taken, or in a
    function. ``missing`` are names of the notebook (``known``) that no cell binds. Raises ``SyntaxError`` if ``code``
    is not Python.
    """
    cells = _read(before)
    bound = _bound(cells)
    wanted = set(names_of(code).needs)
    chosen: set[int] = set()
    while found := {
        number
        for number, names in cells.items()
        if number not in chosen and (bound[number] & wanted or (names.star and wanted))
    }:
        chosen |= found
        wanted |= {name for number in found for name in cells[number].reads}
    there = {name for number in chosen for name in bound[number]}
    missing = set() if any(cells[number].star for number in chosen) else wanted & set(known) - there
    return Needed(cells=tuple(sorted(chosen)), missing=tuple(sorted(missing)))


def untold(code: str, before: Mapping[int, str], chosen: Collection[int]) -> dict[int, tuple[str, ...]]:
    """By cell number, the effects of the cells ``before`` that a run of the ``chosen`` cells and ``code`` may miss.

    These are the names that an unchosen cell may change in place and that the run reads; ``exec`` and the like in
    unchosen cells; and the magics of all cells.
    """
    cells = _read(before)
    wanted = set(names_of(code).needs).union(*(cells[number].reads for number in chosen if number in cells))
    found = {}
    for number, names in cells.items():
        if number in chosen:
            found[number] = tuple(each for each in names.hidden if each[0] in "%!")
        else:
            found[number] = (*sorted(names.changes & wanted), *names.hidden)
    return {number: said for number, said in found.items() if said}


def _bound(cells: Mapping[int, CellNames]) -> dict[int, set[str]]:
    """The names that each cell binds, also through functions of other cells that it may call."""
    functions: dict[str, list[Function]] = {}
    for names in cells.values():
        for name, function in names.functions.items():
            functions.setdefault(name, []).append(function)
    return {number: set(names.binds) | _through(names, functions) for number, names in cells.items()}


def _through(names: CellNames, functions: Mapping[str, list[Function]]) -> set[str]:
    """The names bound by the functions that a cell may call, directly or through other functions."""
    pending, seen, bound = set(names.changes), set[str](), set[str]()
    while pending:
        name = pending.pop()
        seen.add(name)
        for function in functions.get(name, ()):
            bound |= function.binds
            pending |= function.reads - seen
    return bound


def _read(cells: Mapping[int, str]) -> dict[int, CellNames]:
    found = {}
    for number, code in cells.items():
        with suppress(SyntaxError):  # the cell never ran
            found[number] = names_of(code)
    return found


_SCRIPT = """\
__import__({module!r}, fromlist=["run_cells"]).run_cells({cells!r}, {failed!r}, {reached!r})
"""


def script_of_cell(code: str, name: str, before: Mapping[int, str], reached: Path, failed: Collection[int] = ()) -> str:
    """The script for the cell ``name``: the cells ``before`` it without their magics, then its ``code``.

    Cells that ``failed`` in the notebook run as far as they get. The script writes into the file ``reached`` how many
    steps the cells before have made. Raises :class:`UsageError` if the cell itself has magics, and ``SyntaxError`` if
    it awaits.
    """
    if without_magics(code).code != code:
        raise UsageError("%%ampmem --compare runs the cell as a script, where magics do not work: leave them out")
    cells = {f"In [{number}]": without_magics(cell).code for number, cell in before.items()}
    cells[name] = "\n" + code  # its code begins below the line of the magic
    for each, text in cells.items():
        compile(text, each, "exec", dont_inherit=True)
    return _SCRIPT.format(
        module=__name__, cells=cells, failed=[f"In [{number}]" for number in sorted(failed)], reached=str(reached)
    )


REACHED = ".reached"
"""The end of the name of a file for the number of steps; before it comes the name of the script's folder."""


def run_cells(cells: Mapping[str, str], failed: Collection[str], reached: str) -> None:
    """Run ``cells`` (code by name) in ``__main__``; tracebacks name their lines as in the notebook."""
    from ampmem.recorder.script import execute

    main = sys.modules["__main__"]
    vars(main)["display"] = print
    *_, last = cells
    for name, code in cells.items():
        # Tracebacks find the lines through linecache; Python itself would look for a file on sys.path, where the script
        # is.
        (Path(reached.removesuffix(REACHED)) / name).write_text(code, encoding="utf-8")
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        if name == last:
            output.reached(Path(reached)).write_text(str(_steps()), encoding="ascii")
        try:
            execute(compile(code, name, "exec", dont_inherit=True), main)
        except Exception:
            if name not in failed:
                raise


def _steps() -> int:
    """The number of steps that have ended so far."""
    from ampmem.recorder.process import active
    from ampmem.recorder.session import Session

    session = active()
    return session.outcome.steps if isinstance(session, Session) else 0
