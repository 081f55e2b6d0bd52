"""Files with tensors: written without values where the user's files are protected, else refused.

A simulated run trains on made-up numbers, which must never replace trained weights. Where a process of its own keeps
every write from the user's files, tensors are saved as files with holes for their values, so a script can load what it
has saved. Elsewhere, as in a block of code in the user's process, saving made-up numbers is an error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import numpy as np
import torch

from ampmem.output import copy_with_holes
from ampmem.patching import Undo, in_place_of, replace_all, undone_together
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import general
from ampmem.simulator.private.general import FakeTensor, tree_leaves, tree_map, without_modes
from ampmem.simulator.where import stop

_REFUSED = (
    "{what} would write made-up numbers, because a simulated device has no data; leave it out here, or run the script "
    "with ampmem profile --device sim on Linux, which then keeps your files as they are"
)


@undone_together
def install(mode: SimulatedMode) -> Iterator[Undo]:
    """Install everything in this module; returns the undo."""
    how = _Saving() if mode.saves else _Refusing(mode)
    own = {"save": in_place_of(torch.save, how.save), "load": in_place_of(torch.load, _load)}
    yield replace_all((torch, torch.serialization), own)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        yield replace_all((safetensors.torch,), how.safetensors(safetensors.torch))
    if isinstance(how, _Refusing):
        yield how.install()


class _Saving:
    """Writes tensors without values as holes in files, which take no space."""

    def save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save``. It has one file format for them: the older one cannot leave values out."""
        if not any(isinstance(leaf, FakeTensor) for leaf in _leaves(obj)):
            return original(obj, f, *args, **kwargs)
        kwargs.pop(general.OLD_FORMAT, None)
        with general.saving_without_values():
            return original(obj, f, *args[:2], **kwargs)

    def safetensors(self, module: Any) -> dict[str, Any]:
        """safetensors' function that writes a file."""
        names = general.names_of_safetensors(module)

        def save_file(original: Any, tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None) -> Any:
            if not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
                return original(tensors, filename, metadata)
            return _write_safetensors(tensors, filename, metadata, names)

        return {"save_file": in_place_of(module.save_file, save_file)}


