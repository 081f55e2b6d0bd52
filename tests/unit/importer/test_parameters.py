"""Which blocks of a snapshot are taken for parameters, states of an optimizer and workspaces."""

from pathlib import Path

import pytest
from support.snapshots import (
    ACCUMULATE,
    BACKWARD,
    CAST,
    ENGINE,
    FORWARD,
    KIB,
    MIB,
    SCRIPT,
    WORKSPACE,
    ZERO,
    Frames,
    Story,
    imported,
    native,
    op,
    python,
)

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.importer.infer import CUBLAS_WORKSPACE, LARGE_CUBLAS_WORKSPACE
from ampmem.names import LEFT_OVER

MODEL: Frames = [op("empty_memory_format"), python("__init__", "/home/net.py", 5), SCRIPT]
OPTIMIZER: Frames = [op("zeros_like"), python("__init__", "/home/optimizer.py", 27), SCRIPT]
CONVOLUTION: Frames = [native("at::native::run_conv_plan(cudnnContext*)"), op("cudnn_convolution"), *FORWARD]
LINEAR: Frames = [native("void at::cuda::blas::gemm_and_bias<float>(bool)"), op("addmm"), *FORWARD]


def update(line: int) -> Frames:
    """A line of an optimizer of the script's own, whose updates make new tensors."""
    wrapper = python("wrapper", "/env/torch/optim/optimizer.py")
    return [op("add_Tensor"), python("step", "/home/optimizer.py", line), wrapper, SCRIPT]


def at_the_end(analysis: Analysis) -> Breakdown:
    return analysis.timeline.breakdown(len(analysis.recording.events))


def forward_and_backward(story: Story, gradient: str, size: int) -> None:
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    story.alloc("seed", 4, [op("ones_like"), *BACKWARD])
    story.alloc(gradient, size, ACCUMULATE)
    story.free("out", "seed", frames=ENGINE)


def test_parameters_that_each_update_makes_anew_and_their_states(tmp_path: Path) -> None:
    story = Story()
    story.alloc("weight", 4 * MIB, MODEL)
    story.alloc("m", 4 * MIB, OPTIMIZER)
    story.alloc("v", 4 * MIB, OPTIMIZER)
    for step in range(2):
        forward_and_backward(story, "gradient", 4 * MIB)
        story.alloc(f"m{step}", 4 * MIB, update(51))
        story.alloc(f"v{step}", 4 * MIB, update(56))
        story.alloc(f"weight{step}", 4 * MIB, update(63))
        story.free("weight" if step == 0 else "weight0", frames=update(63)[1:])
        story.free(*(("m", "v") if step == 0 else ("m0", "v0")), frames=update(50)[1:])
        story.free("gradient", frames=ZERO)
    analysis = imported(tmp_path, story.snapshot())
    (record,) = analysis.recording.parameters
    assert (record.bytes, record.trainable) == (4 * MIB, True)
    assert at_the_end(analysis)[Category.PARAMETERS] == 4 * MIB
    assert at_the_end(analysis)[Category.OPTIMIZER_STATE] == 8 * MIB
    assert at_the_end(analysis)[Category.OTHER] == 0
    series = analysis.timeline.series(Category.PARAMETERS)
    assert series.max() == 8 * MIB  # the old one and the new one, for an instant
    assert {int(series[analysis.timeline.position(step.end_ns)]) for step in analysis.recording.steps} == {4 * MIB}


def test_momentum_is_no_parameter_however_many_steps_the_trace_has(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, other=4 * MIB, momentum=4 * MIB, of_the_other=4 * MIB, buffer=7 * KIB)
    for _ in range(3):  # SGD in place leaves no event
        forward_and_backward(story, "one", 4 * MIB)
        forward_and_backward(story, "two", 4 * MIB)
        story.free("one", "two", frames=ZERO)
    end = at_the_end(imported(tmp_path, story.snapshot()))
    assert (end[Category.PARAMETERS], end[Category.OPTIMIZER_STATE]) == (8 * MIB, 8 * MIB)
    assert end[Category.OTHER] == 7 * KIB


def test_a_frozen_twin_is_no_state_where_no_optimizer_was_seen(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, twin=4 * MIB)
    forward_and_backward(story, "gradient", 4 * MIB)
    analysis = imported(tmp_path, story.snapshot())
    assert at_the_end(analysis)[Category.PARAMETERS] == at_the_end(analysis)[Category.OTHER] == 4 * MIB
    assert at_the_end(analysis)[Category.OPTIMIZER_STATE] == 0
    assert any(note.endswith(LEFT_OVER) for note in analysis.recording.notes)


