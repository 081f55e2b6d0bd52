"""Which answer to a yes-or-no question lets the asking code go on, by what it does with either."""

import pytest

from ampmem.simulator import branches

ASKS = {
    "if q: raise ValueError": False,
    "if not q: raise ValueError": True,
    "if q:\n  x = f'{q!r} is {1 + 2}'\n  raise ValueError(x)": False,
    "assert q": True,
    "assert not q": False,
    "assert q, 'text'": True,
    "assert bool(q)": True,
    "assert not bool(q) and q": False,
    "assert q.item() and q.item()": True,
    "if q.item(): raise ValueError": False,
    "if not (q and q): raise ValueError": True,
    "if q or q: raise ValueError": False,
    "if q: pass\nelse: raise ValueError": True,
    "if q: pass": None,
    "x = bool(q)": None,
    "return q.item()": None,
    "for _ in range(2):\n  if q: continue\n  break": None,
    "for _ in range(2):\n  if not q: continue\n  print()": None,
    "if q:\n  if not q: raise ValueError": None,
}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question below is not the code that asks."""
    monkeypatch.setattr(branches, "OWN_FOLDERS", (*branches.OWN_FOLDERS, __file__))


class Question:
    """Notes the first answer that its asker goes on with."""

    def __init__(self, usual: bool | None) -> None:
        self.usual = usual
        self.answers: list[bool | None] = []

    def __bool__(self) -> bool:
        assert len(self.answers) < 9, "it asks for ever"
        self.answers.append(branches.answer_that_goes_on(self.usual))
        return bool(self.usual if self.answers[-1] is None else self.answers[-1])

    item = __bool__


def asked(code: str, usual: bool | None = None) -> list[bool | None]:
    space: dict[str, object] = {}
    body = "\n".join(f"  {line}" for line in code.splitlines())
    exec(compile(f"def ask(q):\n{body}", "script.py", "exec"), space)
    question = Question(usual)
    space["ask"](question)  # type: ignore[operator]
    return question.answers


@pytest.mark.parametrize("code", ASKS)
@pytest.mark.parametrize("usual", [True, False, None])
def test_the_answer_that_does_not_raise_is_given_and_no_other_is_preferred(code: str, usual: bool | None) -> None:
    assert asked(code, usual)[0] == ASKS[code]


def test_no_check_of_several_raises() -> None:
    assert asked("assert q and not q\nif not q and q: raise ValueError") == [True, False, None, False]


def test_a_loop_that_goes_on_while_the_answer_is_yes_ends_after_a_round() -> None:
    assert asked("while q: pass", usual=True) == [None, False]
    assert asked("while not q: pass", usual=True) == [None]
