"""Numbers on the device with known values although nothing is computed there, and guesses for the others.

A GradScaler needs two of them: its scale, and whether it found an infinity.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampmem.output import Terminal
from ampmem.own_code import script_line
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.general import FakeTensor, arguments_written, below_modes, is_computed, storage_key

aten = torch.ops.aten

Number = int | float | bool


class Known:
    """Known values of small tensors on the device: integers and booleans, and single numbers of any dtype.

    They come from the script's own data, and from ops that fill; results computed from them alone are computed on the
    CPU, too. Kept by storage, as bytes on the CPU, so each view of it shows the same. Any write makes the whole storage
    unknown: code that sees a write calls :meth:`forget`.
    """

    MOST = 1 << 16
    """Maximum number of elements; values of larger tensors are not kept."""

    def __init__(self) -> None:
        self.held: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = weakref.WeakKeyDictionary()
        """The values, as bytes on the CPU, by the storage on the device."""

    def values_of(self, tensor: Any) -> torch.Tensor | None:
        """The values of ``tensor`` as a CPU tensor, ``None`` if unknown.

        For a tensor on the device it is a view of the kept values: a write to it changes them.
        """
        if not self._small(tensor):
            return None
        if not isinstance(tensor, FakeTensor):
            return tensor.detach() if tensor.device.type == "cpu" else None
        storage = tensor.untyped_storage()
        held = self.held.get(storage)
        if held is None or held.nbytes() != storage.nbytes() or tensor.is_neg() or tensor.is_conj():
            return None
        return seen_as(tensor, held)

    def number(self, tensor: torch.Tensor) -> Number | None:
        """The single number in ``tensor``, ``None`` if unknown."""
        real = self.values_of(tensor)
        number: Number | None = None if real is None else real.item()
        return number

    def note(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """Note that ``tensor``, which fills its memory, is now a copy of ``real``."""
        storage = tensor.untyped_storage()
        self.forget(storage)
        # Of a tensor that is only a part of its storage the rest would be unknown.
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if whole and self._small(tensor) and real.shape == tensor.shape and real.dtype == tensor.dtype:
            with below_modes():
                held = torch.UntypedStorage(storage.nbytes())
                seen_as(tensor, held).copy_(real.detach())
            self.held[storage] = held

    def fill(self, tensor: torch.Tensor, number: Number) -> None:
        """Note that all of ``tensor`` is now ``number``."""
        with below_modes():
            self.note(tensor, torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu"))

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Forget the values of ``storage``, which was written to."""
        self.held.pop(storage, None)

    def note_result(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of ``result``, which ``func`` returned for these arguments, if they are known."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not results or not all(isinstance(one, FakeTensor) and self._small(one) for one in results):
            return
        if not is_computed(func):
            return
        given = {storage_key(one.untyped_storage()) for one in fakes_in((*args, *kwargs.values()))}
        if any(storage_key(one.untyped_storage()) in given for one in results):
            return  # views: their values are kept already, or unknown
        real = self.computed(func, args, kwargs) or self._decided(func, args, results[0])
        for one, known in zip(results, real, strict=True) if real else ():
            self.note(one, known)

    def _decided(self, func: Any, args: Any, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``result`` if one operand decides it: `True or unknown` is known to be True."""
        settles = _SETTLES.get(func)
        whole = not (result.is_floating_point() or result.is_complex())
        if settles is None or not whole or (settles and result.dtype != torch.bool):
            return ()
        with below_modes():
            if not any(self._is_all(operand, settles) for operand in args):
                return ()
            return (torch.full(result.shape, settles, dtype=result.dtype, device=_CPU),)

    def _is_all(self, operand: Any, answer: bool) -> bool:
        known = self.values_of(operand) if isinstance(operand, torch.Tensor) else torch.as_tensor(operand)
        return known is not None and bool((known.bool() == answer).all())

    def sized_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``, whose size depends on values, in memory of the device.

        ``None`` if a value is unknown.
        """
        first = next(fakes_in(args), None)
        real = None if first is None else self.computed(func, args, kwargs)
        if first is None or not real or not all(map(self._small, real)):
            return None
        results = tuple(first.new_empty(one.shape, dtype=one.dtype) for one in real)
        for one, known in zip(results, real, strict=True):
            self.note(one, known)
        return results if len(results) > 1 else results[0]

    def computed(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The results of ``func`` on the CPU; empty if an argument's value is unknown."""
        if not is_computed(func):
            return ()
        try:
            given = self._real(args, func), self._real(kwargs, func)
            with below_modes():
                real = _HERE.get(func, func)(*given[0], **given[1])
        except Exception:  # unknown, or the CPU has no kernel for it
            return ()
        return tuple(real) if isinstance(real, (tuple, list)) else (real,)

    def _real(self, value: Any, func: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.values_of(value)
            # Some ops read only the shape of a tensor: one without memory of its own stands for it.
            if known is None and func not in _SHAPED_LIKE:
                raise _Unknown
            return torch.empty((), dtype=value.dtype, device=_CPU).expand(value.shape) if known is None else known
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(item, func) for item in value)
        if isinstance(value, Mapping):
            return {name: self._real(item, func) for name, item in value.items()}
        return _CPU if isinstance(value, torch.device) else value

    def _small(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= (1 if tensor.is_floating_point() or tensor.is_complex() else self.MOST)


_CPU = torch.device("cpu")
_SHAPED_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
"""Ops whose results do not depend on the values of their tensor argument."""


def _histogram(tensor: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
    """``histc``, which counts integers on a GPU only."""
    return torch.histc(tensor.double(), *how, **named).to(tensor.dtype)


_HERE = {aten.histc.default: _histogram}
"""Functions that compute an op on the CPU where the CPU's own kernel supports less."""

_SETTLES = {
    aten.bitwise_or.Tensor: True,
    aten.bitwise_or.Scalar: True,
    aten.logical_or.default: True,
    aten.bitwise_and.Tensor: False,
    aten.bitwise_and.Scalar: False,
    aten.logical_and.default: False,
    aten.mul.Tensor: False,
}
"""The operand value that decides such an op: ``True`` for ``or``, ``False`` or 0 for ``and`` and products.

Only for integers: infinity times 0 is not 0, and 2 or True is 3.
"""


def seen_as(tensor: torch.Tensor, held: torch.UntypedStorage) -> torch.Tensor:
    """The values in ``held`` in the shape and strides of ``tensor``."""
    with below_modes():
        view = torch.empty(0, dtype=tensor.dtype, device=_CPU)
        return view.set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Unknown(Exception):
    """A value is unknown."""


def fakes_in(value: Any) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from fakes_in(item)


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.UntypedStorage]:
    """The device storages that ``func`` writes to when called with these arguments."""
    for place, name in arguments_written(func):
        given = args[place] if place < len(args) else kwargs.get(name)
        yield from (tensor.untyped_storage() for tensor in fakes_in(given))


def guess(dtype: torch.dtype) -> Number:
    """The guess for a number that was never computed."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1


def _number_of_dtype(dtype: torch.dtype, number: float) -> Number:
    """``number`` as read from a tensor of ``dtype``."""
    if dtype == torch.bool:
        return bool(number)
    return float(number) if dtype.is_floating_point or dtype.is_complex else int(number)


class MadeUpTensors:
    """Real tensors on the CPU whose numbers were made up, and with :attr:`follow` those computed from them."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.follow = False

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return len(self._storages) > 0 and _on_cpu(tensor) and tensor.untyped_storage() in self._storages

    def add(self, tensor: torch.Tensor) -> None:
        """Note that the numbers in ``tensor`` were made up."""
        self._storages.add(tensor.untyped_storage())

    def note_result(self, given: Sequence[Any], result: Any) -> None:
        """Note the ``result`` of an op with the arguments ``given``: it is made up if one of them is."""
        if self.follow and self._storages and any(one in self for one in given if isinstance(one, torch.Tensor)):
            for one in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(one, torch.Tensor) and _on_cpu(one):
                    self.add(one)


def _on_cpu(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has real memory on the CPU."""
    return not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"


class Guesses:
    """Notes on guessed numbers, with the lines of the script: one note per kind."""

    SHOWN = 5
    """Maximum number of lines named."""
    MANY = 10_000
    """Number of reads on one line that suggests a loop waiting for a value to change, which it never does."""

    def __init__(self, device: SimulatedDevice, assumed: Assumed = NOTHING) -> None:
        self._device = device
        self._assumed = assumed
        unread = f"{assumed.named} for {{}} changed nothing: no number was read from the device on that line"
        self._unused = {line: unread.format(line) for line in assumed.numbers}
        for text in self._unused.values():
            device.warn(text)
        self._lines: dict[str, Counter[str]] = {}
        self._warned: Counter[str] = Counter()
        self._more: set[str] = set()
        self.backward_seen = False
        """Whether the script trains: later reads are of losses and counts."""

    def assumed(self, dtype: torch.dtype) -> Number | None:
        """The user's number for the running line, as ``dtype``."""
        if not self._assumed.numbers:
            return None
        found = self._assumed.number(script_line())
        if found is None:
            return None
        line, number = found
        if line in self._unused:
            self._device.retract(self._unused.pop(line))
        self._device.assume(f"assumed: {number} is read at {line}, as {self._assumed.named} says")
        return _number_of_dtype(dtype, number)

    def read(self, tensor: FakeTensor, likely: Number | None) -> Number:
        """The guess for a number read from ``tensor``, whose value is unknown; ``likely`` if there is one."""
        number = guess(tensor.dtype) if likely is None else likely
        if tensor.dtype == torch.bool:
            where = "the device" if tensor.fake_device.type == "cuda" else "a large tensor without values"
            self.note(f"a yes-or-no question to {where} was answered {'yes' if number else 'no'}")
        elif isinstance(number, int):
            self.note_integer(f"an integer that the script read from the device was taken as {number}")
        else:
            self.note(f"a number that the script read from the device was taken as {number}")
        self._keep(number)
        return number

    def copied(self, dtype: torch.dtype, likely: Number | None = None) -> Number:
        """The guess for all elements of a tensor that the script copies to the CPU; ``likely`` if there is one."""
        number = guess(dtype) if likely is None else likely
        note = self.note_integer if type(number) is int else self.note
        note(f"the values that the script copied to the CPU were taken as {number}")
        self._keep(number)
        return number

    def _keep(self, number: Number) -> None:
        """Note that the running line has read ``number``, which may be why the script fails later."""
        line = script_line()
        self._device.made_up.pop(line, None)
        self._device.made_up[line] = number, self._advice(line)

    def _advice(self, line: str) -> str:
        """The option by which a user sets the number that is read on ``line``."""
        path, _, number = line.rpartition(":")
        return self._assumed.advice(f"{Path(path).name}:{number}=NUMBER")

    def note_integer(self, what: str) -> None:
        """Note a guessed integer. Before the first backward it may be a size, such as the number of classes."""
        line = script_line()
        if self.backward_seen:
            self.note(what)
            return
        if line not in self._warned and len(self._warned) == self.SHOWN:
            self.note(what)
            self._count_more(line)
            return
        self._warned[line] += 1
        self._device.warn(
            f"{line}: {what}, because a simulated device has no data. If a size depends on it, this run has the wrong "
            f"size: give the real number with {self._advice(line)}"
        )
        self._see_whether_it_waits(line, self._warned[line], what)

    def _count_more(self, line: str) -> None:
        """Add ``line`` to one warning for all lines beyond :attr:`SHOWN`."""
        if self._more:
            self._device.retract(_and_more(len(self._more)))
        self._more.add(line)
        self._device.warn(_and_more(len(self._more)))

    def note_choice(self, *, routes: bool) -> None:
        """Note that the running line reads numbers that follow from choices.

        With ``routes`` they decide what runs, or how large a tensor is.
        """
        self.note(f"{'routing is assumed even' if routes else _READ}: {_TURNS}", waits=False)

    def note(self, what: str, *, waits: bool = True) -> None:
        """Note the assumption ``what`` for the running line; if it ``waits``, a loop may wait there for a change."""
        line = script_line()
        lines = self._lines.setdefault(what, Counter())
        known = line in lines
        if not known:
            self._device.assumptions.pop(_lines_text(what, lines), None)
        lines[line] += 1
        if not known:
            self._device.assume(_lines_text(what, lines))
        if waits:
            self._see_whether_it_waits(line, lines[line], what)

    def _see_whether_it_waits(self, line: str, times: int, what: str) -> None:
        if times == self.MANY:
            Terminal(sys.stderr).say(
                f"{line} has asked {self.MANY} times so far: {what}. If the script waits there for a change, it waits "
                "forever: end it with Ctrl-C"
            )


_READ = "choices that the script read from the device were made up"
_TURNS = "the columns that topk, argmax, max, sort and multinomial choose take turns"


def _and_more(count: int) -> str:
    lines = f"{count} more line{'' if count == 1 else 's'}"
    return (
        f"and {lines} on which an integer that the script read from the device was made up, because a simulated "
        "device has no data. If a size depends on one, this run has the wrong size"
    )


def _lines_text(what: str, lines: Mapping[str, int]) -> str:
    shown = list(lines)[: Guesses.SHOWN]
    more = len(lines) - len(shown)
    beyond = f" and at {more} more line{'' if more == 1 else 's'}" if more else ""
    return f"{what} at {', '.join(shown)}{beyond}"
