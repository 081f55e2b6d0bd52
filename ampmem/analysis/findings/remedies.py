"""All that may be changed about a run that ran out of memory, in one list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampmem.analysis.allocator.out_of_memory import FailedRequest
from ampmem.analysis.findings.base import Finding

_OF_ITSELF = "out-of-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something to change, ``why``, and the bytes that this change saves at the failure; ``None`` where not known.

    ``finding`` is the one that says so; ``None`` where the failed request does.
    """

    change: str
    why: str
    bytes: int | None
    finding: Finding | None


def remedies(oom: FailedRequest, findings: Iterable[Finding]) -> tuple[Remedy, ...]:
    """What ``findings`` and the request itself say to change, each once: first what saves the most at the failure."""
    mine = [finding for finding in findings if finding.off_failure]
    said = {finding.code for finding in mine}
    found = [
        Remedy(change=finding.change, why=finding.message, bytes=finding.off_failure, finding=finding)
        for finding in mine
    ]
    found += [
        Remedy(change=option.change, why="", bytes=None, finding=None)
        for option in oom.options
        if option.finding not in said
    ]
    return tuple(sorted(found, key=lambda remedy: -(remedy.bytes or 0)))


def told_elsewhere(oom: FailedRequest | None, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Those of ``findings`` that the section of the failed request does not have already.

    Where the script went on, what to change at the peak is told beside what would have helped at the failure.
    """
    if oom is None:
        return tuple(findings)
    own = (_OF_ITSELF, *((each.code for each in findings if each.off_failure) if oom.ended_the_run else ()))
    return tuple(finding for finding in findings if finding.code not in own)
