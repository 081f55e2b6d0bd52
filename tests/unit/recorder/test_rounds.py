from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ampmem.recorder.rounds import PATIENCE, Optimizers, Rounds

G, D = 1, 2
BOTH = (frozenset({G}), frozenset({D}))


def steps(updates: str, ran: dict[str, tuple[frozenset[int], ...]]) -> list[str]:
    """The steps that ``updates`` make, each letter an update after the forwards that ``ran`` has for it."""
    rounds, found, step = Rounds(), [], ""
    for letter in updates:
        if step and rounds.begun and not rounds.due():
            rounds.end()
            found.append(step)
            step = ""
        for models in ran[letter]:
            rounds.ran(models)
        rounds.update({"G": G, "D": D}[letter])
        step += letter
    return [*found, step]


ALONE = {"G": BOTH[:1], "D": BOTH[1:]}
GAN = {"G": BOTH, "D": BOTH}
ONE_MODEL = {"G": (frozenset({G, D}),), "D": (frozenset({G, D}),)}


@pytest.mark.parametrize(
    ("updates", "ran", "expected"),
    [
        ("GGG", ALONE, ["G", "G", "G"]),
        ("DGDGDG", GAN, ["DG", "DG", "DG"]),
        ("GDGDGD", GAN, ["GD", "GD", "GD"]),
        ("DDDDDGDDDDDGDDDDDG", GAN, ["DDDDDG", "DDDDDG", "DDDDDG"]),
        ("GDDDDDGDDDDDG", GAN, ["GD", "DDDDG", "DDDDDG"]),
        ("GGGGDDDDGGGGDDDD", ALONE, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGGDDDD", ONE_MODEL, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGGDDDD", {"G": BOTH[:1], "D": BOTH}, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGG", GAN, ["GGGGD", *"DDDGGGG"]),
        ("G" * (PATIENCE + 3), GAN, ["G" * PATIENCE, "G", "G", "G"]),
    ],
    ids=[
        "the only one",
        "a GAN",
        "the generator first",
        "a critic five times",
        "a critic five times, after the generator",
        "in turn, models apart",
        "in turn, one model",
        "in turn, the second on top of the first one's model",
        "in turn, both models running: known after the first change",
        "the other is idle",
    ],
)
def test_which_updates_make_a_step(
    updates: str, ran: dict[str, tuple[frozenset[int], ...]], expected: list[str]
) -> None:
    assert steps(updates, ran) == expected


def test_an_optimizer_that_died_is_not_waited_for() -> None:
    rounds = Rounds()
    for models in BOTH:
        rounds.ran(models)
    rounds.update(D)
    assert rounds.due() == {G}
    rounds.forget(G)
    assert rounds.due() == set()


def test_an_update_without_a_forward_ends_no_step_of_its_own() -> None:
    rounds = Rounds()
    rounds.update(G)
    assert not rounds.begun


def two() -> tuple[list[nn.Linear], list[torch.optim.SGD], Optimizers]:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    made = [torch.optim.SGD(model.parameters()) for model in models]
    optimizers = Optimizers()
    for optimizer in made:
        optimizers.add(optimizer)
    return models, made, optimizers


def test_a_model_that_is_only_evaluated_is_not_waited_for() -> None:
    (model, other), (optimizer, _other), optimizers = two()
    optimizers.ran(model)
    with torch.no_grad():
        optimizers.ran(other.eval())
    optimizers.updated(id(optimizer))
    assert optimizers.over()


def test_a_model_that_is_frozen_is_not_waited_for() -> None:
    (model, other), (optimizer, _other), optimizers = two()
    optimizers.ran(model)
    optimizers.ran(other)
    optimizers.updated(id(optimizer))
    assert not optimizers.settled()
    other.requires_grad_(False)
    assert optimizers.settled()


def test_one_backward_for_two_optimizers_is_one_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made = [torch.optim.SGD(part.parameters()) for part in model]
    optimizers = Optimizers()
    for optimizer in made:
        optimizers.add(optimizer)
    optimizers.ran(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizers.updated(id(made[0]))
    assert not optimizers.over()
    assert optimizers.settled()  # a forward now would show that the second one is idle
    optimizers.updated(id(made[1]))
    assert optimizers.over()
    assert optimizers.end() == (
        "the updates of several optimizers are put together into one step: SGD once each (2 optimizers)"
    )


def test_an_optimizer_that_dies_leaves_the_other_alone() -> None:
    _models, made, optimizers = two()
    assert optimizers.several
    made.pop()
    gc.collect()
    assert not optimizers.several
    assert list(optimizers) == made


def test_waiting_in_vain_is_said() -> None:
    (model, other), (optimizer, _other), optimizers = two()
    for _ in range(PATIENCE):
        assert not optimizers.settled()
        optimizers.ran(model)
        optimizers.ran(other)
        optimizers.updated(id(optimizer))
    assert optimizers.over()
    assert optimizers.end() == (
        f"several updates are put together into one step (SGD {PATIENCE} times), which waited for one of SGD, whose "
        "model ran too; from then on nothing waits for that"
    )
