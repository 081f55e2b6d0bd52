"""What to change when memory ran out: one list, nothing in it twice."""

from dataclasses import replace

from support.build import Story
from support.failures import FP32, GRADIENTS, ended, in_backward, in_forward, late_zero_grad, oom_at

from ampmem.allocator.oom import Reason
from ampmem.allocator.settings import MIB
from ampmem.analysis.findings.base import Finding, Section, remedies, told_elsewhere
from ampmem.analysis.summary import Summary, summarize
from ampmem.events import Fact, OptimizerRecord, Phase, PrecisionRecord
from ampmem.reporters.text.out_of_memory import render_out_of_memory


def told(summary: Summary) -> list[tuple[int | None, str]]:
    return [(each.bytes, each.change) for each in remedies(summary.out_of_memory, summary.findings)]


def test_the_late_zero_grad_is_in_the_list_once_and_first() -> None:
    summary = summarize(late_zero_grad())
    codes = [finding.code for finding in summary.findings]
    assert "gradients-through-forward" in codes
    (most,) = {change for change in summary.out_of_memory.changes if "zero_grad" in change}
    found = told(summary)
    assert found[0] == (
        GRADIENTS,
        "drop the gradients before the next forward: optimizer.zero_grad() right after optimizer.step()",
    )
    assert [size or 0 for size, _ in found] == sorted((size or 0 for size, _ in found), reverse=True)
    assert most not in [change for _, change in found], "the finding says it better"
    assert len({change for _, change in found}) == len(found)
    left = [finding.code for finding in told_elsewhere(summary.out_of_memory, summary.findings)]
    assert "out-of-memory" not in left
    assert "gradients-through-forward" not in left
    lines = render_out_of_memory(summary).splitlines()
    assert sum("zero_grad" in line for line in lines) == 1
    assert any("39.1 KiB less at the failure: drop the gradients before the next forward" in line for line in lines)


