"""The C++ extension: it observes the same blocks and autograd nodes as torch.profiler, at a fraction of the cost.

Kineto, torch's profiler, has to be stopped for its events, formats each of them, and gives them as a tree of objects.
``ampmem extension`` compiles the C++ files of this folder for the installed torch, into the user's cache folder.
Recordings use it if it is there, and the profiler if not. Both tell the same, so a recording's content does not depend
on it. ``AMPMEM_EXTENSION=off`` leaves it out. ``trace.cpp``, for CUDA, is used by ``cuda/tracker.py``.

A library runs in the user's process before anything of the script does. So it is loaded only if its folder and its file
belong to this user, no other user can write them, and it has the size and the digest that it had when it was
compiled. If not, one line on standard error says why, and the profiler is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ampmem.errors import AmpmemError
from ampmem.events import Column
from ampmem.output import Terminal, cache_folder, sized
from ampmem.recorder.torch_private.general import profiler_enabled

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_NEEDED, _TRACE, _WORKSPACES = "extension.cpp", "trace.cpp", "workspaces.cpp"
"""The source without which there is no extension, and those that need the headers of CUDA."""
VARIABLE = "AMPMEM_EXTENSION"
_OFF = "off"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
_LIBRARIES, _MORE = ("c10", "torch_cpu"), {_TRACE: "c10_cuda", _WORKSPACES: "torch_cuda"}
"""Libraries of torch's, and those that a source needs beside them."""
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")
_EMPTY_HEADERS = ("cublas_v2.h", "cublasLt.h", "cusolverDn.h", "cusparse.h")
"""Headers that torch's headers include and ``workspaces.cpp`` does not need: empty files stand for them."""
_NO_OPS = "the part for the ops of forward does not work with this torch: a dispatch mode sees the ops instead"
_NO_TENSORS = "the part that reads many tensors at once does not work with this torch: Python reads them one by one"
_INSTEAD = "the allocator's history is copied at the end of each step instead"
_NO_TRACE = f"the part for CUDA does not work with this torch: {_INSTEAD}"
_NO_HEADERS = f"CUDA's headers were not found (set CUDA_HOME), so the part for CUDA was left out: {_INSTEAD}"
_NO_WORKSPACES = (
    "the part for the workspaces of cuBLAS does not work with this torch: at the end of a recording ampmem looks for "
    "Python objects that hold them instead"
)
_NO_COMPILER = f"there is no C++ compiler ({', '.join(_COMPILERS)}): install one, or name it in CXX"
_PARTS = (
    ("ampmem_start", "memory events", "torch.profiler"),
    ("ampmem_ops_start", "ops of forward", "a dispatch mode"),
    ("ampmem_tensors_clear", "parameters, gradients and optimizer state that do not change", "Python"),
    ("ampmem_trace_start", "the CUDA allocator's trace", "a copy of its memory history after each step"),
    ("ampmem_workspaces", "workspaces of cuBLAS", "a search for Python objects"),
)
"""Each part by one of its functions, with what it observes, and what does so without it."""
CPU, OTHER_DEVICE = -1, -2
"""The devices of the CPU's blocks, and of those that are neither the CPU's nor CUDA's."""
_BLOCK, _SPAN = 9, 5
"""Integers of a block and of a node in the extension's tables."""
_COUNTS, _TAKEN = ctypes.c_int64 * 3, ctypes.c_int64 * 2
_WORKSPACES_READ = 256
"""Maximum number of workspaces that are read: there is one for each thread and stream that multiplies matrices."""
_TRIED = 4099
"""Bytes of the storage with which a library is tried."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Blocks that were allocated (``bytes`` > 0) or freed (< 0), in order, with the innermost node around each.

    Times are those of ``time.time_ns``. ``total`` is what torch counts in all. ``device`` is a CUDA device's index,
    -1 for the CPU and -2 for others. ``name`` is an index into ``names``; ``own`` is the node's sequence number, -1 if
    it has none, and ``number`` that of the innermost node that has one. ``spans`` are the nodes that have ended, as
    rows of start, end, name, number and thread. The other columns are in the order of the extension's table.
    """

    time_ns: Column
    address: Column
    bytes: Column
    total: Column
    device: Column
    name: Column
    own: Column
    number: Column
    thread: Column
    spans: Column = field(kw_only=True)
    names: list[str] = field(kw_only=True)

    def on(self, device: int) -> tuple[Column, Column, tuple[str, ...]]:
        """The rows of ``device``; the name of the node around each, as an index; and the names, the empty one first."""
        rows = np.flatnonzero(self.device == device)
        name = self.name[rows]
        index = np.zeros(len(self.names), dtype=np.int64)
        index[name] = 1
        used = np.flatnonzero(index).tolist()
        ops = dict.fromkeys(("", *(self.names[each] for each in used)))
        places = {name: place for place, name in enumerate(ops)}
        index[used] = [places[self.names[each]] for each in used]
        return rows, index[name], tuple(ops)


