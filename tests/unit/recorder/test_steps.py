from __future__ import annotations

from ampmem.recorder.steps import _PATIENCE, Rounds

G, D = 1, 2


def test_one_optimizer_ends_a_step_with_every_update() -> None:
    rounds = Rounds()
    assert [rounds.update(G) for _ in range(3)] == [True, True, True]


def test_a_round_needs_an_update_of_every_optimizer() -> None:
    rounds = Rounds()
    rounds.add(G)
    rounds.add(D)
    assert [rounds.update(key) for key in (D, D, D, G, D, G)] == [False, False, False, True, False, True]


def test_an_optimizer_that_never_updates_is_idle_after_a_while_and_can_come_back() -> None:
    rounds = Rounds()
    rounds.add(G)
    rounds.add(D)
    assert [rounds.update(D) for _ in range(_PATIENCE)] == [False] * (_PATIENCE - 1) + [True]
    rounds.add(G)
    assert rounds.update(D)
    assert not rounds.update(G)
    assert rounds.update(D)


def test_an_optimizer_that_died_is_not_waited_for() -> None:
    rounds = Rounds()
    rounds.add(G)
    rounds.add(D)
    rounds.remove(G)
    assert rounds.update(D)
