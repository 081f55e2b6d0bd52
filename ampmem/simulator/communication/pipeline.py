"""Pipelines: one rank runs its stages, and what comes from the others' has the shapes that they would have sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.parallel import backward_shapes, forward_shapes, known_inputs, stages_meet, stages_vote
from ampmem.simulator.where import stop


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    with ExitStack() as undo:
        undo.callback(stages_meet(_hear, _tell))
        undo.callback(stages_vote(mode.known.fill))
        return undo.pop_all().close


def _hear(stage: Any, source: int) -> Any:
    """What stage ``source``, on another rank, has found out of the tensors that it sends to ``stage``."""
    if source > stage.stage_index:
        shapes = backward_shapes(stage)
    else:
        inputs = known_inputs(stage)
        if inputs is None:
            raise stop(
                f"stage {stage.stage_index} of the pipeline gets its inputs from stage {source}, which runs on another "
                "rank, and only this one is simulated; give PipelineStage its input_args= (empty tensors of the shapes "
                "of one microbatch), or simulate rank 0"
            )
        shapes = forward_shapes(inputs)
    data = len(pickle.dumps(shapes))
    for size, dtype in ((1, torch.int64), (data, torch.uint8)):
        torch.empty(size, dtype=dtype, device=stage.device)
    return shapes


def _tell(stage: Any, shapes: Any) -> None:
    """What it takes to send them; nobody is there."""
    data = torch.empty(len(pickle.dumps(shapes)), dtype=torch.uint8).to(stage.device)
    torch.cat([torch.tensor([data.numel()]).to(stage.device)])
