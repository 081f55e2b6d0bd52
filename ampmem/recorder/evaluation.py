"""Records the first evaluation after the recorded steps of a script, in a second session with a file of its own.

Between the two the script runs as without ampmem, but for wrappers of the functions that turn gradients off or put a
module into eval mode. One of them called, a hook waits for the next forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ampmem.errors import AmpmemError
from ampmem.failure import FailureRecord
from ampmem.names import EVALUATED
from ampmem.output import claim, remove_empty
from ampmem.patching import Undo, hook, patch_call, undone_together
from ampmem.recorder.hooks.modules import quiet_compiled_modules
from ampmem.recorder.session import Session
from ampmem.recorder.torch_private.general import CALLS_MODULE, EVAL, GRADIENT_MODES, on_module_before
from ampmem.recording import add_ending, evaluation_file
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
        self._thread = threading.get_ident()
        self._starts = steps.log.misses.guarded(self._forward_starts)
        self._evaluates = False
        """Whether a module was put into eval mode, and no forward has started since."""
        self._unpatch: Undo | None = None
        self._unhook: Undo | None = None

    def begin(self) -> None:
        """Wait for an evaluation from here on.

        Does nothing for steps of inference, or if changes were forced: they end with the recorded steps.
        """
        options = self._steps.options
        forced = options.precision is not Precision.AS_IS or options.forced != NOTHING_FORCED
        if not forced and options.step_on not in OF_INFERENCE:
            self._thread = threading.get_ident()
            self._unpatch = self._install()

    @undone_together
    def _install(self) -> Iterator[Undo]:
        yield quiet_compiled_modules()
        yield patch_call(*EVAL, self._wrap_eval)
        for place in GRADIENT_MODES:
            yield patch_call(*place, self._wrap_gradients)
        yield lambda: self._wait(False)

    def _wrap_eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def eval(module: nn.Module) -> Any:
            if threading.get_ident() == self._thread:
                self._evaluates = True
                self._wait(True)
            return original(module)

        return eval

    def _wrap_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def turn(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if threading.get_ident() == self._thread:
                self._wait(self._evaluates or not torch.is_grad_enabled())

        return turn

    def _wait(self, wanted: bool) -> None:
        """Have a hook for the next forward, or none."""
        if wanted and self._unhook is None and self._unpatch is not None:
            self._unhook = hook(on_module_before, self._starts)
        elif not wanted and self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _forward_starts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin the second session if ``module``, which is about to run, is not trained and not a part of another."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._evaluates = False
        self._wait(False)
        trains = module.training and torch.is_grad_enabled()
        if self.forked():
            self._end_wait()
        elif not trains and _running(sys._getframe(1)) == 1:
            self._end_wait()
            self._begin(module, args)

    def _end_wait(self) -> None:
        if self._unpatch is not None:
            self._unpatch()
            self._unpatch = None

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = None
        try:
            path = _free_file(self._steps.options.path, force=self._force)
            options = replace(
                self._steps.options,
                path=path,
                steps=MOST_BATCHES,
                skip=0,
                step_on=StepOn.EVALUATION,
                baseline=True,
                force=True,
            )
            evaluation = Session(options, source=self._steps.source.again(), inside=id(module))
            evaluation.start()
        except AmpmemError as error:
            remove_empty([path] if path else [])
            self._complain(f"the evaluation after these steps is not recorded: {error}")
            return
        self.evaluation = evaluation
        if evaluation.writer is not None:
            evaluation.writer.file.withdraw()
        evaluation.follow(module, args)

    def recorded(self) -> Session | None:
        """The second session, if it recorded an evaluation, which a note of the steps' recording then says.

        Otherwise its file is removed.
        """
        evaluation = self.evaluation
        if evaluation is None:
            return None
        try:
            evaluation.check()
        except AmpmemError:
            if evaluation.writer is not None:
                evaluation.writer.file.discard()
            return None
        add_ending(self._steps.options.path, [EVALUATED.format(file=evaluation.options.path.name)])
        return evaluation

    def failed(self, failure: FailureRecord) -> None:
        """Note ``failure``, with which the script failed, for both recordings."""
        for session in self._both():
            session.failed(failure)

    def close(self, failure: BaseException | None = None) -> None:
        """Close both sessions; ``failure`` is the exception that ended the script, if it was an error."""
        for session in self._both():
            session.close(failure)
        self._end_wait()

    def _both(self) -> list[Session]:
        return [self._steps, *([] if self.evaluation is None else [self.evaluation])]


def _running(frame: FrameType | None) -> int:
    """The number of modules that run in ``frame`` and its callers."""
    running = 0
    while frame is not None:
        running += frame.f_code.co_name == CALLS_MODULE
        frame = frame.f_back
    return running


def _free_file(steps: Path, *, force: bool) -> Path:
    """The file for the evaluation after the ``steps``; one that exists is replaced only with ``force``."""
    number = 1 if force else claim(lambda number: [evaluation_file(steps, number)])
    return evaluation_file(steps, number)
