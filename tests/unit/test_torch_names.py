"""Private names of torch are named in a few modules only: read from the source of every other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2] / "ampmem"
ROOMS = ("recorder/torch_private/", "simulator/private/")
NOT_TORCHS = frozenset(
    {
        "_current_frames",
        "_exit",
        "_getframe",
        "_run_exitfuncs",
        "_shutdown",
        "_replace",
        "_asdict",
        "_fields",
        "_repr_mimebundle_",
    }
)
"""Of os, sys, atexit, threading, named tuples and IPython."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_").isidentifier()


def private_names(path: str, source: str) -> Iterator[str]:
    """The names with a leading underscore that are not ampmem's own, and all that torch has below a private module.

    Names of ops, which the simulated device goes by, are no parts of torch's Python.
    """
    tree = ast.parse(source)
    own, ops, torchs = own_names(tree), path.startswith("simulator/"), imports_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if is_private_module(item.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{item.name}" for item in node.names]
            yield from (name for name in names if is_private_module(name))
        elif isinstance(node, ast.Attribute):
            of_future = node.attr == "__future__" and is_name(node.value, "torch")
            of_op = ops and is_name(node.value, "aten")
            inherited = is_name(node.value, "self") and not torchs  # from a class of ampmem's, then
            if of_future or (private(node.attr) and node.attr not in own and not of_op and not inherited):
                yield ast.unparse(node)
    if torchs:
        for text in strings(tree):
            if private(text) and text not in own and not (ops and hasattr(torch.ops.aten, text)):
                yield repr(text)


def is_name(node: ast.expr, name: str) -> bool:
    """Whether ``node`` is nothing but ``name``."""
    return isinstance(node, ast.Name) and node.id == name


def is_private_module(name: str) -> bool:
    first, *parts = name.split(".")
    return first == "torch" and any(part.startswith("_") for part in parts)


def imports_torch(tree: ast.Module) -> bool:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return any(name.split(".")[0] == "torch" for name in names)


def own_names(tree: ast.Module) -> set[str]:
    """What the module itself defines: functions, classes, variables, and attributes of its objects."""
    own = set(NOT_TORCHS)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, "self"):
            own.add(node.attr)
    return own


def strings(tree: ast.Module) -> Iterator[str]:
    """All texts, but not how a name ends that is put together from parts."""
    ends = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ends:
            yield node.value


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def test_private_names_of_torch_are_in_a_few_modules() -> None:
    searched = {path: source for path, source in sources().items() if not path.startswith(ROOMS)}
    found = {path: list(private_names(path, source)) for path, source in searched.items()}
    assert {path: names for path, names in found.items() if names} == {}


PATCHES = ("patch", "patch_call")


def patches_by_name(source: str) -> Iterator[str]:
    """Calls of ``patch`` and ``patch_call`` that spell out what is patched: they take for granted that torch has it."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in PATCHES
            and not isinstance(node.args[0], ast.Starred)
        ):
            yield ast.unparse(node)


def test_what_is_patched_has_an_entry_in_one_of_them() -> None:
    # What an integration patches is its host's, under a public name.
    elsewhere = (*ROOMS, "integrations/")
    searched = {path: text for path, text in sources().items() if not path.startswith(elsewhere)}
    found = {path: list(patches_by_name(source)) for path, source in searched.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert list(patches_by_name("undo = patch(torch, 'clear_autocast_cache', wrap)\npatch(*PLACE, wrap)")) == [
        "patch(torch, 'clear_autocast_cache', wrap)"
    ]


def test_those_modules_have_them() -> None:
    for room in ROOMS:
        found = [list(private_names(path, source)) for path, source in sources().items() if path.startswith(room)]
        assert sum(map(len, found)) > 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import _autograd",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils import _pytree",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch\ntorch.__future__.set_swap_module_params_on_conversion(True)",
        "def version(tensor):\n    return tensor._version",
        "class A:\n    def scale(self, scaler):\n        scaler._enabled = False",
        "import torch\ngetattr(torch.Tensor, '_use_count')",
        "import torch\nname = f'_cuda_{verb}MemoryMetadata'",
        "from torch import nn\ndef f(module):\n    return module.__dict__['_parameters']",
        "import torch\ntorch.ops.aten._to_copy.default",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_names("recorder/a.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten.add",
        "class A:\n    def __init__(self):\n        self._on = True\ndef f(a: A):\n    return a._on",
        "import sys\nsys._getframe(1)",
        "import torch\nname = f'{kind}_bytes'",
        "text = '_multi_tensor_'",
        "def f(error):\n    return error.__traceback__",
    ],
)
def test_what_is_public_or_ampmems_own_is_none(source: str) -> None:
    assert list(private_names("recorder/a.py", source)) == []


def test_ops_are_named_by_the_simulated_device() -> None:
    source = "import torch\naten = torch.ops.aten\nOPS = (aten._to_copy.default, '_ctc_loss')"
    assert list(private_names("simulator/a.py", source)) == []
    assert list(private_names("recorder/a.py", source)) == ["aten._to_copy", "'_ctc_loss'"]
