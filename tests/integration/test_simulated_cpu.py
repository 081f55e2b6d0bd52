"""A simulated device that stands for the CPU, against what the CPU profiler measures of the same workload."""

import json
from pathlib import Path

import pytest
from support import measure, precisions
from support.commands import python
from support.simulated_runs import STEPS

from ampmem.events import OTHER_THREADS, Action, Recording
from ampmem.recording import read

WRAPPED = 16
"""Bytes up to which the CPU's allocations are numbers wrapped as tensors, which the simulation does not make."""

LOADER = ""
"""No op: the order of the samples is drawn from real random numbers."""
SCRATCH = {
    LOADER,
    "NativeLayerNormBackward0",
    "EmbeddingBackward0",
    "aten::embedding",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "ScaledDotProductFlashAttentionForCpuBackward0",
}
"""Whose kernels take memory of their own on the CPU."""
CONVOLUTIONS = {
    LOADER,
    "aten::convolution",
    "ConvolutionBackward0",
    "aten::native_batch_norm",
    "NativeBatchNormBackward0",
}
"""Convolutions, and what reads and writes their tensors in the library's own layouts."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]
clean_start = measure.clean_start


def simulated(folder: Path, name: str) -> Recording:
    script = Path(__file__).parents[1] / "support/simulated_runs.py"
    case = f"{name}:fp32:bf16:cpu"
    done = python(folder, str(script), str(folder), "80GiB", case)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {case: []}
    return read(folder / f"{case}.ampmem")


def born(recording: Recording) -> list[tuple[int, str]]:
    """Every allocation's bytes and op, in order; without those of the threads that kernels run on."""
    events = recording.events
    kept = (events.action == Action.ALLOC) & (events.address != OTHER_THREADS) & (events.bytes > WRAPPED)
    return [
        (size, recording.texts[op])
        for size, op in zip(events.bytes[kept].tolist(), events.op[kept].tolist(), strict=True)
    ]


def differ_by(ops: set[str], real: Recording, fake: Recording) -> bool:
    """Whether the simulation allocates the same sizes in the same order, but for some of those of ``ops``."""
    here = [size for size, _ in born(fake)]
    met = {0}  # how many of them can have been met so far: an allocation that may be left out need not be
    for size, op in born(real):
        met = {n + 1 for n in met if n < len(here) and here[n] == size} | (met if op in ops else set())
    return len(here) in met


def test_gpt_allocates_what_it_allocates_on_the_cpu(tmp_path: Path) -> None:
    """The same sizes in the same order, but for the scratch of the CPU's own kernels; and so the same peak."""
    analysis, _ = precisions.workload("gpt", "fp32", steps=STEPS)
    real, fake = analysis.recording, simulated(tmp_path, "gpt")
    assert differ_by(SCRATCH, real, fake)
    assert not any(differ_by(SCRATCH - {op}, real, fake) for op in SCRATCH)
    missing = sum(size for size, _ in born(real)) - sum(size for size, _ in born(fake))
    assert missing < 0.01 * real.events.bytes.sum()
    ratio = int(fake.events.allocated.max()) / int(real.events.allocated.max())
    assert ratio == pytest.approx(1, abs=5e-5)


def test_convolutions_differ_by_what_the_cpus_library_keeps(tmp_path: Path) -> None:
    """Known: oneDNN reorders weights and inputs into buffers of its own, which a simulation cannot see.

    Which ops do so, and how much they take, is chosen after the CPU.
    """
    analysis, _ = precisions.workload("resnet", "fp32", steps=STEPS)
    real, fake = analysis.recording, simulated(tmp_path, "resnet")
    assert differ_by(CONVOLUTIONS, real, fake)
    assert int(fake.events.allocated.max()) <= int(real.events.allocated.max())
