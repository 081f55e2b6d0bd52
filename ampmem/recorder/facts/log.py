"""Facts, phases, modules and ops that the hooks saw since the last transaction, as flat lists: appending is cheap.

Names, modules, ops and stacks repeat, so columns hold the ids of :class:`Texts`. Hooks run in the middle of the script,
so no error of theirs may reach it: when an object's own code fails, or ampmem's, :class:`Misses` writes a note on what
is missing from the recording.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from ampmem.events import NO_STEP, Column, Columns, Fact, FactColumns, Phase, PhaseColumns
from ampmem.names import shape_text, warning
from ampmem.own_code import OWN_FOLDERS
from ampmem.recorder.facts.addresses import PLAIN, Addresses, parts_of
from ampmem.recorder.facts.tensors import NOTHING_KNOWN, TensorReader, TensorsFound
from ampmem.recorder.torch_private.general import never_compiled, next_node, untraced, without_functions


class Texts:
    """Gives each distinct text an id; 0 is the empty text."""

    def __init__(self) -> None:
        self._ids = {"": 0}
        self._values = [""]
        self._new: list[str] = []

    def id(self, text: str) -> int:
        """The id of ``text``, created at its first use."""
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids)
            storable = text.encode("utf-8", "backslashreplace").decode()  # file names may contain lone surrogates
            self._values.append(storable)
            self._new.append(storable)
        return known

    def __contains__(self, text: str) -> bool:
        """Whether ``text`` has an id."""
        return text in self._ids

    def value(self, text_id: int) -> str:
        """The text of an id."""
        return self._values[text_id]

    def take_new(self) -> list[str]:
        """The texts first used since the last call, ordered by id."""
        new, self._new = self._new, []
        return new


_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOST = 10
"""Maximum number of distinct errors that are noted."""

seen: list[str] = []
"""Errors noted by all recordings of this process, oldest first; the tests compare them with what they expect."""


class Misses:
    """Notes each distinct error inside ampmem once, with its place; ``note`` is called with the text."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] | None = None
        self._said: dict[str, None] = {}

    def add(self, error: BaseException) -> None:
        """Note that looking at an object of the script raised ``error``."""
        text = f"{type(error).__name__} at {_where(error.__traceback__)}"
        if text in self._said or len(self._said) == _MOST:
            return
        self._said[text] = None
        seen.append(text)
        self.say(warning(f"ampmem could not inspect an object of the script, and it is not in this recording: {text}"))

    def say(self, message: str) -> None:
        """Put ``message`` into the recording's notes."""
        if self.note is not None:
            self.note(message)

    def why(self) -> str:
        """The errors noted so far, as a suffix for a message that something was not seen; empty without errors."""
        return f" ({'; '.join(self._said)})" if self._said else ""

    def guarded(self, look: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """``look``, with errors noted instead of raised; it returns ``None`` then.

        Only ``Exception`` is caught: what stops the script on purpose is not one. Signal handlers wait meanwhile
        (``ampmem.signals``).
        """

        @functools.wraps(look)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            try:
                with without_functions():
                    return look(*args, **kwargs)
            except Exception as error:
                self.add(error)
                return None

        return never_compiled(untraced(run))


def _where(traceback: TracebackType | None) -> str:
    """The line of ampmem that raised, and the innermost line if that is another one."""
    ours = last = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        last = f"{Path(file).name}:{traceback.tb_lineno}"
        if file.startswith(OWN_FOLDERS):
            ours = last
        traceback = traceback.tb_next
    return ours if ours == last else f"{ours} ({last})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpColumns(Columns):
    """Columns of ops: start, end, name, call stack, and the number of the newest autograd node."""

    start_ns: Column
    end_ns: Column
    name: Column
    stack: Column
    sequence: Column


ELSEWHERE = 1 << 40
"""Added to a node number from another thread than the recorded one: autograd numbers nodes per thread."""


class See(Protocol):
    """Called with each tensor that hooks find to be the script's."""

    def __call__(self, tensor: torch.Tensor, *, kept: bool) -> None:
        """Take ``tensor``; ``kept`` if the script keeps it for long, as it does a parameter."""


_KEPT = frozenset({Fact.PARAMETER, Fact.BUFFER, Fact.OPTIMIZER_STATE, Fact.MASTER_COPY})
"""Facts about tensors that the script keeps for long."""
_TOLD = _KEPT | {Fact.INPUT, Fact.COMMUNICATION, Fact.COLLECTIVE}
"""Facts about tensors that are reported to the source: it may not have seen their allocation."""


class Log:
    """Facts, phases and running modules and ops, with times in ns on the clock of ``time.time_ns``."""

    def __init__(self, addresses: Addresses, see: See | None = None) -> None:
        self.storage_address = addresses.storage_address
        """The address of a tensor's storage: each fact is about one."""
        self.data_address = addresses.data_address
        """The address of a tensor's first element."""
        self.texts = Texts()
        self._see = see
        self.knows: Callable[[frozenset[int]], bool] = lambda addresses: True
        """Returns whether the source knows the storages at all these addresses, so that it need not be told of them."""
        self.misses = Misses()
        """Errors inside hooks, noted instead of raised."""
        self.step = NO_STEP
        self.phase = Phase.SETUP
        self.module = 0
        """Text id of the module that is running."""
        self.entered: set[int] = set()
        """Text ids of all modules that ran so far."""
        self.casts = 0
        """Number of casts of parameters seen so far."""
        self.in_graph: set[int] = set()
        """Text ids of all modules that ran with gradients on."""
        self.running_op = 0
        """Text id of the op that the dispatch mode sees running in forward; 0 if there is none."""
        self.running_in_cpp: Callable[[], int] = lambda: 0
        """Returns the text id of the op that the C++ extension sees running; 0 if there is none."""
        self.reader: TensorReader | None = None
        """Reads tensors by the C++ extension, if that is there."""
        self.collect: Callable[[], None] = lambda: None
        """Called before ops and facts are taken: the C++ extension has logged some of them."""
        self._kinds: dict[tuple[torch.dtype, torch.Size], tuple[int, int]] = {}
        """The text ids of each dtype and shape."""
        self._facts: list[int] = []
        self._phases: list[int] = [time_ns(), self.step, self.phase]
        self._modules: list[int] = []
        self._ops: list[int] = []
        self._more_ops: list[Column] = []
        self._more_facts: list[Column] = []
        """Tables of ops and of facts that the C++ extension has logged."""
        self._thread = threading.get_ident()
        self.observed = False
        """Whether ops are being logged."""
        self.stamp: Callable[[int], None] | None = None
        """Tags the calling thread's allocations from a given time on; for sources whose own clock is coarse."""
        self.stamps_ops: Callable[[], bool] = lambda: False
        """Returns whether :attr:`stamp` has to be called at each op."""

    def fact(
        self,
        fact: Fact,
        address: int,
        name: int = 0,
        module: int = 0,
        tensor: torch.Tensor | None = None,
        *,
        at: int | None = None,
    ) -> None:
        """Log that ``fact`` is true of the storage at ``address``, now or at the time ``at`` (ns).

        ``tensor`` is the tensor with that storage that the fact is about, if there is one.
        """
        dtype, shape = (0, 0) if tensor is None else self._kind(tensor)
        now = time_ns() if at is None else at
        # Not +=, which another thread may be interrupted in, and then puts a list back that was taken meanwhile.
        self._facts.extend((now, address, fact, name, module, dtype, shape if address else 0))

    def _kind(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Text ids of ``tensor``'s dtype and shape."""
        try:
            kind = tensor.dtype, tensor.shape
            known = self._kinds.get(kind)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, and a symbolic size is not hashable
            return self.texts.id(str(tensor.dtype).removeprefix("torch.")), 0
        if known is None:
            dtype, shape = kind
            ids = self.texts.id(str(dtype).removeprefix("torch.")), self.texts.id(shape_text(shape))
            known = self._kinds[kind] = ids
        return known

    def about(self, fact: Fact, tensor: torch.Tensor, name: int = 0, module: int = 0, *, at: int | None = None) -> None:
        """Log that ``fact`` is true of the storages of all parts of ``tensor``, now or at the time ``at`` (ns)."""
        now = time_ns() if at is None else at
        try:
            # Fast path: most tensors are plain, with a dtype and shape seen before.
            plain = type(tensor) in PLAIN and tensor.layout is torch.strided
            for part in (tensor,) if plain else parts_of(tensor):
                address = self.storage_address(part)
                try:
                    dtype, shape = self._kinds[part.dtype, part.shape]
                except (KeyError, RuntimeError, TypeError):
                    dtype, shape = self._kind(part)
                self._facts.extend((now, address, fact, name, module, dtype, shape if address else 0))
                if self._see is not None and fact in _TOLD:
                    self._see(part, kept=fact in _KEPT)
        except Exception as error:  # a subclass may refuse to be read
            self.misses.add(error)

    def follow(self, tensor: torch.Tensor) -> None:
        """Make the source see when ``tensor``'s storage is freed, on whichever thread."""
        if self._see is not None:
            for part in parts_of(tensor):
                self._see(part, kept=False)

    def enter_phase(self, phase: Phase, *, step: int | None = None) -> None:
        """Log that the script enters ``phase``, and ``step`` if that is given."""
        if step is not None:
            self.step = step
        elif phase == self.phase:
            return
        self.phase = phase
        now = time_ns()
        self._phases += (now, self.step, phase)
        if self.stamp is not None:
            self.stamp(now)

    def begin_step(self, since_ns: int, step: int) -> None:
        """Begin ``step`` in the past: everything logged after ``since_ns`` belongs to it."""
        width = len(PhaseColumns.names())
        # From the newest back: few changes of phase can be later than that time.
        for row in range(len(self._phases) - width, -1, -width):
            if self._phases[row] < since_ns:
                break
            self._phases[row + 1] = step
        self.step = step

    def make_steps(self, starts: Sequence[int], ends: Sequence[int], most: int) -> None:
        """Log afterwards the ``starts`` and ``ends`` of forwards, of which the first ``most`` were steps."""
        width, ended = len(PhaseColumns.names()), len(ends)
        times = np.array([*self._phases[::width], *starts, *ends], dtype=np.int64)
        phases = np.array([*self._phases[2::width], *[Phase.FORWARD] * ended, *[Phase.BETWEEN] * ended])
        step = np.where(times < starts[0], NO_STEP, np.searchsorted(ends[:most], times, side="right"))
        phases[phases == Phase.EVALUATION] = Phase.FORWARD
        phases[(phases == Phase.SETUP) & (step != NO_STEP)] = Phase.BETWEEN
        order = np.argsort(times, kind="stable")
        self._phases = np.stack([times, step, phases], axis=1)[order].reshape(-1).tolist()

    def enter_module(self, module: int) -> None:
        """Log that code of ``module`` (a text id) runs from now on."""
        self.module = module
        self._modules += (time_ns(), module)

    def started(self, module: int) -> None:
        """Log that the forward of ``module`` (a text id) starts."""
        self.entered.add(module)
        if torch.is_grad_enabled():
            self.in_graph.add(module)
        self.enter_module(module)

    def running(self) -> str:
        """The path of the running module."""
        return self.texts.value(self.module)

    def ran(self) -> list[str]:
        """The paths of all modules that have run so far."""
        return [self.texts.value(module) for module in sorted(self.entered)]

    def op(self, start_ns: int, name: int, stack: int) -> None:
        """Log the op ``name`` that has just ended, called from ``stack``; its autograd node, if any, is the newest."""
        made = next_node() - 1
        # Another thread: of the script, or autograd's, on which a reentrant checkpoint computes forward again.
        if threading.get_ident() != self._thread:
            made += ELSEWHERE
        self._ops += (start_ns, time_ns(), name, stack, made)

    @property
    def on_own_thread(self) -> bool:
        """Whether the calling thread is the recorded one."""
        return threading.get_ident() == self._thread

    def add_ops(self, table: Column) -> None:
        """Log ops that have ended, as rows of :class:`OpColumns`."""
        self._more_ops.append(table)

    def add_facts(self, table: Column) -> None:
        """Log facts, as rows of ``FactColumns``."""
        self._more_facts.append(table)

    @property
    def fact_count(self) -> int:
        """Number of integers in the facts that Python has logged since the last :meth:`take_facts`."""
        return len(self._facts)

    def facts_since(self, count: int) -> Column:
        """The facts logged since :attr:`fact_count` was ``count``, as rows of ``FactColumns``."""
        return np.array(self._facts[count:], dtype=np.int64).reshape(-1, len(FactColumns.names()))

    def modules_at(self, times: Column) -> Column:
        """Text ids of the modules that ran at ``times``, which are all after the last call of :meth:`take_modules`."""
        known = np.array([0, 0, *self._modules], dtype=np.int64).reshape(-1, 2)
        found: Column = known[np.searchsorted(known[:, 0], times, side="right") - 1, 1]
        return found

    def take_facts(self) -> FactColumns:
        """Facts since the last call."""
        self.collect()
        columns, self._facts = self._facts, []
        more, self._more_facts = self._more_facts, []
        return FactColumns(**_columns_by_time(columns, FactColumns, more))

    def take_phases(self) -> PhaseColumns:
        """Phase changes since the last call."""
        columns, self._phases = self._phases, []
        return PhaseColumns(**_columns_by_time(columns, PhaseColumns, []))

    def take_modules(self) -> tuple[Column, Column]:
        """Times and module text ids since the last call; the module running at its end stays for the next call."""
        taken, self._modules = self._modules, self._modules[-2:]
        times, modules = np.array(taken, dtype=np.int64).reshape(-1, 2).T
        return times, modules

    def take_ops(self) -> OpColumns:
        """Ops since the last call."""
        self.collect()
        taken, self._ops = self._ops, []
        more, self._more_ops = self._more_ops, []
        return OpColumns(**_columns_by_time(taken, OpColumns, more))


class Repeated:
    """Facts that a hook logs in each step: the C++ extension logs them anew while their tensors are the same."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._told: frozenset[int] = frozenset()
        """Addresses of the storages that were reported to the source."""

    def log(self, key: int, read: Callable[[TensorReader, int, int], int] | None, look: Callable[[], None]) -> bool:
        """Log the facts that ``look`` logs about a set of tensors; returns whether it is the set of the last call.

        ``read`` reads the set: it is called with the extension's reader, this object's number, and ``key``, which
        changes when anything else changes that the facts depend on. For the same set the extension logs the facts.
        """
        log, reader, found = self._log, self._log.reader, int(TensorsFound.UNREADABLE)
        if reader is not None and read is not None:
            found = read(reader, id(self), key if log.knows(self._told) else NOTHING_KNOWN)
        if found == TensorsFound.REPEATED:
            return True
        if reader is not None:  # what ``look`` will find may have effects that older facts do not have
            reader.forget(id(self))
        since = log.fact_count
        look()
        if reader is not None and found == TensorsFound.READ:
            facts = log.facts_since(since)
            self._told = frozenset(address for address, fact in facts[:, 1:3].tolist() if address and fact in _TOLD)
            reader.keep(id(self), key, facts)
        return False


def _columns_by_time(flat: list[int], kind: type[Columns], more: list[Column]) -> dict[str, Column]:
    """The columns of the rows in ``flat`` and in the tables ``more``, whose first column is a time."""
    names = kind.names()
    table = np.fromiter(flat, dtype=np.int64, count=len(flat)).reshape(-1, len(names))
    if more:
        table = np.concatenate([table, *more])
        # Stable: rows of equal times stay in the order in which they were logged.
        table = table.take(np.argsort(table[:, 0], kind="stable"), axis=0)
    return dict(zip(names, np.ascontiguousarray(table.T), strict=True))
