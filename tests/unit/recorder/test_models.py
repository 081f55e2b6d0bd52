"""How the script's modules and parameters get their names."""

from __future__ import annotations

import pytest
from torch import nn

from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models import models as models_module
from ampmem.recorder.models.models import Models


def test_a_module_at_the_id_of_a_dead_one_is_named_by_its_root() -> None:
    models = Models(Log(RealAddresses()))
    child, dead = nn.Linear(2, 2, bias=False), nn.Sequential()
    models.registered(child)
    models.registered(dead)
    number = id(dead)
    del dead
    roots = [nn.Sequential()]
    while id(roots[-1]) != number:  # Python hands out the memory of the dead module sooner or later
        assert len(roots) < 10_000
        roots.append(nn.Sequential())
    roots[-1].append(child)
    models.registered(roots[-1])
    models.add_registered()
    assert [slot.name for slot, _ in models.parameters()] == ["0.weight"]


def test_a_module_that_was_there_before_is_named_by_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(RealAddresses())
    models, texts = Models(log), log.texts
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert texts.value(models.path_id(model[0][0])) == "0.0"  # type: ignore[index]

    alone = nn.Linear(3, 3)
    variables = {"alone": alone, "width": 3}
    monkeypatch.setattr(models_module, "live_modules", lambda: pytest.fail("a root needs no look at all modules"))
    assert texts.value(models.path_id(variables["alone"])) == "Linear"  # type: ignore[arg-type]
