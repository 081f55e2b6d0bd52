"""What is compiled in tests: by torch's compiler, and ampmem's C++ extension.

The extension takes half a minute: it is compiled once for all processes of a run of pytest, or for all runs.
"""

import fcntl
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from ampmem.recorder.sources import extension

VERIFIED = ("2.12", "2.13", "2.14")
needs_the_compiler = pytest.mark.skipif(
    not torch.__version__.startswith(VERIFIED), reason="the compiler was not verified"
)
"""For tests of compiled code on a simulated GPU."""


def compiled(factory: pytest.TempPathFactory, name: str) -> Path:
    """A cache folder with the extension as :func:`extension.build` makes it; ``name`` says what is special of it.

    It is this run's own: tests may change it. What was compiled is kept in the folder AMPMEM_COMPILED, where that is
    set, for the same sources and the same torch. Skips the test without a compiler.
    """
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    how = sha256(Path(extension.__file__).read_bytes()).hexdigest()[:12]
    kept = Path(os.environ.get("AMPMEM_COMPILED") or base / "compiled") / how / name
    kept.mkdir(parents=True, exist_ok=True)
    cache = base / f"extension-{name}"
    with (kept / f"{torch.__version__}.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(kept))
        made = extension.path()
        if not made.exists():
            extension.build()
        patch.setenv("XDG_CACHE_HOME", str(cache))
        if not extension.path().exists():
            extension.folder().mkdir(parents=True, mode=0o700)
            for each in (made.with_suffix(".sha256"), made):
                shutil.copy2(each, extension.folder())
    return cache
