"""The compiled code of a script: collects its graphs and calls, and names what they allocate when a step is written."""

from __future__ import annotations

import re
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from time import time_ns
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ampmem.events import Action, Column, Fact, FactColumns
from ampmem.names import COMPILED_BACKWARD
from ampmem.recorder.compiled.graphs import Call, Graph, Name, Names, Origin, Traced, frames_of, part_of, script_lines
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.torch_private.inductor import DynamoNode, compile_id, source_of
from ampmem.units import format_bytes

_LINE = re.compile(r"(.+):(\d+) (?:\S+\.)?(?:call|partition_\d+)")
_SAVED_BY, BACKWARD = "CompiledFunction", COMPILED_BACKWARD
"""The autograd Function that runs compiled graphs, and its node."""
_BUFFER = "aten::empty_strided"
"""The op by which compiled code on a simulated GPU makes a buffer; on a GPU that is no op."""
_UNNAMED = (
    "{unnamed} of {all} allocated inside compiled code have no module or source line: the code that torch.compile "
    "generated does not say what they are"
)


class Who(NamedTuple):
    """Text ids of the op, module and stack of each event."""

    op: Column
    module: Column
    stack: Column


class CompiledCode:
    """All graphs that Inductor compiled or loaded, and their calls since the last step was written."""

    def __init__(self, log: Log, models: Models, stacks: Stacks) -> None:
        self._log, self._models, self._stacks = log, models, stacks
        self._tracing: list[Traced] = []
        """What dynamo is compiling now, the innermost last."""
        self._graphs: dict[int, tuple[weakref.ref[Any], Graph]] = {}
        """By ``id`` of torch's object."""
        self._all: list[Graph] = []
        self._paths: dict[str, Graph] = {}
        """The newest graph whose text is in a file."""
        self._calls: list[Call] = []
        self._made: dict[int, Call] = {}
        """The newest call of a forward that returned the memory at an address."""
        self._places: dict[int, tuple[str, int] | None] = {}
        """The file and line of a graph's text in each stack (a text id)."""
        self._bytes = self._unnamed = 0
        self.explained = 0
        """How many calls of forwards there were whose text says everything."""

    def computes_again(self) -> bool:
        """Whether compiled code runs an op of forward again in backward, now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            graph = self._paths.get(frame.f_code.co_filename)
            if graph is not None:
                return graph.computes_again(frame.f_lineno)
            frame = frame.f_back
        return False

    def notes(self) -> list[str]:
        """A note on what has no name."""
        if not self._unnamed:
            return []
        return [_UNNAMED.format(unnamed=format_bytes(self._unnamed), all=format_bytes(self._bytes))]

    def traces(self, nodes: Iterable[DynamoNode]) -> None:
        """Note that a graph of dynamo's with these ``nodes`` is about to be compiled."""
        traced = Traced()
        frames = cache(frames_of)
        for node in nodes:
            if node.kind == "placeholder":
                traced.inputs += [part_of(node.source)] if node.outermost else []
            elif node.kind != "output":
                origin = Origin(part_of(node.module), frames(node.stack))
                traced.origins.setdefault(node.name, []).append(origin)
        self._tracing.append(traced)

    def traced(self) -> None:
        """Note that it was compiled."""
        self._tracing.pop()

    def finished(self, compiled: Any) -> Graph:
        """Note torch's object for a ``compiled`` graph, made in this process or loaded from a cache."""
        path, source = source_of(compiled)
        key = compile_id()
        traced = self._tracing[-1] if self._tracing else None
        graph = Graph(path, source, key, traced)
        if graph.backward:
            forwards = (each for each in reversed(self._all) if not each.backward and each.pair is None)
            graph.pair = next((each for each in forwards if each.key == key), None)
            if graph.pair is not None:
                graph.pair.pair = graph
        self._graphs[id(compiled)] = weakref.ref(compiled), graph
        self._all.append(graph)
        self._paths[path] = graph
        self._places.clear()
        return graph

    def model_of(self, compiled: Any, inputs: Iterable[Any]) -> tuple[nn.Module, bool] | None:
        """The model whose forward the ``compiled`` graph runs, or a part of it, and whether it is trained.

        ``None`` if the graph runs none.
        """
        graph = self._graph_of(compiled)
        origins = () if graph.traced is None or graph.backward else graph.traced.origins.values()
        if not any(each.module is not None for known in origins for each in known):
            return None
        root = self._models.root_with({self._log.storage_address(each) for each in inputs if is_tensor(each)})
        return None if root is None else (root, graph.text.trains)

    def _graph_of(self, compiled: Any) -> Graph:
        known = self._graphs.get(id(compiled))
        return known[1] if known is not None and known[0]() is compiled else self.finished(compiled)

    def begin(self, compiled: Any, inputs: Iterable[Any]) -> Call:
        """Note that a ``compiled`` graph is about to run with ``inputs``."""
        log, graph = self._log, self._graph_of(compiled)
        tensors = [each if is_tensor(each) else None for each in inputs]
        addresses = [0 if each is None else log.storage_address(each) for each in tensors]
        find = self._models.parameters_at.find
        call = Call(
            graph=graph,
            start_ns=time_ns(),
            stack=0 if graph.backward else self._stacks.capture(),
            module=log.module,
            inputs=addresses,
            parameters=[]
            if graph.backward
            else [find(at, each) or 0 if each is not None else 0 for at, each in zip(addresses, tensors, strict=True)],
        )
        if log.stamp is not None:
            log.stamp(call.start_ns)
        return call

    def end(self, call: Call, results: Iterable[Any]) -> None:
        """Note that ``call`` has returned ``results``."""
        call.outputs = [self._log.storage_address(each) if is_tensor(each) else 0 for each in results]
        call.end_ns = time_ns()
        if self._log.stamp is not None:
            self._log.stamp(call.end_ns)
        if call.graph.backward:
            made = Counter(self._made[each] for each in call.inputs if each in self._made)
            call.forward = made.most_common(1)[0][0] if made else None
        else:
            self._made |= dict.fromkeys(filter(None, call.outputs), call)
            parameters = dict(zip(call.graph.text.inputs, call.parameters, strict=False))
            self._log.casts += sum(1 for name in call.graph.text.casts if parameters.get(name))
            self.explained += call.graph.text.understood
        self._calls.append(call)

    def attribute(self, time_ns: Column, address: Column, size: Column, action: Column, who: Who) -> Who:
        """``who`` allocated, with what the texts of compiled code say of it; the facts go into the log."""
        if not self._paths:
            return who
        op, module, stack = (column.copy() for column in who)
        rows: list[tuple[int, ...]] = []
        texts = self._log.texts
        calls: dict[str, list[Call]] = {}
        for each in self._calls:
            calls.setdefault(each.graph.path, []).append(each)
        in_order = self._in_order(time_ns, size, action)
        for at in np.flatnonzero(action == Action.ALLOC).tolist():
            place = self._place_of(int(stack[at])) if stack[at] else None
            if place is not None:
                call = _call_at(calls.get(place[0], []), int(time_ns[at]))
                line = place[1]
            elif at in in_order:
                call, line = in_order[at]
            else:
                continue
            self._bytes += int(size[at])
            names = None if call is None else self._names(call)
            name = None if names is None else names.at(line)
            if name is None or not name.stack:
                self._unnamed += int(size[at])
            if name is None or names is None:
                continue
            was = texts.value(int(op[at]))
            if was == _BUFFER or not was.startswith("aten::"):
                op[at] = name.op or op[at]
            module[at] = name.module or module[at]
            if self._stacks.enabled:
                stack[at] = name.stack or stack[at]
            rows += _facts(int(time_ns[at]), int(address[at]), name, names, texts.id)
        if rows:
            self._log.add_facts(np.array(rows, dtype=np.int64).reshape(-1, len(FactColumns.names())))
        return Who(op, module, stack)

    def _in_order(self, time_ns: Column, size: Column, action: Column) -> dict[int, tuple[Call | None, int]]:
        """The call and the line of each allocation, by their order: where there is no stack, as on the CPU.

        Ops that a graph calls have allocations of their own, too: a call counts only if all its own ones are found.
        """
        found: dict[int, tuple[Call | None, int]] = {}
        for call in self._calls:
            first, last = np.searchsorted(time_ns, (call.start_ns, call.end_ns)).tolist()
            lines = iter(call.graph.text.allocations)
            line, wanted = next(lines, (0, None))
            mine: dict[int, tuple[Call | None, int]] = {}
            for at in range(first, last):
                if action[at] == Action.ALLOC and call.graph.text.in_cpp:
                    mine[at] = None, 0
                elif action[at] == Action.ALLOC and size[at] == wanted:
                    mine[at] = call, line
                    line, wanted = next(lines, (0, None))
            if line == 0:
                found |= mine
        return found

    def name_saved(self, facts: FactColumns) -> FactColumns:
        """``facts`` with the ops for whose backward compiled code has saved tensors; ends what belongs to this step."""
        saved: dict[int, list[tuple[int, int]]] = {}
        for call in self._calls:
            names = None if call.graph.backward else self._names(call)
            for index, backward, held in names.saved() if names is not None else ():
                pair = call.graph.pair
                op = ("" if pair is None else pair.text.reader(backward)) or ("" if held is None else held.op)
                if op and index < len(call.outputs):
                    text = self._log.texts.id(op)
                    saved.setdefault(call.outputs[index], []).append((call.start_ns, text))
        since = self._calls[0].start_ns if self._calls else 0
        self._made = {address: call for address, call in self._made.items() if call.start_ns >= since}
        self._calls = []
        if not saved or _SAVED_BY not in self._log.texts:
            return facts
        name = facts.name.copy()
        mine = (facts.fact == Fact.SAVED) & (name == self._log.texts.id(_SAVED_BY))
        for at in np.flatnonzero(mine).tolist():
            known = saved.get(int(facts.address[at]), [])
            before = bisect_right(known, (int(facts.time_ns[at]), 1 << 62))
            if before:
                name[at] = known[before - 1][1]
        return replace(facts, name=name)

    def outside(self, stack: int) -> int:
        """Text id of a ``stack`` (a text id) that ends inside compiled code, cut where the script called that."""
        text = self._log.texts.value(stack)
        place = self._place_of(stack)
        above = text if place is None else text.partition(f"\n{place[0]}:")[0]
        return self._log.texts.id(script_lines(above))

    def _place_of(self, stack: int) -> tuple[str, int] | None:
        if stack not in self._places:
            lines = map(_LINE.fullmatch, reversed(self._log.texts.value(stack).splitlines()))
            inside = (found for found in lines if found is not None and found[1] in self._paths)
            self._places[stack] = next(((found[1], int(found[2])) for found in inside), None)
        return self._places[stack]

    def _names(self, call: Call) -> Names:
        forward = None if call.forward is None else self._names(call.forward)
        key = (tuple(call.parameters), call.stack, call.module, id(forward))
        names = call.graph.names.get(key)
        if names is None:
            texts = self._log.texts
            base = script_lines(texts.value(self._stacks.text_ids(texts)[call.stack]))
            names = call.graph.names[key] = Names(call, texts, base, forward)
        return names


def _call_at(calls: Sequence[Call], now_ns: int) -> Call | None:
    """The one of ``calls`` that runs at ``now_ns``, on a clock that may be off by some microseconds."""
    at = bisect_right(calls, now_ns, key=lambda call: call.start_ns)
    return calls[max(at - 1, 0)] if calls else None


def _facts(time_ns: int, address: int, name: Name, names: Names, text_id: Any) -> list[tuple[int, ...]]:
    """The rows of facts about an allocation, with the columns of ``FactColumns``."""
    held = name.held
    dtype, shape = text_id(held.dtype), text_id(held.shape)
    rows: list[tuple[int, ...]] = []
    if dtype:
        rows.append((time_ns, address, int(Fact.OUTPUT), name.op, name.module, dtype, shape))
    for each in (held, *held.others):
        parameter = names.parameter(each.cast) if each.cast else 0
        if parameter:  # a copy in memory that is for something else has none of its own
            where, dtype, shape = address if held.cast else 0, text_id(each.dtype), text_id(each.shape)
            for fact in (Fact.CAST_COPY, Fact.COMPILED):
                rows.append((time_ns, where, int(fact), parameter, name.module, dtype, shape))
    return rows
