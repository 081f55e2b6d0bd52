"""Writes ``docs/api.md`` from the docstrings: ``python docs/make_api.py``. Imports nothing of the package.

``python docs/make_api.py --check`` says whether the page is as it would be written now.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
COMMAND = "python docs/make_api.py"

Definition = ast.FunctionDef | ast.ClassDef

INTEGRATIONS = (
    ("ampmem.integrations.transformers", ("AmpmemCallback",)),
    ("ampmem.integrations.lightning", ("AmpmemCallback",)),
    ("ampmem.integrations.accelerate", ("record", "AmpmemTracker")),
)
"""What is imported by its module, beside ``import ampmem``: each needs the package that it is for."""

HEAD = f"""# Python API

Made from the docstrings by `{COMMAND}`. Sizes are bytes unless a name or a line says otherwise;
instants and durations are nanoseconds. Every error that ampmem raises on purpose is an `ampmem.errors.AmpmemError`.
What stays as it is between versions is in [contributing.md](contributing.md#what-stays-as-it-is).
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A definition and the module that it is in."""

    module: str
    node: Definition


@cache
def tree_of(module: str) -> ast.Module:
    """The source of ``module``, parsed."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """The names that ``module`` imports, each with the module that it is imported from and its name there."""
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in nodes for alias in node.names}


def find(module: str, name: str) -> Found | None:
    """The class or function that ``name`` is in ``module``, wherever it is defined."""
    for node in tree_of(module).body:
        if isinstance(node, Definition) and node.name == name:
            return Found(module, node)
    source, known_as = imports_of(module).get(name, ("", ""))
    return find(source, known_as) if source.startswith("ampmem") else None


def public_names() -> list[str]:
    """``ampmem.__all__``, without the version and the module of the errors, which has a section of its own."""
    for node in tree_of("ampmem").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name not in ("__version__", "errors")]
    raise SystemExit("ampmem/__init__.py has no __all__")


def plain(text: str) -> str:
    """A docstring's markup as Markdown."""
    text = re.sub(r":\w+:`[~.]?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")


def cell(text: str) -> str:
    """``text`` in a row of a table."""
    return " ".join(plain(text).split()).replace("|", "\\|")


def sections(node: Definition) -> dict[str, str]:
    """The parts of a docstring by their titles: ``""`` for what comes first, ``Args``, ``Returns``, ``Raises``."""
    parts = re.split(r"^(Args|Returns|Raises):$", ast.get_docstring(node) or "", flags=re.MULTILINE)
    return {"": parts[0].strip()} | dict(zip(parts[1::2], parts[2::2], strict=True))


def items(body: str) -> Iterator[tuple[str, str]]:
    """The entries of ``Args`` and ``Raises``: a name, and what is said of it."""
    for entry in re.split(r"^ {4}(?=\S)", body, flags=re.MULTILINE)[1:]:
        name, _, said = entry.partition(":")
        yield name.strip(), said


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table, and the empty line behind it; nothing where it has no rows."""
    lines = [head, tuple("---" for _ in head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in lines), ""] if rows else []


def raised(parts: dict[str, str]) -> list[str]:
    """The errors of a docstring's ``Raises``."""
    return table(("raises", "when"), [(f"`{kind}`", cell(said)) for kind, said in items(parts.get("Raises", ""))])


def signature(node: ast.FunctionDef, name: str) -> str:
    """The call, without the types; what stays ``self`` is left out."""
    call = ast.FunctionDef(name="call", args=node.args, body=[ast.Pass()], decorator_list=[], lineno=0)
    bare = ast.parse(ast.unparse(ast.fix_missing_locations(call))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in ast.walk(bare.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    bare.args.args = [each for each in bare.args.args if each.arg != "self"]
    return f"{name}({ast.unparse(bare.args).replace('Precision.AS_IS.value', repr('as-is'))})"


def types_of(node: ast.FunctionDef) -> dict[str, str]:
    """The types of the arguments as they are written."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg]
    return {each.arg: cell(ast.unparse(each.annotation)) for each in every if each is not None and each.annotation}


def function(node: ast.FunctionDef, name: str, level: str) -> list[str]:
    """What a function is for, its arguments, what it returns and what it raises."""
    parts, types = sections(node), types_of(node)
    rows = [(f"`{arg}`", f"`{types.get(arg, '')}`", cell(said)) for arg, said in items(parts.get("Args", ""))]
    lines = [f"{level} `{signature(node, name)}`", "", plain(parts[""]), ""]
    lines += table(("argument", "type", "what"), rows)
    if "Returns" in parts:
        lines += [f"Returns: {cell(parts['Returns'])}", ""]
    return lines + raised(parts)


def has(node: ast.FunctionDef, decorator: str) -> bool:
    return any(ast.unparse(each).split("(")[0].endswith(decorator) for each in node.decorator_list)


def fields(node: ast.ClassDef) -> list[tuple[str, ...]]:
    """The fields and properties of a class that have a public name, with what is said below them."""
    rows = []
    for each, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            text = following.value if isinstance(following, ast.Expr) else None
            said = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            rows.append((f"`{each.target.id}`", f"`{cell(ast.unparse(each.annotation))}`", cell(said)))
        elif isinstance(each, ast.FunctionDef) and each.name[0] != "_" and has(each, "property"):
            kind = ast.unparse(each.returns) if each.returns else ""
            rows.append((f"`{each.name}`", f"`{cell(kind)}`", cell(ast.get_docstring(each) or "")))
    return rows


def whole_class(found: Found, name: str, level: str) -> list[str]:
    """What a class is, its arguments, its fields, its methods; its methods' errors are in their words."""
    node = found.node
    assert isinstance(node, ast.ClassDef)
    parts = sections(node)
    lines = [f"{level} `{name}`", "", plain(parts[""]), ""]
    lines += table(("field", "type", "what"), fields(node))
    bases = [base.node for each in node.bases if (base := find(found.module, ast.unparse(each))) is not None]
    methods = [each for definition in (node, *bases) for each in definition.body if isinstance(each, ast.FunctionDef)]
    for each in (each for each in methods if not has(each, "property")):
        if each.name[0] != "_" and ast.get_docstring(each):
            lines += function(each, each.name, f"{level}#")
    return lines + raised(parts)


def callback(found: Found, name: str) -> list[str]:
    """A class that a trainer is given: what it does, and how it is made; the trainer calls its methods."""
    node, parts = found.node, sections(found.node)
    assert isinstance(node, ast.ClassDef)
    bases = [base for each in node.bases if (base := find(found.module, ast.unparse(each))) is not None]
    made = next(
        each
        for definition in (node, *(base.node for base in bases))
        for each in definition.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    lines = [f"### `{found.module}.{signature(made, name)}`", "", plain(parts[""]), ""]
    return lines + raised(parts)


def one(module: str, name: str, title: str, level: str) -> list[str]:
    """The entry of one public name."""
    found = find(module, name)
    if found is None:
        raise SystemExit(f"{module}.{name} is not found in the sources")
    if isinstance(found.node, ast.FunctionDef):
        return function(found.node, title, level)
    if module.startswith("ampmem.integrations"):
        return callback(found, name)
    return whole_class(found, title, level)


def errors() -> list[str]:
    """The classes of :mod:`ampmem.errors`, with what the command line exits with."""
    rows = []
    codes: dict[str, str] = {"Exception": "1"}
    for node in tree_of("ampmem.errors").body:
        if isinstance(node, ast.ClassDef):
            base = ast.unparse(node.bases[0])
            own = [ast.unparse(each.value) for each in node.body if isinstance(each, ast.Assign)]
            codes[node.name] = own[0] if own else codes[base]
            said = (ast.get_docstring(node) or "").split("\n\n")[0]
            rows.append((f"`{node.name}`", f"`{base}`", codes[node.name], cell(said)))
    return table(("class", "is a", "exit code", "when"), rows)


def page() -> str:
    """The whole page."""
    found = [(name, find("ampmem", name)) for name in public_names()]
    functions = [name for name, each in found if each and isinstance(each.node, ast.FunctionDef)]
    classes = [name for name, each in found if each and isinstance(each.node, ast.ClassDef)]
    lines = [HEAD, "## Functions", ""]
    for name in functions:
        lines += one("ampmem", name, f"ampmem.{name}", "###")
    lines += ["## Values", "", "What the functions return; each is immutable, but for `Profile`.", ""]
    for name in classes:
        lines += one("ampmem", name, f"ampmem.{name}", "###")
    lines += ["## Errors", "", plain(ast.get_docstring(tree_of("ampmem.errors")) or ""), "", *errors()]
    lines += ["## Trainers", "", "[trainers.md](trainers.md) has whole examples.", ""]
    for module, names in INTEGRATIONS:
        for name in names:
            lines += one(module, name, f"{module}.{name}", "###")
    lines += ["## The pytest fixture `ampmem`", "", "[pytest.md](pytest.md) has the mark and the options.", ""]
    recorder = find("ampmem.integrations.pytest.judging", "Recorder")
    assert recorder is not None
    method = next(each for each in recorder.node.body if isinstance(each, ast.FunctionDef) and each.name == "profile")
    lines += [plain(sections(recorder.node)[""]), "", *function(method, "ampmem.profile", "###")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    """The command line."""
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            raise SystemExit(f"docs/api.md is not as the docstrings are; make it anew: {COMMAND}")
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
