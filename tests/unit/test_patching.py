"""The registry of what is in place in torch, on owners of the test's own."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from ampmem.patching import (
    InPlace,
    Undo,
    added,
    hook,
    in_place,
    in_place_of,
    patch,
    put_in,
    replace_all,
    set_variables,
    suspended,
    undone_together,
)


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    def own(self) -> str:
        return "original"


ORIGINAL = vars(Owner)["own"]
PLACE = InPlace(f"{__name__}.Owner", "own")


def louder(original: Callable[[Owner], str]) -> Callable[[Owner], str]:
    return lambda owner: original(owner) + "!"


def test_a_patch_is_known_until_it_is_undone() -> None:
    before = in_place()
    undo = patch(Owner, "own", louder)
    assert (Owner().own(), in_place()) == ("original!", [*before, PLACE])
    undo()
    assert (vars(Owner)["own"], in_place()) == (ORIGINAL, before)
    undo()
    assert (vars(Owner)["own"], in_place()) == (ORIGINAL, before)


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_two_patches_of_one_name_leave_the_original_in_whatever_order_they_are_undone(order: tuple[int, int]) -> None:
    undo = [patch(Owner, "own", louder), patch(Owner, "own", louder)]
    assert Owner().own() == "original!!"
    for which in order:
        undo[which]()
    assert vars(Owner)["own"] is ORIGINAL


def test_what_somebody_else_has_patched_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = patch(Owner, "own", louder)
    ours = vars(Owner)["own"]
    monkeypatch.setattr(Owner, "own", lambda owner: ours(owner) + "?")
    theirs = vars(Owner)["own"]
    undo()
    assert vars(Owner)["own"] is theirs
    assert PLACE not in in_place()
    monkeypatch.undo()
    Owner.own = ORIGINAL  # type: ignore[method-assign]


def test_a_name_that_the_owner_only_inherits_is_its_own_no_more() -> None:
    undo = replace_all((Owner,), {"inherited": lambda owner: "replaced", "own": lambda owner: "replaced"})
    assert (Owner().inherited(), Owner().own()) == ("replaced", "replaced")
    undo()
    assert "inherited" not in vars(Owner)
    assert (Owner().inherited(), vars(Owner)["own"]) == ("base", ORIGINAL)


def test_a_name_that_nobody_has_is_left_out() -> None:
    module = ModuleType("some.module")
    module.there = 1  # type: ignore[attr-defined]
    undo = replace_all((module, Owner), {"there": 2})
    assert in_place()[-1] == InPlace("some.module", "there")
    assert not hasattr(Owner, "there")
    undo()
    assert module.there == 1


def test_a_replacement_that_fails_leaves_nothing() -> None:
    before = in_place()
    with pytest.raises(TypeError, match="immutable type"):
        replace_all((Owner, int), {"__add__": None, "__repr__": None})
    assert "__repr__" not in vars(Owner)
    assert in_place() == before


def test_a_hook_and_what_was_added_are_known_until_they_are_removed() -> None:
    hooks: list[str] = []

    def register(name: str, *, front: bool) -> SimpleNamespace:
        hooks.insert(0 if front else len(hooks), name)
        return SimpleNamespace(remove=lambda: hooks.remove(name))

    undo = [hook(register, "second", front=False), hook(register, "first", front=True)]
    undo.append(added("a stack", "top", hooks.clear))
    assert (hooks, in_place()[-3:]) == (
        ["first", "second"],
        [InPlace(__name__, "register")] * 2 + [InPlace("a stack", "top")],
    )
    undo[0]()
    assert hooks == ["first"]
    undo[1]()
    hooks.append("another")
    undo[2]()
    assert (hooks, [entry for entry in in_place() if entry.owner in (__name__, "a stack")]) == ([], [])


def test_suspended_patches_are_out_of_place_and_come_back() -> None:
    undo = [
        patch(Owner, "own", louder),
        patch(Owner, "own", louder),
        put_in(Owner, "inherited", lambda owner: "put in"),
    ]
    before = in_place()
    with suspended():
        assert (vars(Owner)["own"], Owner().inherited(), "inherited" in vars(Owner)) == (ORIGINAL, "base", False)
    assert (Owner().own(), Owner().inherited(), in_place()) == ("original!!", "put in", before)
    for each in undo:
        each()
    assert (vars(Owner)["own"], Owner().inherited()) == (ORIGINAL, "base")


def test_variables_are_as_before_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPMEM_ONE", "1")
    undo = set_variables({"AMPMEM_ONE": "2", "AMPMEM_TWO": "3"})
    assert (os.environ["AMPMEM_ONE"], os.environ["AMPMEM_TWO"]) == ("2", "3")
    undo()
    assert os.environ["AMPMEM_ONE"] == "1"
    assert "AMPMEM_TWO" not in os.environ


def test_a_function_in_place_of_another_gets_it_first_and_looks_like_it() -> None:
    def exclaim(original: Callable[..., str], owner: Owner, *, mark: str = "!") -> str:
        return original(owner) + mark

    undo = put_in(Owner, "own", in_place_of(ORIGINAL, exclaim))
    assert (Owner().own(), Owner.own.__name__) == ("original!", "own")  # a method of its class
    undo()
    assert vars(Owner)["own"] is ORIGINAL


def test_what_is_undone_together_is_undone_last_one_first_also_after_an_error() -> None:
    undone: list[int] = []

    @undone_together
    def install(count: int, *, fails: bool) -> Iterator[Undo]:
        """As it was written."""
        for number in range(count):
            yield partial(undone.append, number)
        if fails:
            raise ValueError("the last one")

    undo = install(3, fails=False)
    assert (undone, install.__doc__) == ([], "As it was written.")
    undo()
    undo()
    assert undone == [2, 1, 0]
    with pytest.raises(ValueError, match="the last one"):
        install(2, fails=True)
    assert undone == [2, 1, 0, 1, 0]