NOTHING_OBSERVED = Observed(*np.zeros((9, 0), np.int64), spans=np.zeros((0, 5), np.int64), names=[""])


class CompiledExtension:
    """Records the calling thread, and the backward passes that it starts, from :meth:`start` to :meth:`stop`."""

    def __init__(self, library: Path) -> None:
        """Load ``library``. Raises ``OSError`` if that is impossible, ``AttributeError`` if a function is missing."""
        self.library = ctypes.CDLL(str(library))
        """The loaded library. While one of its functions runs, other threads run Python."""
        # CDLL gives up the GIL around each call, PyDLL does not; both are one library in memory.
        self.with_gil = ctypes.PyDLL(str(library))
        """The library for functions that call Python: no other thread runs Python meanwhile."""
        self.library.ampmem_name.restype = ctypes.c_char_p
        self.library.ampmem_name.argtypes = (ctypes.c_int64,)
        self.library.ampmem_take.argtypes = (*(ctypes.c_void_p, ctypes.c_int64) * 2, _TAKEN)
        self._names: list[str] = []

    def workspaces(self) -> set[int]:
        """Addresses of the blocks that torch keeps for cuBLAS; none if the library was compiled without this part."""
        if not hasattr(self.library, "ampmem_workspaces"):
            return set()
        found = (ctypes.c_int64 * _WORKSPACES_READ)()
        return set(found[: self.library.ampmem_workspaces(found, ctypes.c_int64(_WORKSPACES_READ))])

    def start(self) -> None:
        """Begin. Raises ``RuntimeError`` if torch refuses."""
        if self.library.ampmem_start():
            raise RuntimeError("torch refused ampmem's C++ extension")

    def abandon(self) -> None:
        """Stop, on the thread that has started; what was not taken is dropped at the next start."""
        self.library.ampmem_stop()

    def names(self) -> list[str]:
        """The names of all nodes so far."""
        counts = _COUNTS()
        self.library.ampmem_count(counts)
        return self._names_so_far(counts[2])

    def _names_so_far(self, count: int) -> list[str]:
        for index in range(len(self._names), count):
            self._names.append(self.library.ampmem_name(index).decode("utf-8", "backslashreplace"))
        return self._names

    def take(self, *, go_on: bool = True) -> Observed:
        """The blocks and nodes observed since the last call; recording goes on, or stops."""
        if not go_on:
            self.abandon()
        counts, taken = _COUNTS(), _TAKEN()
        self.library.ampmem_count(counts)
        blocks, spans = np.empty((counts[0], _BLOCK), np.int64), np.empty((counts[1], _SPAN), np.int64)
        self.library.ampmem_take(blocks.ctypes.data, len(blocks), spans.ctypes.data, len(spans), taken)
        columns = np.ascontiguousarray(blocks[: taken[0]].T)
        return Observed(*columns, spans=spans[: taken[1]], names=self._names_so_far(counts[2]))

    def works(self) -> bool:
        """Whether the extension sees a storage that this thread allocates and frees."""
        self.start()
        storage = torch.UntypedStorage(_TRIED)
        address = storage.data_ptr()
        del storage
        seen = self.take(go_on=False)
        rows = (seen.address == address) & (seen.device == CPU)
        came_and_went: bool = seen.bytes[rows].tolist() == [_TRIED, -_TRIED]
        return came_and_went


def folder() -> Path:
    """The folder of compiled extensions. Raises ``RuntimeError`` without a home folder."""
    return cache_folder("extension")


def path() -> Path:
    """The file of the extension for this torch and this ampmem, compiled or not; its :func:`_seal` is beside it."""
    return folder() / f"{torch.__version__}-{_digest()[:12]}.so"


def _seal(library: Path) -> Path:
    """The file with the size and the digest of ``library``."""
    return library.with_suffix(".sha256")


def _sealed(content: bytes) -> bytes:
    """The text in the seal of a library with this content: its size and digest."""
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n".encode()


@functools.cache
def _digest() -> str:
    """A digest of the extension's sources and of torch's version: it identifies the compiled file."""
    sources = b"".join(source.read_bytes() for source in (*_HEADERS, *SOURCES))
    return hashlib.sha256(sources + str(torch.version.git_version).encode()).hexdigest()


