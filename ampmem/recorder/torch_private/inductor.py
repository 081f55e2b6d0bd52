"""Private names of torch.compile and its backend Inductor: what a compiled graph is made of, and when it runs.

Nothing here imports the compiler before the script has asked it to compile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ampmem.patching import Undo, added, suspended
from ampmem.recorder.torch_private.entries import Place, patched

_UNNAMED = "memory inside compiled code has no names"
COMPILES: Place = patched(
    "torch._TorchCompileInductorWrapper",
    "__call__",
    "to know the modules and source lines of the graphs that Inductor compiles",
    without=_UNNAMED,
)
_FUNCTORCH, _BUDGET = "torch._functorch.config", "activation_memory_budget"
_OUTPUT, _CACHE = "torch._inductor.output_code", "torch._inductor.codecache"


def load_compiler() -> None:
    """Import what torch itself imports next: it is about to compile."""
    import_module("torch._inductor.compile_fx")
    # The step of an optimizer with hooks runs uncompiled, and would import this while dynamo tries each function.
    torch.autograd.profiler.record_function("")
    getattr(torch.autograd.profiler, "_maybe_cupti_monitor", bool)()


def set_memory_budget(share: float) -> Undo:
    """Let compiled code keep at most this ``share`` of its activations for backward; returns the undo."""
    changed = import_module(_FUNCTORCH).patch({_BUDGET: share})
    changed.__enter__()
    return added(_FUNCTORCH, _BUDGET, partial(changed.__exit__, None, None, None))


def memory_budget() -> float:
    """The share of its activations that compiled code may keep for backward."""
    return float(getattr(import_module(_FUNCTORCH), _BUDGET))


def know_functions() -> None:
    """Have dynamo look up torch's own functions now, without ampmem's patches: it finds them by name when it traces."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    known = getattr(rules, "get_torch_obj_rule_map", None)
    if known is not None:
        known.cache_clear()
        with suspended():
            known()


def graph_places() -> tuple[Place, Place] | None:
    """The methods that finish a compiled graph, in each process, and that run it; ``None`` if they are not loaded."""
    kind = getattr(sys.modules.get(_OUTPUT), "CompiledFxGraph", None)
    if kind is None or not {"post_compile", "__call__"} <= vars(kind).keys():
        return None
    return (kind, "post_compile"), (kind, "__call__")


def compile_id() -> str:
    """The id of the code that dynamo compiles now, such as ``0/0``; empty if none."""
    current = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    found = None if current is None else current.current_compile_id()
    return "" if found is None else str(found)


def source_of(graph: Any) -> tuple[str, str]:
    """The file and the text of the Python code of a compiled ``graph``."""
    path = str(sys.modules[_CACHE].get_path(graph.cache_key, "py")[2])
    text = graph.source_code
    return path, text if isinstance(text, str) else Path(path).read_text()


class DynamoNode(NamedTuple):
    """One node of dynamo's graph. ``module`` is an expression such as ``L['self'].blocks.0``, empty outside modules.

    ``source`` is that of an argument of the graph, ``stack`` the lines of the script as Python prints them.
    ``outermost`` says that it is not in a graph inside the graph, as of a checkpoint.
    """

    name: str
    kind: str
    target: str
    module: str
    stack: str
    source: str
    arguments: tuple[Any, ...]
    outermost: bool


def nodes_of(graph: torch.fx.GraphModule, *, outermost: bool = True) -> Iterator[DynamoNode]:
    """The nodes of dynamo's ``graph``, and of the graphs inside it."""
    for node in graph.graph.nodes:
        inner = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            yield from nodes_of(inner, outermost=False)
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        yield DynamoNode(
            name=node.name,
            kind=node.op,
            target=getattr(node.target, "__name__", str(node.target)),
            module=str(modules[-1][0]) if modules else "",
            stack=node.meta.get("stack_trace") or "",
            source=str(name() if callable(name) else name),  # a method before 2.10
            arguments=node.args,
            outermost=outermost,
        )
