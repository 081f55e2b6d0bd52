"""Which variables hold a tensor is seen, and looking changes nothing for the script."""

import sys
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampmem.events import Fact
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.holders import Variables


class Looks:
    """Looks at the variables of the tests as a recording does."""

    def __init__(self) -> None:
        self.log = Log(RealAddresses())
        self.texts = self.log.texts
        self.variables = Variables(self.log)

    def names_of(self, address: int) -> list[tuple[str, str]]:
        """Look, and say which variables hold the storage at ``address``, and where they got it."""
        self.variables.note()
        facts = self.log.take_facts()
        rows = zip(*(getattr(facts, name).tolist() for name in ("fact", "address", "name", "module")), strict=True)
        assert self.log.misses.why() == ""
        return [
            (self.texts.value(name), self.texts.value(module))
            for fact, where, name, module in rows
            if (fact, where) == (Fact.VARIABLE, address)
        ]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def looks() -> Looks:
    return Looks()


class Output(OrderedDict[str, Tensor]):
    """As an output of transformers: its items are attributes, too."""


@dataclass
class Result:
    logits: Tensor


Pair = namedtuple("Pair", ["loss", "logits"])


class Silent:
    """Its own code is not to be run."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("hold", "name"),
    [
        (lambda kept: kept, "held"),
        (lambda kept: kept.view(-1), "held"),
        (lambda kept: Output(logits=kept), "held['logits']"),
        (lambda kept: Result(kept), "held.logits"),
        (lambda kept: Pair(None, kept), "held.logits"),
        (lambda kept: {"logits": kept}, "held['logits']"),
        (lambda kept: (None, kept), "held[1]"),
        (lambda kept: [None] * 1000 + [kept], "held[1000]"),
        (lambda kept: Silent(kept), "held.kept"),
        (lambda kept: nn.Parameter(kept), None),
        (lambda kept: [[kept]], None),
    ],
)
def test_a_variable_is_named_as_the_script_writes_it(
    looks: Looks, hold: Callable[[Tensor], Any], name: str | None
) -> None:
    def script() -> list[tuple[str, str]]:
        kept = torch.ones(8, 8)
        address, held = address_of(kept), hold(kept)
        del kept
        found = looks.names_of(address)
        del held
        return found

    assert [found for found, _ in script()] == ([] if name is None else [name])


def test_a_recording_looks_inside_so_many_objects_only(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards variables alone are searched: searches inside of objects must not cost much of a long run."""

    def named() -> set[str]:
        looks.variables.note_inside()
        return {looks.texts.value(name) for name in looks.log.take_facts().name.tolist()}

    def script() -> list[set[str]]:
        direct, nested = torch.ones(4), [Result(torch.ones(3))]
        found = [named(), named()]
        del direct, nested
        return found

    monkeypatch.setattr(looks.variables._held, "_left", 1)  # a search that has begun is not cut off
    assert script() == [{"direct", "nested[0].logits"}, {"direct"}]


def test_a_variable_is_where_it_got_its_value(looks: Looks) -> None:
    first = sys._getframe().f_lineno + 3

    def train(given: Tensor) -> list[tuple[str, str]]:
        held: Any = given * 1
        for _ in range(2):
            held = held * 1
        found = looks.names_of(address_of(held))
        held = None
        return found + looks.names_of(address_of(given))

    mine = "test_a_variable_is_where_it_got_its_value.<locals>.train"
    assert train(torch.ones(8)) == [
        ("held", f"{__file__}:{first + 2} {mine}"),
        ("given", f"{__file__}:{first - 1} {mine}"),
    ]


def test_a_variable_of_the_module_is_seen_from_its_functions_and_from_itself(looks: Looks) -> None:
    script = """
held = torch.ones(8)
def seen():
    return names_of(address_of(held))
from_inside = seen()
at_the_end = names_of(address_of(held))
"""
    space = {"torch": torch, "names_of": looks.names_of, "address_of": address_of}
    exec(compile(script, "train.py", "exec"), space)
    assert space["from_inside"] == space["at_the_end"] == [("held", "train.py:2 <module>")]
    assert space["seen"]() == [("held", "train.py:0 <module>")]


# The functions that look have no assert in them: pytest's asserts ask for all variables.


def test_nothing_lives_longer_for_having_been_looked_at(looks: Looks) -> None:
    def script() -> tuple[list[tuple[str, str]], Tensor | None]:
        held = torch.ones(8)
        alive = weakref.ref(held)
        found = looks.names_of(address_of(held))
        del held
        return found, alive()

    found, alive = script()
    assert found
    assert alive is None


def test_the_names_of_a_class_stay(looks: Looks) -> None:
    class Body:
        held = torch.ones(8)
        found = looks.names_of(address_of(held))

    assert [name for name, _ in Body.found] == ["held"]
    assert isinstance(Body.held, Tensor)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="each call of locals() makes a dictionary of its own")
def test_what_the_script_asked_for_stays_as_it_was(looks: Looks) -> None:
    def script() -> tuple[list[tuple[str, str]], bool]:
        held = before = torch.ones(8)
        mine = locals()
        held = torch.zeros(8)
        found = looks.names_of(address_of(held))
        return found, mine["held"] is before

    assert script() == ([], True)


def test_to_ask_for_the_variables_of_an_object_is_not_to_ask_for_the_functions_own(looks: Looks) -> None:
    def script() -> list[tuple[str, str]]:
        held = torch.ones(8)
        vars(Result(held))
        return looks.names_of(address_of(held))

    assert [name for name, _ in script()] == ["held"]


def test_a_method_called_eval_is_not_the_builtin(looks: Looks) -> None:
    def script() -> list[tuple[str, str]]:
        held = torch.ones(8)
        torch.nn.Linear(1, 1).eval()
        return looks.names_of(address_of(held))

    def evaluates() -> list[tuple[str, str]]:
        held = torch.ones(8)
        return eval("looks.names_of(address_of(held))", {"looks": looks, "address_of": address_of, "held": held})  # type: ignore[no-any-return]

    assert [name for name, _ in script()] == ["held"]
    assert "held" not in [name for name, place in evaluates() if place.endswith("evaluates")]


def test_a_snapshot_that_somebody_else_has_taken_is_not_emptied(looks: Looks) -> None:
    def script() -> tuple[list[tuple[str, str]], bool]:
        held = torch.ones(8)
        theirs = sys._getframe().f_locals
        found = looks.names_of(address_of(held))
        return found, theirs["held"] is held

    found, there = script()
    assert [name for name, _ in found] == ["held", "theirs['held']"]
    assert there


def test_of_much_only_some_is_looked_at(looks: Looks) -> None:
    def script() -> list[tuple[str, str]]:
        held = [torch.ones(8) for _ in range(1000)]
        return looks.names_of(address_of(held[0])) + looks.names_of(address_of(held[-1]))

    assert [name for name, _ in script()] == ["held[999]"]


def test_classes_come_and_go(looks: Looks) -> None:
    def script(body: dict[str, Any], *bases: type) -> list[tuple[str, str]]:
        tensor = torch.ones(8)
        made: Any = type("Made", bases, body)()  # Python may put each class where the last one was
        if bases:
            made["kept"] = tensor
        elif not body:
            made.kept = tensor
        return looks.names_of(address_of(tensor))

    for _ in range(20):
        assert [name for name, _ in script({"__slots__": ()})] == ["tensor"]
        assert [name for name, _ in script({})] == ["tensor", "made.kept"]
        assert [name for name, _ in script({}, dict)] == ["tensor", "made['kept']"]
