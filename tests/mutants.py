"""Breaks ampmem's core in small ways, one at a time, and counts which of them the unit tests notice.

    python tests/mutants.py [--count 300] [--seed 0] [--only PATTERN] [--jobs 2]

A mutant is a copy of the package in which one place of one module has another meaning: ``<`` became ``<=``, ``and``
became ``or``, a number one more, a condition its opposite, a call was left out. The unit tests that are for the module
run on it; where none fails the mutant *survives*, and is printed as a diff of one line. Mutants are drawn evenly from
:data:`TARGETS`, the same ones for the same seed and the same code. Those that change nothing that can be seen are in
the count: a survivor is a question, not yet a fault of the tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 180
"""After which a mutant has hung, which is noticed, too."""

TARGETS: dict[str, tuple[str, ...]] = {
    "recorder/steps.py": ("recorder/test_steps.py",),
    "recorder/sources/ledger.py": ("recorder/test_ledger.py", "recorder/test_cuda_source.py"),
    "analysis/timeline": tuple(
        f"analysis/test_{name}.py"
        for name in ("classify", "untrained", "lifetimes", "tensors", "marks", "timeline", "communication")
    ),
    "analysis/static_model": tuple(
        f"analysis/test_{name}.py"
        for name in ("static_model", "terms", "verdict", "evidence_of_terms", "unfinished_step")
    ),
    "analysis/findings": tuple(
        f"analysis/test_{name}.py"
        for name in ("findings", "findings_of_copies", "findings_of_the_loop", "remedies", "out_of_memory")
    ),
    "analysis/budgets": ("analysis/budgets", "cli/test_check.py"),
    "allocator": ("allocator",),
}
"""Modules of the package, or folders of them, and the unit tests that are for them."""

_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """The module at ``path``, below the package, with another line ``number``."""

    path: str
    number: int
    source: str
    before: str
    after: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"ampmem/{self.path}:{self.number}\n  - {self.before}\n  + {self.after}"


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    """Each place of ``tree`` that may be changed, and what changes it there."""
    for node in _behaviour(tree):
        if isinstance(node, ast.Compare):
            yield node, lambda node=node: _set(node, "ops", [_other(node.ops[0]), *node.ops[1:]])  # type: ignore[misc]
        elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in _OTHER:
            yield node, lambda node=node: _set(node, "op", _other(node.op))  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node, lambda node=node, other=other: _set(node, "value", other)  # type: ignore[misc]
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            opposite = ast.UnaryOp(op=ast.Not(), operand=node.test)
            yield node.test, lambda node=node, opposite=opposite: _set(node, "test", opposite)  # type: ignore[misc]
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.YieldFrom)):
            yield node, lambda node=node: _set(node, "value", ast.Constant(value=...))  # type: ignore[misc]


def _behaviour(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of ``tree`` but for types and messages, which no test of behaviour is about."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "type_params"):
                waiting += [
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
                ]


def _other(operator: ast.AST) -> ast.AST:
    other: ast.AST = _OTHER.get(type(operator), type(operator))()
    return other


def _set(node: ast.AST, name: str, value: object) -> None:
    setattr(node, name, value)


def mutants(path: str, tests: tuple[str, ...]) -> list[Mutant]:
    """All those of the module at ``path``."""
    tree = ast.parse((ROOT / "ampmem" / path).read_text(encoding="utf-8"))
    plain = ast.unparse(tree).splitlines()
    found = []
    for index, (node, _change) in enumerate(changes(tree)):
        changed = copy.deepcopy(tree)
        list(changes(changed))[index][1]()
        source = ast.unparse(ast.fix_missing_locations(changed))
        lines = source.splitlines()
        different = [pair for pair in zip(plain, lines, strict=False) if pair[0] != pair[1]]
        if different:
            before, after = different[0]
            number = getattr(node, "lineno", 0)
            found.append(Mutant(path, number, source, before.strip(), after.strip(), tests))
    return found


def drawn(count: int, seed: int, only: str) -> list[Mutant]:
    """``count`` of all that match ``only``, as many of each target as of the others where it has so many."""
    chosen: list[Mutant] = []
    targets = [target for target in TARGETS if re.search(only, target)]
    for left, target in zip(range(len(targets), 0, -1), targets, strict=True):
        place = ROOT / "ampmem" / target
        files = [place] if place.is_file() else sorted(place.glob("*.py"))
        paths = [str(file.relative_to(ROOT / "ampmem")) for file in files]
        every = [mutant for path in paths for mutant in mutants(path, TARGETS[target])]
        wanted = min((count - len(chosen)) // left, len(every))
        chosen += random.Random(f"{seed} {target}").sample(every, wanted)
    return chosen


def survives(mutant: Mutant) -> bool:
    """Whether all the tests that are for it pass on the mutant."""
    return _tests_pass(mutant.tests, mutant)


def _tests_pass(tests: Sequence[str], mutant: Mutant | None = None) -> bool:
    """Whether they pass on a copy of the package, that of ``mutant`` where one is given."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "ampmem")
        shutil.copytree(ROOT / "ampmem", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            (package / mutant.path).write_text(mutant.source, encoding="utf-8")
        return _run(Path(folder), tests)


def _run(folder: Path, tests: Sequence[str]) -> bool:
    """Run them in a child of this process, which has imported torch already, on the package in ``folder``."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.environ["PYTHONPATH"] = str(folder)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(folder))
            os.chdir(ROOT)
            import signal

            import pytest

            signal.alarm(SECONDS)
            options = ("-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/made")
            code = int(pytest.main([*options, *(f"tests/unit/{test}" for test in tests)]))
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survivors and, for each target, how many of its mutants were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, for targets")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    import torch  # noqa: F401  # once, and not in each child

    chosen = drawn(asked.count, asked.seed, asked.only)
    for tests in {mutant.tests for mutant in chosen}:
        if not _tests_pass(tests):
            print(f"without a mutant these fail: {' '.join(tests)}", file=sys.stderr)
            return 1
    noticed: dict[str, list[bool]] = {}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, alive in zip(chosen, pool.map(survives, chosen), strict=True):
            target = next(target for target in TARGETS if mutant.path.startswith(target))
            noticed.setdefault(target, []).append(not alive)
            if alive:
                print(mutant, flush=True)
    print(f"\n{'target':<30}{'mutants':>8}{'noticed':>8}")
    for target, each in noticed.items():
        print(f"{target:<30}{len(each):>8}{sum(each):>8}")
    total = [one for each in noticed.values() for one in each]
    print(f"{'all':<30}{len(total):>8}{sum(total):>8}  {sum(total) / max(len(total), 1):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
