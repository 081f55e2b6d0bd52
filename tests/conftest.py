"""What holds for every test: how it is run, and proof that it left nothing of ampmem behind in torch."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.golden_sections import Golden

# Models of tests gain nothing from more threads, and several processes of pytest would wait for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A compiled extension in the user's cache folder changes nothing in a recording, but a test must not depend on it. With
# AMPMEM_EXTENSION=on the suite uses it.
os.environ.setdefault("AMPMEM_EXTENSION", "off")

# Tables of programs that tests run are as wide as anywhere. pytest imports readline, which sets this for programs only.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

# What a shell starts in the background ignores Ctrl-C, and so would all programs of tests, some of which wait for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same in every run: what passed on one machine is what passes on another. To look for new ones:
# --hypothesis-profile=explore.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("repeatable")

torch = pytest.importorskip("torch")

from support.compiled import compiled  # noqa: E402
from support.ready_python import share  # noqa: E402
from torch.amp.grad_scaler import GradScaler  # noqa: E402
from torch.autograd.profiler import profile, record_function  # noqa: E402
from torch.nn.modules import module as torch_module  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from ampmem import patching  # noqa: E402
from ampmem.own_code import RUNNER  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist hand out files in the order of :func:`pytest_collection_modifyitems`, not by numbers of tests.

    Its processes have one server of ready Pythons, which starts while they collect.
    """
    config.option.loadscopereorder = False
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        cold = os.environ.get("AMPMEM_COLD")
        share(str(Path(cold).absolute() / "bin" / "python") if cold else sys.executable)


SHARING = (
    *("test_precisions.py", "test_verdict_of_runs.py", "test_cast_ledger.py"),
    *("test_exactness.py", "test_simulated_cpu.py", "test_simulated_workloads.py"),
)
"""Files of tests/integration that ask :func:`precisions.workload` for the same recordings, which a process keeps."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one worker run the files of :data:`SHARING`, and each other file on its own, as ``--dist loadfile`` says."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "SHARING" if file.startswith("tests/integration/") and file.endswith(SHARING) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a browser is slow. Files with slow tests come first, or one process would be busy with the last."""
    for item in items:
        if item.get_closest_marker("browser") is not None:
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


_RUN: dict[str, Any] = {}
exec(compile("def run(test, arguments):\n    test(**arguments)\n", RUNNER, "exec"), _RUN)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call a test from a frame as that below a script: recordings in it leave out the variables of pytest's frames.

    To look through these takes a third of a short recording. Under a pytest of its own, which has no such frame, the
    tests of the plugin record.
    """
    _RUN["run"](pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    return True


@pytest.fixture(scope="session")
def compiled_extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with ampmem's C++ extension."""
    return compiled(tmp_path_factory, "whole")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave torch, and all else that is imported by now, out of garbage collections: there are many in a test."""
    if any("integration" in item.path.parts for item in session.items):
        import_module("torch._dynamo")  # as large as the rest of torch; the first optimizer would import it
    _silence_the_profiler()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or the triton of a CUDA build says at the end that it was not collected


def _silence_the_profiler() -> None:
    """Start kineto once without its lines on stderr: it is asked only then, and any test may be the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KINETO_LOG_LEVEL", "99")
        with profile():
            pass


_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
)
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def torch_state() -> dict[str, object]:
    """What a session hooks, patches or pushes onto, looked at in torch itself, to be compared with ``==``.

    The registry knows of more, but not whether an undo did what it says.
    """
    state: dict[str, object] = {name: dict(getattr(torch_module, name)) for name in _HOOKS}
    state |= {name: dict(getattr(torch_optimizer, name)) for name in _OPTIMIZER_HOOKS}
    return state | {
        "backward": (torch.autograd.backward, torch.autograd.grad, torch.autograd._engine_run_backward),
        "scaler": GradScaler.step,
        "data": _BaseDataLoaderIter.__next__,
        "profiler": (profile._prepare_trace, record_function.__enter__),
        "functorch": torch.autograd.graph.disable_saved_tensors_hooks,
        "functions": torch.autograd.function.FunctionCtx.save_for_backward,
        "modes": list(_get_current_dispatch_mode_stack()),
        "saved hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "profiling": torch._C._autograd._profiler_enabled(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaves a hook, a patch, a mode or a session behind."""
    from ampmem.recorder.facts import log
    from ampmem.recorder.session import active

    before = torch_state(), patching.in_place()
    yield
    assert active() is None
    assert patching.in_place() == before[1]
    assert torch_state() == before[0]
    missed = list(log.seen)  # what hooks kept to themselves: faults of ours, unless the test is about it
    log.seen.clear()
    assert missed == []


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """Compares the texts of a test with those in the file beside its module."""
    return Golden(request.path.with_suffix(".txt"), request.node.name, tmp_path)
