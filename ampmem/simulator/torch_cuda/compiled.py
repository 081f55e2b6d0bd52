"""``torch.compile`` on the simulated device: compiled by Inductor as on a GPU, or uncompiled if the user says so.

What is not known without a GPU is refused, or assumed and said: see ``docs/compiled.md``.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ampmem.allocator.settings import MIB
from ampmem.failure import failure_of
from ampmem.own_code import is_library
from ampmem.patching import Undo, replace_all, undone_together, unseen
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import compilation
from ampmem.simulator.private.compilation import Kernel
from ampmem.simulator.private.general import CALL, FakeTensor, run_uncompiled, tree_leaves
from ampmem.simulator.torch_cuda import compiler_cache
from ampmem.simulator.where import stop

_VERIFIED = ("2.12", "2.13", "2.14")
"""Versions of torch for which compiled code was verified to allocate the same as on PyTorch's CUDA build."""
_STOPS = (
    "the memory of compiled code depends on {}; {} runs it uncompiled, or leave torch.compile out to see what the "
    "uncompiled run needs"
)
_VERSION = (
    f"Inductor, and that of torch {torch.__version__} has not been verified ({_VERIFIED[0]} to {_VERIFIED[-1]} have)"
)
_BACKEND = 'the backend "{}", which does not run on a simulated GPU'
_MODE = 'what mode="{}" does on the GPU'
_WHY = {
    "triton.cudagraphs": 'CUDA graphs (mode="reduce-overhead"), whose own memory pools are not simulated',
    "max_autotune": "what Inductor measures on the GPU (max_autotune), which decides which buffers there are",
    "max_autotune_gemm": "what Inductor measures on the GPU (max_autotune_gemm), which decides which buffers there are",
    "cpp_wrapper": "what Inductor compiles for the GPU in C++ (cpp_wrapper)",
}
_FAILED = "compiling this failed on the simulated GPU: {}; {} runs it uncompiled"
_SKIPPED = "torch.compile ran {} uncompiled, which changes the run's numbers: {}; if that is intended, give {}"
_DEFAULT = "inductor"
_UNCOMPILED = (
    "compiled code, which ran uncompiled, as {} says; a compiled run has other numbers, and usually keeps less, "
    "because pointwise operations are fused and some results are recomputed in backward"
)
_UNMEASURED = "assumed: compiled code is what Inductor makes where it measures nothing, so it pads no matrix products"
_TUNING = "the trials of compiled kernels at their first call"
_TUNES = (
    f"assumed: {_TUNING} take at most a buffer of the size of the L2 cache, and copies of what a kernel changes in "
    "place, freed at once; nothing if PyTorch's cache has their result from an earlier run"
)
_L2 = {(8, 0): 40, (8, 9): 96, (9, 0): 60, (10, 0): 128, (10, 3): 128, (12, 0): 128}
"""MiB of the L2 cache of the largest chip of a compute capability; 6 for others.

NVIDIA's architecture papers have them. Many GPUs have a part of it: an H100 50 MiB, an RTX 4090 72, an RTX 5090 96.
"""


@undone_together
def install(mode: SimulatedMode, cache: Path | None) -> Iterator[Undo]:
    """Run compiled code compiled, or uncompiled if the user says so; returns the undo.

    ``cache`` is the folder for what the compiler keeps, the user's own by default.
    """
    assumed = mode.assumed
    if assumed.uncompiled:
        uncompiled = _UNCOMPILED.format(assumed.advice("compile=eager"))
        yield run_uncompiled(functools.partial(mode.device_model.leave_out, uncompiled))
        yield replace_all((torch,), {"compile": _without_inductor(torch.compile, mode)})
    else:
        compiler = _Compiler(mode, cache)
        yield compiler.undo.close
        yield compilation.prepare(compiler.ready, compiler)
        yield replace_all((torch,), {"compile": _refusing(torch.compile, mode, compiler.refuse)})


