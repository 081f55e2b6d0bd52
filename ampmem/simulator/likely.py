"""Unknown values on the device that follow from what every healthy run has in common.

Two things are assumed. Checks are passed: no number is infinite or NaN. And routing is even: the columns that ``topk``,
``argmax`` and the like choose take turns, so each of E experts gets the same number of rows. Whatever is computed from
such values alone is computed on the CPU, too, so masks, counts and places of a mixture of experts fit together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from ampmem.simulator.private import general
from ampmem.simulator.private.general import FakeTensor, below_modes, is_computed, storage_key
from ampmem.simulator.values import Known, Number, fakes_in, seen_as

aten = torch.ops.aten


_Numbers: TypeAlias = "weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[torch.dtype, Number]]"
"""The dtype and value that all elements of a storage have."""


class Written(NamedTuple):
    """A write after which ``storage`` holds ``values``."""

    storage: torch.UntypedStorage
    values: torch.UntypedStorage


class Likely(Known):
    """Values of tensors on the device that follow from an assumption, of any dtype.

    Kept as the known ones are, or as one number if all elements of a tensor are equal. Those that :meth:`are_even` also
    depend on even routing.
    """

    MOST = 1 << 26
    """Maximum number of elements of what depends on even routing: (tokens, choices, experts) of one layer."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known
        self._numbers: _Numbers = weakref.WeakKeyDictionary()
        self._blank: _Numbers = weakref.WeakKeyDictionary()
        """The same for tensors that an op filled with one number; used only together with values of even routing."""
        self._even: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def are_even(self, tensor: torch.Tensor) -> bool:
        """Whether the values of ``tensor`` depend on even routing."""
        return isinstance(tensor, FakeTensor) and tensor.untyped_storage() in self._even

    def values_of(self, tensor: Any) -> torch.Tensor | None:
        """The known or likely values of ``tensor`` as a CPU tensor, not to be written to; ``None`` without any."""
        known = self._known.values_of(tensor)
        if known is not None:
            return known
        alike = _all_alike(tensor, self._numbers)
        return super().values_of(tensor) if alike is None else alike

    def fill(self, tensor: torch.Tensor, number: Number) -> None:
        """Note that all of ``tensor``, which fills its memory, is likely ``number``."""
        storage = tensor.untyped_storage()
        self.forget(storage)
        if tensor.numel() * tensor.element_size() == storage.nbytes():
            self._numbers[storage] = tensor.dtype, number

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Forget the values of ``storage``, which was written to."""
        super().forget(storage)
        self._numbers.pop(storage, None)
        self._blank.pop(storage, None)
        self._even.discard(storage)

    def note_result(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the likely values of ``result``, which ``func`` returned for these arguments."""
        number = _FILLS[func](args) if func in _FILLS else None
        if isinstance(number, (int, float)) and isinstance(result, FakeTensor):
            if result.numel() * result.element_size() == result.untyped_storage().nbytes():
                self._blank[result.untyped_storage()] = result.dtype, number
            return
        given = list(fakes_in((*args, *kwargs.values())))
        if any(map(self._has, given)) and is_computed(func):
            if not any(map(self.are_even, given)):
                # One number for all elements needs no memory for them, so it is tried first.
                if not self._fill_alike(func, args, kwargs, result) and _few_elements(given):
                    super().note_result(func, args, kwargs, result)
                return
            super().note_result(func, self._beside_even(func, args), kwargs, result)
            results = result if isinstance(result, (tuple, list)) else (result,)
            self._even.update(each.untyped_storage() for each in results if self._has(each))
        elif func in _CHECKS and (answer := _CHECKS[func](args)) is not None:
            self.fill(result, answer)
        if func in _CHOICES:
            self._choose(*_CHOICES[func](args, kwargs, result))

    def sized_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As :meth:`Known.sized_result`, for arguments of which some values are likely."""
        given = list(fakes_in(args))
        if not any(map(self._has, given)) or not (_few_elements(given) or any(map(self.are_even, given))):
            return None
        result = super().sized_result(func, args, kwargs)
        if result is not None and any(map(self.are_even, given)):
            self._even.update(each.untyped_storage() for each in fakes_in((result,)))
        return result

    def written_by(self, func: Any, args: Any, kwargs: Any) -> Written | None:
        """What ``func`` writes to its first argument if that is known and depends on even routing; else ``None``."""
        if not args or not isinstance(args[0], FakeTensor) or not _writes_first(func):
            return None
        if not any(map(self.are_even, fakes_in((*args, *kwargs.values())))):
            return None
        storage = args[0].untyped_storage()
        try:
            with below_modes():
                values = self._copied(args[0], anything=func in _OVERWRITES)
                others = self._real(self._beside_even(func, args)[1:], func), self._real(kwargs, func)
                func(seen_as(args[0], values), *others[0], **others[1])
        except Exception:  # unknown, or the CPU has no kernel for it
            return None
        return Written(storage, values)

    def write(self, written: Written) -> None:
        """Keep the values of ``written``."""
        self.forget(written.storage)
        self.held[written.storage] = written.values
        self._even.add(written.storage)

    def _has(self, tensor: Any) -> bool:
        """Whether values of ``tensor`` are noted here."""
        if not isinstance(tensor, FakeTensor):
            return False
        storage = tensor.untyped_storage()
        return storage in self.held or storage in self._numbers

    def _real(self, value: Any, func: Any) -> Any:
        blank = (
            _all_alike(value, self._blank) if isinstance(value, FakeTensor) and self.values_of(value) is None else None
        )
        return super()._real(value, func) if blank is None else blank

    def _beside_even(self, func: Any, args: Any) -> Any:
        """``args`` with a stand-in for each unknown tensor that a mask or choice of even routing keeps or drops.

        Padding and gates say nothing about who is chosen. Larger tensors, such as the tokens, have no stand-in.
        """
        if func not in _KEEPS:
            return args
        most = max(each.numel() for each in fakes_in(args) if self.are_even(each))

        def unknown(value: Any) -> bool:
            made = isinstance(value, FakeTensor) and value.untyped_storage() not in self._blank
            return made and value.numel() <= most and self.values_of(value) is None

        return [_stand_in(each) if unknown(each) else each for each in args]

    def _copied(self, tensor: FakeTensor, *, anything: bool) -> torch.UntypedStorage:
        """A copy of the values in the memory of ``tensor``; ``anything`` if all of ``tensor`` is overwritten."""
        storage = tensor.untyped_storage()
        held = self.held.get(storage)
        if held is not None:
            copy: torch.UntypedStorage = held.clone()
            return copy
        values = self.values_of(tensor)
        if values is None:
            values = _all_alike(tensor, self._blank)
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if not whole or (values is None and not anything):
            raise ValueError("unknown")
        copied = torch.UntypedStorage(storage.nbytes())
        if values is not None:
            seen_as(tensor, copied).copy_(values)
        return copied

    def _fill_alike(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Note a result whose elements are all equal since those of each argument are; returns whether it is one."""
        places = [place for place, each in enumerate(args) if isinstance(each, FakeTensor)]
        alike = {place: _all_alike(args[place], self._numbers) for place in places}
        one, numbers = list(args), []
        try:
            with below_modes():
                for place, values in alike.items():
                    if values is None:
                        return False
                    one[place] = values.as_strided((1,) * values.dim(), (1,) * values.dim())
                    numbers.append(one[place].item())
                if not (general.is_pointwise(func) or func in _EXTREMES or (func in _SUMS and not any(numbers))):
                    return False
                self.fill(result, func(*one, **self._real(kwargs, func)).item())
        except Exception:  # another argument has several elements, or there is no kernel
            return False
        return True

    def _choose(self, chosen: torch.Tensor, columns: int, dim: int) -> None:
        """Note the columns in ``chosen``, whose choices of a row are along ``dim`` (-1 if there is one for each).

        All choices together take turns, and so do the first choices of all rows, the second ones, and so on.
        """
        if self.values_of(chosen) is not None or chosen.numel() > _MOST_CHOSEN or columns < 1:
            return
        if columns > _EXPERTS and chosen.numel() < columns:
            return
        # Below the script's modes: none of this is its computation.
        with below_modes():
            each = chosen.shape[dim] if dim >= 0 else 1
            rows = torch.arange(chosen.numel() // max(each, 1), device="cpu").unsqueeze(1)
            first = rows * each + rows * each // columns if columns % max(each, 1) == 0 else rows
            turns = (first + torch.arange(each, device="cpu")).remainder_(columns)
            if dim >= 0:
                turns = turns.view(*(size for at, size in enumerate(chosen.shape) if at != dim), -1).movedim(-1, dim)
            self.note(chosen, turns.reshape(chosen.shape).to(chosen.dtype))
            if self._has(chosen):
                self._even.add(chosen.untyped_storage())

    def _small(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= self.MOST


def _all_alike(tensor: Any, numbers: Mapping[torch.UntypedStorage, tuple[torch.dtype, Number]]) -> torch.Tensor | None:
    """The values of ``tensor`` if its memory is in ``numbers``; ``None`` otherwise, and for a view as another type."""
    if not isinstance(tensor, FakeTensor):
        return None
    dtype, number = numbers.get(tensor.untyped_storage(), (None, 0))
    if dtype is not tensor.dtype or tensor.is_neg() or tensor.is_conj():
        return None
    with below_modes():
        return torch.full((), number, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


_MOST_CHOSEN = 1 << 24
"""Maximum number of choices."""
_EXPERTS = 1024
"""With more columns than this a choice is not one of experts, unless there are enough rows to choose all of them."""


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Ones in the shape of ``tensor``; as floating-point numbers they are larger, each row's in its own order.

    So the next column in turn is chosen where the first choice has been masked.
    """
    with below_modes():
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        if not tensor.is_floating_point() or not tensor.dim() or not tensor.numel():
            return ones
        columns = tensor.shape[-1]
        row = torch.arange(tensor.numel() // columns, device="cpu").unsqueeze(1)
        behind = torch.arange(columns, device="cpu").sub(row).remainder_(columns)
        return ones.add_(behind.add_(1).reciprocal().view(tensor.shape))


def _few_elements(tensors: list[FakeTensor]) -> bool:
    return sum(tensor.numel() for tensor in tensors) <= Known.MOST


def _writes_first(func: Any) -> bool:
    """Whether ``func`` is one of torch's ops that writes to its first argument alone, by no random numbers."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return [place for place, _ in general.arguments_written(func)] == [0]


_OVERWRITES = (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default)
"""Ops that write to all of their first argument."""

_KEEPS = frozenset({
    aten.mul.Tensor,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.scatter.src,
    aten.scatter_.src,
})  # fmt: skip
"""Ops by which a mask or a choice keeps some of other numbers, or is itself masked."""

_FILLS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda args: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda args: 1),
    **dict.fromkeys((aten.full.default, aten.full_like.default), lambda args: args[1]),
    aten.new_full.default: lambda args: args[2],
    aten.zero_.default: lambda args: 0,
    aten.fill_.Scalar: lambda args: args[1],
}
"""The number with which an op fills its result, by the op's arguments."""

_EXTREMES = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("all", "any", "amax", "amin", "_is_all_true", "_is_any_true")
    for overload in getattr(aten, name).overloads()
    if not overload.endswith("out")
) | {aten.max.default, aten.min.default, aten._to_copy.default, aten.clone.default, aten.alias.default}
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.mean.default})
"""Ops whose result for equal elements is that of one of them: for sums, if the elements are 0."""