def _write_safetensors(
    tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any, names: Mapping[torch.dtype, str]
) -> None:
    """Write ``tensors`` with holes for those without values.

    The format: the length of the header in 8 bytes, the header as JSON, the values one after the other.
    """
    header, at = dict[str, Any]({} if metadata is None else {"__metadata__": metadata}), 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(filename).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begun = file.tell()
        for name, tensor in tensors.items():
            if not isinstance(tensor, FakeTensor):
                file.seek(begun + header[name]["data_offsets"][0])
                file.write(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        # What was not written is a hole, which takes no space and reads as zeros.
        file.truncate(begun + at)


class _Refusing:
    """Raises an error where made-up numbers would be written: whole tensors, copies on the CPU, and arrays of them."""

    def __init__(self, mode: SimulatedMode) -> None:
        self._mode = mode
        self._pickling = threading.local()

    @undone_together
    def install(self) -> Iterator[Undo]:
        """The writers of pickle and numpy."""
        self._mode.made_up.follow = True
        yield replace_all((pickle,), self._pickles())
        tensor: Any = torch.Tensor
        own = {"numpy": self._numpy, "__reduce_ex__": self._reduce_ex}
        made = {name: in_place_of(getattr(tensor, name), function) for name, function in own.items()}
        yield replace_all((tensor,), made)
        writers = {name: in_place_of(getattr(np, name), self._write) for name in _WRITERS}
        yield replace_all((np,), writers)
        assign = in_place_of(np.memmap.__setitem__, self._assign)
        yield replace_all((np.memmap,), {"__setitem__": assign})

    def save(self, original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save``."""
        self._check("torch.save", _leaves(obj))
        return original(obj, *args, **kwargs)

    def safetensors(self, module: Any) -> dict[str, Any]:
        """safetensors' function that each of its writers calls for a tensor."""
        name = next(name for name in general.SAFETENSORS_ARRAYS if hasattr(module, name))

        def to_array(original: Any, tensor: torch.Tensor, *of: str) -> Any:
            self._check("safetensors", [tensor])
            return original(tensor, *of)

        return {name: in_place_of(getattr(module, name), to_array)}

    def _check(self, what: str, leaves: Iterable[Any]) -> None:
        if any(map(self._made_up, leaves)):
            raise stop(_REFUSED.format(what=what))

    def _made_up(self, value: Any) -> bool:
        while isinstance(value, np.ndarray):
            if isinstance(value, MadeUp):
                return True
            value = value.base  # a view; the array of a tensor has the tensor here
        return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value in self._mode.made_up)

    def _write(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(f"numpy.{original.__name__}", tree_leaves((args, kwargs)))
        return original(*args, **kwargs)

    def _assign(self, original: Any, array: Any, place: Any, value: Any) -> None:
        self._check("numpy.memmap", [value])
        original(array, place, value)

    def _numpy(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        array = original(tensor, *args, **kwargs)
        return array.view(MadeUp) if tensor in self._mode.made_up else array

    def _reduce_ex(self, original: Any, tensor: torch.Tensor, protocol: Any) -> Any:
        if getattr(self._pickling, "depth", 0):
            self._check("pickle", [tensor])
        return original(tensor, protocol)

    def _pickles(self) -> dict[str, Any]:
        refusing, kind = self, cast(Any, pickle.Pickler)

        class Pickler(kind):  # type: ignore[misc, valid-type]
            """A pickler that refuses made-up numbers."""

            def dump(self, obj: Any) -> None:
                refusing._check("pickle", tree_leaves(obj))
                with refusing._at_pickling():
                    super().dump(obj)

        def guarded(original: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            self._check("pickle", tree_leaves(obj))
            with self._at_pickling():
                return original(obj, *args, **kwargs)

        writers = {name: in_place_of(getattr(pickle, name), guarded) for name in ("dump", "dumps")}
        return {"Pickler": Pickler, **writers}

    @contextmanager
    def _at_pickling(self) -> Iterator[None]:
        self._pickling.depth = getattr(self._pickling, "depth", 0) + 1
        try:
            yield
        finally:
            self._pickling.depth -= 1


_WRITERS = ("save", "savez", "savez_compressed", "savetxt")


class MadeUp(np.ndarray[Any, Any]):
    """An array of made-up numbers: it cannot be written to a file. What is computed from it is one as well."""

    def tofile(self, *_: Any, **__: Any) -> None:
        """Raises an error."""
        raise stop(_REFUSED.format(what="numpy.ndarray.tofile"))

    def dump(self, *_: Any, **__: Any) -> None:
        """Raises an error."""
        raise stop(_REFUSED.format(what="numpy.ndarray.dump"))


def _leaves(obj: Any) -> Iterable[Any]:
    return obj.parameters() if isinstance(obj, torch.nn.Module) else tree_leaves(obj)


def _load(original: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.load`` as on a machine with the GPU."""
    places: dict[int, str] = {}

    def locate(storage: Any, location: str) -> Any:
        chosen = _location(map_location, storage, location)
        if isinstance(chosen, str):
            places[storage.data_ptr()] = chosen
            return storage
        return chosen

    with _mapped(f) as file, without_modes():
        loaded = original(file, locate, *args, **kwargs | ({} if file is f else {"mmap": True}))
    return _placed(loaded, {address for address, place in places.items() if torch.device(place).type == "cuda"})


@contextmanager
def _mapped(file: Any) -> Iterator[Any]:
    """A copy of the ``file`` to be mapped into memory, where its holes take none; the file itself if it has no holes.

    The file itself is not mapped: the script may overwrite it, and the memory would be gone.
    """
    path = Path(file) if isinstance(file, (str, os.PathLike)) else None
    if path is None or not path.is_file() or path.stat().st_blocks * 512 >= path.stat().st_size:
        yield file
        return
    with NamedTemporaryFile(prefix="ampmem-") as copy:
        copy_with_holes(path, Path(copy.name))
        yield copy.name


def _placed(loaded: Any, addresses: set[int]) -> Any:
    """``loaded`` with the tensors at one of ``addresses`` moved to the device."""
    moved: dict[Any, torch.Tensor] = {}

    def goes(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in addresses

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            return leaf.to("cuda") if any(map(goes, leaf.parameters())) else leaf
        if not isinstance(leaf, torch.Tensor) or not goes(leaf):
            return leaf
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        # What shares memory in the file shares it on the device.
        if key not in moved:
            there = leaf.detach().to("cuda")
            parameter = isinstance(leaf, torch.nn.Parameter)
            moved[key] = torch.nn.Parameter(there, leaf.requires_grad) if parameter else there
        return moved[key]

    return tree_map(move, loaded)


def _location(map_location: Any, storage: Any, location: str) -> Any:
    """The device of a loaded storage: ``map_location``'s device, or the result of the script's function."""
    if callable(map_location):
        placed = map_location(storage, location)
        return location if placed is None else placed
    if isinstance(map_location, dict):
        return str(map_location.get(location, location))
    return location if map_location is None else str(map_location)