def _without_inductor(original: Callable[..., Any], mode: SimulatedMode) -> Callable[..., Any]:
    """``torch.compile`` that wraps as usual (``_orig_mod``), but never loads the compiler."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:  # the names of torch's own parameters
        if not mode.ended:  # libraries keep what they have imported
            options |= {"backend": "eager", "mode": None, "options": None}
        return original(model, **options)

    return compile


class _Compiler(compilation.Compiling):
    """Refuses code that cannot be simulated, loads Inductor at the first compilation, and notes the compiled graphs."""

    def __init__(self, mode: SimulatedMode, cache: Path | None) -> None:
        self.undo = ExitStack()
        self._mode = mode
        self._device = mode.device_model
        self._advice = mode.assumed.advice("compile=eager")
        self._cache = cache
        self._loaded = False
        self._graphs = self._again = 0
        self.breaks: Counter[str] = Counter()
        self._used = False
        """Whether compiled code was made, or has run, since the code began of which a frame was skipped."""
        self.waits = False
        self._skipped: tuple[CodeType, str] | None = None
        self._tuned: set[str] = set()
        self._told = ""

    def refuse(self, backend: Any, mode: str | None, options: Mapping[str, Any]) -> Exception | None:
        """The error for code that cannot be simulated compiled, if it is; a ``backend`` of ``None`` is torch's own."""
        name = str(getattr(backend, "compiler_name", getattr(backend, "__name__", backend or _DEFAULT)))
        given = {option.replace("-", "_") for option, value in options.items() if value}
        why = next((_WHY[option] for option in _WHY if option in given), None)
        if _DEFAULT not in name:
            why = _BACKEND.format(name)
        elif mode not in (None, "default"):
            why = _WHY["triton.cudagraphs"] if mode == "reduce-overhead" else _MODE.format(mode)
        elif not torch.__version__.startswith(_VERIFIED):
            why = _VERSION
        return None if why is None else stop(_STOPS.format(why, self._advice))

    def ready(self) -> None:
        """Load and install the compiler, once."""
        if self._loaded:
            return
        self._loaded = True
        try:
            compilation.load()
            self.undo.callback(compiler_cache.use(self._cache, self._device.gpu.name))
            self.undo.callback(compilation.install(self._mode, self, self._device.order.current))
        except (ImportError, AttributeError, KeyError) as error:  # torch has moved or removed a part
            raise self.failed(error) from error

    def begins(self, backend: str, options: Mapping[str, Any]) -> None:
        if (error := self.refuse(backend, None, options)) is not None:
            raise error
        if not self.waits:
            self._used = False

    def made(self, *, again: bool) -> None:
        self._used = True
        self._graphs += 1
        self._again += again
        self._device.assume(_UNMEASURED)
        self._tell()

    def broke(self, places: Sequence[tuple[str, int]]) -> None:
        of_script = [f"{file}:{line}" for file, line in places if not is_library(file)]
        self.breaks[of_script[-1] if of_script else "lines of libraries"] += 1
        self._tell()

    def _tell(self) -> None:
        """Keep one note of what was compiled so far."""
        parts = [_count(self._graphs, "graph")]
        parts += [f"{_count(times, 'break')} at {place}" for place, times in self.breaks.items()]
        if self._again:
            parts.append(f"{_count(self._again, 'graph')} of them for other inputs of the same code")
        self._device.assumptions.pop(self._told, None)
        self._told = f"torch.compile made {', '.join(parts)}"
        self._device.assume(self._told)

    def skipped(self, code: CodeType, reason: str) -> None:
        if not is_library(code.co_filename):
            self._skipped = self._skipped or (code, reason)
            self.waits = True

    def left(self) -> None:
        skipped, self._skipped, self.waits = self._skipped, None, False
        if skipped is not None and not self._used:
            code, reason = skipped
            place = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
            raise stop(_SKIPPED.format(place, reason, self._advice))

    def failed(self, error: Exception) -> Exception:
        return stop(_FAILED.format(failure_of(error).line, self._advice))

    def launched(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        self._used = True
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._mode.forget(leaf.untyped_storage())
        if kernel.configurations < 2 or kernel.source in self._tuned:
            return
        self._tuned.add(kernel.source)
        changed = [arguments[place] for place in kernel.mutated if place < len(arguments)]
        copies = sum(each.nbytes for each in changed if isinstance(each, FakeTensor))
        buffer = _L2.get(self._device.gpu.compute_capability or (0, 0), 6) * MIB
        self._device.assume(_TUNES)
        self._device.assume_scratch(_TUNING, buffer + copies, buffer + copies)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _refusing(
    original: Callable[..., Any],
    mode: SimulatedMode,
    refuse: Callable[[Any, str | None, Mapping[str, Any]], Exception | None],
) -> Callable[..., Any]:
    """``torch.compile`` that refuses modules at once, functions when called: libraries compile many unused ones."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if options.get("disable") or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return model
        if (error := refusal(options)) is None:
            compilation.load()
            return original(model, **options)
        if isinstance(model, torch.nn.Module):
            raise error
        if isinstance(model, type):  # torch compiles its calls, and returns the class
            name = CALL if issubclass(model, torch.nn.Module) else "__call__"
            setattr(model, name, when_called(getattr(model, name), {}))
            return model
        return when_called(model, options)

    def refusal(options: Mapping[str, Any]) -> Exception | None:
        if mode.ended:  # libraries keep what they have imported
            return None
        return refuse(options.get("backend"), options.get("mode"), options.get("options") or {})

    def when_called(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: original(function, **options))

        @functools.wraps(function)
        def stopped(*args: Any, **kwargs: Any) -> Any:
            if (error := refusal(options)) is not None:
                raise error
            return compiled()(*args, **kwargs)  # after the end of the simulation

        return unseen(stopped)

    return compile
