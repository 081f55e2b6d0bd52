"""Records blocks of one test: all of a marked one, or those that it asks the fixture for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from ampmem import api
from ampmem.block import ENDS_LATER
from ampmem.integrations.pytest.limits import NO_LIMITS, Limits

if TYPE_CHECKING:
    from ampmem.recorder.models.live import Module, Optimizer


_LEFT_OPEN = (
    "a block of the fixture ampmem was open after its test: something still holds it, such as a generator that was not "
    "run to its end. It has been closed, for the tests that follow; close it in the test"
)


class Recorder:
    """The fixture ``ampmem``: records blocks of the test as :func:`ampmem.profile` does, and is the module otherwise.

    So a test that takes the fixture and has ``import ampmem`` above it works with either. A call is a block, too:
    ``with ampmem(model) as prof``. What the marks of the test say of how to record holds for each block that says
    nothing else.
    """

    def __init__(self, limits: Limits = NO_LIMITS) -> None:
        self._limits = limits
        self._blocks: list[api.Profile] = []

    def profile(self, model: Module | None = None, optimizer: Optimizer | None = None, **options: Any) -> api.Profile:
        """A block of the test to record, which the limits of the test, its baseline and the report are about.

        Takes what :func:`ampmem.profile` takes.
        """
        how = self._limits.how.given()
        if "device" in options:
            how = {name: value for name, value in how.items() if name == "step_on"}
        block = api.profile(model, optimizer, **{**how, **options})
        self._blocks.append(block)
        return block

    __call__ = profile

    def __getattr__(self, name: str) -> object:
        """What the module has."""
        return getattr(sys.modules["ampmem"], name)

    def whole_test(self) -> AbstractContextManager[None]:
        """The test that runs now, from its beginning to its end. Raises :class:`UsageError` as a block does."""
        block = self.profile()
        block.__enter__()
        return _until_the_end(block)

    def blocks(self) -> tuple[api.Profile, ...]:
        """What was recorded, in order."""
        return tuple(block for block in self._blocks if block.path.exists())

    def limits(self) -> Limits:
        """What the marks of the test say."""
        return self._limits

    def forget(self) -> None:
        """Let go of the recordings; what is open is still to be left."""
        self._blocks = [block for block in self._blocks if block.is_open]

    def leave_open(self) -> str:
        """Leave what is open, whoever holds it; returns what that came to, in words, and nothing where nothing was."""
        left = [block for block in self._blocks if block.is_open]
        said: list[str] = []
        for block in left:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                block.__exit__(None, None, None)
            said += [str(warning.message).removeprefix("ampmem: ") for warning in caught]
        self._blocks.clear()
        if not left:
            return ""
        if ENDS_LATER in said:
            return f"a block of the fixture ampmem is open after its test, and cannot be ended here: {ENDS_LATER}"
        return _LEFT_OPEN


@contextmanager
def _until_the_end(block: api.Profile) -> Iterator[None]:
    """Leave ``block`` without a word of nothing to show: what is judged says it."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ampmem: ", RuntimeWarning)
            block.__exit__(None if failure is None else type(failure), failure, None)
