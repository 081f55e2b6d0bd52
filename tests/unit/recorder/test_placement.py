"""Where the script's models were."""

from types import SimpleNamespace
from typing import Any

import torch

from ampmem.recorder.device import Placement
from ampmem.vocabulary import SourceKind


def _placement(*, offloaded: bool) -> Placement:
    parameter = torch.nn.Parameter(torch.zeros(2))
    models: Any = SimpleNamespace(
        generation=1,
        parameter_names=lambda: ["a"],
        parameters=lambda: [(SimpleNamespace(name="a", above=()), parameter)],
        sharded=SimpleNamespace(offloaded=lambda parameter: offloaded),
    )
    log: Any = SimpleNamespace(entered=set())
    placement = Placement(models, log, SourceKind.SIMULATED, "cuda")
    placement.note()
    return placement


def test_a_model_on_the_cpu_was_not_recorded() -> None:
    placement = _placement(offloaded=False)
    assert placement.missing() == "the model is on cpu: none of its 1 parameters was on the simulated GPU"
    assert placement.notes() == []


def test_shards_that_fsdp_offloads_are_where_they_belong() -> None:
    placement = _placement(offloaded=True)
    assert placement.missing() is None
    assert placement.notes() == ["1 of 1 parameters was never on cuda (such as a, on cpu): its memory was not recorded"]