def find() -> CompiledExtension | None:
    """The compiled extension; ``None`` if there is none, it does not work here, or the environment turns it off."""
    if os.environ.get(VARIABLE) == _OFF or profiler_enabled():  # a running profiler would miss what is tried
        return None
    try:
        library = path()
    except RuntimeError:
        return None
    # lexists: a dangling link is reported as an error, and not silently ignored.
    return _load(library) if os.path.lexists(library) else None


@functools.cache
def _load(library: Path) -> CompiledExtension | None:
    try:
        return _loaded(library)
    except AmpmemError as error:
        Terminal(sys.stderr).say(
            f"the C++ extension is not used, and torch.profiler is: {error}. To compile it anew: ampmem extension"
        )
        return None


def _loaded(library: Path) -> CompiledExtension:
    """The extension in the file ``library``. Raises :class:`AmpmemError` if that is not safe, or it does not work."""
    try:
        _own_content(library.parent)
        if _sealed(_own_content(library)) != _own_content(_seal(library)):
            raise AmpmemError(f"{library} was changed since it was compiled")
        extension = CompiledExtension(library)
        if extension.works():
            return extension
    except (OSError, AttributeError, RuntimeError) as error:
        raise AmpmemError(f"{library} cannot be loaded ({error})") from error
    raise AmpmemError(f"{library} does not see what torch {torch.__version__} allocates")


def _own_content(path: Path) -> bytes:
    """The content of the file ``path``; empty if that is a folder.

    Raises :class:`AmpmemError` if it is not this user's alone, ``OSError`` if it cannot be read.
    """
    if path.is_symlink():
        raise AmpmemError(f"{path} is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its writer
    try:
        # Asked of the open file: what is at the path may be replaced between two questions.
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise AmpmemError(f"{path} belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise AmpmemError(f"other users can write {path}")
        return os.read(descriptor, status.st_size) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)


def compiler_here() -> list[str]:
    """The words that begin a C++ compiler's command; empty without a compiler."""
    return (os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), "")).split()


def is_missing() -> bool:
    """Whether the extension could be compiled here, was not, and is not turned off."""
    try:
        return os.environ.get(VARIABLE) != _OFF and not os.path.lexists(path()) and bool(compiler_here())
    except RuntimeError:  # no home folder
        return False


def _path_to_use() -> Path:
    """As :func:`path`; raises :class:`AmpmemError` without a home folder."""
    try:
        return path()
    except RuntimeError as error:
        raise AmpmemError("there is no home folder: name a cache folder in XDG_CACHE_HOME") from error


def status() -> list[str]:
    """What is compiled, for which torch, and what it replaces, a sentence each. Raises :class:`AmpmemError`."""
    library, version = _path_to_use(), f"torch {torch.__version__}"
    others = sorted(each.name.rpartition("-")[0] for each in folder().glob("*.so") if each != library)
    said = [f"compiled for another torch or by another ampmem: torch {', '.join(others)}"] if others else []
    if os.environ.get(VARIABLE) == _OFF:
        said.append(f"{VARIABLE}=off: recordings do not use it")
    if not os.path.lexists(library):
        how = f"ampmem extension compiles it with {compiler_here()[0]}" if compiler_here() else _NO_COMPILER
        return [f"not compiled for {version}; {how}", *said]
    try:
        _loaded(library)
    except AmpmemError as error:
        return [f"compiled for {version}, but not used: {error}", *said]
    has = ctypes.CDLL(str(library))
    used = [f"{what}: in place of {other}" for name, what, other in _PARTS if hasattr(has, name)]
    return [f"compiled for {version}: {sized(library)}", *used, *left_out(library), *said]


