"""The findings about a run: small checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.findings import attention, copies, precision, training_loop, whole_run
from ampmem.analysis.findings.base import Check, Finding, TrainingRun
from ampmem.analysis.out_of_memory import advise_command
from ampmem.analysis.timeline.marks import trains

CHECKS: tuple[Check, ...] = (
    precision.fp16_without_scaler,
    precision.amp_saves,
    copies.autocast_in_backward,
    copies.copies_survive,
    copies.copies_grow,
    copies.cache_off_costs,
    copies.cache_on_saves,
    copies.cache_off_saves,
    copies.recompute_recasts,
    copies.compiled_casts,
    precision.fp32_activations,
    precision.autocast_widens,
    attention.attention_kernel,
    attention.attention_masks,
    copies.expanded_buffer_cast,
    training_loop.foreach_temporaries,
    training_loop.gradients_through_forward,
    training_loop.reduce_buckets,
    training_loop.unreduced_gradients,
    training_loop.state_not_there_yet,
    training_loop.outputs_kept,
    training_loop.no_grad_missing,
    training_loop.predictions_kept,
    whole_run.steady_growth,
    whole_run.larger_step,
    whole_run.fragmentation,
    precision.no_autocast_effect,
)
"""The checks of finished steps, in order. A new finding is a function in one of the five modules, and a line here."""

OF_INFERENCE: tuple[Check, ...] = (
    copies.cache_off_saves,
    training_loop.no_grad_missing,
    training_loop.predictions_kept,
    whole_run.fragmentation,
    precision.no_autocast_effect,
)
"""The checks that also apply to steps without a backward and an update."""

OF_A_FAILURE: tuple[Check, ...] = (
    copies.cache_off_saves,
    precision.fp32_activations,
    attention.attention_kernel,
    attention.attention_masks,
    copies.expanded_buffer_cast,
    training_loop.foreach_temporaries,
    training_loop.predictions_kept,
)
"""The checks that need only what was alive when memory ran out, so they apply to a first step that failed."""

FORCED_BY_ADVISE: Mapping[str, str] = {
    "foreach-temporaries": "foreach,fused",
    "fragmentation": "allocator",
    "gradients-through-forward": "gradients",
    "fp32-activations": "loss",
    "reduce-buckets": "bucket-view",
    "unreduced-gradients": "gradient-sync",
}
"""By code: the names that ``ampmem advise --allow`` has for the changes that the finding suggests."""

SEVERITIES = ("warning", "advice", "info")
"""The severities in the order of display."""


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """The findings about a run: warnings, then advice by bytes saved, then information.

    For a run that ended with a failed request, all findings are about that instant.
    """
    found = _checked(TrainingRun(analysis=analysis))
    oom = analysis.failed_request
    if oom is not None and not oom.later:  # after the recorded steps only the failure itself is known
        found = _at_failure(found, _checked(TrainingRun(analysis=analysis, at_failure=True)), ended=oom.ended_the_run)
    judged = [_with_proof(finding, analysis) for finding in found.values()]
    return tuple(sorted(judged, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.saved)))


def _checked(run: TrainingRun) -> dict[str, Finding]:
    """The findings of all checks of ``run``, by code."""
    of_steps = CHECKS if trains(run.recording) else OF_INFERENCE
    if not run.steps:
        of_steps = OF_A_FAILURE if run.at_failure and trains(run.recording) else ()
    checks = (whole_run.out_of_memory, whole_run.residual, *of_steps)
    found = (
        replace(each, code=each.code or check.__name__.replace("_", "-"))
        for check in checks
        if (each := check(run)) is not None
    )
    # Warnings are always shown, since something is wrong; others if their size is notable.
    return {
        each.code: each for each in found if each.severity == "warning" or each.bytes is None or run.notable(each.bytes)
    }


def _at_failure(found: Mapping[str, Finding], then: Mapping[str, Finding], *, ended: bool) -> dict[str, Finding]:
    """``found`` at the peak with the bytes of ``then`` at the failure; if that ``ended`` the run, only ``then``'s."""
    if not ended:
        return {
            code: replace(each, off_failure=then[code].off_peak if code in then else None)
            for code, each in found.items()
        }
    # A change that helps at the peak but not at the failure would not have helped.
    told = [code for code, each in found.items() if code in then or each.severity != "advice"]
    return {
        code: replace(then[code], off_peak=None, off_failure=then[code].off_peak)
        if code in then
        else replace(found[code], off_peak=None)
        for code in dict.fromkeys((*then, *told))
    }


def _with_proof(finding: Finding, analysis: Analysis) -> Finding:
    """``finding`` with the command that proves its advice, if there is one.

    Advice whose change was not seen to lower memory becomes information.
    """
    if finding.severity != "advice":
        return finding
    if not finding.saved:
        return replace(finding, severity="info")
    of_loss = finding.change == precision.IN_CHUNKS and "nll_loss" in finding.message  # F.cross_entropy's op
    changes = FORCED_BY_ADVISE.get(finding.code)
    if changes is None or (changes == "loss" and not of_loss):
        return finding
    return replace(finding, proof=advise_command(analysis.recording, None, "--allow", changes) or "")
