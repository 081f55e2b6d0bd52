"""One training run, three ways: as it is, recorded by ampmem, and simulated; each in a process of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import children

from ampmem.errors import AmpmemError
from ampmem.events import Recording
from ampmem.recording import read
from ampmem.vocabulary import Mark

HERE = Path(__file__).parent
CASE, PLAIN = HERE / "case.py", HERE / "plain.py"
NOT_INSTALLED = 3
_NO_GPU: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes; the most that was allocated and reserved, and what was used of the device beside that.

    ``at_start`` is what was used of it before anything was allocated: the CUDA context, and what others have.
    ``most_allocated`` and ``most_reserved`` are a simulation's with the most that it assumes for what it does not know.
    ``why`` says why there are no figures, or none of the whole run: ``out of memory``, what was refused, what failed.
    """

    allocated: int | None = None
    reserved: int | None = None
    outside: int | None = None
    at_start: int | None = None
    most_allocated: int | None = None
    most_reserved: int | None = None
    why: str = ""
    refused: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Where and how the runs are made. With ``device`` ``sim`` every way is simulated: to try out without a GPU."""

    folder: Path
    gpu: str
    device: str = "cuda"
    steps: int = 3
    each: float = 150

    def plain(self, case: str, precision: str) -> Peaks:
        """As PyTorch's own statistics have it."""
        result = self.folder / f"{case}.{precision}.json"
        script = (str(PLAIN), str(result), *self._script(case, precision))
        recording = self._recording("plain", case, precision)
        command = self._profile("sim", recording) if self.device == "sim" else ()
        ended = children.follow((*command, *script), self.each)
        if not result.exists():
            return failed(ended)
        figures = json.loads(result.read_text(encoding="utf-8"))
        why = "out of memory" if "ran_out" in figures else "a recorder was there" if figures["recorder"] else ""
        # Under a simulation the recorder is there by design.
        return Peaks(
            allocated=figures["allocated"],
            reserved=figures["reserved"],
            outside=figures["outside"],
            at_start=figures["at_start"],
            why="" if self.device == "sim" and why.startswith("a recorder") else why,
            seconds=ended.seconds,
        )

    def recorded(self, case: str, precision: str) -> Peaks:
        """As ampmem's recording has it."""
        path = self._recording("recorded", case, precision)
        ended = children.follow((*self._profile(self.device, path), *self._script(case, precision)), self.each)
        recording = _read(path)
        if recording is None or (ended.code != 0 and not recording.ooms):
            return failed(ended)
        return recorded_peaks(recording, ended.seconds)

    def simulated(self, case: str, precision: str) -> Peaks:
        """As ampmem's simulation has it, in a process that sees no GPU."""
        path = self._recording("simulated", case, precision)
        command = (*self._profile("sim", path), *self._script(case, precision))
        ended = children.follow(command, 3 * self.each, variables=_NO_GPU)
        recording = _read(path)
        if recording is None or recording.prediction is None or (ended.code != 0 and not recording.ooms):
            return failed(ended)
        return simulated_peaks(recording, ended.seconds)

    def _script(self, case: str, precision: str) -> tuple[str, ...]:
        return str(CASE), case, precision, "--steps", str(self.steps), "--device", "cuda"

    def _recording(self, way: str, case: str, precision: str) -> Path:
        return self.folder / f"{case}.{precision}.{way}.ampmem"

    def _profile(self, device: str, path: Path) -> tuple[str, ...]:
        gpu = ("--gpu", self.gpu, "--files", "write") if device == "sim" else ()  # plain.py's figures are a file
        options = ("--device", device, *gpu, "--run-to-end", "--steps", str(self.steps), "--no-stacks")
        return "-m", "ampmem", "profile", *options, "--quiet", "--force", "-o", str(path)


def recorded_peaks(recording: Recording, seconds: float = 0.0) -> Peaks:
    """The largest of the steps' peaks, by ampmem's own events, and what was outside at the marks at most."""
    peaks = [row for row in recording.layers if row.mark == Mark.PEAK]
    used = [row.device_used - row.reserved for row in recording.layers if row.device_used is not None]
    return Peaks(
        allocated=max((row.allocated for row in peaks), default=None),
        reserved=max((row.reserved for row in recording.layers), default=None),
        outside=max(used, default=None),
        why="out of memory" if recording.ooms else "",
        seconds=seconds,
    )


def simulated_peaks(recording: Recording, seconds: float = 0.0) -> Peaks:
    """The prediction's two peaks, and the same with the most that is assumed for what is not known."""
    found = recording.prediction
    levels = [
        each.tensors + sum(each.workspaces.values()) + sum(each.scratch.values()) + each.rounding
        for each in (found.allocated, found.reserved)
    ]
    return Peaks(
        allocated=levels[0],
        reserved=levels[1] + found.reserved.cached,
        outside=found.outside + sum(found.libraries.values()),
        most_allocated=found.highest_allocated if found.bounds else None,
        most_reserved=found.highest_reserved if found.bounds else None,
        why="out of memory" if found.ran_out else "",
        seconds=seconds,
    )


def _read(path: Path) -> Recording | None:
    try:
        return read(path)
    except AmpmemError:
        return None


def failed(ended: children.Ended) -> Peaks:
    """Why there are no figures, in the process's own last words."""
    last = next((line.strip() for line in reversed(ended.lines) if line.strip()), "")
    missing = next((line for line in ended.lines if line.startswith("not installed: ")), "")
    refused = bool(missing) or ended.code == 2 or any("cannot be simulated" in line for line in ended.lines)
    return Peaks(why=missing or f"{ended.how}: {last[:200]}", refused=refused, seconds=ended.seconds)
