from types import CodeType

import pytest

from ampmem.errors import UsageError
from ampmem.recorder.marker import Marker, step_on_of
from ampmem.vocabulary import StepOn


def code_of(source: str, file: str, name: str) -> CodeType:
    """The code of the function ``name`` in ``source``, as it would be compiled from ``file``."""
    pending = [compile(source, file, "exec")]
    while pending:
        code = pending.pop()
        if code.co_qualname == name:
            return code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    raise AssertionError(name)


SOURCE = """
def train(): pass
class Trainer:
    def step(self): pass
def main():
    def inner(): pass
"""


@pytest.mark.parametrize(
    ("text", "function", "met"),
    [
        ("train.py:train", "train", True),
        ("project/train.py:train", "train", True),
        ("./train.py:train", "train", True),
        ("/home/me/project/train.py:train", "train", True),
        ("other/train.py:train", "train", False),
        ("rain.py:train", "train", False),
        ("train.py:Trainer.step", "Trainer.step", True),
        ("train.py:step", "Trainer.step", True),
        ("train.py:main.inner", "main.<locals>.inner", True),
        ("package.train.train", "train", True),
        ("package.train.Trainer.step", "Trainer.step", True),
        ("package.other.train", "train", False),
    ],
)
def test_which_function_is_meant(text: str, function: str, met: bool) -> None:
    marker = step_on_of(text)
    assert isinstance(marker, Marker)
    assert marker.is_in(code_of(SOURCE, "/home/me/project/train.py", function), "package.train") == met


def test_words_are_kinds_of_events() -> None:
    assert step_on_of(None) is StepOn.FOUND
    assert [step_on_of(word) for word in ("backward", "optimizer", "forward")] == [
        StepOn.BACKWARD,
        StepOn.OPTIMIZER,
        StepOn.FORWARD,
    ]


@pytest.mark.parametrize("text", ["", "found", "train", "train.py", "train.py:", ":train", "train.txt:train", "a b.c"])
def test_what_says_nothing_is_refused(text: str) -> None:
    forms = r"give backward, optimizer, forward, evaluation, or a function as FILE\.py:FUNCTION"
    with pytest.raises(UsageError, match=forms):
        step_on_of(text)
