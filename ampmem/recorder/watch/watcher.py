"""Watches a whole run: a row for each step, some steps recorded in full, and the state when memory ran out.

Between full recordings only the cheap hooks of a session follow the script's steps and phases.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import time_ns
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.errors import AmpmemError, UsageError
from ampmem.events import Phase, PlaceRecord
from ampmem.failure import FailureRecord, failure_of
from ampmem.growth import LEAST_STEPS, growth_of
from ampmem.output import lock_file
from ampmem.own_code import script_line
from ampmem.patching import hook
from ampmem.recorder.models.holders import Variables, holders_of
from ampmem.recorder.models.live import collection_paused, live_at_start, live_tensors
from ampmem.recorder.options import Options
from ampmem.recorder.process import active, become_active, check_none, release
from ampmem.recorder.script_listener import ScriptListener
from ampmem.recorder.session import Session
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.choose import records_cuda
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.sources.cuda.oom import is_out_of_memory
from ampmem.recorder.sources.simulated import SimulatedSource
from ampmem.recorder.torch_private.general import in_backward, on_step_before, tree_leaves
from ampmem.recorder.watch.gauges import CpuGauge, CudaGauge, Gauge, SimulatedGauge, UnservedRequest
from ampmem.recording.bounds import NAME
from ampmem.recording.watched import (
    EVERYTHING_ELSE,
    IDLE_PARAMETERS,
    Ending,
    Grown,
    HeldMemory,
    Row,
    WatchedHeader,
    Why,
)
from ampmem.recording.watched_file import WatchedFile
from ampmem.signals import SIGNALS
from ampmem.simulator.device import SimulatedDevice
from ampmem.version import __version__

_SHAPES = 3
"""Maximum number of a batch's tensors that are named."""
_FOLDERS = "ampmem-watch-"
"""How the names of folders for full recordings begin."""


def _locked_folder(undo: ExitStack) -> str:
    """A temporary folder, which ``undo`` removes; removes those of watches whose processes were killed, too.

    A watch holds the lock of its folder, and the kernel gives it up when the process ends, however it ends.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            opened = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            if os.fstat(opened).st_uid == os.getuid() and lock_file(opened):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(opened)
    made = tempfile.mkdtemp(prefix=_FOLDERS)
    undo.callback(shutil.rmtree, made, ignore_errors=True)
    held = os.open(made, os.O_DIRECTORY)
    undo.callback(os.close, held)
    lock_file(held)
    return made


class LightListener(ScriptListener):
    """Reports phases and batches to ``watcher``, too."""

    watcher: Watcher

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():  # else it is recomputed
            self.watcher.fed(module, *_batch(args, sys._getframe(2).f_locals.get("kwargs")))
            self.watcher.entered(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)
        super().skimmed(module, args)

    def skimmed_over(self) -> None:
        if not in_backward():
            self.watcher.entered(Phase.BETWEEN)
        super().skimmed_over()

    def backward_started(self, loss: float | LateNumber | None) -> None:
        self.watcher.entered(Phase.BACKWARD)
        super().backward_started(loss)

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        self.watcher.entered(Phase.BETWEEN)
        super().backward_ended(raised=raised, differentiable=differentiable)

    def update_begins(self, optimizer: Optimizer, *_: object) -> None:
        """Note that a ``step`` begins."""
        if self.on_thread() and not in_backward():
            self.watcher.entered(Phase.OPTIMIZER)

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        super().updated(optimizer, skipped=skipped)  # the step may end with it, in this phase
        if not in_backward():
            self.watcher.entered(Phase.BETWEEN)


class LightSession(Session):
    """A session that only times steps, and reports them to ``watcher``, with the phases and batches.

    ``look`` is called after each module's forward, for gauges whose peak is only sampled.
    """

    LISTENER = LightListener
    listener: LightListener

    def __init__(
        self, options: Options, watcher: Watcher, *, source: Source | None, look: Callable[[], object] | None
    ) -> None:
        super().__init__(replace(options, timed=True, skip=0, steps=None), source=source)
        self._watcher = self.listener.watcher = watcher
        self._look = look

    def _install(self) -> None:
        super()._install()
        if self.options.baseline:
            for optimizer in live_at_start(tensors=False)[0]:
                self.add_optimizer(optimizer)
        self.skim()
        self._undo.callback(hook(on_step_before, self.listener.update_begins))

    def end_step(self, ended_ns: int | None) -> None:
        self.outcome.steps += 1
        self._watcher.step_ended(self.outcome.number - 1)


def _batch(args: tuple[Any, ...], kwargs: Any) -> tuple[str, int]:
    """Shapes and dtypes of the first tensors, such as ``8x512 int64``, and the number of elements of all."""
    given = (*args, *(kwargs or {}).values())
    if any(isinstance(each, dict | list | tuple) for each in given):
        given = tuple(tree_leaves(given))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    said = [
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors[:_SHAPES]
    ]
    more = f" and {len(tensors) - _SHAPES} more" if len(tensors) > _SHAPES else ""
    return (", ".join(said) + more)[:NAME], sum(tensor.numel() for tensor in tensors)


FULL_STEPS = 3
"""Number of steps per full recording."""
_HIGHER = 1.05
"""Factor by which a peak must exceed all fully recorded ones to be recorded itself."""
_SERIES = 2048
"""Number of steps kept to detect growth; beyond it, every other one is dropped."""
_NO_STEP = "no step ended: no backward ran and no optimizer made an update; for inference, use --step-on forward"
_ENDED_FIRST = "no step ended before the script failed or was interrupted"
_IN_CHILDREN = (
    "no step ended in the script's own process: it started others, which are not watched; start its ranks with "
    "torchrun ... -m ampmem watch SCRIPT"
)
_MODELS = 64
"""Number of models that ran at which freed ones are forgotten."""
_FIRST = 5
_NEAR = 0.8
"""Share of the device's memory from which on lines of allocations are kept, as in the first steps."""
_PASSING = (Phase.BETWEEN, Phase.SETUP)
"""Phases whose peak is read only when the next phase ends: reading costs more than it shows."""
_LINES = 12
"""Maximum number of the script's lines named for memory held when it ran out."""


