"""What is worth telling about a run: small checks, each in a module of its own, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.findings import fragmentation, residual
from ampmem.analysis.findings.base import Check, Finding, Section, TrainingRun
from ampmem.analysis.findings.copies import (
    autocast_in_backward,
    cache_off_costs,
    cache_off_saves,
    cache_on_saves,
    copies_grow,
    copies_survive,
    expanded_buffer_cast,
    recompute_recasts,
)
from ampmem.analysis.findings.precision import amp_saves, fp16_without_scaler, fp32_activations, no_autocast_effect
from ampmem.analysis.findings.training_loop import (
    foreach_temporaries,
    gradients_through_forward,
    out_of_memory,
    outputs_kept,
    state_not_there_yet,
    steady_growth,
)
from ampmem.analysis.timeline.marks import trains

__all__ = ["CHECKS", "SEVERITIES", "Finding", "Section", "findings"]

CHECKS: tuple[Check, ...] = (
    fp16_without_scaler.check,
    amp_saves.check,
    autocast_in_backward.check,
    copies_survive.check,
    copies_grow.check,
    cache_off_costs.check,
    cache_on_saves.check,
    cache_off_saves.check,
    recompute_recasts.check,
    fp32_activations.check,
    expanded_buffer_cast.check,
    foreach_temporaries.check,
    gradients_through_forward.check,
    state_not_there_yet.check,
    outputs_kept.check,
    steady_growth.check,
    fragmentation.check,
    no_autocast_effect.check,
)
"""All that look at steps that ended, in order."""

OF_INFERENCE: tuple[Check, ...] = (cache_off_saves.check, fragmentation.check, no_autocast_effect.check)
"""Those that are true of steps without a backward and an update, too."""

OF_A_FAILURE: tuple[Check, ...] = (
    cache_off_saves.check,
    fp32_activations.check,
    expanded_buffer_cast.check,
    foreach_temporaries.check,
)
"""Those that need nothing but what was alive when memory ran out, so that they are true of a first step that failed."""

SEVERITIES = ("warning", "advice", "info")
"""In which order findings are told."""


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """What the checks found: warnings, then advice by what it takes off, then what is worth knowing.

    Of a run that ended with a failed request all is said of that instant.
    """
    found = _checked(TrainingRun(analysis=analysis))
    oom = analysis.failed_request
    if oom is not None and not oom.later:  # of what came after the recorded steps only the failure is known
        found = _at_failure(found, _checked(TrainingRun(analysis=analysis, at_failure=True)), ended=oom.ended_the_run)
    proven = [_proven(finding) for finding in found.values()]
    return tuple(sorted(proven, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.saved)))


def _checked(run: TrainingRun) -> dict[str, Finding]:
    """What the checks find in ``run``, by code."""
    of_steps = CHECKS if trains(run.recording) else OF_INFERENCE
    if not run.steps:
        of_steps = OF_A_FAILURE if run.at_failure and trains(run.recording) else ()
    found = (check(run) for check in (out_of_memory.check, residual.check, *of_steps))
    return {finding.code: finding for finding in found if finding is not None and _worth_a_line(run, finding)}


def _worth_a_line(run: TrainingRun, finding: Finding) -> bool:
    """Whether ``finding`` is notable by its size; a warning is at any size, since something is wrong."""
    return finding.severity == "warning" or finding.bytes is None or run.notable(finding.bytes)


def _at_failure(found: Mapping[str, Finding], then: Mapping[str, Finding], *, ended: bool) -> dict[str, Finding]:
    """``found`` at the peak with the bytes of ``then``, at the failure; no others where that ``ended`` the run."""
    if not ended:
        return {
            code: replace(each, off_failure=then[code].off_peak if code in then else None)
            for code, each in found.items()
        }
    # What is to be changed at the peak, and not at the failure, would not have helped.
    told = [code for code, each in found.items() if code in then or each.severity != "advice"]
    return {
        code: replace(then[code], off_peak=None, off_failure=then[code].off_peak)
        if code in then
        else replace(found[code], off_peak=None)
        for code in dict.fromkeys((*then, *told))
    }


def _proven(finding: Finding) -> Finding:
    """``finding``, as information where its change was not seen to take memory off."""
    return replace(finding, severity="info") if finding.severity == "advice" and not finding.saved else finding