def test_a_forward_alone_counts_no_twin_as_a_parameter(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, twin=4 * MIB, other=4 * MIB, of_the_other=4 * MIB)
    story.alloc("copy", 2 * MIB, CAST)
    story.alloc("copy of the other", 2 * MIB, CAST)
    end = at_the_end(imported(tmp_path, story.snapshot()))
    assert (end[Category.PARAMETERS], end[Category.OPTIMIZER_STATE]) == (8 * MIB, 0)
    assert end[Category.OTHER] == 8 * MIB


def test_a_tensor_of_the_script_that_is_trained_and_a_frozen_model(tmp_path: Path) -> None:
    story = Story(frozen=64 * KIB)
    story.alloc("given", 4 * MIB, [op("_to_copy"), SCRIPT])
    story.alloc("trained", 4 * MIB, [op("_to_copy"), SCRIPT])
    forward_and_backward(story, "gradient", 4 * MIB)
    story.free("gradient", frames=ZERO)
    analysis = imported(tmp_path, story.snapshot())
    assert [record.bytes for record in analysis.recording.parameters] == [4 * MIB]
    assert at_the_end(analysis)[Category.OTHER] == 4 * MIB + 64 * KIB


@pytest.mark.parametrize("frames", [CONVOLUTION, LINEAR])
def test_what_a_library_asks_for_is_workspace(frames: Frames, tmp_path: Path) -> None:
    story = Story()
    story.alloc("out", 1 * MIB, [op("empty_memory_format"), *frames[1:]])
    story.alloc("scratch", 128 * MIB, frames)
    story.free("scratch", frames=frames)
    analysis = imported(tmp_path, story.snapshot())
    assert analysis.timeline.series(Category.WORKSPACE).max() == 128 * MIB
    assert analysis.timeline.series(Category.TEMPORARIES).max() == 0


def test_a_tensor_that_a_convolution_makes_on_its_way_is_none(tmp_path: Path) -> None:
    story = Story()
    story.alloc("copy", 1 * MIB, [op("contiguous"), *CONVOLUTION])
    story.free("copy", frames=FORWARD)
    assert imported(tmp_path, story.snapshot()).timeline.series(Category.WORKSPACE).max() == 0


def hopper(**weights: int) -> Story:
    """A step of a process that has multiplied before, on both threads."""
    story = Story(**weights, main=LARGE_CUBLAS_WORKSPACE, engine=LARGE_CUBLAS_WORKSPACE)
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    for name, size in weights.items():
        story.alloc(f"gradient of {name}", size, [op("mm"), *ENGINE])
    story.free("out", frames=ENGINE)
    return story


@pytest.mark.parametrize("weights", [{"weight": 4 * MIB}, {"weight": 32 * MIB, "other": 32 * MIB}])
def test_workspaces_of_hopper_from_before_the_trace_are_no_parameters(weights: dict[str, int], tmp_path: Path) -> None:
    end = at_the_end(imported(tmp_path, hopper(**weights).snapshot()))
    assert end[Category.WORKSPACE] == 2 * LARGE_CUBLAS_WORKSPACE
    assert end[Category.PARAMETERS] == end[Category.GRADIENTS] == sum(weights.values())


def test_weights_as_large_as_a_workspace_are_none_where_the_trace_made_the_workspaces(tmp_path: Path) -> None:
    story = Story(weight=LARGE_CUBLAS_WORKSPACE)
    story.alloc("workspace", LARGE_CUBLAS_WORKSPACE, WORKSPACE)
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    end = at_the_end(imported(tmp_path, story.snapshot()))
    assert end[Category.PARAMETERS] == end[Category.WORKSPACE] == LARGE_CUBLAS_WORKSPACE


def test_older_gpus_have_no_workspace_of_hopper(tmp_path: Path) -> None:
    story = Story(weight=LARGE_CUBLAS_WORKSPACE, main=CUBLAS_WORKSPACE)
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    end = at_the_end(imported(tmp_path, story.snapshot()))
    assert end[Category.PARAMETERS] == LARGE_CUBLAS_WORKSPACE
    assert end[Category.WORKSPACE] == CUBLAS_WORKSPACE