def test_without_findings_the_list_is_what_the_request_says_without_bytes() -> None:
    recording = in_forward()
    fragmented = oom_at(recording.ooms[0].time_ns, (400, 700), asked=350)
    summary = summarize(replace(recording, ooms=(fragmented,)))
    assert told(summary) == [
        (None, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (None, "make the batch smaller, or recompute activations with torch.utils.checkpoint"),
    ]
    assert "to change" not in render_out_of_memory(summary) and "may help" in render_out_of_memory(summary)
    assert summary.out_of_memory.explanation.startswith("the cached memory is too small for it"), "100 for 350"
    assert summary.out_of_memory.changes == tuple(change for _, change in told(summary))


def test_where_all_is_parameters_in_setup_the_batch_does_not_help() -> None:
    story = Story(weight=100)
    story.now += 10
    summary = summarize(ended(story, story.now, (400,), step=-1))
    assert told(summary)[0] == (None, "make the model smaller, or use a larger GPU")


def test_a_smaller_batch_is_not_said_twice() -> None:
    changes = [change for _, change in told(summarize(in_backward()))]
    assert changes == [
        "make the batch smaller, or recompute activations with torch.utils.checkpoint",
        "make the model smaller, or spread it over several GPUs",
    ]


def test_what_no_change_is_about_has_no_bytes_and_comes_last() -> None:
    story = Story()
    story.alloc(0x1000, 640)
    story.now += 10
    nothing_known = ended(story, story.now, (640,), step=-1)
    assert told(summarize(nothing_known))[-1] == (
        None,
        "make the batch or the model smaller, or spread the model over several GPUs",
    )


def test_what_a_finding_says_of_foreach_is_not_said_again() -> None:
    story = Story(weight=100, begins=Phase.OPTIMIZER)
    story.alloc(0x2000, 3000)
    story.now += 10
    recording = replace(
        ended(story, story.now, (400, 3000)),
        optimizers=(OptimizerRecord(class_name="AdamW", implementation="foreach", settings={"fused": None}),),
    )
    without = replace(recording, optimizers=(OptimizerRecord(class_name="Adadelta", implementation="foreach"),))
    assert (None, "let the optimizer update one parameter at a time (foreach=False)") in told(summarize(without))
    summary = summarize(recording)
    foreach = (None, "let the optimizer update one parameter at a time (foreach=False), or use fused=True")
    assert (3000, "AdamW(..., fused=True)") in told(summary) and foreach not in told(summary)
    finding = Finding(
        code="foreach-temporaries",
        severity="advice",
        section=Section.TIMELINE,
        message="3000 B of copies",
        bytes=2500,
        change="AdamW(..., fused=True)",
        evidence=(),
        off_failure=2000,
    )
    found = [(each.bytes, each.change) for each in remedies(summary.out_of_memory, (finding,))]
    assert foreach not in found
    assert (2000, "AdamW(..., fused=True)") in found


def test_what_is_no_waste_stays_a_finding_of_its_own() -> None:
    summary = summarize(in_forward())
    oom = summary.out_of_memory
    (itself,) = summary.findings
    kinds = [("info", 5), ("warning", None), ("advice", 9)]
    # The bytes that a finding is about are not those that its change saves.
    others = tuple(replace(itself, code="other", severity=severity, bytes=size) for severity, size in kinds)  # type: ignore[arg-type]
    residual = replace(itself, code="residual", bytes=7)
    assert told_elsewhere(oom, (itself, *others, residual)) == (*others, residual)
    assert told_elsewhere(None, (itself,)) == (itself,)
    assert [each.finding for each in remedies(oom, (*others, residual)) if each.finding] == []


def test_each_reason_names_the_memory_that_did_not_serve() -> None:
    recording = in_forward()
    limited = replace(
        recording, ooms=(replace(oom_at(recording.ooms[0].time_ns, (400, 700)), limit=1000, free=20_000),)
    )
    assert summarize(limited).out_of_memory.reason is Reason.LIMITED
    assert (None, "allow the process more memory with torch.cuda.set_per_process_memory_fraction") in told(
        summarize(limited)
    )


def of_two_blocks(*, autocast: bool = False) -> Summary:
    """Two blocks with 4 MiB of weights each; forward keeps 8 MiB inside each, its result of 2 MiB, and the loss's."""
    story = Story()
    for i in range(2):
        story.parameter(0x1000 + i, f"layers.{i}.up.weight", MIB)
    story.begin(0, Phase.FORWARD)
    for i in range(2):
        saved(story, 0x2000 + i, 8, "aten::addmm", f"layers.{i}.up")
        saved(story, 0x3000 + i, 2, "aten::add", f"layers.{i}")
    saved(story, 0x4000, 16, "aten::_log_softmax", "")
    story.now += 10
    precision = PrecisionRecord(name="amp", dtype="bfloat16", cache=True, scaler=False) if autocast else FP32
    alive = (4 * MIB, 4 * MIB, *(8 * MIB, 2 * MIB) * 2, 16 * MIB)
    return summarize(ended(story, story.now, alive, precision=precision))


def saved(story: Story, address: int, mebibytes: int, op: str, module: str) -> None:
    story.tensor(Fact.OUTPUT, address, mebibytes * MIB, op, module=module, op=op, dtype="float32")
    story.fact(Fact.SAVED, address, op)


def test_the_changes_of_the_whole_run_have_the_bytes_of_the_tensors_that_they_are_about() -> None:
    assert told(of_two_blocks()) == [
        (36 * MIB, "offload saved tensors to the CPU (ampmem profile --force-offload)"),
        (44 * MIB // 2, "put weights in bfloat16, no autocast (ampmem profile --precision bf16)"),
        (36 * MIB // 2, "use autocast (ampmem profile --precision amp)"),
        (2 * 8 * MIB, "recompute 2 blocks (ampmem profile --force-checkpoint 'layers.*')"),
        (14 * MIB, "compute the loss in 8 chunks (ampmem profile --force-chunked-loss 8)"),
    ]
    under_autocast = [change for _, change in told(of_two_blocks(autocast=True))]
    assert any("bf16" in change for change in under_autocast)
    assert not any("--precision amp" in change or "chunked-loss" in change for change in under_autocast)
    text = render_out_of_memory(of_two_blocks())
    assert "at most 16.0 MiB less at the failure: recompute 2 blocks" in text
    assert "at most: computed from the tensors alive then; ampmem advise runs each change" in text