class Series:
    """Memory alive at the ends of steps, evenly thinned out: its size is bounded for a run of any length."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.alive: list[int] = []
        self._every = 1

    def add(self, step: int, alive: int) -> None:
        """Add the bytes ``alive`` at the end of ``step``."""
        if step % self._every:
            return
        self.steps.append(step)
        self.alive.append(alive)
        if len(self.steps) > _SERIES:
            self._every *= 2
            kept = [i for i, each in enumerate(self.steps) if each % self._every == 0]
            self.steps, self.alive = [self.steps[i] for i in kept], [self.alive[i] for i in kept]


class FullRecordings:
    """Decides at the end of each step whether to record the next few in full. Pure."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._recorded = 0
        """The highest peak of the fully recorded steps."""
        self._not_before = 0
        self._wait = FULL_STEPS
        self._next_growth = LEAST_STEPS

    def note(self, row: Row) -> None:
        """Note ``row`` of a fully recorded step."""
        self._recorded = max(self._recorded, row.peak)

    def wanted(self, row: Row, *, grows: Callable[[], bool]) -> Why | None:
        """Why to record the steps after ``row`` in full, if so; ``grows`` is called rarely."""
        step = row.step + 1
        if step % self._every == 0:
            return Why.EVERY
        if step >= self._next_growth:
            self._next_growth = max(2 * step, LEAST_STEPS)
            if grows():
                return Why.GROWTH
        if not row.full and row.peak > self._recorded * _HIGHER and step >= self._not_before:
            # The next steps may be lower: then the wait for the next attempt doubles.
            self._wait *= 2
            self._not_before = step + self._wait
            return Why.HIGHEST
        return None


