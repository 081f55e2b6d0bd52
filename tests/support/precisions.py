"""Recordings of functions in a forced precision, and what their verdicts say."""

import functools
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent, StaticVerdict, judge
from ampmem.events import Recording
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.recording import read
from ampmem.vocabulary import STEP_MARKS, Precision
from support import measure

PRECISIONS = ("fp32", "amp", "amp-nocache")
STATIC = ("parameters", "cast_copies", "gradients", "master_copies", "optimizer_state")


def record(function: Callable[[], Any], forced: Precision = Precision.AS_IS) -> Recording:
    """``function`` under ampmem in ``forced``."""
    gc.collect()  # the optimizers of the one before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        session = Session(Options(path=path, script="", stacks=False, precision=forced))
        session.start()
        try:
            function()
        finally:
            session.close()
        session.check()
        return read(path)


@pytest.fixture
def alone() -> None:
    """No models and optimizers of earlier tests, nor what :func:`workload` keeps of them."""
    _workload.cache_clear()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def workload(
    name: str, precision: str, forced: str = Precision.AS_IS, steps: int = 2, **rest: Any
) -> tuple[Analysis, measure.Run]:
    """A workload of that precision in ``forced``, and what its ``train`` left alive: run once in a process."""
    return _workload(name, precision, Precision(forced), steps, frozenset(rest.items()))


@functools.cache
def _workload(
    name: str, precision: str, forced: Precision, steps: int, rest: frozenset[tuple[str, Any]]
) -> tuple[Analysis, measure.Run]:
    runs = []
    module = measure.workload(name)

    def run() -> None:
        with measure.watched(module) as seen:
            runs.append(seen)
            module.train(measure.options(precision, steps=steps), **measure.EXTRA.get(name, {}), **dict(rest))

    return analyse(record(run, forced)), runs[0]


def judged(analysis: Analysis, index: int | None = None) -> StaticVerdict:
    """The verdict, which must hold for every component at every mark, and measure what the categories say."""
    verdict = judge(analysis, analysis.ledger, index)
    at = len(analysis.marks) - 1 if index is None else index
    names = [mark for mark in STEP_MARKS if getattr(analysis.marks[at], mark) is not None]
    assert [(part.mark, part.component) for part in verdict.components] == [
        (mark, component) for mark in names for component in (*STATIC, TOTAL)
    ]
    for part in verdict.components:
        assert part.holds, part
        assert part.residual_bytes == 0
        assert part.measured_bytes == part.model_bytes + sum(term.bytes for term in part.terms)
        if part.component != TOTAL:
            position = analysis.timeline.position(getattr(analysis.marks[at], part.mark))
            assert part.measured_bytes == analysis.timeline.breakdown(position)[part.component]
    return verdict


def all_judged(analysis: Analysis) -> list[StaticVerdict]:
    """The verdicts on all steps that have marks, each of which must hold."""
    steps = [index for index, marks in enumerate(analysis.marks) if marks.after_backward is not None]
    assert steps
    return [judged(analysis, index) for index in steps]


def part(verdict: StaticVerdict, mark: str, component: str) -> StaticComponent:
    """One component at one mark."""
    (found,) = [part for part in verdict.components if (part.mark, part.component) == (mark, component)]
    return found


def terms(verdict: StaticVerdict, mark: str, component: str) -> dict[str, int]:
    """Its terms: bytes by reason."""
    return {term.why: term.bytes for term in part(verdict, mark, component).terms}
