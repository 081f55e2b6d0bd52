"""``torch.compile`` on a simulated GPU: what it compiles stops, or runs as it is where that is asked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from ampmem.patching import passed_over, replace_all
from ampmem.simulator.assumed import Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.compiled import CALL, on_call, run_uncompiled
from ampmem.simulator.where import stop

_STOPS = (
    "what compiled code allocates is decided by {}; {} runs it uncompiled, or leave torch.compile out to see what the "
    "plain run needs"
)
_INDUCTOR = "the kernels that torch.compile makes for a GPU, and there is none"
_OTHER = 'the backend "{}", which does not run on a simulated GPU'
_DEFAULT = "inductor"
_UNCOMPILED = (
    "compiled code, which ran uncompiled, as {} says; a compiled run has other numbers, and keeps "
    "less as a rule, since pointwise operations are fused and some results computed again in backward"
)


def install(device: SimulatedDevice, assumed: Assumed) -> Callable[[], None]:
    """Put in place what becomes of compiled code, which may be ``assumed`` to run as it is; returns what undoes it."""
    advice = assumed.advice("compile=eager")
    with ExitStack() as undo:
        if assumed.uncompiled:
            uncompiled = _UNCOMPILED.format(advice)
            undo.callback(run_uncompiled(lambda _: device.leave_out(uncompiled)))
            undo.callback(replace_all((torch,), {"compile": _without_inductor(torch.compile)}))
        else:
            undo.callback(on_call(lambda backend: _refuse(backend, advice)))
            undo.callback(replace_all((torch,), {"compile": _stopping(torch.compile, advice)}))
        return undo.pop_all().close


def _refuse(backend: Any, advice: str) -> NoReturn:
    """``backend`` is its name or the function that it is; ``None`` is torch's own."""
    name = str(getattr(backend, "__name__", backend or _DEFAULT))
    raise stop(_STOPS.format(_INDUCTOR if _DEFAULT in name else _OTHER.format(name), advice))


def _without_inductor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's own, which wraps what it is given as ever (``_orig_mod``); what would make kernels is not even loaded."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:  # as it is called, by name too
        if torch.compile is compile:
            options |= {"backend": "eager", "mode": None, "options": None}
        return original(model, **options)

    return compile


def _stopping(original: Callable[..., Any], advice: str) -> Callable[..., Any]:
    """A module stops when it is compiled, a function when it is called: libraries compile many that nobody uses."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if options.get("disable") or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return model
        if isinstance(model, torch.nn.Module):
            _refuse(options.get("backend"), advice)
        if isinstance(model, type):  # torch compiles its calls, and gives it back
            name = CALL if issubclass(model, torch.nn.Module) else "__call__"
            setattr(model, name, when_called(getattr(model, name), {}))
            return model
        return when_called(model, options)

    def when_called(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: original(function, **options))

        @functools.wraps(function)
        def stopped(*args: Any, **kwargs: Any) -> Any:
            if torch.compile is compile:
                _refuse(options.get("backend"), advice)
            return compiled()(*args, **kwargs)  # the simulation has ended

        return passed_over(stopped)

    return compile
