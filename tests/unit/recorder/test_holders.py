import copy
import gc
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from ampmem.events import Fact
from ampmem.recorder.facts.addresses import AliveBlocks, RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models import holders
from ampmem.recorder.models.holders import HolderLog, Variables, holders_of
from ampmem.recorder.models.models import Models


class Layer:
    keys: torch.Tensor


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]


class Loader:
    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept


class _Iterator(Loader):
    pass


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past = [torch.ones(3)]


def names_of(tensors: list[torch.Tensor]) -> list[str]:
    return [name for name, _ in holders_of(tensors, {})]


def module_with(**variables: object) -> ModuleType:
    module = ModuleType("script")
    module.__dict__.update(variables)
    return module


def test_a_tensor_is_named_after_the_object_that_holds_it() -> None:
    cache, decoder, script = Cache(), Decoder(), module_with(KEPT={"past": torch.ones(3)})
    for layer in cache.layers:
        layer.keys = torch.ones(3)
    names = names_of([cache.layers[1].keys, decoder.past[0], script.KEPT["past"]])
    assert names == ["Cache.layers[1].keys", "Decoder.past[0]", "KEPT['past']"]


def test_of_two_objects_the_name_is_the_same_whenever_the_collector_ran() -> None:
    kept = torch.ones(3)
    loader = Loader(kept)
    gc.collect()  # the collector now has the iterator before the loader, since it is younger
    iterator = _Iterator(kept)
    assert names_of([kept]) == ["Loader.kept"]
    gc.collect()
    assert names_of([kept]) == ["Loader.kept"]
    del loader, iterator


def test_what_a_local_container_holds_is_named_after_that() -> None:
    past = {"keys": (torch.ones(3), torch.ones(3))}
    assert names_of([past["keys"][1]]) == ["dict['keys'][1]"]


def test_the_arguments_of_a_call_hold_nothing() -> None:
    arguments, past = (torch.ones(3), None), ((torch.ones(3), torch.ones(3)), None)
    assert names_of([arguments[0]]) == [""]
    assert names_of([past[0][1]]) == ["tuple[0][1]"]


def test_what_a_local_variable_holds_has_no_name() -> None:
    tensor = torch.ones(3)
    assert names_of([tensor]) == [""]


def test_of_no_tensors_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("that walks through all objects"))
    assert names_of([]) == []


def test_modules_that_did_not_run_are_looked_for_where_parameters_are_unknown() -> None:
    log = Log(RealAddresses())
    texts = log.texts
    models = Models(log)
    model = nn.Linear(2, 2)
    models.add(model)
    log.take_facts()
    idle = copy.deepcopy(model)
    HolderLog(log, Variables(log)).note_rest(models, [], None)
    facts = log.take_facts()
    copies = [row for row, fact in enumerate(facts.fact) if fact == Fact.PARAMETER_COPY]
    found = {texts.value(facts.name[row]) for row in copies if facts.address[row] == idle.weight.data_ptr()}
    assert found == {"copy of weight"}


def test_buffers_of_a_model_are_known_so_nobody_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(RealAddresses())
    models = Models(log)
    model = nn.BatchNorm1d(4096)
    models.add(model)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("that walks through all objects"))
    HolderLog(log, Variables(log)).note_rest(models, [], AliveBlocks(sizes, sum(sizes.values())))


def test_because_of_inputs_nobody_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(RealAddresses())
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("that walks through all objects"))
    HolderLog(log, Variables(log)).note_rest(Models(log), [], AliveBlocks({64: 8 << 20}, 9 << 20), inputs={64})


class DifferentiableOptimizer:
    """As that of ``higher``: no torch.optim optimizer, with updated weights that autograd goes through."""

    def __init__(self, weight: torch.Tensor) -> None:
        leaf = torch.ones(1000, requires_grad=True)
        self.param_groups = [{"params": [weight, leaf]}]
        self.state = {"momentum": weight * 2, "average": torch.zeros(1000)}


def test_what_another_optimizer_updates_is_not_its_state() -> None:
    optimizer = DifferentiableOptimizer(torch.ones(1000, requires_grad=True) * 3)
    log = Log(RealAddresses())
    HolderLog(log, Variables(log)).note_rest(Models(log), [], None)
    facts = log.take_facts()
    state = {facts.address[row] for row, fact in enumerate(facts.fact) if fact == Fact.OPTIMIZER_STATE}
    assert optimizer.state["average"].data_ptr() in state
    others = [*optimizer.param_groups[0]["params"], optimizer.state["momentum"]]
    assert not state & {tensor.data_ptr() for tensor in others}


class Masked(nn.Module):
    def __init__(self, place: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.sizes, self.names, self.flags, self.nothing = (3, 3), {"a": 1}, {True}, None
        self.mask = place(torch.ones(3))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda mask: mask, "Masked.mask"),
        (lambda mask: [None, {"causal": (0, mask)}], "Masked.mask[1]['causal'][1]"),
        (lambda mask: OrderedDict(width=3, causal=mask), "Masked.mask['causal']"),
        (lambda mask: module_with(mask=mask), None),
    ],
)
def test_tensors_in_attributes_of_a_module_are_found(place: Callable[[torch.Tensor], object], name: str | None) -> None:
    log = Log(RealAddresses())
    models = Models(log)
    model = Masked(place)
    models.add(model)
    HolderLog(log, Variables(log)).note_rest(models, [], AliveBlocks({}, 1))
    facts = log.take_facts()
    assert [log.texts.value(each) for each in facts.name] == ([] if name is None else [name])


def test_unknown_blocks_without_tensors_have_no_holders_and_no_idle_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(RealAddresses())
    idle, workspace = nn.Linear(2, 2), {64: 8 << 20}
    monkeypatch.setattr(holders, "live_modules", lambda: pytest.fail("that walks through all objects"))
    monkeypatch.setattr(gc, "get_referrers", only_of_classes(gc.get_referrers))
    HolderLog(log, Variables(log)).note_rest(Models(log), [], AliveBlocks(workspace, 8 << 20))
    assert not len(log.take_facts())
    del idle


def only_of_classes(query: Callable[..., list[object]]) -> Callable[..., list[object]]:
    """``query``, which must be about classes: who holds tensors is not asked."""

    def ask(*items: object) -> list[object]:
        assert all(isinstance(item, type) for item in items)
        return query(*items)

    return ask


def test_only_tensors_in_blocks_have_holders() -> None:
    log = Log(RealAddresses())
    cache, beside = {"past": torch.ones(3000)}, {"other": torch.ones(3000)}
    address = cache["past"].data_ptr()
    HolderLog(log, Variables(log)).note_rest(Models(log), [], AliveBlocks({address: 12000}, 12000))
    facts = log.take_facts()
    assert facts.address.tolist() == [address]
    assert [log.texts.value(name) for name in facts.name] == ["dict['past']"]
    del beside
