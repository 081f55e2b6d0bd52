"""Stacks are texts of who called whom, however little of them was looked at."""

import sys

from ampmem.patching import unseen
from ampmem.recorder.facts.log import Texts
from ampmem.recorder.models.stacks import Stacks


class Module:
    """Runs ``forward`` as a module does, beginning with a hook."""

    def __init__(self, stacks: Stacks, *, hooked: bool) -> None:
        self._stacks = stacks
        self._hooked = hooked

    def __call__(self) -> list[int]:
        call = self._stacks.entered(sys._getframe()) if self._hooked else 0
        found = self._forward()
        self._stacks.left(call)
        return found

    def _forward(self) -> list[int]:
        @unseen
        def op() -> int:
            return self._stacks.capture()

        return [op(), op()]


def _texts(*, hooked: bool) -> list[str]:
    stacks, texts = Stacks(enabled=True), Texts()
    module = Module(stacks, hooked=hooked)
    found = [number for _ in range(2) for number in module()]
    ids = stacks.text_ids(texts)
    return [texts.value(ids[number]) for number in found]


def test_below_a_module_that_runs_a_stack_is_the_same() -> None:
    plain, hooked = [_texts(hooked=each) for each in (False, True)]
    assert all(text.splitlines()[-1].endswith("Module._forward") for text in plain)
    assert hooked == plain


def test_what_called_a_module_is_looked_at_once() -> None:
    stacks = Stacks(enabled=True)

    def forward() -> int:
        return stacks._above(sys._getframe()).count(id(caller.f_code))

    def outer(depth: int) -> list[int]:
        return outer(depth - 1) if depth else [forward(), forward()]

    caller = sys._getframe()
    call = stacks.entered(caller)
    assert outer(3) == [1, 1]
    kept = stacks._calls[call]
    assert kept == [stacks._above(caller.f_back)]
    stacks.left(call)
    assert stacks._calls == {}
