import gc
from typing import Any

import torch
from torch import nn

from ampmem.recorder.models.optimizers import Optimizers


def two() -> tuple[list[nn.Linear], list[torch.optim.SGD], Optimizers, list[int]]:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    made = [torch.optim.SGD(model.parameters()) for model in models]
    died: list[int] = []
    optimizers = Optimizers(died.append)
    for optimizer in made:
        optimizers.add(optimizer)
    return models, made, optimizers, died


def test_whose_parameters_an_optimizer_holds() -> None:
    models, made, optimizers, _died = two()
    first, second = map(id, made)
    assert [optimizers.holding(model) for model in models] == [{first}, {second}]
    both = nn.Sequential(*models)
    assert optimizers.holding(both) == {first, second}
    third = torch.optim.SGD(models[0].parameters())
    optimizers.add(third)
    assert optimizers.holding(both) == {first, second, id(third)}
    assert optimizers.holding(nn.ReLU()) == set()


def test_whether_an_optimizer_trains_and_has_gradients() -> None:
    (model, _), made, optimizers, _died = two()
    first, second = map(id, made)
    assert optimizers.trains(first)
    assert not optimizers.has_gradients(first)
    model(torch.ones(1, 2)).sum().backward()
    assert (optimizers.has_gradients(first), optimizers.has_gradients(second)) == (True, False)
    model.requires_grad_(False)
    assert (optimizers.trains(first), optimizers.trains(second)) == (False, True)


def test_an_optimizer_that_dies_is_told_and_leaves_the_other_alone() -> None:
    models, made, optimizers, died = two()
    keys = list(map(id, made))
    made.pop()
    gc.collect()
    assert died == keys[1:]
    assert list(optimizers) == made
    assert (optimizers.trains(keys[1]), optimizers.has_gradients(keys[1])) == (False, False)
    assert optimizers.holding(models[1]) == set()


def test_an_optimizer_may_die_while_another_is_asked_what_it_holds() -> None:
    model, made = nn.Linear(2, 2), []

    class Last(torch.optim.SGD):
        @property
        def param_groups(self) -> list[dict[str, Any]]:
            made.clear()
            return self.groups

        @param_groups.setter
        def param_groups(self, groups: list[dict[str, Any]]) -> None:
            self.groups = groups

    died: list[int] = []
    optimizers, last = Optimizers(died.append), Last(model.parameters())
    made.append(torch.optim.SGD(model.parameters()))
    other = id(made[0])
    for optimizer in (last, *made):
        optimizers.add(optimizer)
    del optimizer
    assert optimizers.holding(model) == {id(last)}
    assert died == [other]
