"""The recording of a block of code: :func:`profile`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ampmem.analysis.summary import Summary, summarize
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import Recording
from ampmem.failure import failure_of
from ampmem.output import Bundle, Shown, check_output, one_line, sized
from ampmem.recorder.options import Asked, asked_in_python, wrong_type
from ampmem.recording import SUFFIX, read
from ampmem.vocabulary import Device, Precision, StepOn

if TYPE_CHECKING:
    from ampmem.recorder.models.live import Module, Optimizer
    from ampmem.recorder.session import Session
    from ampmem.recorder.simulated_block import SimulatedBlock

ENDS_LATER = (
    "the block was left on a different thread than it was entered on; the recording ends when the first thread next "
    "runs a module, a backward or an optimizer, or is over"
)


def command_line() -> list[str]:
    """``sys.argv``; ``["a notebook"]`` in a notebook, where ``sys.argv`` is the kernel's."""
    command = sys.argv or [""]
    return ["a notebook"] if "kernel_launcher" in command[0] else command


def _remove_folder(folder: str, process: int) -> None:
    """Remove ``folder``, unless this is a forked child of ``process``, which made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def profile(
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    output: str | Path | None = None,
    steps: int | None = None,
    skip: int = 0,
    stacks: bool = True,
    force: bool = False,
    device: str = "auto",
    gpu: str | None = None,
    assume: Sequence[str] = (),
    step_on: str | None = None,
    phase: str | None = None,
    precision: str = Precision.AS_IS.value,
    dtype: str | None = None,
    seed: int | None = None,
) -> Profile:
    """Record the training steps inside a ``with`` block.

    Args:
        model: the root module; by default models are found automatically.
        optimizer: an optimizer whose updates end steps; by default found automatically.
        output: the recording to write; by default it lives as long as the returned object.
        steps: record this many steps, then let the block run on uninstrumented; all by default.
        skip: let this many steps pass first.
        stacks: record the Python stack of every op of the forward pass.
        force: replace ``output`` when it exists.
        device: whose memory to record: ``cuda``, ``cpu``, or ``auto`` for the GPU where torch sees one. With ``sim``,
            ``torch.cuda`` is a simulated GPU inside the block. Models made before can be moved to it, but not used
            after the block: tensors on the simulated GPU have no values.
        gpu: which GPU to simulate, such as ``h100``, or its memory, such as ``24GiB``. Without ``device`` this is
            enough where torch sees no GPU; where it sees one, ``device="sim"`` is needed.
        assume: assumptions about data that a simulated GPU does not have, such as ``["nonzero=0.5", "train.py:12=7"]``;
            ``compile=eager`` runs code of ``torch.compile`` uncompiled. A string is one assumption.
        step_on: what ends a step: ``backward``, ``optimizer``, ``forward`` for inference, or each return of a function,
            as ``FILE.py:FUNCTION`` or ``MODULE.FUNCTION``; by default found automatically.
        phase: ``evaluation`` records only the first evaluation in the block, one step for each batch.
        precision: what to force on the block: ``fp32`` without autocast and GradScaler, ``amp`` with autocast,
            ``amp-nocache`` with autocast without its weight cache; ``as-is`` changes nothing.
        dtype: what autocast casts to, ``bf16`` or ``fp16``, under ``amp`` and ``amp-nocache``; by default what the
            block's own autocast says.
        seed: seed of Python's, numpy's and torch's random numbers, set on entering. Models made before
            keep their weights.

    Returns:
        A context manager: inside the block ``prof.step()`` ends a step, and afterwards ``prof.summary()`` has the
        result, ``prof.recording()`` the events, and ``prof.report("page.html")`` writes the page.

    Raises:
        UsageError: at once, when an argument is invalid, when ``gpu`` is unknown, when ``device`` is a real one but
            ``gpu`` or ``assume`` is given, or when ``step_on`` or ``phase`` names nothing; on entering, when another
            ``profile`` is active, when ``output`` exists or cannot be written, when ``device`` cannot be recorded, when
            ``gpu`` is given without ``device`` where torch sees a GPU, or when torch.profiler is running.
    """
    if phase not in (None, StepOn.EVALUATION):
        raise UsageError(f"unknown phase {phase!r}; the only one that can be recorded alone is {StepOn.EVALUATION}")
    asked = asked_in_python(
        steps=steps,
        skip=skip,
        stacks=stacks,
        force=force,
        device=device,
        gpu=gpu,
        assume=assume,
        step_on=step_on if phase is None else phase,
        precision=precision,
        dtype=dtype,
        seed=seed,
    )
    return Profile(asked, model, optimizer, output=output)


def _check_trained(model: object, optimizer: object) -> None:
    """Raise :class:`UsageError` if ``model`` is not a module or ``optimizer`` is not an optimizer."""
    if model is None and optimizer is None:
        return
    from ampmem.recorder.models.live import Module

    if model is not None and not isinstance(model, Module):
        raise wrong_type("model", "a torch.nn.Module", model)
    # Other libraries' optimizers have the same methods, but need not derive from torch's.
    if optimizer is not None and (isinstance(optimizer, Module) or not hasattr(optimizer, "param_groups")):
        raise wrong_type("optimizer", "a torch.optim.Optimizer", optimizer)


def path_of(given: object, name: str) -> Path:
    """The path in the argument ``name``. Raises :class:`UsageError` if it cannot be a file's name."""
    if not isinstance(given, str | os.PathLike):
        raise wrong_type(name, "a path", given)
    path = Path(given)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # reported when the file is written
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{name} cannot be the name of a file ({why}): {str(path)[:40]!r}") from None
    return path


