"""The private parts of torch by which code that is compiled is met, beside those in ``general.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from ampmem.patching import added, patch, replace_all

CALL = "_call_impl"
"""What runs a module, hooks included; of classes ``torch.compile`` compiles it. Since 2.2."""


def load() -> None:
    """Import what keeps torch's functions by their identity: later it would keep what stands in for them.

    That is dynamo, which optimizers import too, the functions that make tensors under ``with torch.device(...)``
    (since 2.0), and TorchScript's table of what it need not compile (since 1.0).
    """
    import_module("torch._dynamo")
    torch.utils._device._device_constructors()
    torch.jit._builtins._get_builtin_table()


def on_call(called: Callable[[str], object]) -> Callable[[], None]:
    """Let ``called`` be called where code would be compiled, which then runs as it is; returns what undoes it.

    It is given the name of the backend that would compile it, empty where that is not known.

    Dynamo asks a function of its own, since 2.6, what to do whenever compiled code is called: here the answer is
    "nothing".
    """
    from torch._dynamo import eval_frame

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def callback_from_stance(callback: Any) -> Any:
            if callback in (None, False):  # nothing was to be compiled
                return original(callback)
            backend = eval_frame.innermost_backend(callback)
            called(str(getattr(backend, "compiler_name", getattr(backend, "__name__", "of dynamo"))))
            return None

        return callback_from_stance

    return patch(eval_frame, "_callback_from_stance", wrap)


def run_uncompiled(called: Callable[[str], object]) -> Callable[[], None]:
    """Let code that is compiled run as it is, and ``called`` be called each time; returns what undoes it.

    The stance "force_eager" is torch's own word for it, since 2.6: with any other, code that is to be compiled whole
    and is not is an error. So a script can set no other.
    """
    former: Any = torch._dynamo.set_stance

    class set_stance(former):  # type: ignore[misc]
        def __init__(self, stance: str = "default", **_: Any) -> None:
            super().__init__("force_eager")

    with ExitStack() as undo:
        undo.callback(on_call(called))
        eager = former("force_eager")
        undo.callback(added("torch.compiler", "set_stance", functools.partial(eager.__exit__, None, None, None)))
        undo.callback(replace_all((torch._dynamo, torch._dynamo.decorators), {"set_stance": set_stance}))
        return undo.pop_all().close
