"""Memory snapshots for tests, as ``torch.cuda.memory._dump_snapshot`` of several versions of torch writes them."""

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.importer.recording import import_snapshot
from ampmem.recording import read

KIB, MIB = 1 << 10, 1 << 20

Frames = list[dict[str, Any]]

_MODULE = "/env/torch/nn/modules/module.py"


def python(name: str, filename: str, line: int = 1) -> dict[str, Any]:
    """A Python frame."""
    return {"name": name, "filename": filename, "line": line}


def native(name: str) -> dict[str, Any]:
    """A C++ frame."""
    return {"name": name, "filename": "??", "line": 0}


def op(name: str) -> dict[str, Any]:
    """The frame of an op, such as ``mul_Tensor``."""
    return native(f"at::_ops::{name}::call(at::Tensor const&, at::Tensor const&)")


SCRIPT = python("<module>", "/home/train.py", 40)
FORWARD: Frames = [python("forward", "/home/net.py", 9), python("_call_impl", _MODULE), SCRIPT]
LOSS: Frames = [python("loss_of", "/home/train.py", 20), SCRIPT]
BACKWARD: Frames = [python("backward", "/env/torch/_tensor.py"), SCRIPT]
ENGINE: Frames = [native("torch::autograd::Engine::thread_main(std::shared_ptr<...> const&)")]
STEP: Frames = [
    python("_multi_tensor_adamw", "/env/torch/optim/adamw.py"),
    python("wrapper", "/env/torch/optim/optimizer.py"),
    SCRIPT,
]
ZERO: Frames = [python("zero_grad", "/env/torch/optim/optimizer.py"), SCRIPT]
CAST: Frames = [op("empty_strided"), op("_to_copy"), native("at::autocast::cached_cast(c10::ScalarType)"), *FORWARD]
ACCUMULATE: Frames = [native("void torch::autograd::AccumulateGrad::accumulateGrad<...>"), *ENGINE]
WORKSPACE: Frames = [native("at::cuda::getNewWorkspace()"), op("mm"), *FORWARD]
REDUCTION: Frames = [native("void at::native::gpu_reduce_kernel<float>()"), op("sum_dim_IntList"), *ENGINE]


class Story:
    """Allocs and frees, one microsecond apart; ``before`` is there when the trace starts, by name and bytes."""

    def __init__(self, **before: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._addresses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._next = 1 << 40
        self.now = 1_700_000_000_000_000
        self.before(**before)

    def before(self, **sizes: int) -> None:
        """Blocks that were there before the trace."""
        for name, size in sizes.items():
            self._place(name, size)

    def alloc(self, name: str, size: int, frames: Frames) -> None:
        self._place(name, size)
        self.event("alloc", self._addresses[name], size, frames)

    def free(self, *names: str, frames: Frames | None = None) -> None:
        for name in names:
            address, size = self._addresses.pop(name), self._sizes.pop(name)
            self.event("free_requested", address, size, frames or [])
            self.event("free_completed", address, size, frames or [])

    def event(self, action: str, address: int, size: int, frames: Frames) -> None:
        self.now += 1
        self.events.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.now, "frames": frames}
        )

    def _place(self, name: str, size: int) -> None:
        self._addresses[name] = self._next
        self._sizes[name] = size
        self._next += _rounded(size)

    def snapshot(self, **more: Any) -> dict[str, Any]:
        """The snapshot of now: one segment that holds everything."""
        blocks = []
        at = 1 << 40
        for name, address in sorted(self._addresses.items(), key=lambda item: item[1]):
            if address > at:
                blocks.append(_block(at, address - at, 0, "inactive"))
            blocks.append(_block(address, _rounded(self._sizes[name]), self._sizes[name], "active_allocated"))
            at = address + _rounded(self._sizes[name])
        if self._next > at:
            blocks.append(_block(at, self._next - at, 0, "inactive"))
        segment = {
            "device": 0,
            "address": 1 << 40,
            "total_size": self._next - (1 << 40),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        return {"segments": [segment], "device_traces": [self.events], "external_annotations": [], **more}


def _rounded(size: int) -> int:
    return max(512, -(-size // 512) * 512)


def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


PARAMETERS = {"embedding": 8 * MIB, "weight": 4 * MIB, "other": 4 * MIB, "norm": 3 * KIB}


def training_step(story: Story, *, state: bool, number: int = 0) -> None:
    """A step under autocast with Adam on :data:`PARAMETERS`; ``state`` says that this one makes its state."""
    mine = f"@{number}"
    for name in ("weight", "other"):
        story.alloc(f"cast {name}{mine}", PARAMETERS[name] // 2, CAST)
        story.alloc(f"input {name}{mine}", 1 * MIB, CAST)
        story.alloc(f"out {name}{mine}", 3 * MIB, [op("mm"), *FORWARD])
    story.alloc(f"scratch{mine}", 2 * KIB, [op("exp"), *FORWARD])
    story.free(f"scratch{mine}")
    story.alloc(f"loss{mine}", 4, [op("mean"), *LOSS])
    story.alloc(f"seed{mine}", 4, [op("ones_like"), *BACKWARD])
    for name in reversed(PARAMETERS):
        story.alloc(f"part{mine}", 5 * KIB, [op("mul_Tensor"), *ENGINE])
        story.alloc(f"reduced{mine}", 6 * KIB, REDUCTION)
        story.alloc(f"grad {name}{mine}", PARAMETERS[name], ACCUMULATE if name == "norm" else [op("mm"), *ENGINE])
        story.free(f"part{mine}", f"reduced{mine}", frames=ENGINE)
    for name in ("weight", "other"):
        story.free(f"cast {name}{mine}", f"input {name}{mine}", f"out {name}{mine}", frames=ENGINE)
    story.free(f"seed{mine}", frames=BACKWARD)
    for name, size in PARAMETERS.items():
        if state:
            story.alloc(f"exp_avg {name}", size, [op("zeros_like"), *STEP])
            story.alloc(f"exp_avg_sq {name}", size, [op("zeros_like"), *STEP])
        story.alloc(f"root{mine}", size, [op("_foreach_sqrt"), *STEP])
        story.free(f"root{mine}", frames=STEP)
    story.free(*(f"grad {name}{mine}" for name in PARAMETERS), frames=ZERO)
    story.free(f"loss{mine}", frames=[SCRIPT])


def dump(path: Path, data: object, protocol: int = 4) -> Path:
    """``data`` pickled at ``path``."""
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


def imported(tmp_path: Path, data: object, *, device: int | None = None) -> Analysis:
    """``data`` as a snapshot file, imported and read again."""
    source = dump(tmp_path / "snapshot.pickle", data)
    import_snapshot(source, tmp_path / "run.ampmem", device=device, force=True)
    return analyse(read(tmp_path / "run.ampmem"))


def without(items: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """``items`` as a version of torch writes them that knows no ``keys``."""
    return [{key: value for key, value in item.items() if key not in keys} for item in items]


def real(name: str) -> Path:
    """A snapshot that others recorded on a GPU; the test is skipped where it is not there."""
    default = Path(__file__).resolve().parents[3] / "shared" / "snapshots"
    folder = Path(os.environ.get("AMPMEM_SNAPSHOTS", default))
    path = folder / f"{name}.pickle"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {folder}; name its folder in AMPMEM_SNAPSHOTS")
    return path