class Profile(Shown):
    """A recording of a block; made by :func:`profile`."""

    def __init__(
        self,
        asked: Asked,
        model: Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        output: str | Path | None = None,
        script: str | None = None,
    ) -> None:
        """Takes the arguments of :func:`profile`, and ``script``, which says in words what is recorded."""
        _check_trained(model, optimizer)
        self._asked = asked
        self._model = model
        self._optimizer = optimizer
        self._script = script
        if output is None:
            folder = tempfile.mkdtemp(prefix="ampmem-")
            weakref.finalize(self, _remove_folder, folder, os.getpid())
            output = Path(folder) / f"profile{SUFFIX}"
        self.path = path_of(output, "output").absolute()
        """The path of the recording."""
        self._session: Session | None = None
        self._simulated: SimulatedBlock | None = None
        self._undo, self.is_open = ExitStack(), False  # open: entered and not left yet
        self._failure: NothingRecorded | None = None

    def __enter__(self) -> Self:
        if self._session is not None:
            state = "is already recording" if self.is_open else "has already recorded"
            raise UsageError(f"this profile {state}: call ampmem.profile() again for another recording")
        check_output(self.path, force=self._asked.force, option="output=")
        from ampmem.recorder.options import options_of
        from ampmem.recorder.ranks.environment import launched
        from ampmem.recorder.session import Session
        from ampmem.recorder.simulated_block import simulated_block

        known = launched()
        script, *arguments = command_line() if self._script is None else [self._script]
        options = options_of(
            self._asked,
            path=self.path,
            script=script,
            arguments=tuple(arguments),
            place=None if known is None else known.place,
        )
        if options.seed is not None:
            from ampmem.recorder.comparable import seed_everything

            seed_everything(options.seed)
        with ExitStack() as undo:
            simulated = simulated_block(options)
            if simulated is not None:
                undo.callback(simulated.end)
                options = replace(options, device=Device.SIMULATED)
            self._simulated = simulated
            self._start(Session(options, source=None if simulated is None else simulated.source))
            self._undo, self.is_open = undo.pop_all(), True
        return self

    def _start(self, session: Session) -> None:
        try:
            if self._model is not None:
                session.models.add(self._model)
            if self._optimizer is not None:
                session.add_optimizer(self._optimizer)
            self._model = self._optimizer = None  # the recording must not keep them alive
            session.start()
        except BaseException as error:
            session.close(error)
            raise
        self._session = session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._running()
        if not self.is_open or sys.is_finalizing():  # already left, or Python ended before the object's owner died
            return
        from ampmem.signals import SIGNALS  # late: most programs that import ampmem record nothing

        self.is_open = False
        with SIGNALS:
            self._leave(session, error)

    def _leave(self, session: Session, error: BaseException | None) -> None:
        """End the recording; warn if nothing was recorded."""
        if error is not None and self._simulated is not None:
            session.failed(failure_of(error))  # whether the run fits is unknown then
        with self._undo:
            session.close(error)
        if self._simulated is not None:
            self._simulated.tell_doubts(failed=isinstance(error, Exception))
            self._simulated = None
        from ampmem.recorder.process import active  # late, as it imports torch

        if active() is session:
            warnings.warn(f"ampmem: {ENDS_LATER}", RuntimeWarning, stacklevel=3)
            return
        try:
            session.check()
        except NothingRecorded as nothing:
            self._failure = nothing
            if error is None:
                warnings.warn(f"ampmem: {nothing}", RuntimeWarning, stacklevel=3)

    def step(self) -> None:
        """End a step here; from the first call on, only these calls end steps.

        Raises:
            UsageError: outside the ``with`` block, or before any model ran forward.
        """
        session = self._running()
        if not self.is_open:
            raise UsageError("prof.step() was called after the with block; call it inside, at the end of an iteration")
        session.manual_step()

    def recording(self) -> Recording:
        """The recording; inside the block, the steps that have ended.

        Raises:
            NothingRecorded: no step has ended.
            UsageError: the recording has not begun.
        """
        if self._failure is not None:
            raise self._failure
        if self._session is None and not self.path.exists():
            raise UsageError("nothing has been recorded yet: train inside the with block, then read the result")
        return read(self.path)

    def summary(self) -> Summary:
        """The summary of the recording. Raises what :meth:`recording` raises."""
        return summarize(self.recording())

    def report(self, path: str | Path, *, force: bool = False) -> None:
        """Write the HTML report to ``path``. Raises :class:`UsageError` when it exists, unless ``force``."""
        from ampmem.reporters.html import write

        self.recording()
        page = path_of(path, "path")
        check_output(page, force=force, option="path=")
        write([self.path], page, force=force)

    def _in_short(self) -> str:
        if self._session is None:
            return "not started" if not self.path.exists() else f"the recording {sized(self.path)}"
        count = self._session.outcome.recorded
        steps = f"{count} step{'' if count == 1 else 's'}"
        from ampmem.recorder.process import active

        if active() is self._session:
            return f"recording, {steps} so far"
        return f"{steps} recorded in {sized(self.path)}" if self._failure is None else str(self._failure)

    def __str__(self) -> str:
        """The tables that ``ampmem show`` prints; one line as long as nothing is recorded."""
        return str(self._repr_mimebundle_()["text/plain"])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        """The summary in several formats; the ``repr`` alone while there is no summary."""
        try:
            return self.recording()._repr_mimebundle_()
        except Exception as error:
            why = "" if isinstance(error, NothingRecorded | UsageError) else f"\n{one_line(str(error))}"
            return {"text/plain": f"{self!r}{why}"}

    def _running(self) -> Session:
        if self._session is None:
            raise UsageError("this belongs inside the with block: with ampmem.profile() as prof: ...")
        return self._session
