"""Compiled graphs and their calls: from which module and source line each allocation in them comes.

Dynamo's graph has the modules and lines, the text of a compiled graph has dynamo's nodes, and each call has addresses:
one graph may serve many modules, which are told apart by their parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from ampmem.recorder.compiled.text import BufferContents, Text
from ampmem.recorder.facts.log import Texts
from ampmem.recorder.models.models import ROOT
from ampmem.recorder.models.stacks import stack_text

_ROOT_OF = re.compile(r"([LG]\['[^']*'\])(.*)")
_PART = re.compile(r"\['?([^'\]]+)'?\]|\.(\w+)")
_CONTAINERS = frozenset({"_modules", "_parameters", "_buffers"})
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INSIDE = (
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_inductor/",
    "torch/autograd/",
    "torch/fx/graph_module.py",
    "<eval_with_key>",
)
"""Parts of torch between the script's code and its compiled graph, as stacks show them."""

Part = tuple[str, tuple[str, ...]]
"""A module or tensor as dynamo reaches it: a variable, such as ``L['self']``, and the path from there."""


def part_of(expression: str) -> Part | None:
    """What dynamo's ``expression`` names; ``None`` if it is not a path."""
    found = _ROOT_OF.fullmatch(expression)
    if found is None:
        return None
    parts = (first or second for first, second in _PART.findall(found[2]))
    return found[1], tuple(part for part in parts if part not in _CONTAINERS)


def frames_of(trace: str) -> str:
    """The lines of the script in ``trace``, which Python printed, as a recording has them."""
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(trace)]
    return stack_text(reversed(frames))


class Origin(NamedTuple):
    """The module in which a node of dynamo's graph runs, ``None`` outside of modules, and the script's lines."""

    module: Part | None
    stack: str


@dataclass(slots=True)
class Traced:
    """What is known of one graph of dynamo's."""

    origins: dict[str, list[Origin]] = field(default_factory=dict)
    """By name: graphs inside the graph, such as those of checkpoints, have names of their own."""
    inputs: list[Part | None] = field(default_factory=list)


class Graph:
    """One compiled graph: its file, the ``key`` of dynamo's code that it belongs to, and its text, which is read late.

    ``pair`` is the backward of a forward, and the other way round.
    """

    def __init__(self, path: str, source: str, key: str, traced: Traced | None) -> None:
        self.path, self.key, self.traced = path, key, traced
        self.pair: Graph | None = None
        self.names: dict[tuple[object, ...], Names] = {}
        """The names of its allocations, by the parameters and the place of a call."""
        self._source = source

    @property
    def backward(self) -> bool:
        """Whether it is the backward of another one."""
        return self.text.backward

    def computes_again(self, line: int) -> bool:
        """Whether the op that ``line`` of backward calls is forward's, and has no node of backward in it."""
        known = {} if self.traced is None else self.traced.origins
        return line in self.text.own and all(name in known for name in self.text.own[line])

    @cached_property
    def text(self) -> Text:
        """What its text says."""
        return Text(self._source)


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a graph: its time in ns, the text ids of parameters among the arguments, and addresses.

    ``stack`` is the script's (an id of ``Stacks``), ``module`` the text id of the module that ran.
    """

    graph: Graph
    start_ns: int
    stack: int
    module: int
    parameters: list[int]
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    end_ns: int = 0
    forward: Call | None = None


class Name(NamedTuple):
    """Text ids of an allocation's op, module and stack, and what it holds; 0 where unknown."""

    op: int
    module: int
    stack: int
    held: BufferContents


