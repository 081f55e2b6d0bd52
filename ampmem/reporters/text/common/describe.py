"""What a summary says of a run, a few words for each fact."""

from __future__ import annotations

from ampmem.analysis.summary import ArmSummary, Step, Summary
from ampmem.events import AllocatorRecord
from ampmem.names import NOT_KNOWN
from ampmem.reporters.text.common.plain_text import ABSENT
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import Arm, SourceKind


def describe_arm(summary: Summary) -> str:
    """The arm in words: ``amp, bfloat16, cache on``."""
    return arm_in_words(summary.arm, summary.source)


def arm_in_words(arm: ArmSummary, source: SourceKind) -> str:
    """The same of what a recording from ``source`` says of it."""
    if arm.name == Arm.AS_IS and source == SourceKind.SNAPSHOT:
        return "not known"
    words: list[str] = [arm.name]
    if arm.dtype is not None:
        words.append(arm.dtype)
    if arm.cache is not None:
        words.append("cache on" if arm.cache else "cache off")
    if arm.scaler:
        words.append("loss scaling")
    if arm.forced:
        words.append("forced, in regions that ampmem opened" if arm.wrapped else "forced")
    return ", ".join(words)


def describe_allocator(allocator: AllocatorRecord) -> str:
    """How the caching allocator was set and used: ``PYTORCH_ALLOC_CONF=max_split_size_mb:64, allocated on 2 streams``.

    Other streams may use that memory, too: these are the streams for which it was allocated.
    """
    variable = f"{allocator.variable}=" if allocator.variable else ""
    words = [f"{variable}{allocator.settings}" if allocator.settings else "default settings"]
    if allocator.settings == NOT_KNOWN:
        words = ["settings not known"]
    if allocator.expandable_segments and "expandable_segments" not in allocator.settings:
        words.append("expandable segments")
    words.append(f"allocated on {counted(allocator.streams, 'stream')}")
    if allocator.private_pools:
        words.append(counted(allocator.private_pools, "private pool"))
    return ", ".join(words)


def describe_devices(allocator: AllocatorRecord) -> str:
    """The devices that had memory, with their peaks; empty where that is the first one alone."""
    used = [device for device, peak in enumerate(allocator.peaks) if peak]
    if used in ([], [0]) and allocator.device == 0:
        return ""
    shown = used or [allocator.device]
    return "; ".join(
        f"{device}{' (recorded)' * (device == allocator.device)}"
        + (f" peak {format_bytes(allocator.peaks[device])}" if used else "")
        for device in shown
    )


def counted(count: int, what: str) -> str:
    """``1 stream``, ``2 streams``."""
    return f"{format_count(count)} {what}{'' if count == 1 else 's'}"


def describe_optimizers(summary: Summary) -> str:
    """The optimizers that stepped, in words; empty when none did."""
    return ", ".join(f"{item.class_name} ({item.implementation})" for item in summary.optimizer)


def optimizers_or_none(summary: Summary) -> str:
    """The same, or that there was none; of a snapshot that is not known, as an update may allocate nothing."""
    none = "not known" if summary.source is SourceKind.SNAPSHOT else "none stepped"
    return describe_optimizers(summary) or none


def parameters_in_short(summary: Summary) -> str:
    """``1,000 parameters in 3.9 KiB``; of a snapshot, where they cannot be counted, how much was recognised."""
    parameters = summary.parameters
    if parameters.exact:
        amount = f"{format_count(parameters.count)} parameters in {format_bytes(parameters.bytes)}"
        return f"{amount}{of_all_ranks(summary)}"
    return f"{recognised(summary)} of parameters recognised"


def of_all_ranks(summary: Summary) -> str:
    """What of the parameters this rank has, after how many it has: empty where it has all."""
    parameters = summary.parameters
    if parameters.global_count is None or parameters.global_bytes is None:
        return ""
    return f" on this rank, of {format_count(parameters.global_count)} in {format_bytes(parameters.global_bytes)}"


def recognised(summary: Summary) -> str:
    """How much of the memory was taken for parameters, where they cannot be counted: ``at least 8.6 MiB``."""
    return " ".join(filter(None, (summary.parameters.bound, format_bytes(summary.parameters.bytes))))


def describe_loss(step: Step) -> str:
    """The loss of the step's last backward, and of how many: ``0.6931 (last of 4)``."""
    if step.loss is None:
        return ABSENT
    return f"{step.loss:.6g}" if step.backwards <= 1 else f"{step.loss:.6g} (last of {step.backwards})"


def describe_update(step: Step) -> str:
    """What became of the step's update, in words."""
    if not step.finished:
        return "out of memory"
    if step.skipped_update:
        return "skipped"
    return "done" if step.marks.after_optimizer is not None else "none seen"


def conserved(summary: Summary) -> str:
    """How many events there were, and how far our sums were from the allocator's."""
    conservation = summary.conservation
    residual, reserved = conservation.residual_bytes, conservation.reserved_residual_bytes
    words = [f"{format_count(conservation.events)} events"]
    words.append("no total to check against" if residual is None else f"residual {format_bytes(residual)}")
    if reserved is not None:
        words.append(f"of reserved memory {format_bytes(reserved)}")
    if conservation.other_threads_bytes:
        most = format_bytes(conservation.other_threads_bytes)
        words.append(f"other threads, which are not recorded, held up to {most} at once (in other)")
    return ", ".join(words)