class GrowthLook:
    """Finds tensors made between two looks and still alive, and their holders. Parameters are left out."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._there = {id(each): weakref.ref(each) for each in _other_tensors()}

    def end(self, step: int, line_of: Callable[[int], str], variables: Variables) -> Grown:
        """The second look, at the end of ``step``; ``line_of`` returns the line that allocated an address."""
        fresh = [
            each for each in _other_tensors() if (known := self._there.get(id(each))) is None or known() is not each
        ]
        fresh.sort(key=lambda each: -each.nbytes)
        del fresh[_LOOKED_AT:]
        by_holder: dict[str, list[int]] = {}
        for tensor, (name, _) in zip(fresh, holders_of(fresh, variables.by_id()), strict=True):
            line = line_of(tensor.untyped_storage().data_ptr() if tensor.device.type == "cuda" else 0)
            by_holder.setdefault(_called(name, line)[:NAME], []).append(tensor.nbytes)
        ordered = sorted(by_holder.items(), key=lambda each: -sum(each[1]))[:_LINES]
        held = [HeldMemory(what=what, bytes=sum(sizes), count=len(sizes)) for what, sizes in ordered if what]
        steps = step - self.step
        often = [each for each in held if 2 * each.count >= steps]  # a batch is alive after each step without growing
        return Grown(step=step, steps=steps, held=tuple(often or held))


_LOOKED_AT = 1000
_LOOK_STEPS = 10
"""Number of steps between the two looks."""
_NUMBER = re.compile(r"\[\d+\]")
_ROOT = re.compile(r"(?<!^self)[.\[].*")


def _called(holder: str, line: str) -> str:
    name = _NUMBER.sub("[*]", holder)
    return f"{name}, allocated at {line}" if name and line else name or (f"allocated at {line}" if line else "")


def _other_tensors() -> list[torch.Tensor]:
    """Live tensors with memory of their own that are neither parameters nor gradients of parameters."""
    return [each for each in live_tensors() if not isinstance(each, nn.Parameter) and _has_memory(each)]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type != "meta" and tensor.nbytes > 0
    except (RuntimeError, NotImplementedError, ValueError):
        return False


_watching: list[Watcher] = []
"""The active watcher, if any."""


def _forget_in_child() -> None:
    for watcher in _watching:
        watcher.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class Watcher:
    """Watches from :meth:`start` to :meth:`close`; the runner of a script uses it like a session.

    ``simulated`` replaces the device that ``options.device`` names. Every ``every`` steps some are recorded in full;
    the last ``keep`` recordings are kept. ``on_step`` is called after each step, ``say`` with one-line messages about
    errors.
    """

    def __init__(
        self,
        options: Options,
        *,
        every: int = 500,
        keep: int = 3,
        simulated: SimulatedDevice | None = None,
        say: Callable[[str], None] = lambda _: None,
        on_step: Callable[[Row], None] | None = None,
    ) -> None:
        check_none()
        if _watching:
            raise UsageError("ampmem.watch() is active already and cannot be nested; leave the outer one first")
        self.options = options
        self._simulated = simulated
        self._every, self._keep = every, keep
        self._say, self._on_step = say, on_step
        self._gauge: Gauge = _gauge_of(options, simulated)
        look = self._gauge.peak if self._gauge.sampled else None
        self._light = LightSession(options, self, source=self._source(), look=look)
        self._file: WatchedFile | None = None
        self._full: Session | None = None
        self._why, self._first = Why.START, 0
        self._undo = ExitStack()
        self._folder = ""
        self._plans = FullRecordings(every)
        self._series = Series()
        self._regular: list[int] = []
        self._latest: dict[Why, int] = {}
        self._phase, self._peak, self._peak_phase = Phase.SETUP, 0, Phase.SETUP
        self._batch = self._fed = ""
        self._largest = 0
        """The largest number of elements of a batch so far."""
        self._careful, self._grew = True, False
        """Whether this step may run out of memory, so lines are worth their time; whether memory grew."""
        self._limit: int | None = None
        self._named = False
        self._look: GrowthLook | None = None
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._shortage: Ending | None = None
        """The last failed request, as an ending."""
        self._caught = False
        self._failure: FailureRecord | None = None
        self.rows = self.written = 0
        """Number of steps that ended, and of those that were written."""
        self.stopped_by: str | None = None
        """Why the file ends before the run, if so."""

    def _source(self) -> Source | None:
        return None if self._simulated is None else SimulatedSource(self._simulated)

    def start(self) -> None:
        """Begin, and record the first steps in full. On an error nothing is left, not even a file."""
        self._folder = _locked_folder(self._undo)
        try:
            self._file = WatchedFile(self.options.path, self._header(), force=self.options.force)
            self._undo.callback(self._write, WatchedFile.close, last=True)
            self._light.start()
            self._undo.callback(self._gauge.install(self._short))
            self._named = bool(self._gauge.device()[0])
        except BaseException as error:
            self._light.close(error)
            self._undo.close()
            if self._file is not None:
                self.options.path.unlink(missing_ok=True)
            raise
        _watching.append(self)
        self._undo.callback(_watching.remove, self)
        self._begin_full(Why.START)

    def close(self, failure: BaseException | None = None) -> None:
        """Write how the run ended, and undo every hook; a second call does nothing."""
        if self.forked() or self._folder == "":
            return
        self._folder, folder = "", self._folder
        with SIGNALS:
            # The hooks of the full recording lie over those of the light session: they go first.
            self._end_full(Path(folder), failure)
            self._light.close(failure)
            if self.rows == 0:
                self._tell_why_nothing(failure)
            self._write_ending(failure)
            self._undo.close()

    def _tell_why_nothing(self, failure: BaseException | None) -> None:
        """Say that no step ended, and note why if the script's own failure does not tell it."""
        if failure is not None:
            self._say(_ENDED_FIRST)
            return
        why = _IN_CHILDREN if self._light.outcome.children else _NO_STEP
        self._write(lambda file: file.note(why))
        self._say(why)

    def failed(self, failure: FailureRecord) -> None:
        """Note ``failure``, with which the script failed."""
        self._failure = failure
        if self._full is not None:
            self._full.failed(failure)

    def forget(self) -> None:
        """Stop in a forked child."""
        with suppress(Exception):  # a full recording forgets itself
            self._light.forget()

    def forked(self) -> bool:
        """Whether this process is a forked child: the run is its parent's."""
        return self._light.forked()

    def manual_step(self) -> None:
        """End the step here; from now on only this method ends steps."""
        if self._folder == "":
            raise UsageError("watch.step() was called after the with block; call it inside, at the end of an iteration")
        full = self._full
        self._light.manual_step()
        if full is not None and active() is full:
            full.manual_step()

    # Called by the light session.

    def entered(self, phase: Phase) -> None:
        """The script enters ``phase``."""
        if self._phase not in _PASSING or self._gauge.sampled:
            self._note_peak(self._gauge.peak())
        self._phase = phase

    def _note_peak(self, peak: int) -> None:
        """Attribute ``peak`` to the phase that ends here, if it rose since the last reading."""
        if peak > self._peak:
            self._peak, self._peak_phase, self._fed = peak, self._phase, self._batch

    def fed(self, module: nn.Module, batch: str, size: int) -> None:
        """An outermost ``module`` gets ``batch``, of ``size`` elements."""
        self._batch = batch
        if size > self._largest:
            self._largest = size
            if not self._careful:  # a batch as large has not passed so far
                self._careful = True
                self._gauge.keep_lines(wanted=True)
        known = self._models.get(id(module))
        if known is None or known() is not module:
            if len(self._models) >= _MODELS:  # for example losses made anew in each step
                self._models = {key: each for key, each in self._models.items() if each() is not None}
            self._models[id(module)] = weakref.ref(module)

    def step_ended(self, number: int) -> None:
        """Write the row of the step that has ended, before anything else."""
        now, host = self._gauge.take(), _resident()
        self._note_peak(now.peak)
        self._phase = Phase.BETWEEN
        row = Row(
            step=number,
            time_ns=time_ns(),
            peak=max(self._peak, now.alive),
            phase=self._peak_phase.name.lower(),
            alive=now.alive,
            reserved=now.reserved,
            host=host,
            retries=now.retries,
            split=now.split,
            batch=self._fed,
            full=self._full is not None,
        )
        self._peak = 0
        self._write(lambda file: file.row(row))
        self.rows += 1
        self.written += self.stopped_by is None
        self._note_what_went_on()
        self._series.add(number, row.alive)
        if not self._named and self._gauge.device()[0]:
            self._named = True
            self._write(lambda file: file.header(self._header()))
        near = self._limit is not None and row.reserved > _NEAR * self._limit
        careful = self.rows < _FIRST or self._grew or near
        if careful != self._careful:
            self._careful = careful
            self._gauge.keep_lines(wanted=careful)
        self._go_on(row)
        if self._on_step is not None:
            self._on_step(row)

    def _note_what_went_on(self) -> None:
        """Note a failed request in the step that has ended: the script caught the error."""
        short, self._shortage = self._shortage, None
        if short is not None and not self._caught:
            self._caught = True
            where = f" at {short.line}" if short.line else ""
            note = (
                f"memory ran out in step {short.step}{where}, and the script continued; later failures are not recorded"
            )
            self._write(lambda file: file.note(note))

    def _go_on(self, row: Row) -> None:
        """Begin or end a full recording, if due after ``row``."""
        if self._full is not None:
            self._plans.note(row)
            if active() is self._full:  # it ends itself after this call: its hooks come last
                return
            self._end_full(Path(self._folder), None)
        look = self._look
        if look is not None and row.step - look.step >= _LOOK_STEPS:
            self._look = None
            with collection_paused():
                grown = look.end(row.step, self._gauge.line_of, self._light.listener.variables)
            if grown.held:
                self._write(lambda file: file.grown(grown))
        why = self._plans.wanted(row, grows=self._grows)
        if why is Why.GROWTH:
            with collection_paused():
                self._look = GrowthLook(row.step)
        if why is not None:
            self._begin_full(why)

    def _grows(self) -> bool:
        self._grew = growth_of(self._series.steps, self._series.alive) is not None
        return self._grew

    # Full recordings.

    def _begin_full(self, why: Why) -> None:
        if self.stopped_by is not None or active() is not self._light:  # or the script records something itself
            return
        self._why, self._first = why, self._light.outcome.number
        path = Path(self._folder) / "full.ampmem"
        options = replace(self.options, path=path, steps=FULL_STEPS, skip=0, first_step=self._first, force=True)
        if why is not Why.START:
            options = replace(options, baseline=True)
        # There is one memory history and one active session: the light one makes room until the full one has ended.
        self._gauge.pause()
        release(self._light)
        try:
            full = Session(options, source=self._source(), on_done=lambda: self._end_full(path.parent, None))
            full.start()
        except AmpmemError as error:
            self._say(f"no steps are recorded in full from step {self._first} on: {error}")
        else:
            self._full = full
        finally:
            if self._full is None:
                become_active(self._light)
                self._gauge.resume()

    def _end_full(self, folder: Path, failure: BaseException | None) -> None:
        full, self._full = self._full, None
        if full is None:
            return
        try:
            full.close(failure)
        finally:
            if active() is None:
                become_active(self._light)
            self._gauge.resume()
        recorded = full.outcome.recorded
        path = folder / "full.ampmem"
        if (recorded or full.outcome.unfinished is not None) and path.exists():
            last = self._first + max(recorded - 1, 0)
            self._write(lambda file: self._keep_full(file, path, last))
        path.unlink(missing_ok=True)

    def _keep_full(self, file: WatchedFile, path: Path, last: int) -> None:
        number = file.full(path, self._why, self._first, last)
        former = self._latest.pop(self._why, None)
        if self._why is Why.EVERY:
            self._regular.append(number)
            former = self._regular.pop(0) if len(self._regular) > self._keep else None
        else:
            self._latest[self._why] = number
        if former is not None:
            file.drop(former)

    # The file, and its end.

    def _write(self, write: Callable[[WatchedFile], object], *, last: bool = False) -> None:
        """Call ``write``; a full disk ends the recording, never the script. Then only the ``last`` writes are tried."""
        if self._file is None or (self.stopped_by is not None and not last) or self.forked():
            return
        try:
            # A collection here would free tensors of the script at an instant at which it does not.
            with collection_paused():
                write(self._file)
        except (OSError, AmpmemError) as error:
            if self.stopped_by is None:
                self.stopped_by = (
                    f"{self.options.path} could not be written from step {self._light.outcome.number} on: {error}"
                )
                self._say(self.stopped_by)

    def _header(self) -> WatchedHeader:
        options, (name, limit) = self.options, self._gauge.device()
        self._limit = limit
        place = options.place or PlaceRecord(rank=0, world_size=1)
        return WatchedHeader(
            ampmem=__version__,
            torch=torch.__version__,
            source=self._gauge.kind.value,
            device=name,
            script=options.script,
            arguments=options.arguments,
            started_ns=time_ns(),
            every=self._every,
            limit=limit,
            rank=place.rank,
            world_size=place.world_size,
            job=place.job,
            sampled=self._gauge.sampled,
        )

    def _short(self, shortage: UnservedRequest) -> None:
        """Note a failed request; the script does not know yet."""
        with collection_paused():
            self._shortage = Ending(
                step=self._light.outcome.number,
                time_ns=time_ns(),
                out_of_memory=True,
                asked=shortage.asked,
                free=shortage.free,
                total=shortage.total,
                reserved=shortage.reserved,
                phase=self._phase.name.lower(),
                batch=self._batch,
                line=script_line(),
                held=self._held_memory(shortage.blocks, shortage.lines),
            )

    def _held_memory(self, blocks: Mapping[int, int], lines: Mapping[int, str]) -> tuple[HeldMemory, ...]:
        """What the ``blocks`` are: known tensors first, the rest by the line that allocated them, or by the holder."""
        left, found = dict(blocks), []

        def take(groups: Iterable[tuple[str, list[torch.Tensor]]]) -> None:
            for what, tensors in groups:
                addresses = {address for each in tensors if (address := self._light.log.storage_address(each))}
                sizes = [left.pop(address) for address in addresses if address in left]
                if sizes:
                    found.append(HeldMemory(what=what, bytes=sum(sizes), count=len(sizes)))

        take(
            (
                *self._labelled_tensors(),
                (IDLE_PARAMETERS, [each for each in live_tensors() if isinstance(each, nn.Parameter)]),
            )
        )
        take(self._by_holder(frozenset(address for address in left if not lines.get(address))).items())
        by_line: dict[str, list[int]] = {}
        for address, size in left.items():
            by_line.setdefault(lines.get(address, ""), []).append(size)
        ordered = sorted(by_line.items(), key=lambda each: -sum(each[1]))
        named = [(line, sizes) for line, sizes in ordered if line][:_LINES]
        rest = [size for line, sizes in ordered if (line, sizes) not in named for size in sizes]
        found += [HeldMemory(what=line, bytes=sum(sizes), count=len(sizes), line=True) for line, sizes in named]
        if rest:
            found.append(HeldMemory(what=EVERYTHING_ELSE, bytes=sum(rest), count=len(rest)))
        return tuple(found)

    def _by_holder(self, addresses: Set[int]) -> dict[str, list[torch.Tensor]]:
        """The largest live tensors at ``addresses``, by the name of their holder."""
        at = self._light.log.storage_address
        found = [each for each in live_tensors() if _has_memory(each) and at(each) in addresses]
        found = sorted(found, key=lambda each: -each.nbytes)[:_LOOKED_AT]
        holders: dict[str, list[torch.Tensor]] = {}
        named = holders_of(found, self._light.listener.variables.by_id())
        for tensor, (name, _) in zip(found, named, strict=True):
            root = _ROOT.sub("", name)  # all of `ema` in `ema['0.weight']`
            if root not in ("", "dict", "list", "set", "tuple"):
                holders.setdefault(root[:NAME], []).append(tensor)
        largest = sorted(holders, key=lambda name: -sum(each.nbytes for each in holders[name]))
        return {name: holders[name] for name in largest[:_LINES]}

    def _labelled_tensors(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Parameters and buffers of the models that ran, their gradients, and optimizer states, each with a label."""
        models = [model for reference in self._models.values() if (model := reference()) is not None]
        parameters: list[torch.Tensor] = [each for model in models for each in model.parameters()]
        gradients = [grad for each in parameters if (grad := each.grad) is not None]
        states = self._light.listener.holders.state_of(self._light.optimizers)
        buffers = [each for model in models for each in model.buffers()]
        return [("parameters", parameters), ("gradients", gradients), ("optimizer state", states), ("buffers", buffers)]

    def _write_ending(self, failure: BaseException | None) -> None:
        record = self._failure
        if record is None and failure is not None and not isinstance(failure, GeneratorExit):
            record = failure_of(failure)
        ran_out = failure is not None and is_out_of_memory(failure)
        if self._shortage is not None and ran_out:
            ending = replace(self._shortage, failure=record)
        else:
            ending = Ending(
                step=self._light.outcome.number,
                time_ns=time_ns(),
                failure=record,
                out_of_memory=ran_out,
                phase=self._phase.name.lower(),
                batch=self._batch,
            )
        stopped_by = self.stopped_by
        self._write(lambda file: file.end(ending), last=True)
        if stopped_by is not None:
            self._write(lambda file: file.note(stopped_by), last=True)


def _gauge_of(options: Options, simulated: SimulatedDevice | None) -> Gauge:
    if simulated is not None:
        return SimulatedGauge(simulated)
    return CudaGauge(stacks=options.stacks) if records_cuda(options) else CpuGauge()


_PAGE = resource.getpagesize()


def _resident() -> int:
    """The process's resident memory in bytes; its peak if the system does not report the current value."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as stream:  # noqa: PTH123
        # The second number is that of the resident pages.
        return int(stream.read().split()[1]) * _PAGE
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, in KiB on Linux.
    return most if sys.platform == "darwin" else most * 1024
