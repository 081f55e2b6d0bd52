"""The changes that ``ampmem advise`` tries: conditions, combinations, costs in words, and the code of each.

Their options and values are the fields of :class:`~ampmem.vocabulary.Forced`; the hooks that force them on a script
are in ``ampmem.recorder.steering.changes``. A new change is a field there, an entry here, and a hook there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any

from ampmem.analysis.blocks import Blocks
from ampmem.analysis.fit import Memory
from ampmem.analysis.levers import LOSS_CHUNKS
from ampmem.analysis.suggested import Suggestion
from ampmem.units import format_bytes
from ampmem.vocabulary import NOTHING_FORCED, WORKSPACE_CONFIG, Device, Forced

EXPANDABLE = "expandable_segments:True"
"""The setting of the caching allocator that is tried."""

WORKSPACE = ":16:8"
"""The smaller of the two settings (128 KiB) that cuBLAS documents for deterministic results."""

MEMORY_BUDGETS = (0.75, 0.5, 0.25)
"""The shares of its activations that compiled code may keep for backward, in the order in which they are tried."""


class Loop(StrEnum):
    """Whose training loop the script uses, and whose model; a change is written in its words."""

    OWN = "own"
    """The script's own."""
    OF_TRANSFORMERS = "transformers"
    """The script's own, for a model of transformers."""
    TRAINER = "Trainer"
    """The Trainer of transformers."""
    LIGHTNING = "Lightning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The properties of a script, from the recording of an unchanged run; of a run that failed, up to the failure."""

    blocks: Blocks | None
    optimizers: tuple[str, ...]
    updated: int
    """The number of trained parameters."""
    trained_bytes: int = 0
    batch: int | None = None
    """Samples that the DataLoader puts into a batch; ``None`` where no DataLoader was seen to make the last batch."""
    no_precision: str | None = None
    """Why autocast in bfloat16 is not tried; ``None`` where it is tried."""
    no_low_weights: str | None = None
    """Why weights in bfloat16 are not tried; ``None`` where they are tried."""
    no_loss: str | None = None
    """Why the loss is not tried in chunks; ``None`` where it is tried."""
    no_fused: str | None = None
    """Why ``fused=True`` is not tried; ``None`` where it is tried."""
    no_foreach: str | None = None
    """Why ``foreach=False`` is not tried; ``None`` where it is tried."""
    compiles: bool = False
    """Whether the script trains compiled code."""
    idle_gradients: bool = False
    """Whether gradients that the update has used already are still alive when forward starts."""
    cached_casts: bool = False
    """Whether the copies in autocast's weight cache are a notable part of the peak."""
    workspaces: bool = False
    """Whether cuBLAS's workspaces are a notable part of the peak."""
    suggestions: tuple[Suggestion, ...] = ()
    device: Device = Device.SIMULATED
    """The device of the runs."""
    device_name: str = ""
    loop: Loop = Loop.OWN
    profiled: str = field(default="", compare=False)
    """What follows ``ampmem profile`` and a change's options on a command line that runs the script."""
    replicated: bool = False
    """Whether the script trains on several ranks, each with all parameters."""
    sharded: bool = False
    """Whether the script trains on several ranks, each with a shard of some parameters."""
    unreduced: bool = False
    """Whether whole gradients of sharded parameters outlive the backward that made them."""
    ranks: tuple[int, ...] = ()
    """The ranks as which the changes are run; empty where the script runs in one process."""
    stages: tuple[tuple[str, ...], ...] = ()
    """The blocks of each rank by name, where ranks have different blocks (pipeline stages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with changes. ``memory`` is ``None`` if it ran out, or if ``failure`` says why there was no run.

    ``needed`` are then the bytes that were alive and the request that failed; ``None`` if unknown. ``flops`` are the
    last step's, ``recomputed_flops`` the part that backward computed again, and ``moved_bytes`` the bytes that the step
    copied between GPU and CPU; 0 if unknown. ``step_ns`` is the duration of a step without recording, on a real device.
    ``rank`` is the rank that has these peaks, where there are several.
    """

    memory: Memory | None
    failure: str | None = None
    needed: int | None = None
    rank: int | None = None
    flops: int = 0
    recomputed_flops: int = 0
    moved_bytes: int = 0
    step_ns: int | None = None