def _same_tensor(args: Any, answer: bool) -> bool | None:
    """``answer`` if both arguments are the same tensor: its elements differ from themselves only if they are NaN."""
    first, second = args[:2]
    if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
        return None
    alike = (first.shape, first.stride(), first.storage_offset(), storage_key(first.untyped_storage()))
    same = alike == (second.shape, second.stride(), second.storage_offset(), storage_key(second.untyped_storage()))
    return answer if same else None


def _with_infinity(compare: Callable[[float, float], bool]) -> Callable[[Any], bool | None]:
    """The answer for any finite number compared with an infinite one; otherwise ``None``."""

    def answer(args: Any) -> bool | None:
        other = args[1]
        return compare(0.0, other) if isinstance(other, float) and math.isinf(other) else None

    return answer


_CHECKS: dict[Any, Callable[[Any], bool | None]] = {
    aten.eq.Tensor: lambda args: _same_tensor(args, True),
    aten.ne.Tensor: lambda args: _same_tensor(args, False),
    **dict.fromkeys((aten.isnan.default, aten.isinf.default), lambda args: False),
    **dict.fromkeys((aten.isposinf.default, aten.isneginf.default), lambda args: False),
    aten.isfinite.default: lambda args: True,
    aten.eq.Scalar: _with_infinity(float.__eq__),
    aten.ne.Scalar: _with_infinity(float.__ne__),
    aten.lt.Scalar: _with_infinity(float.__lt__),
    aten.le.Scalar: _with_infinity(float.__le__),
    aten.gt.Scalar: _with_infinity(float.__gt__),
    aten.ge.Scalar: _with_infinity(float.__ge__),
}
"""The answer of each op that checks numbers, if all of them are finite."""

