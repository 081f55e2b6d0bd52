"""The ops of forward as the C++ extension saw them, put into the log as the dispatch mode would.

The extension (``sources/ops.cpp``) writes tables of integers while forward runs; they are read when forward ends. It
sees plain tensors only: where a script has others, or dispatch modes, ``hooks/forward.py`` takes the mode.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable

import numpy as np

from ampmem.events import Column, Fact
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.tensors import Forms, TensorReader
from ampmem.recorder.hooks.casts import CastHooks, SeenCopy
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources import extension
from ampmem.vocabulary import FUSED_ATTENTION

_OP, _FACT = 5, 8
"""Integers of an op and of a fact in the extension's tables."""
_OUTPUT, _SAVED, _USE, _TO_COPY, _COPY = range(5)
"""The kinds of rows in the table of facts."""
_VIEW, _LEAF = 1, 2
_I64 = ctypes.c_int64
_COUNTS, _TAKEN = _I64 * 7, _I64 * 2
_POINTER = ctypes.POINTER(_I64)


class OpRecorder:
    """Records ops between :meth:`start` and :meth:`stop`, and logs them when :meth:`take` is called.

    ``other`` is called once after each start, after the first op that only a dispatch mode sees right; it must not
    raise.
    """

    def __init__(
        self, library: ctypes.CDLL, log: Log, casts: CastHooks, stacks: Stacks, other: Callable[[], object]
    ) -> None:
        self._library = library
        self._log = log
        self._casts = casts
        self._stacks = stacks
        self._names, self._stack_ids = array("q", [0]), array("q", [0])
        """Ids in the recording of the extension's names and stacks."""
        self._forms = Forms(library.ampmem_ops_form, log.texts.id)
        library.ampmem_ops_start.argtypes = (_I64, ctypes.c_void_p)
        library.ampmem_ops_take.argtypes = (*(ctypes.c_void_p, _I64) * 2, _TAKEN)
        library.ampmem_ops_name.argtypes, library.ampmem_ops_name.restype = (_I64,), ctypes.c_char_p
        library.ampmem_ops_stack.argtypes, library.ampmem_ops_stack.restype = (_I64, ctypes.POINTER(_POINTER)), _I64
        library.ampmem_ops_holders.argtypes, library.ampmem_ops_holders.restype = (_I64,), _I64
        library.ampmem_ops_forget.argtypes, library.ampmem_ops_copies.restype = (_I64,), _I64
        library.ampmem_ops_before.argtypes = (ctypes.c_void_p,)
        self._before: object = None
        self._other = _called_from_cpp(other)
        library.ampmem_ops_clear()
        # The log asks for what C++ has when it is taken, and for the op that runs when memory runs out.
        log.collect, log.running_in_cpp = self.take, self.running_op
        casts.collect, casts.drop = self._take_casts, self._forget

    @staticmethod
    def find(log: Log, casts: CastHooks, stacks: Stacks, other: Callable[[], object]) -> OpRecorder | None:
        """A recorder, if the compiled extension has this part and the recorded device is a real one."""
        if log.storage_address is not RealAddresses.storage_address:
            return None
        found = extension.find()
        if found is None or not hasattr(found.library, "ampmem_ops_start"):
            return None
        log.reader = TensorReader.find(found.with_gil, log.texts.id)
        return OpRecorder(found.library, log, casts, stacks, other)

    def start(self) -> bool:
        """Begin on the calling thread; returns whether torch allows it."""
        self._stacks.by_cpp = not self._library.ampmem_ops_start(self._stacks.enabled, self._other)
        return self._stacks.by_cpp

    def stop(self) -> None:
        """Stop, on the thread that has started, and log what was seen."""
        self.read_saved()
        self._stacks.by_cpp = False
        self._library.ampmem_ops_stop()
        self.take()
        self._forget(0)

    def _forget(self, address: int) -> None:
        """Let go of the cast at ``address``; if that is 0, of those that were freed."""
        self._library.ampmem_ops_forget(address)

    def read_saved(self) -> None:
        """Read now what the newest op saved, and not before the next op."""
        self._library.ampmem_ops_read()

    def call_before(self, call: Callable[[], object] | None) -> None:
        """Call ``call`` before each op from now on, or nothing any more; it must not raise."""
        if call is None:
            self._library.ampmem_ops_before(None)
            return
        # ctypes frees a callback with its Python object: it must live for as long as C++ may call it.
        before = _called_from_cpp(call)
        self._library.ampmem_ops_before(before)
        self._before = before  # not earlier: C++ has the one that is freed now

    def counts(self) -> list[int]:
        """The numbers of ops, facts, names, forms and stacks; of ops that need a mode; the name of the running op."""
        counts = _COUNTS()
        self._library.ampmem_ops_count(counts)
        return list(counts)

    @property
    def needs_mode(self) -> bool:
        """Whether there was an op that only a dispatch mode sees right."""
        return self.counts()[5] > 0

    def running_op(self) -> int:
        """Text id of the op that runs now; 0 if there is none."""
        counts = self.counts()
        self._learn_names(counts[2])
        return self._names[counts[6]]

    def take(self) -> None:
        """Log what was seen since the last call."""
        repeated = None if self._log.reader is None else self._log.reader.take()
        if repeated is not None:
            self._log.add_facts(repeated)
        op_count, fact_count, names, forms, stacks, _, _ = self.counts()
        if not op_count and not fact_count:
            return
        # Python makes the room, and C++ fills at most so much: another thread may add rows after the count.
        ops, facts = np.empty((op_count, _OP), np.int64), np.empty((fact_count, _FACT), np.int64)
        taken = _TAKEN()
        self._library.ampmem_ops_take(ops.ctypes.data, op_count, facts.ctypes.data, fact_count, taken)
        ops, facts = ops[: taken[0]], facts[: taken[1]]
        self._learn_names(names)
        self._forms.learn(forms)
        self._learn_stacks(stacks)
        ops[:, 2] = np.asarray(self._names)[ops[:, 2]]
        ops[:, 3] = np.asarray(self._stack_ids)[ops[:, 3]]
        self._log.add_ops(ops)
        self._log_facts(facts)

    def _take_casts(self) -> None:
        """Log what was seen since the last call, if there are casts: most steps without autocast have none."""
        if self._library.ampmem_ops_copies():
            self.take()

    def _learn_names(self, count: int) -> None:
        for index in range(len(self._names), count):
            self._names.append(self._log.texts.id(self._library.ampmem_ops_name(index).decode()))

    def _learn_stacks(self, count: int) -> None:
        frames = _POINTER()
        for index in range(len(self._stack_ids), count):
            length = self._library.ampmem_ops_stack(index, ctypes.byref(frames))
            self._stack_ids.append(self._stacks.add(tuple(frames[:length])))

    def _log_facts(self, facts: Column) -> None:
        time, kind, address, name, form, *_ = facts.T
        modules = self._log.modules_at(time)
        names, (dtypes, shapes) = np.asarray(self._names)[name], self._forms.text_ids(form, address)
        fact, wanted = np.full(len(facts), Fact.OUTPUT), kind < _USE
        fact[kind == _SAVED], modules[kind == _SAVED] = Fact.SAVED, 0
        self._log.add_facts(np.stack([time, address, fact, names, modules, dtypes, shapes], axis=1)[wanted])
        rows: list[tuple[int, ...]] = []
        for place in np.flatnonzero((kind == _OUTPUT) & (facts[:, -1] != 0)).tolist():
            disabled = (kernel for bit, kernel in enumerate(FUSED_ATTENTION) if facts[place, -1] >> bit & 1)
            of_kernels = Fact.DISABLED, self._log.texts.id(", ".join(disabled)), 0
            rows.append((*facts[place, [0, 2]].tolist(), *of_kernels, int(dtypes[place]), int(shapes[place])))
        for place in np.flatnonzero(~wanted).tolist():
            rows += self._of_casts(facts[place].tolist(), *(int(x[place]) for x in (names, modules, dtypes, shapes)))
        if rows:
            self._log.add_facts(np.array(rows, dtype=np.int64))

    def _of_casts(self, row: list[int], name: int, module: int, dtype: int, shape: int) -> list[tuple[int, ...]]:
        """The facts about a cast, or about an op that reads one, from a ``row`` of the extension's table."""
        time, kind, address, _, _, storage, start, flags = row
        if kind == _USE:
            used = self._casts.copies.get(address)
            return [] if used is None else [(time, address, Fact.CAST_USE, name, 0, 0, 0)]
        parameter, buffer = self._casts.named(storage, start)
        found: list[tuple[int, ...]] = []
        if parameter is not None:
            self._log.casts += 1
            found.append((time, address, Fact.CAST_COPY, parameter, module, dtype, shape))
            if flags & _VIEW and kind == _TO_COPY:
                found.append((time, address, Fact.VIEW_CAST, parameter, module, dtype, shape))
        elif kind == _TO_COPY:
            found.append((time, address, Fact.OTHER_CAST, buffer or 0, module, dtype, shape))
            found.append((time, storage, Fact.CAST_SOURCE, 0, 0, 0, 0))
        if kind == _TO_COPY:
            if parameter is not None or flags & _LEAF:
                self._casts.copies[address] = SeenCopy(address, self._library.ampmem_ops_holders)
            else:  # the storage of a copy that was freed
                self._casts.copies.pop(address, None)
        return found


def _called_from_cpp(call: Callable[[], object]) -> object:
    """A C function that calls ``call``; to be kept for as long as C++ has it."""
    return ctypes.CFUNCTYPE(None)(lambda: call() and None)
