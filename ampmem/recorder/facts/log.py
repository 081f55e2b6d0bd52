"""What the hooks saw since the last transaction, as flat lists that cost little to append to.

Names, modules, ops and stacks repeat, so columns hold numbers for :class:`Texts`. Hooks run in the middle of the
script, so nothing that goes wrong in them may come out there: of objects of the script's whose own code fails, and of
faults of ours, :class:`Misses` makes a note that says what is not in the recording.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
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
from ampmem.recorder.torch_private.general import never_compiled, next_node, untraced, without_functions


class Texts:
    """Gives every distinct text an id; 0 is the empty text."""

    def __init__(self) -> None:
        self._ids = {"": 0}
        self._values = [""]
        self._new: list[str] = []

    def id(self, text: str) -> int:
        """The id of ``text``, a new one at its first use."""
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids)
            storable = text.encode("utf-8", "backslashreplace").decode()  # file names may hold lone surrogates
            self._values.append(storable)
            self._new.append(storable)
        return known

    def value(self, text_id: int) -> str:
        """The text behind an id."""
        return self._values[text_id]

    def take_new(self) -> list[str]:
        """The texts first used since the last call, in the order of their ids."""
        new, self._new = self._new, []
        return new


_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOST = 10
"""So many are told apart."""

seen: list[str] = []
"""What all recordings of this process could not look at, the oldest first: tests know what they expect."""


class Misses:
    """Says of each what it was and where, once. ``note`` is told."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] | None = None
        self._said: dict[str, None] = {}

    def add(self, error: BaseException) -> None:
        """``error`` was raised where something of the script's was looked at."""
        text = f"{_kind(error)} at {_where(error.__traceback__)}"
        if text in self._said or len(self._said) == _MOST:
            return
        self._said[text] = None
        seen.append(text)
        self.say(warning(f"something in the script could not be looked at, and is not in this recording: {text}"))

    def say(self, message: str) -> None:
        """A reader of the recording must know ``message``."""
        if self.note is not None:
            self.note(message)

    def why(self) -> str:
        """What to add to a message that something was not seen at all."""
        return f" ({'; '.join(self._said)})" if self._said else ""

    def guarded(self, look: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """``look``, but nothing that goes wrong in it comes out: ``None`` does.

        It is ``Exception`` that is kept: what stops the script on purpose is none. No handler of a signal runs
        meanwhile (``ampmem.signals``).
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


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _where(traceback: TracebackType | None) -> str:
    """The line of ours that looked, and the one that failed where that is another."""
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
    """When each op started and ended, its name, where it was called from, the newest autograd node's number."""

    start_ns: Column
    end_ns: Column
    name: Column
    stack: Column
    sequence: Column


ELSEWHERE = 1 << 40
"""Added to the number of a node that another thread than the recorded one has made: each thread counts its own."""


class See(Protocol):
    """What is told of tensors that hooks find to be the script's."""

    def __call__(self, tensor: torch.Tensor, *, kept: bool) -> None:
        """``kept`` where it is the script's for long."""


_KEPT = frozenset({Fact.PARAMETER, Fact.BUFFER, Fact.OPTIMIZER_STATE, Fact.MASTER_COPY})
_TOLD = _KEPT | {Fact.INPUT, Fact.COMMUNICATION, Fact.COLLECTIVE}


class Log:
    """Facts, phases, and who was running when: three streams on the clock of ``time.time_ns``."""

    def __init__(self, addresses: Addresses, texts: Texts, see: See | None = None) -> None:
        self.storage_address = addresses.storage_address
        """Where a tensor's storage lies: what facts are about."""
        self.data_address = addresses.data_address
        """Where a tensor's first element lies."""
        self._texts = texts
        self._see = see
        self.misses = Misses()
        """What could not be looked at."""
        self.step = NO_STEP
        self.phase = Phase.SETUP
        self.module = 0
        """Text id of the module that is running."""
        self.entered: set[int] = set()
        """Text ids of all modules that ran so far."""
        self.casts = 0
        """How many casts of parameters were seen."""
        self.in_graph: set[int] = set()
        """Text ids of those that ran with gradients on."""
        self.running_op = 0
        """Text id of the op that is running on the recorded thread, in forward."""
        self._kinds: dict[tuple[torch.dtype, torch.Size], tuple[int, int]] = {}
        """By dtype and shape, the ids of their texts."""
        self._facts: list[int] = []
        self._phases: list[int] = [time_ns(), self.step, self.phase]
        self._modules: list[int] = []
        self._ops: list[int] = []
        self._thread = threading.get_ident()
        self.observed = False
        """Whether ops are being logged."""
        self.stamp: Callable[[int], None] | None = None
        """Tags what the calling thread allocates from an instant on, for sources whose own clock is coarse."""

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
        """``fact`` is true of the storage at ``address`` now, or was at the instant ``at``.

        ``tensor`` is the one with that storage that it is about, where there is one.
        """
        dtype, shape = (0, 0) if tensor is None else self._kind(tensor)
        self._facts += (time_ns() if at is None else at, address, fact, name, module, dtype, shape if address else 0)

    def _kind(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Text ids of the dtype and the shape of ``tensor``."""
        try:
            kind = tensor.dtype, tensor.shape
            known = self._kinds.get(kind)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, and a symbol cannot be looked up
            return self._texts.id(str(tensor.dtype).removeprefix("torch.")), 0
        if known is None:
            dtype, shape = kind
            ids = self._texts.id(str(dtype).removeprefix("torch.")), self._texts.id(shape_text(shape))
            known = self._kinds[kind] = ids
        return known

    def about(self, fact: Fact, tensor: torch.Tensor, name: int = 0, module: int = 0, *, at: int | None = None) -> None:
        """``fact`` is true of all memory of ``tensor`` now, or was at the instant ``at``: of all its parts."""
        now = time_ns() if at is None else at
        try:
            # Most are plain, and of a type and a shape that were there before: not worth two calls.
            plain = type(tensor) in PLAIN and tensor.layout is torch.strided
            for part in (tensor,) if plain else parts_of(tensor):
                address = self.storage_address(part)
                try:
                    dtype, shape = self._kinds[part.dtype, part.shape]
                except (KeyError, RuntimeError, TypeError):
                    dtype, shape = self._kind(part)
                self._facts += (now, address, fact, name, module, dtype, shape if address else 0)
                if self._see is not None and fact in _TOLD:
                    self._see(part, kept=fact in _KEPT)
        except Exception as error:  # of a subclass that does not let it be asked
            self.missed(error)

    def follow(self, tensor: torch.Tensor) -> None:
        """Have the source hear when the memory of ``tensor`` dies, whichever thread it is that frees it."""
        if self._see is not None:
            for part in parts_of(tensor):
                self._see(part, kept=False)

    def missed(self, error: Exception) -> None:
        """Something of the script's could not be looked at: it is left out, which must not go unsaid."""
        self.misses.add(error)

    def enter_phase(self, phase: Phase, *, step: int | None = None) -> None:
        """From now on the script is in ``phase``, and in ``step`` when that is given."""
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
        """What came after ``since_ns`` belongs to ``step``, as turns out now."""
        width = len(PhaseColumns.names())
        for row in range(len(self._phases) - width, -1, -width):
            if self._phases[row] < since_ns:
                break
            self._phases[row + 1] = step
        self.step = step

    def enter_module(self, module: int) -> None:
        """From now on code of ``module`` (a text id) runs."""
        self.module = module
        self._modules += (time_ns(), module)

    def started(self, module: int) -> None:
        """The forward of ``module`` (a text id) starts."""
        self.entered.add(module)
        if torch.is_grad_enabled():
            self.in_graph.add(module)
        self.enter_module(module)

    def running(self) -> str:
        """The path of the module that is running."""
        return self._texts.value(self.module)

    def ran(self) -> list[str]:
        """The paths of all modules that ran so far."""
        return [self._texts.value(module) for module in sorted(self.entered)]

    def op(self, start_ns: int, name: int, stack: int) -> None:
        """The op ``name``, called from ``stack``, has just ended; if it made an autograd node, that is the newest."""
        made = next_node() - 1
        # Or the engine's thread, on which a reentrant checkpoint computes forward again.
        if threading.get_ident() != self._thread:
            made += ELSEWHERE
        self._ops += (start_ns, time_ns(), name, stack, made)

    def take_facts(self) -> FactColumns:
        """The facts since the last call."""
        columns, self._facts = self._facts, []
        return FactColumns(**_split(columns, FactColumns))

    def take_phases(self) -> PhaseColumns:
        """The phase changes since the last call."""
        columns, self._phases = self._phases, []
        return PhaseColumns(**_split(columns, PhaseColumns))

    def take_modules(self) -> tuple[Column, Column]:
        """(times, module text ids) since the last call; the state at its end stays for the next."""
        taken, self._modules = self._modules, self._modules[-2:]
        times, modules = np.array(taken, dtype=np.int64).reshape(-1, 2).T
        return times, modules

    def take_ops(self) -> OpColumns:
        """The ops since the last call."""
        taken, self._ops = self._ops, []
        return OpColumns(**_split(taken, OpColumns))


def _split(flat: list[int], kind: type[Columns]) -> dict[str, Column]:
    names = kind.names()
    table = np.array(flat, dtype=np.int64).reshape(-1, len(names))
    return {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)}
