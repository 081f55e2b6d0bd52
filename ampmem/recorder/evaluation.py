"""Records the first evaluation after the recorded steps of a script, in a second session with a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ampmem.errors import AmpmemError
from ampmem.failure import FailureRecord
from ampmem.output import claim
from ampmem.recorder.session import Session
from ampmem.recording import evaluation_file
from ampmem.vocabulary import NOTHING_FORCED, OF_INFERENCE, Precision, StepOn

MOST_BATCHES = 1000
"""Maximum number of batches that are recorded of the evaluation: what it keeps grows with each of them."""


class ThenEvaluation:
    """The session ``steps`` and, from its last step on, one that records the first evaluation that comes then.

    :meth:`begin` is the ``on_done`` of ``steps``. ``force`` says whether to replace an existing recording of an
    evaluation. ``complain`` gets the reason in one line if there can be no second session.
    """

    def __init__(self, steps: Session, complain: Callable[[str], None], *, force: bool) -> None:
        self._steps = steps
        self._complain = complain
        self._force = force
        self.evaluation: Session | None = None
        """The second session, once it was begun."""
        self.start, self.forked = steps.start, steps.forked

    def begin(self) -> None:
        """Follow the script from here on, without recording it, until an evaluation begins.

        Does nothing for steps of inference, or if changes were forced: they end with the recorded steps.
        """
        options = self._steps.options
        forced = options.precision is not Precision.AS_IS or options.forced != NOTHING_FORCED
        if forced or options.step_on in OF_INFERENCE:
            return
        try:
            options = replace(
                options,
                path=_free_file(options.path, force=self._force),
                steps=MOST_BATCHES,
                skip=0,
                step_on=StepOn.EVALUATION,
                baseline=True,
                force=True,
            )
            evaluation = Session(options, source=self._steps.source.again(), inside=self._steps.listener.outermost)
            evaluation.start()
        except AmpmemError as error:
            self._complain(f"an evaluation after these steps is not recorded: {error}")
            return
        self.evaluation = evaluation
        if evaluation.writer is not None:
            evaluation.writer.file.withdraw()

    def recorded(self) -> Session | None:
        """The second session, if it recorded an evaluation; otherwise its file is removed."""
        evaluation = self.evaluation
        if evaluation is None:
            return None
        try:
            evaluation.check()
        except AmpmemError:
            if evaluation.writer is not None:
                evaluation.writer.file.discard()
            return None
        return evaluation

    def failed(self, failure: FailureRecord) -> None:
        """Note ``failure``, with which the script failed, for both recordings."""
        for session in self._both():
            session.failed(failure)

    def close(self, failure: BaseException | None = None) -> None:
        """Close both sessions; ``failure`` is the exception that ended the script, if it was an error."""
        for session in self._both():
            session.close(failure)

    def _both(self) -> list[Session]:
        return [self._steps, *([] if self.evaluation is None else [self.evaluation])]


def _free_file(steps: Path, *, force: bool) -> Path:
    """The file for the evaluation after the ``steps``; one that exists is replaced only with ``force``."""
    number = 1 if force else claim(lambda number: [evaluation_file(steps, number)])
    return evaluation_file(steps, number)
