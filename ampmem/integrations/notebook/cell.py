"""One cell that is recorded while it runs in this process, as it would without us."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from ampmem.errors import AmpmemError
from ampmem.integrations.notebook import output
from ampmem.integrations.notebook.options import CellOptions
from ampmem.integrations.notebook.shell import display
from ampmem.output.files import check_output, sized
from ampmem.output.shown import Bundle
from ampmem.output.terminal import printable
from ampmem.vocabulary import Arm, Device

if TYPE_CHECKING:
    from ampmem.api import Profile


class RecordedCell:
    """Records from now until :meth:`end`. Raises :class:`UsageError`, and does nothing, where that is not possible."""

    def __init__(self, options: CellOptions, name: str) -> None:
        from ampmem.api import Profile

        if options.output is not None:
            check_output(options.output, force=options.force)
        if options.html is not None:
            check_output(options.html, force=options.force, option="--html")
        self._options = options
        self._name = name
        self.profile: Profile = Profile(
            None,
            None,
            output=options.output,
            steps=options.steps,
            skip=options.skip,
            stacks=True,
            force=options.force,
            device=options.device,
            gpu=options.gpu,
            arm=options.arm,
            step_on=options.step_on,
            script=name,
        )
        self.profile.__enter__()

    def end(self, error: BaseException | None) -> bool:
        """End the recording, of a cell that may have failed with ``error``, and show it; whether there is one."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trace = None if error is None else error.__traceback__
            self.profile.__exit__(None if error is None else type(error), error, trace)
        ours = [text for one in said if (text := str(one.message)).startswith("ampmem: ")]
        if ours:
            _say(ours[0].removeprefix("ampmem: "))
            return False
        shown = False
        try:
            display(self.bundle(error=error))
            shown = True
            if self._options.html is not None:
                self.profile.report(self._options.html, force=self._options.force)
                _say(f"wrote {sized(self._options.html)}")
        except AmpmemError as problem:
            _say(str(problem))
        return shown

    def bundle(self, *, error: BaseException | None = None) -> Bundle:
        """What is shown. Raises :class:`NothingRecorded` and what reading a recording raises."""
        recording = self.profile.recording()
        tables = recording._repr_mimebundle_()
        return output.bundle(list(self._said(len(recording.steps), error)), [self.profile.path], tables)

    def _said(self, steps: int, error: BaseException | None) -> list[str]:
        """What was done, for whoever reads the page."""
        options, count = self._options, f"{steps} step{'' if steps == 1 else 's'}"
        which = f"of {self._name}" if not options.skip else f"of {self._name}, after the first {options.skip},"
        were = "was" if steps == 1 else "were"
        ended = "was stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        then = "" if error is None else f"; then it {ended}"
        if steps == options.steps:
            said = [f"The first {count} {which} {were} recorded (--steps {steps}){then}."]
        elif error is not None:
            said = [f"{count} {which} had ended when it {ended}, and {were} recorded."]
        else:
            said = [f"All {count} {which} {were} recorded."]
        if options.arm != Arm.AS_IS:
            said.append(f"ampmem forced the precision {options.arm} on the cell.")
        if options.device == Device.SIMULATED or options.gpu is not None:
            said.append("The GPU was simulated: what the cell left on it has no values, and other cells cannot use it.")
        if options.output is not None:
            said.append(f"The recording is {sized(options.output)}.")
        return [*said, "_ampmem has it: _ampmem.summary(), _ampmem.report(FILE)."]


def _say(message: str) -> None:
    print(f"ampmem: {printable(message)}", file=sys.stderr)