class Names:
    """Names what a graph allocates in calls with the same parameters, from the same place ``base`` of the script."""

    def __init__(self, call: Call, texts: Texts, base: str, forward: Names | None) -> None:
        self._graph, self._texts, self._base, self._forward = call.graph, texts, base, forward
        self._parameters = call.parameters
        self._running = call.module
        self._lines: dict[int, Name | None] = {}
        self._heads = {} if call.graph.traced is None else _heads(self._named_inputs(call.graph.traced))

    def at(self, line: int) -> Name | None:
        """The name of what is allocated at ``line`` of the text; ``None`` if nothing is known."""
        if line not in self._lines:
            held = self._graph.text.at(line)
            self._lines[line] = None if held is None else self.name(held)
        return self._lines[line]

    def name(self, held: BufferContents) -> Name:
        """The name of a buffer."""
        module, stack = self._place(held) or (0, 0)
        op = held.op or ("aten::_to_copy" if held.cast and self.parameter(held.cast) else "")
        return Name(self._texts.id(op), module, stack, held)

    def parameter(self, name: str) -> int:
        """Text id of the parameter that the argument ``name`` is; 0 if it is none."""
        inputs = self._graph.text.inputs
        at = inputs.index(name) if name in inputs else len(self._parameters)
        return self._parameters[at] if at < len(self._parameters) else 0

    def saved(self) -> Iterator[tuple[int, str, BufferContents | None]]:
        """The index among the results, the name in backward's text, and the contents of each saved tensor."""
        text, pair = self._graph.text, self._graph.pair
        names = [] if pair is None else [name for name in pair.text.inputs if not name.startswith(_TANGENT)]
        # The sizes of dynamic shapes are forward's last results, and backward's first arguments.
        sizes = len(list(takewhile("".__eq__, reversed(text.returned))))
        for index, name in enumerate([*names[sizes:], *names[:sizes]], start=len(text.returned) - len(names)):
            if index >= 0:
                yield index, name, text.of(text.returned[index])

    def _place(self, held: BufferContents) -> tuple[int, int] | None:
        """Text ids of module and stack of ``held``."""
        text, forward = self._graph.text, self._forward
        if not text.backward:
            cast = text.inputs.index(held.cast) if held.cast in text.inputs else None
            return self.of_sources(held, text) or self.of_parameter(cast)
        if forward is None:
            return None
        return forward.of_parameter(held.gradient) or forward.of_sources(held, text) or self._of_reads(held)

    def of_sources(self, held: BufferContents, text: Text) -> tuple[int, int] | None:
        """The place of the nodes of dynamo's graph that ``held``, a buffer of ``text``, comes from."""
        known = {} if self._graph.traced is None else self._graph.traced.origins
        for source in held.sources:
            origins = known.get(source, ())
            if origins:
                found = origins[0] if len(origins) == 1 else self._nearest(origins, held, text)
                return self._module(found.module), self._stack(found.stack)
        return None

    def _nearest(self, origins: Sequence[Origin], held: BufferContents, text: Text) -> Origin:
        """The one of ``origins`` whose module is the nearest to that of the parameters of which ``held`` was made."""
        paths = [self._texts.value(self._module(each.module)).split(".") for each in origins]
        for parameter in filter(None, map(self.parameter, _arguments(held, text))):
            path = self._texts.value(parameter).split(".")
            same = [len(list(takewhile(bool, map(eq, path, each)))) for each in paths]
            if same.count(max(same)) == 1:
                return origins[same.index(max(same))]
        return origins[0]

    def of_parameter(self, index: int | None) -> tuple[int, int] | None:
        """The place of the parameter that the argument at ``index`` is, ``None`` if it is none: its module."""
        if index is None or index >= len(self._parameters) or not self._parameters[index]:
            return None
        module = self._texts.value(self._parameters[index]).rpartition(".")[0] or ROOT
        path = self._texts.id(module)
        traced = self._graph.traced
        origins = () if traced is None else (each for known in traced.origins.values() for each in known)
        lines = (each.stack for each in origins if self._module(each.module) == path)
        return path, self._stack(next(lines, ""))

    def _of_reads(self, held: BufferContents) -> tuple[int, int] | None:
        """The place of the nearest saved tensor of which ``held`` was made."""
        found = map(self._forward.of_saved, _arguments(held, self._graph.text)) if self._forward is not None else ()
        return next(filter(None, found), None)

    def of_saved(self, name: str) -> tuple[int, int] | None:
        """The place of the tensor that backward's text calls ``name``."""
        text = self._graph.text
        if name in text.inputs:
            return self.of_parameter(text.inputs.index(name))
        if name.startswith(_TANGENT):
            results = [each for each in text.returned if each]
            held = text.of(results[min(int(name.removeprefix(_TANGENT)), len(results)) - 1])
        else:
            held = next((held for _, each, held in self.saved() if each == name), None)
            if name in text.source_of:
                held = replace(held or BufferContents(), sources=(text.source_of[name],))
        return None if held is None else self.of_sources(held, text)

    def _named_inputs(self, traced: Traced) -> Iterator[tuple[Part, tuple[str, ...]]]:
        """Each parameter among the arguments as dynamo and as the recording name it."""
        for part, name in zip(traced.inputs, self._parameters, strict=False):
            if part is not None and name:
                yield part, tuple(self._texts.value(name).split("."))

    def _module(self, part: Part | None) -> int:
        """Text id of the path of a module; 0 outside of modules."""
        if part is None:
            if self._heads and _SELF not in self._heads:
                return 0
            part = _SELF, ()
        root, path = part
        if root not in self._heads:
            return self._running
        before, after = self._heads[root]
        inside = path[len(before) :] if path[: len(before)] == before else ()
        return self._texts.id(".".join([*after, *inside]) or ROOT)

    def _stack(self, stack: str) -> int:
        """Text id of the script's stack at a node: the lines above the compiled function, and those inside."""
        above, inside = self._base.splitlines(), stack.splitlines()
        if above and inside:
            function = inside[0].rpartition(" ")[2]
            file, _, running = above[-1].rpartition(" ")
            same = file.rpartition(":")[0] == inside[0].rpartition(" ")[0].rpartition(":")[0]
            if same and (running.endswith(function) or f"_in_{function}_at_" in running):
                del above[-1]  # the frame that runs the compiled code
        return self._texts.id("\n".join([*above, *inside]))


_SELF = "L['self']"
"""The module whose forward is compiled, as dynamo names it."""
_TANGENT = "tangents_"
"""How backward's text calls the gradient of one of forward's results; the number follows."""


def _arguments(held: BufferContents, text: Text) -> Iterator[str]:
    """The arguments of the graph of which ``held`` was made, the nearest first."""
    seen = dict.fromkeys(reversed(held.reads))
    waiting = list(seen)
    for name in waiting:
        made = text.of(name)
        if made is None:
            yield name
        else:
            waiting += [each for each in reversed(made.reads) if each not in seen]
            seen |= dict.fromkeys(made.reads)


def _heads(named: Iterable[tuple[Part, tuple[str, ...]]]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """For each variable of dynamo's the head of its paths, and what stands for it in the recording's names."""
    found: dict[str, Counter[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    for (root, path), name in named:
        same = 0
        while same < min(len(path), len(name)) and path[-1 - same] == name[-1 - same]:
            same += 1
        if same:
            found.setdefault(root, Counter())[path[: len(path) - same], name[: len(name) - same]] += 1
    return {root: heads.most_common(1)[0][0] for root, heads in found.items()}


def script_lines(stack: str) -> str:
    """The lines of ``stack`` that are the script's, without those between it and compiled code."""
    return "\n".join(line for line in stack.splitlines() if not any(part in line for part in _INSIDE))
