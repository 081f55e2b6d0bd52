"""Writes what each step leaves: its events, joined to what the hooks saw, and what is known of the run by now."""

from __future__ import annotations

from ampmem.events import PredictionRecord, StepRecord
from ampmem.recorder.device import Taken
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.process.forks import leave_to_parent
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.writing.describe import Describer
from ampmem.recorder.writing.join import Joiner
from ampmem.recording import Batch, RecordingWriter
from ampmem.recording.database import written_here


class StepWriter:
    """Writes into one recording."""

    def __init__(self, file: RecordingWriter, joiner: Joiner, texts: Texts, describer: Describer) -> None:
        self._file = file
        self._joiner = joiner
        self._texts = texts
        self._describer = describer

    def write(self, raw: RawEvents, taken: Taken, step: StepRecord | None, *, last: bool) -> None:
        """One transaction: the events since the last one, and ``step``, if one has ended; ``last`` at the end.

        Raises:
            RecordingError: the file cannot be written.
        """
        joined = self._joiner.join(raw)
        layers, ooms = taken
        batch = Batch(**joined, texts=self._texts.take_new(), step=step, layers=layers, ooms=ooms)
        # Going through all parameters in every step would cost.
        description = self._describer.description() if self._describer.changed() or last else None
        self._file.append(batch, description)

    @property
    def prediction(self) -> PredictionRecord | None:
        """What was written last of a simulated device."""
        return self._file.prediction

    def withdraw(self) -> None:
        """Let no file be there until there is a step to write."""
        self._file.withdraw()

    def discard(self) -> None:
        """Remove a recording of nothing."""
        self._file.discard()

    def close(self) -> None:
        """The recording is whole.

        Raises:
            RecordingError: steps that waited for a reader of the file cannot be written.
        """
        self._file.close()

    def forget(self) -> None:
        """In a forked child: leave the recording to the parent."""
        leave_to_parent(self._file, self._file.path)
        written_here.clear()
