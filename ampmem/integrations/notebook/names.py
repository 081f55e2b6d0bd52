"""What the code of a cell does to names, as far as its text tells."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ampmem.integrations.notebook.magics import without_magics

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HIDDEN = frozenset({"exec", "globals", "locals", "vars", "__main__"})
"""Whoever uses these may bind any name."""
_LOOKS_ONLY = frozenset(
    {"bool", "dir", "display", "enumerate", "float", "getattr", "hasattr", "help", "id", "int", "isinstance", "iter"}
    | {"len", "list", "max", "min", "print", "range", "repr", "sorted", "str", "sum", "tuple", "type", "zip"}
)
"""Functions that change nothing of what they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """What a function, or a class, ``reads`` and ``binds`` of the notebook's names when it is called."""

    reads: frozenset[str]
    binds: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a cell ``binds`` (or deletes, or changes a part of: ``a.b = c``), and what it reads.

    It ``needs`` what it has not bound itself by then; ``reads`` has also what its functions read, whenever they are
    called. ``changes`` are names whose value it may change in place (``model.half()``, ``init(model)``). ``functions``
    are those that it defines, ``star`` says that it imports names that its code does not say, ``hidden`` is what may
    bind any name.
    """

    binds: frozenset[str]
    needs: frozenset[str]
    reads: frozenset[str]
    changes: frozenset[str]
    functions: Mapping[str, Function]
    star: bool
    hidden: tuple[str, ...]


def names_of(code: str) -> Names:
    """What ``code`` does to names. Raises ``SyntaxError``."""
    plain = without_magics(code)
    tree = ast.parse(plain.code)
    reader = _Reader()
    reader.visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Names(
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
    """Walks over a cell in the order in which it runs."""

    binds: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    """Names of which a part is bound: an attribute, or an item."""
    needs: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    """What functions read when they are called, which may be bound anew by then."""
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

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.binds |= {node.name} if node.name else set()
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self.binds |= {node.name} if node.name else set()
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

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
    """``a`` of ``a.b[0].c()``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _part(node: ast.AST) -> str | None:
    """The name of which ``node`` binds a part."""
    bound = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return _root(node) if bound else None


def _globals(scope: ast.AST) -> tuple[set[str], set[str]]:
    """The notebook's names that are read in a function, a class or a comprehension, and those that it binds."""
    tables = [symtable.symtable(ast.unparse(scope), "a cell", "exec")]
    symbols = [] if isinstance(scope, _DEFINITIONS) else [one for one in tables[0].get_symbols() if one.is_referenced()]
    while tables:
        children = tables.pop().get_children()
        symbols += [one for child in children for one in child.get_symbols() if one.is_global()]
        tables += children
    read = {one.get_name() for one in symbols if one.is_referenced()}
    return read, {one.get_name() for one in symbols if one.is_declared_global() and one.is_assigned()}


def _changed(tree: ast.AST) -> Iterator[str]:
    """The names whose values calls at the top of a cell may change."""
    for node in _running(tree):
        if isinstance(node, ast.Call):
            yield from _given(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _looks_only(node.value):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _given(call: ast.Call) -> Iterable[str]:
    """The function, and what it is given as it is."""
    if _looks_only(call):
        return []
    handed = [call.func, *call.args, *(word.value for word in call.keywords)]
    return [node.id for node in handed if isinstance(node, ast.Name)]


def _looks_only(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _LOOKS_ONLY


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the cell does: not those inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _FUNCTIONS):
            yield node
            yield from _running(node)
