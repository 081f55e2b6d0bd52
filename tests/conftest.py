"""What holds for every test: how it is run, and proof that it left nothing of ampmem behind in torch."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator

import pytest

# Models of tests gain nothing from more threads, and several processes of pytest would wait for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

torch = pytest.importorskip("torch")

from torch.amp.grad_scaler import GradScaler  # noqa: E402
from torch.autograd.profiler import profile, record_function  # noqa: E402
from torch.nn.modules import module as torch_module  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from ampmem import patching  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a browser is slow."""
    for item in items:
        if item.get_closest_marker("browser") is not None:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave torch, and all else that is imported by now, out of garbage collections: there are many in a test."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or the triton of a CUDA build says at the end that it was not collected


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
    from ampmem.recorder.facts import misses
    from ampmem.recorder.session import active

    before = torch_state(), patching.in_place()
    yield
    assert active() is None
    assert patching.in_place() == before[1]
    assert torch_state() == before[0]
    missed = list(misses.seen)  # what hooks kept to themselves: faults of ours, unless the test is about it
    misses.seen.clear()
    assert missed == []
