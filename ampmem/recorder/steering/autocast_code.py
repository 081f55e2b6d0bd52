"""What the code of a script says about autocast: whether it opens regions, and whether only to disable it."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ampmem.recorder.torch_private.general import DECORATED, ENTER_AUTOCAST

_TORCH = str(Path(torch.__file__).parent) + os.sep


def entering_code() -> CodeType:
    """The code that enters a region, past the ``__enter__`` of ours and of autocast's subclasses."""
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_name == "__enter__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def restates(code: CodeType) -> bool:
    """Whether ``code`` is torch's, which enters a region to restore a state: checkpoint, custom_fwd, DataParallel."""
    of_script = code.co_name in ("decorate_autocast", ENTER_AUTOCAST)
    return code.co_filename.startswith(_TORCH) and not of_script


def of_compiled(code: CodeType) -> bool:
    """Whether ``code`` is what compiled code enters its regions by."""
    return code.co_filename.startswith(_TORCH) and code.co_name == ENTER_AUTOCAST


def has_autocast(function: Any) -> bool:
    """Whether ``function``, a module or a method of one perhaps, opens autocast, or a module inside it."""
    owner = getattr(function, "__self__", function)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    return _opens_autocast(function) or any(_opens_autocast(module.forward) for module in modules)


def _opens_autocast(function: Any) -> bool:
    """Whether ``function`` is decorated with autocast, or names it other than to disable it."""
    while function is not None:
        if hasattr(function, DECORATED):  # autocast's decorator leaves it
            return True
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and _names_autocast(code) and not only_disables(code):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _names_autocast(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(map(_is_autocast, code.co_names + code.co_freevars)) or any(map(_names_autocast, inner))


def _is_autocast(name: str) -> bool:
    """Whether what is called ``name`` can enter autocast: ``is_autocast_enabled`` cannot."""
    return "autocast" in name and not name.startswith(("is_", "get_", "set_", "clear_"))


@functools.lru_cache(maxsize=256)
def only_disables(code: CodeType) -> bool:
    """Whether ``code`` names autocast only in calls that say ``enabled=False``, as the islands of FP32 in models do."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = list(ast.walk(tree))
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    variables = _made_here(nodes)
    # What a variable such as autocast_ctx holds is looked at where it is made, unless the variable itself is called.
    named = [node for node in nodes if _is_autocast(_name(node)) and (node in calls or _name(node) not in variables)]
    return bool(named) and all(node in calls and _disabled(calls[node]) for node in named)


def _made_here(nodes: Sequence[ast.AST]) -> set[str]:
    """The variables that are only ever set to what calls of autocast or ``nullcontext`` make, right there."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
    made = [_name(node.targets[0]) for node in assigned if _makes(node.value)]
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {name for name in made if made.count(name) == stored.count(name)} - given


def _makes(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _makes(value.body) and _makes(value.orelse)
    called = _name(value.func) if isinstance(value, ast.Call) else ""
    return called == "nullcontext" or _is_autocast(called)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _disabled(call: ast.Call) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "enabled"]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def forget_code() -> None:
    """Let go of all code that was looked at."""
    only_disables.cache_clear()