def build() -> Path:
    """Compile the extension for this torch, and try it; returns its path.

    Parts that do not compile, or do not work, are left out: that for CUDA, of a torch without CUDA or without CUDA's
    headers, that for the ops of forward, and that for many tensors at once.

    Raises:
        AmpmemError: there is no C++ compiler, it fails, the cache folder cannot be written, or the extension does not
            see what torch allocates.
    """
    compiler = compiler_here()
    if not compiler:
        raise AmpmemError(_NO_COMPILER)
    library = _path_to_use()
    cache = library.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if cache.is_symlink():
            raise AmpmemError(f"{cache} is a symbolic link, through which no library is loaded: remove it")
        cache.chmod(0o700)
        # In the same folder, so that a rename puts the finished library in place at once: other processes load it.
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _compile(compiler, Path(work) / library.name)
            for each in (_seal(library), library):
                (Path(work) / each.name).replace(each)
    except OSError as error:
        raise AmpmemError(f"cannot write to {cache}: {error.strerror}; name another in XDG_CACHE_HOME") from error
    _load.cache_clear()
    return library


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Make ``library``, of as many parts as work, and its seal. Raises :class:`AmpmemError` if none does."""
    objects = _compiled(compiler, library.parent)
    for parts in (objects, objects[:1]):
        if _linked(compiler, parts, library) is not None:
            library.chmod(0o600)
            _seal(library).write_bytes(_sealed(library.read_bytes()))
            _seal(library).chmod(0o600)
            with suppress(AmpmemError):
                _loaded(library)
                return
    raise AmpmemError(f"the compiled extension does not work with torch {torch.__version__}, and was removed")


def left_out(library: Path) -> list[str]:
    """One message for each part that the compiled ``library`` lacks although this torch could have it."""
    has, missing = ctypes.CDLL(str(library)), []
    if not hasattr(has, "ampmem_ops_start"):
        missing.append(_NO_OPS)
    if not hasattr(has, "ampmem_tensors_clear"):
        missing.append(_NO_TENSORS)
    if torch.version.cuda is not None and cuda_headers() is None:
        missing.append(_NO_HEADERS)
    elif torch.version.cuda is not None:
        parts = {"ampmem_trace_start": _NO_TRACE, "ampmem_workspaces": _NO_WORKSPACES}
        missing += [message for name, message in parts.items() if not hasattr(has, name)]
    return missing


def cuda_headers() -> Path | None:
    """The folder with CUDA's headers; ``None`` if there is none, or this torch was built without CUDA."""
    if torch.version.cuda is None:
        return None
    packages = Path(torch.__file__).parents[1]
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [
        *(home / "include" for home in homes),
        packages / "triton" / "backends" / "nvidia" / "include",
        *sorted(packages.glob("nvidia/*/include")),
        Path("/usr/local/cuda/include"),
    ]
    return next((folder for folder in folders if all((folder / name).exists() for name in _CUDA_HEADERS)), None)


def _compiled(compiler: Sequence[str], work: Path) -> list[Path]:
    """The objects of the sources that compile, side by side; raises :class:`AmpmemError` if the needed one does not."""
    include, headers = Path(torch.__file__).parent / "include", cuda_headers()
    folders = [work, include, include / "torch" / "csrc" / "api" / "include", *([headers] if headers else [])]
    for name in _EMPTY_HEADERS:
        (work / name).touch()
    flags = [*compiler, *_FLAGS, *(f"-I{folder}" for folder in folders), "-c"]
    sources = [source for source in SOURCES if source.name not in _MORE or headers is not None]
    # The needed one first: it alone is tried if the parts together do not work.
    sources.sort(key=lambda source: source.name != _NEEDED)
    objects = [work / f"{source.stem}.o" for source in sources]

    def compile(source: Path, made: Path) -> str | None:
        return _ran([*flags, str(source), "-o", str(made)])

    # Compilers are processes: the threads only wait for them.
    with ThreadPoolExecutor(len(sources)) as pool:
        said = list(pool.map(compile, sources, objects))
    if said[0] is not None:
        raise AmpmemError(said[0])
    return [made for made, problem in zip(objects, said, strict=True) if problem is None]


def _linked(compiler: Sequence[str], objects: Iterable[Path], library: Path) -> Path | None:
    """``library``, made of ``objects``; ``None`` if that is impossible."""
    names = [*_LIBRARIES, *(_MORE[name] for each in objects if (name := f"{each.stem}.cpp") in _MORE)]
    found = [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in names)]
    problem = _ran([*compiler, "-shared", *map(str, objects), "-o", str(library), *found])
    return library if problem is None else None


def _ran(command: Sequence[str]) -> str | None:
    """Run the compiler; returns what is wrong. Raises :class:`AmpmemError` if the compiler does not start."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise AmpmemError(f"the C++ compiler {command[0]} does not start: {error.strerror}") from error
    if not ran.returncode:
        return None
    said = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr.strip()[-200:])
    return f"the C++ compiler {command[0]} could not compile the extension: {said}"


def remove() -> int:
    """Delete all compiled extensions; returns how many there were."""
    found = list(folder().glob("*.so"))
    for library in found:
        library.unlink()
        _seal(library).unlink(missing_ok=True)
    _load.cache_clear()
    return len(found)