Choice = tuple[torch.Tensor, int, int]
"""The chosen columns, the number of columns, and the dimension of the choices of a row, -1 if there is one for each."""


def _several(args: Any, kwargs: Any, result: Any, place: int) -> Choice:
    source, chosen = args[0], result[1]
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    return chosen, *_along(source, dim)


def _along(source: torch.Tensor, dim: int) -> tuple[int, int]:
    """The size of ``source`` along ``dim``, and the positive number of ``dim``; a scalar has one column."""
    return (source.shape[dim], dim % source.dim()) if source.dim() else (1, -1)


def _one_choice(args: Any, kwargs: Any, result: Any) -> Choice:
    """A choice by ``argmax`` or ``max``; nothing if it is among all elements."""
    chosen = result[1] if isinstance(result, (tuple, list)) else result
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return chosen, 0 if dim is None else _along(args[0], dim)[0], -1


_CHOICES: dict[Any, Callable[[Any, Any, Any], Choice]] = {
    aten.topk.default: lambda args, kwargs, result: _several(args, kwargs, result, 2),
    aten.sort.default: lambda args, kwargs, result: _several(args, kwargs, result, 1),
    aten.multinomial.default: lambda args, kwargs, result: (result, *_along(args[0], -1)),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), _one_choice),
}
"""Ops that choose columns."""
