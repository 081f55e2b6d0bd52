"""Prints what a program finds when it starts: what Python has set, one line each."""

import builtins
import gc
import inspect
import linecache
import locale
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path

if "--without-torch" not in sys.argv:
    import torch  # noqa: F401  # what it leaves behind is not what is looked at


def names_and_types(values: dict[str, object]) -> str:
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())


def depth(calls: int = 0) -> int:
    try:
        return depth(calls + 1)
    except RecursionError:
        return calls


BEFORE = {name: value for name, value in globals().items() if name.startswith("__") and name != "__warningregistry__"}

for name, value in BEFORE.items():
    if name in ("__loader__", "__spec__"):
        value = (
            type(value).__name__,
            getattr(value, "name", None),
            getattr(value, "path", getattr(value, "origin", "")),
        )
    print(f"{name}: {value!r}")
print("attributes:", names_and_types(BEFORE))
print("is __main__:", sys.modules["__main__"].__dict__ is globals())
for name in (
    "argv",
    "path",
    "flags",
    "warnoptions",
    "_xoptions",
    "executable",
    "dont_write_bytecode",
    "stdin",
    "stdout",
):
    print(f"sys.{name}: {getattr(sys, name)!r}")
print("orig_argv:", sys.orig_argv)
print("line buffering:", sys.stdout.line_buffering, sys.stderr.line_buffering)
for name in ("excepthook", "displayhook", "breakpointhook", "unraisablehook"):
    print(f"sys.{name}:", getattr(sys, name) is getattr(sys, f"__{name}__"), getattr(sys, name))
print(
    "trace:", sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.excepthook is threading.__excepthook__
)
print("limits:", sys.getrecursionlimit(), depth(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold())
print("frozen:", gc.get_freeze_count(), "debug", gc.get_debug(), len(gc.callbacks))
print("hook of last:", [name for name in ("last_type", "last_value", "last_traceback") if hasattr(sys, name)])
print("threads:", [(thread.name, thread.daemon) for thread in threading.enumerate()])
print(
    "signals:",
    {number.name: signal.getsignal(number) for number in signal.Signals},
    signal.getitimer(signal.ITIMER_REAL),
)
print("blocked:", signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1))
print("warnings:", [(each[0], each[1] and each[1].pattern, each[2].__name__) for each in warnings.filters])
print("shown by:", warnings.showwarning.__module__, warnings.formatwarning.__module__)
print("registry:", "__warningregistry__" in globals(), "__warningregistry__" in vars(sys))
print("environment:", sorted(os.environ.items()))
print("folder:", Path.cwd(), oct(os.umask(0o22)), locale.setlocale(locale.LC_ALL))
print("logging:", logging.getLogger().handlers, logging.getLogger().level, logging.getLogger().disabled)
print("builtins:", [name for name in dir(builtins) if not name.startswith("_")])
print("source:", inspect.getsource(depth), inspect.getmodule(depth) is sys.modules["__main__"], depth.__module__)
print("code:", depth.__code__.co_filename, depth.__code__.co_flags, linecache.getline(__file__, 1))
try:
    raise ValueError
except ValueError as error:
    print("traceback:", traceback.format_exc(), error.__context__)
print("frames below:", [frame.filename for frame in inspect.stack()[1:]])
