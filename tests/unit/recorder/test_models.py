"""How the script's modules and parameters get their names."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ampmem.events import ParameterRecord
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


def as_it_is(record: ParameterRecord) -> ParameterRecord:
    return record


class Quantized(nn.Linear):
    """A class that a module may get later."""


class Own(Tensor):
    """A class of the script, which may change without a trace."""


def tie(model: nn.Sequential) -> None:
    model[0].weight.data = model[1].weight.data


def overlap(model: nn.Sequential) -> None:
    both = torch.ones(6)
    model[0].weight.data, model[1].weight.data = both[:4].view(2, 2), both[2:].view(2, 2)


def stride(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.as_strided((2, 2), (1, 1))


def swap(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))


def free(model: nn.Sequential) -> None:
    model[0]._parameters.clear()


def reclassify(model: nn.Sequential) -> None:
    model[0].__class__ = Quantized


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: model[0].weight.requires_grad_(False),
        lambda model: model.half(),
        *(tie, overlap, stride, swap, free, reclassify),
    ],
)
def test_parameters_are_described_anew_if_one_has_changed(change: Callable[[nn.Sequential], object]) -> None:
    log = Log(RealAddresses())
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    models, fresh = Models(log), Models(log)
    models.add(model)
    before = {record.name: record for record in models.records(as_it_is)}
    change(model)
    fresh.add(model)
    now = {record.name: record for record in fresh.records(as_it_is)}
    assert {record.name: record for record in models.records(as_it_is)} == before | now


def test_parameters_are_described_anew_if_a_module_has_run() -> None:
    log = Log(RealAddresses())
    models = Models(log)
    model = nn.Linear(2, 2, bias=False)
    models.add(model)

    def in_graph() -> bool | None:
        (record,) = models.records(as_it_is)
        return record.in_graph

    assert in_graph() is None
    with torch.no_grad():
        log.started(models.path_id(model))
    assert in_graph() is False
    log.started(models.path_id(model))
    assert in_graph() is True


def test_what_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(Log(RealAddresses()))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    models.add(model)
    records = models.records(as_it_is)
    monkeypatch.setattr(models_module, "parameter_record", lambda *_, **__: pytest.fail("nothing has changed"))
    assert all(map(lambda a, b: a is b, models.records(as_it_is), records))
    held = [replace(record, optimizer=0, held=True) for record in records]
    assert models.records(lambda record: replace(record, optimizer=0, held=True)) == held


def test_parameters_of_own_classes_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(Log(RealAddresses()))
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Own))
    models.add(model)
    (record,) = models.records(as_it_is)
    read = models_module.parameter_record
    monkeypatch.setattr(models_module, "parameter_record", lambda *a, **b: replace(read(*a, **b), elements=1))
    assert models.records(as_it_is) == [replace(record, elements=1)]
