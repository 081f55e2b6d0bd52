"""Facts about many tensors at once, by the C++ extension (``sources/tensors.cpp``)."""

from __future__ import annotations

import ctypes
from array import array
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Column, Fact, FactColumns
from ampmem.names import shape_text
from ampmem.recorder.torch_private.general import (
    BUFFERS,
    PARAMETERS,
    implementation_of,
    without_dispatch,
    without_functions,
)

_I64 = ctypes.c_int64
_POINTER = ctypes.POINTER(_I64)
_FACT = len(FactColumns.names())
"""Integers of a fact."""


class Forms:
    """Text ids of the dtypes and shapes that the extension has numbered; ``read`` is its function for one number."""

    def __init__(self, read: Any, text_id: Callable[[str], int]) -> None:
        read.argtypes, read.restype = (_I64, ctypes.POINTER(_POINTER), _POINTER), ctypes.c_char_p
        self._read = read
        self._text_id = text_id
        self._dtypes, self._shapes = array("q", [0]), array("q", [0])

    def learn(self, count: int) -> None:
        """Read the forms up to the number ``count`` that are not known yet."""
        sizes, dimensions = _POINTER(), _I64()
        for index in range(len(self._shapes), count):
            dtype = self._read(index, ctypes.byref(sizes), ctypes.byref(dimensions))
            self._dtypes.append(self._text_id(dtype.decode()))
            self._shapes.append(self._text_id(shape_text(sizes[: dimensions.value])))

    def text_ids(self, forms: Column, addresses: Column) -> tuple[Column, Column]:
        """Text ids of the dtype and of the shape of each form; a tensor without an address has no shape."""
        return np.asarray(self._dtypes)[forms], np.asarray(self._shapes)[forms] * (addresses != 0)


class TensorsFound(IntEnum):
    """The result of reading a set of tensors."""

    UNREADABLE = 0
    """Not all tensors are plain."""
    READ = 1
    REPEATED = 2
    """The tensors are those of the last call, and the facts kept about them were logged anew."""


NOTHING_KNOWN = -2
"""A key under which nothing is kept."""


class TensorReader:
    """Reads plain tensors through Python's objects, and logs anew what Python has logged about the same tensors before.

    ``number`` identifies a set of tensors; ``key`` changes with everything else that the facts about it depend on.
    """

    def __init__(self, library: ctypes.PyDLL, text_id: Callable[[str], int]) -> None:
        self._library = library
        self._forms = Forms(library.ampmem_tensors_form, text_id)
        one, address = ctypes.py_object, ctypes.c_void_p
        for name, arguments, result in (
            ("clear", (address, address), None),
            ("of_modules", (_I64, _I64, one, one, one, one), _I64),
            ("of_gradients", (_I64, _I64, one), _I64),
            ("of_state", (_I64, _I64, one), _I64),
            ("forget", (_I64,), None),
            ("keep", (_I64, _I64, address, _I64), None),
            ("hook", (one, _I64, _I64, _I64), one),
            ("count", (_POINTER,), _I64),
            ("take", (address, _I64), _I64),
        ):
            function = getattr(library, f"ampmem_tensors_{name}")
            function.argtypes, function.restype = arguments, result
        library.ampmem_tensors_clear(id(torch.Tensor), id(nn.Parameter))

    @staticmethod
    def find(library: ctypes.PyDLL, text_id: Callable[[str], int]) -> TensorReader | None:
        """A reader, if the compiled extension has this part, and Python's tensors are laid out as the part assumes."""
        with without_functions(), without_dispatch():  # the script's modes must see only the script's ops
            empty = torch.empty(0, device="cpu")
        if hasattr(library, "ampmem_tensors_clear") and _as_assumed(empty):
            return TensorReader(library, text_id)
        return None

    def modules(self, number: int, key: int, parameters: list[object], buffers: list[object]) -> int:
        """Read parameters and buffers, each given as a weak reference to its module and its name there, in turns.

        They count as the same only if they are in the same places, too.
        """
        return int(self._library.ampmem_tensors_of_modules(number, key, parameters, PARAMETERS, buffers, BUFFERS))

    def gradients(self, number: int, key: int, optimizer: Optimizer) -> int:
        """Read the gradients of the parameters of ``optimizer``."""
        groups = [group["params"] for group in optimizer.param_groups]
        return int(self._library.ampmem_tensors_of_gradients(number, key, groups))

    def state(self, number: int, key: int, optimizer: Optimizer) -> int:
        """Read the tensors in the state of ``optimizer``."""
        state = optimizer.state
        if type(state) not in (dict, defaultdict):
            return TensorsFound.UNREADABLE
        return int(self._library.ampmem_tensors_of_state(number, key, state))

    def forget(self, number: int) -> None:
        """Forget the facts that are kept under ``number``."""
        self._library.ampmem_tensors_forget(number)

    def keep(self, number: int, key: int, facts: Column) -> None:
        """Keep the ``facts`` that Python has logged about the tensors read last, if there is one about each."""
        self._library.ampmem_tensors_keep(number, key, facts.ctypes.data, len(facts))

    def gradient_hook(
        self, otherwise: Callable[[torch.Tensor], object], name: int, module: int
    ) -> Callable[[torch.Tensor], object]:
        """A function for ``register_post_accumulate_grad_hook`` that logs the gradient of a plain parameter.

        ``name`` and ``module`` are text ids; ``otherwise`` is called with a parameter that is not plain.
        """
        hook: Callable[[torch.Tensor], object] = self._library.ampmem_tensors_hook(
            otherwise, Fact.GRADIENT, name, module
        )
        return hook

    def take(self) -> Column | None:
        """The facts logged since the last call, as rows of ``FactColumns``; ``None`` if there are none."""
        forms = _I64()
        count = self._library.ampmem_tensors_count(ctypes.byref(forms))
        if not count:
            return None
        # Other threads may add facts between the count and the take: those are taken the next time.
        facts = np.empty((count, _FACT), np.int64)
        facts = facts[: self._library.ampmem_tensors_take(facts.ctypes.data, count)]
        # Rows of the hook on gradients, which C++ writes without asking Python for text ids.
        hooked = np.flatnonzero(facts[:, -1] < 0)
        if len(hooked):
            self._forms.learn(forms.value)
            facts[hooked, -2], facts[hooked, -1] = self._forms.text_ids(facts[hooked, -2], facts[hooked, 1])
        return facts


def _as_assumed(tensor: torch.Tensor) -> bool:
    """Whether the object of ``tensor`` is a reference count, its type, and the C++ tensor."""
    words = (_I64 * 3).from_address(id(tensor))
    return torch.Tensor.__basicsize__ >= ctypes.sizeof(words) and words[1:] == [
        id(torch.Tensor),
        implementation_of(tensor),
    ]
