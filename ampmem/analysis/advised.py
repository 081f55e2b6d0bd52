"""The file of runs that ``ampmem advise --resume`` keeps, and the findings that these runs disprove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampmem.analysis.advise import name_of, why_not_run
from ampmem.analysis.changes import CHANGES, Script, Trial, alone
from ampmem.analysis.findings import FORCED_BY_ADVISE
from ampmem.analysis.findings.base import NOTABLE_BYTES, NOTABLE_SHARE, Finding
from ampmem.analysis.jsonable import NOT_IN_JSON, Json, NotOfThisKind, from_json, parsed
from ampmem.analysis.ranks.jobs import RankRun
from ampmem.analysis.summary import Summary
from ampmem.errors import UsageError
from ampmem.events import PrecisionRecord, RunRecord
from ampmem.units import format_bytes
from ampmem.vocabulary import NOTHING_FORCED, Device, Forced, Precision, SourceKind

KIND = "ampmem advise"
"""The key in the first line of a file of runs; its value is the version of ampmem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that has ended; ``script`` is there for the run of the unchanged script only."""

    forced: Forced
    trial: Trial
    script: Script | None = None
    recording: Path | None = field(default=None, metadata=NOT_IN_JSON)


def identity_in(line: str) -> dict[str, Json] | None:
    """The properties that all runs of a file share, from its first ``line``; ``None`` for another kind of file."""
    try:
        found = parsed(line)
    except NotOfThisKind:
        return None
    return found if isinstance(found, dict) and KIND in found else None


def run_in(line: str) -> EndedRun | None:
    """The run in one line of the file; ``None`` for a line that a killed process has written in part."""
    try:
        return from_json(EndedRun, parsed(line))
    except NotOfThisKind:
        return None


# Which findings the runs disprove.

_DEVICES = {SourceKind.SIMULATED: Device.SIMULATED, SourceKind.CUDA: Device.CUDA, SourceKind.CPU: Device.CPU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """The runs in a file: ``identity`` has the properties that they share, ``trials`` are the runs by their changes."""

    path: Path
    identity: Mapping[str, Json]
    trials: Mapping[Forced, Trial]
    script: Script
    """The properties of the script, from the run of the unchanged script."""

    def rank_without_disproved(self, run: RankRun) -> RankRun:
        """``run`` without the findings that these runs disprove, and with a note on each of them."""
        if run.entry is None or run.entry.summary is None or run.run is None or run.precision is None:
            return run
        summary, notes = self.without_disproved(run.entry.summary, run.run, run.precision)
        return replace(run, entry=replace(run.entry, summary=summary), notes=(*run.notes, *notes))

    def without_disproved(
        self, summary: Summary, run: RunRecord, precision: PrecisionRecord
    ) -> tuple[Summary, tuple[str, ...]]:
        """``summary`` without the findings that these runs disprove, and a note on each of them."""
        other = self._differences(run, precision, summary)
        if other:
            notes = [f"{self.path}: its runs differ from this one ({', '.join(other)}), so no finding is left out"]
            kept = list(summary.findings)
        else:
            found = {finding.code: self.disproof(finding) for finding in summary.findings}
            notes = [text for text in found.values() if text is not None]
            kept = [finding for finding in summary.findings if found[finding.code] is None]
        return replace(summary, findings=tuple(kept), notes=(*summary.notes, *notes)), tuple(notes)

    def disproof(self, finding: Finding) -> str | None:
        """The reason to leave ``finding`` out: its changes were run and saved too little, with their savings.

        ``None`` if one of its changes saves enough, or was neither run nor refused.
        """
        suggested = FORCED_BY_ADVISE.get(finding.code, "").split(",")
        changes = [alone(change, self.script) for change in CHANGES if change.allow in suggested]
        if suggested == ["loss"] and not finding.proof:  # no change is run for other activations
            return None
        if any(
            each is None or (each not in self.trials and why_not_run(each, self.script) is None) for each in changes
        ):
            return None
        ran = {
            name_of(each, self.script): self._saved(each)
            for each in changes
            if each is not None and each in self.trials and self.trials[each].failure is None
        }
        if not ran or any(saved is None or self._notable(saved) for saved in ran.values()):
            return None
        results = ", ".join(
            f"{name} saved {format_bytes(saved) if saved and saved > 0 else 'nothing'}" for name, saved in ran.items()
        )
        return f"the finding {finding.code} is left out: ampmem advise ran its change for this script: {results}"

    def _saved(self, forced: Forced) -> int | None:
        """The bytes that ``forced`` takes off the allocated peak; for the allocator's settings, off the reserved peak.

        ``None`` if one of the two runs has no peak.
        """
        before, after = (self.trials.get(each, Trial(memory=None)).memory for each in (NOTHING_FORCED, forced))
        if before is None or after is None:
            return None
        return before.reserved - after.reserved if forced.allocator else before.allocated - after.allocated

    def _notable(self, saved: int) -> bool:
        """Whether a finding that saves ``saved`` bytes would be shown."""
        memory = self.trials[NOTHING_FORCED].memory
        return memory is not None and saved >= max(NOTABLE_BYTES, NOTABLE_SHARE * memory.allocated)

    def _differences(self, run: RunRecord, precision: PrecisionRecord, summary: Summary) -> list[str]:
        """The differences between the recording and these runs that matter for its findings, in words."""
        precision_name, _, dtype = str(self.identity.get("precision", "")).partition(" ")
        gpu = str(self.identity.get("GPU", ""))
        all_ranks = str(self.identity.get("rank")).startswith("all ")
        recorded: dict[str, tuple[object, object]] = {
            "script": (self.identity.get("script"), " ".join((run.script, *run.arguments))),
            "source of the script": (self.identity.get("source"), run.script_sha256),
            "version of torch": (self.identity.get("torch"), run.torch),
            "device": (self.identity.get("device"), _DEVICES.get(run.source)),
            "GPU": (gpu or self.script.device_name, run.device_name),
            "precision": (precision_name, precision.name if precision.forced else Precision.AS_IS),
            "type of autocast": (
                dtype,
                {"bfloat16": "bf16", "float16": "fp16"}.get(precision.dtype or "") if dtype else "",
            ),
            "assumption": (self.identity.get("assumption"), list(run.assume)),
            "rank": (self.identity.get("rank"), f"{'all' if all_ranks else run.rank} of {run.world_size}"),
            "forced change": (False, any(note.startswith("forced: ") for note in summary.notes)),
        }
        return [what for what, (theirs, ours) in recorded.items() if theirs != ours]


def read_advised(path: Path) -> Advised:
    """The runs in the file ``path`` (``--advised``). Raises :class:`UsageError` if it has none."""
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, ValueError) as error:
        raise UsageError(f"--advised {path}: {error}") from error
    identity = identity_in(first)
    if identity is None:
        raise UsageError(f"--advised {path}: not a file that ampmem advise --resume has written")
    ended = [run for run in map(run_in, lines) if run is not None]
    plain = next((run.script for run in ended if run.script is not None), None)
    if plain is None:
        raise UsageError(
            f"--advised {path}: it does not have the run of the script as it is yet; let ampmem advise finish"
        )
    return Advised(path=path, identity=identity, trials={run.forced: run.trial for run in ended}, script=plain)