class Combined(Enum):
    """When the search adds a change to a combination of changes, in this order; a costly one is tried alone first."""

    BY_ITSELF = auto()
    """The search has its own rules for this change."""
    CHEAP = auto()
    """A change that costs hardly any time: added if it lowers a peak."""
    OF_RANKS = auto()
    """A change for several ranks that keeps the results: added if it lowers the device's use."""
    SETTING = auto()
    """A setting in the environment: added if it lowers the device's use."""
    COSTLY = auto()
    """A change that takes time or may change the results: added if the changes before it are not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that can be tried.

    ``field`` is its field of :class:`Forced`, ``allow`` its name in ``--allow``, ``about`` its description in
    ``--help``. ``tried`` gives the value to try first, alone; ``None`` if the change makes no sense for a script.
    ``name``, ``code`` and ``cost`` are texts with ``{value}`` in them, or functions that make them.

    ``refused`` gives the reason not to run a value, ``not_on_cpu`` the reason not to run the change on a CPU at all.
    ``unproven`` is the reason not to compare its results; ``computes`` says that it changes what the script computes.
    """

    field: str
    allow: str
    about: str
    name: str | Callable[[Any, Script], str]
    code: str | Callable[[Any, Script], tuple[str, ...]]
    tried: Callable[[Script], Any] = lambda _: True
    cost: str | Callable[[Any, Script, Trial], str | None] = ""
    combined: Combined = Combined.BY_ITSELF
    refused: Callable[[Any, Script], str | None] = lambda *_: None
    not_on_cpu: str = ""
    unproven: str = ""
    computes: bool = False

    def in_words(self, value: Any, script: Script) -> str:
        """The change in words."""
        return self.name.format(value=value) if isinstance(self.name, str) else self.name(value, script)

    def why_not(self, value: Any, script: Script) -> str | None:
        """Why the script is not run with this ``value``; ``None`` if it is run."""
        return (script.device is Device.CPU and self.not_on_cpu) or self.refused(value, script)

    def cost_of(self, value: Any, script: Script, trial: Trial) -> str | None:
        """The cost of the change in words, without the step time; ``None`` or empty if there is none."""
        return self.cost if isinstance(self.cost, str) else self.cost(value, script, trial)

    def lines(self, value: Any, script: Script) -> tuple[str, ...]:
        """The change as lines of code, in the words of the script's training loop."""
        written = _IN_LOOPS.get((self.field, script.loop))
        whole = self.field != "checkpoint" or (script.blocks is not None and value == script.blocks.names)
        if written is not None and value and whole:
            times = -(-script.batch // value) if self.field == "batch_size" and script.batch else 1
            return (written.format(value=value, times=times),)
        return (self.code.format(value=value),) if isinstance(self.code, str) else self.code(value, script)


def _checkpointed(names: tuple[str, ...], script: Script) -> str:
    return f"checkpoint {len(names)} of {0 if script.blocks is None else len(script.blocks.names)} blocks"


def _recomputed(names: tuple[str, ...], script: Script, trial: Trial) -> str | None:
    if trial.recomputed_flops or script.blocks is None:
        return None  # the share of the FLOPs is there
    return f"recomputes the forward of {len(names)} of {len(script.blocks.names)} blocks in each step"


def _checkpointing(names: tuple[str, ...], script: Script) -> tuple[str, ...]:
    if script.blocks is None:
        return ()
    return (
        f"for block in {script.blocks.in_code(names)}: "
        "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)",
    )


def _moved(_: bool, __: Script, trial: Trial) -> str:
    moved = f"{format_bytes(trial.moved_bytes)} move" if trial.moved_bytes else "saved tensors move"
    return f"{moved} between GPU and CPU in each step"


def _with_argument(argument: str) -> Callable[[Any, Script], tuple[str, ...]]:
    def lines(value: Any, script: Script) -> tuple[str, ...]:
        return tuple(f"{name}(..., {argument.format(value=value)})" for name in script.optimizers or ("the optimizer",))

    return lines


def _chunks(count: int, _: Script) -> tuple[str, ...]:
    return (
        f"parts = zip(logits.chunk({count}), target.chunk({count}))",
        "loss = torch.stack([torch.utils.checkpoint.checkpoint(F.cross_entropy, *part, reduction='sum', "
        "use_reentrant=False) for part in parts]).sum() / (target != -100).sum()  # without the division for a sum",
    )


def _autocast(_: bool, script: Script) -> tuple[str, ...]:
    kind = Device.CPU if script.device is Device.CPU else Device.CUDA
    return (f"with torch.autocast('{kind}', dtype=torch.bfloat16):  # around forward and loss, not backward",)


def _batch_refused(size: int, script: Script) -> str | None:
    if size == 0:
        return "no DataLoader was seen making the script's batches"
    return "the batch has only one sample" if script.batch == 1 else None


# The same in the words of libraries.

_NOT_REENTRANT = "gradient_checkpointing_kwargs={{'use_reentrant': False}}"
_LOSS_OF_TRANSFORMERS = """\
def one_chunk(logits, target):
    return F.cross_entropy(logits.float(), target, reduction='sum')
def loss_function(logits, labels, vocab_size, num_items_in_batch=None, **_):
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten().to(logits.device)
    parts = zip(logits.view(-1, vocab_size).chunk({value}), target.chunk({value}))
    losses = [torch.utils.checkpoint.checkpoint(one_chunk, *part, use_reentrant=False) for part in parts]
    count = (target != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(losses).sum() / count
model.loss_function = loss_function  # for a causal language model that gets labels"""
_IN_LOOPS = {
    ("checkpoint", Loop.OF_TRANSFORMERS): f"model.gradient_checkpointing_enable({_NOT_REENTRANT})",
    ("loss_chunks", Loop.OF_TRANSFORMERS): _LOSS_OF_TRANSFORMERS,
    ("checkpoint", Loop.TRAINER): f"TrainingArguments(..., gradient_checkpointing=True, {_NOT_REENTRANT})",
    ("loss_chunks", Loop.TRAINER): _LOSS_OF_TRANSFORMERS,
    ("offload", Loop.TRAINER): "with torch.autograd.graph.save_on_cpu(): trainer.train()",
    ("fused", Loop.TRAINER): "TrainingArguments(..., optim='adamw_torch_fused')",
    ("compile", Loop.TRAINER): "TrainingArguments(..., torch_compile=True)",
    ("bfloat16", Loop.TRAINER): "TrainingArguments(..., bf16=True)",
    ("batch_size", Loop.TRAINER): (
        "TrainingArguments(..., per_device_train_batch_size={value}, gradient_accumulation_steps={times})"
    ),
    ("offload", Loop.LIGHTNING): "with torch.autograd.graph.save_on_cpu(): trainer.fit(...)",
    ("bfloat16", Loop.LIGHTNING): "Trainer(..., precision='bf16-mixed')",
    ("low_weights", Loop.LIGHTNING): "Trainer(..., precision='bf16-true')",
    ("batch_size", Loop.LIGHTNING): (
        "DataLoader(..., batch_size={value}), Trainer(..., accumulate_grad_batches={times})"
    ),
}
"""The code of a change where a library has a word of its own for it; for checkpoints, of all blocks."""

CHANGES = (
    Change(
        field="checkpoint",
        allow="checkpoint",
        about="activation checkpointing of the model's blocks",
        tried=lambda script: None if script.blocks is None else script.blocks.names,
        name=_checkpointed,
        cost=_recomputed,
        code=_checkpointing,
    ),
    Change(
        field="offload",
        allow="offload",
        about="saved tensors in CPU memory",
        name="offload saved tensors",
        cost=_moved,
        code="with torch.autograd.graph.save_on_cpu():  # around the call of model, not backward",
        combined=Combined.COSTLY,
        not_on_cpu="saved tensors are in the CPU's memory already",
    ),
    Change(
        field="foreach",
        allow="foreach",
        about="optimizers with foreach=False",
        tried=lambda _: False,
        name="foreach={value}",
        cost=lambda value, script, _: None if value else f"separate kernels for each of {script.updated} parameters",
        code=_with_argument("foreach={value}"),
        refused=lambda _, script: script.no_foreach,
        not_on_cpu="on a CPU torch's optimizers use foreach only if the script asks for it",
    ),
    Change(
        field="fused",
        allow="fused",
        about="optimizers with fused=True",
        name="fused=True",
        cost="fewer kernels",
        code=_with_argument("fused=True"),
        refused=lambda _, script: script.no_fused,
    ),
    Change(
        field="loss_chunks",
        allow="loss",
        about="cross_entropy in chunks",
        tried=lambda _: LOSS_CHUNKS,
        name="loss in {value} chunks",
        cost="recomputes the loss's log-softmax in each step",
        code=_chunks,
        refused=lambda _, script: script.no_loss,
    ),
    Change(
        field="compile",
        allow="compile",
        about="model.compile(), if the script compiles nothing",
        tried=lambda script: None if script.compiles else True,
        name="model.compile()",
        cost="compiles once; rounds differently",
        code="model.compile()  # before the first step",
    ),
    Change(
        field="activation_memory_budget",
        allow="memory-budget",
        about="activation_memory_budget of compiled code",
        tried=lambda script: MEMORY_BUDGETS[0] if script.compiles else None,
        name="activation_memory_budget {value}",
        cost=lambda _, __, trial: None if trial.recomputed_flops else "recomputes cheap operations in backward",
        code="torch._functorch.config.activation_memory_budget = {value}  # before the first step",
    ),
    Change(
        field="free_gradients",
        allow="gradients",
        about="set to None after the update, if they are alive in forward",
        tried=lambda script: script.idle_gradients or None,
        name="gradients freed after the update",
        code="optimizer.zero_grad()  # right after optimizer.step()",
        combined=Combined.CHEAP,
    ),
    Change(
        field="no_cache",
        allow="cache",
        about="autocast without its weight cache, if the script uses autocast",
        tried=lambda script: script.cached_casts or None,
        name="autocast without its cache",
        cost="casts weights at each use",
        code="torch.autocast(..., cache_enabled=False)",
        combined=Combined.CHEAP,
    ),
    Change(
        field="allocator",
        allow="allocator",
        about="expandable_segments",
        tried=lambda _: EXPANDABLE,
        name=EXPANDABLE.partition(":")[0],
        code="PYTORCH_ALLOC_CONF={value}  # in the environment, before CUDA is used",
        combined=Combined.SETTING,
        not_on_cpu="the setting is for CUDA's caching allocator, which the CPU does not have",
        unproven="the setting changes where CUDA's allocator places tensors, and a CPU does not have that allocator",
    ),
    Change(
        field="workspace",
        allow="workspace",
        about="small cuBLAS workspaces",
        tried=lambda script: WORKSPACE if script.workspaces else None,
        name="small cuBLAS workspaces",
        cost="matrix products may take slower kernels",
        code=f"{WORKSPACE_CONFIG}={{value}}  # in the environment, before CUDA is used",
        combined=Combined.SETTING,
        not_on_cpu="the setting is for cuBLAS's workspaces, which the CPU does not have",
        unproven="a CPU does not have cuBLAS",
    ),
    Change(
        field="bucket_view",
        allow="bucket-view",
        about="DistributedDataParallel with gradient_as_bucket_view, on several ranks",
        tried=lambda script: script.replicated or None,
        name="gradient_as_bucket_view=True",
        code="DistributedDataParallel(..., gradient_as_bucket_view=True)",
        combined=Combined.OF_RANKS,
    ),
    Change(
        field="reshard",
        allow="reshard",
        about="FSDP that reshards after forward",
        tried=lambda script: script.sharded or None,
        name="reshard after forward",
        cost="gathers parameters again for backward",
        code="fully_shard(..., reshard_after_forward=True)  # FSDP1: ShardingStrategy.FULL_SHARD",
        combined=Combined.OF_RANKS,
    ),
    Change(
        field="no_prefetch",
        allow="prefetch",
        about="FSDP without prefetching",
        tried=lambda script: script.sharded or None,
        name="no prefetch in backward",
        cost="backward waits for each all-gather",
        code="each.set_modules_to_backward_prefetch([each])  # of all sharded modules; FSDP1: backward_prefetch=None",
        combined=Combined.OF_RANKS,
    ),
    Change(
        field="gradient_sync",
        allow="gradient-sync",
        about="FSDP that reduces gradients in each backward, if the script leaves that out",
        tried=lambda script: script.unreduced or None,
        name="gradients reduced in each backward",
        cost="reduces the gradients of each micro-batch",
        code="model.set_requires_gradient_sync(True)  # in each micro-batch; FSDP1: no no_sync()",
        combined=Combined.OF_RANKS,
    ),
    Change(
        field="policy",
        allow="policy",
        about="FSDP with bfloat16 mixed precision",
        tried=lambda script: script.sharded or None,
        name="bfloat16 policy",
        cost="rounds parameters and results to bfloat16",
        code="fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
        "  # FSDP1: mixed_precision=MixedPrecision(...)",
        combined=Combined.COSTLY,
        refused=lambda _, script: script.no_precision,
        computes=True,
    ),
    Change(
        field="bfloat16",
        allow="precision",
        about="autocast to bfloat16",
        name="autocast bfloat16",
        cost="rounds results to bfloat16",
        code=_autocast,
        combined=Combined.COSTLY,
        refused=lambda _, script: script.no_precision,
        computes=True,
    ),
    Change(
        field="low_weights",
        allow="16-bit-weights",
        about="weights in bfloat16 in place of autocast, tried alone",
        name="weights in bfloat16",
        cost="rounds weights and updates to bfloat16, without FP32 master copies",
        code="model.to(torch.bfloat16)  # before its optimizer is made, and batches; without autocast",
        refused=lambda _, script: script.no_low_weights,
        computes=True,
    ),
    Change(
        field="batch_size",
        allow="batch",
        about="half the DataLoader's batch size",
        tried=lambda script: 0 if script.batch is None else max(script.batch // 2, 1),
        name=lambda size, script: f"batch size {size} of {script.batch}" if script.batch else "smaller batches",
        cost=lambda size, script, _: (
            f"{script.batch / size:.3g} steps for the same number of samples" if size and script.batch else None
        ),
        code=lambda size, _: (
            (f"DataLoader(..., batch_size={size})  # and accumulate gradients, if losses are means",) if size else ()
        ),
        refused=_batch_refused,
        unproven="a smaller batch gives other losses",
        computes=True,
    ),
)
"""All changes, in the order in which a text names several."""


def changes_in(forced: Forced) -> list[tuple[Change, Any]]:
    """The changes that are forced, each with its value."""
    kinds = forced.kinds()
    return [(change, getattr(forced, change.field)) for change in CHANGES if change.field in kinds]


def computing(forced: Forced) -> dict[str, Any]:
    """By field, the values of the changes that alter the script's results, such as the batch size."""
    return {change.field: value for change, value in changes_in(forced) if change.computes}


def alone(change: Change, script: Script) -> Forced | None:
    """The change as it is tried alone; ``None`` where it makes no sense for this script."""
    value = change.tried(script)
    return None if value is None else replace(NOTHING_FORCED, **{change.field: value})
