"""What is worth telling about a run: small checks, each in a module of its own, in the order of the report."""

from __future__ import annotations

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

SEVERITIES = ("warning", "advice", "info")
"""In which order findings are told."""


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """What the checks found: warnings, then advice by what it takes off, then what is worth knowing."""
    run = TrainingRun(analysis=analysis)
    of_steps = CHECKS if trains(analysis.recording) else OF_INFERENCE
    checks = (out_of_memory.check, residual.check, *(of_steps if run.steps else ()))
    found = [_proven(finding) for check in checks if (finding := check(run)) is not None]
    return tuple(sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.saved)))


def _proven(finding: Finding) -> Finding:
    """``finding``, as information where its change was not seen to take memory off."""
    return replace(finding, severity="info") if finding.severity == "advice" and not finding.saved else finding
