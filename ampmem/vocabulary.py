"""Words that commands, recordings and JSON share, each spelled only here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class Precision(StrEnum):
    """A precision mode of a script."""

    AS_IS = "as-is"
    """The script's own precision."""
    FP32 = "fp32"
    """Without autocast and GradScaler."""
    AMP = "amp"
    """With autocast and its weight cache."""
    AMP_NOCACHE = "amp-nocache"
    """With autocast, without its weight cache."""
    BF16 = "bf16"
    """Weights and buffers in bfloat16, without autocast and GradScaler."""

    @property
    def autocast(self) -> bool:
        """Whether autocast is on in this precision."""
        return self in AUTOCAST_PRECISIONS


FORCED_PRECISIONS = (Precision.FP32, Precision.AMP, Precision.AMP_NOCACHE)
"""The precisions that are compared by default."""

AUTOCAST_PRECISIONS = (Precision.AMP, Precision.AMP_NOCACHE)


class Form(StrEnum):
    """The form of a command's output: text, or its tables alone, to be pasted elsewhere."""

    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"


class AutocastDtype(StrEnum):
    """The dtype that autocast casts to."""

    BF16 = "bf16"
    FP16 = "fp16"


COMPILED = "compiled"
"""The folder of ampmem's cache for what ``torch.compile`` makes for simulated GPUs."""
LOW_PRECISION = ("bfloat16", "float16")
"""The names of the types that autocast casts to."""
FUSED_ATTENTION = ("flash", "memory-efficient", "cuDNN")
"""The kernels of ``scaled_dot_product_attention`` that a script can disable, besides the math kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedOption:
    """The command-line option that forces a change: ``words`` are the option, and words before its value.

    An option of its own has a ``help``; the others are a precision. Without ``metavar`` and ``choices`` it is a flag;
    with ``least`` its value is a number, at least that; with ``share`` a number between 0 and 1.
    """

    words: tuple[str, ...]
    help: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    share: bool = False

    def written(self, value: Any) -> list[str]:
        """The option with ``value``."""
        if not self.metavar and not self.choices:
            return [*self.words]
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        return [*self.words, text.lower() if self.choices else text]


def _forced(default: Any, *words: str, **option: Any) -> Any:
    return field(default=default, metadata={"option": ForcedOption(words=words, **option)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Changes that save memory and that ampmem can force on a script; by default none."""

    checkpoint: tuple[str, ...] = _forced(
        (),
        "--force-checkpoint",
        metavar="NAME,...",
        help="Run the modules with these names under torch.utils.checkpoint; * stands for one part of a name, as in "
        "'blocks.*'.",
    )
    offload: bool = _forced(
        False, "--force-offload", help="Keep saved tensors in CPU memory, as torch.autograd.graph.save_on_cpu does."
    )
    foreach: bool | None = _forced(
        None,
        "--force-foreach",
        choices=("true", "false"),
        help="Create torch's optimizers with foreach=True or foreach=False.",
    )
    fused: bool = _forced(False, "--force-fused", help="Create torch's optimizers with fused=True.")
    loss_chunks: int = _forced(
        0,
        "--force-chunked-loss",
        metavar="N",
        least=2,
        help="Compute F.cross_entropy in N chunks of rows, each under torch.utils.checkpoint.",
    )
    free_gradients: bool = _forced(
        False,
        "--force-free-gradients",
        help="Set gradients to None right after the update, if the script zeroes them later.",
    )
    compile: bool | None = _forced(
        None,
        "--force-compile",
        choices=("true", "false"),
        help="Compile the outermost models that train, as model.compile() does, or leave torch.compile out.",
    )
    activation_memory_budget: float | None = _forced(
        None,
        "--force-activation-memory-budget",
        metavar="SHARE",
        share=True,
        help="Let compiled code keep at most this share of its activations for backward, and recompute the others: "
        "torch._functorch.config.activation_memory_budget.",
    )
    allocator: str = _forced(
        "",
        "--force-allocator",
        metavar="SETTINGS",
        help="Add SETTINGS to PYTORCH_ALLOC_CONF, such as expandable_segments:True.",
    )
    workspace: str = _forced(
        "",
        "--force-workspace",
        metavar="CONFIG",
        help="Set CUBLAS_WORKSPACE_CONFIG, such as :16:8 for 128 KiB.",
    )
    no_cache: bool = _forced(False, "--precision", Precision.AMP_NOCACHE.value)
    batch_size: int | None = _forced(
        None, "--force-batch-size", metavar="N", least=1, help="Limit the batch size of DataLoaders to N."
    )
    bucket_view: bool = _forced(
        False, "--force-bucket-view", help="Create DistributedDataParallel with gradient_as_bucket_view=True."
    )
    reshard: bool = _forced(
        False,
        "--force-reshard",
        help="Call fully_shard with reshard_after_forward=True, and FullyShardedDataParallel with FULL_SHARD.",
    )
    policy: bool = _forced(
        False,
        "--force-policy",
        help="Give FSDP a mixed-precision policy: parameters in bfloat16, gradients reduced in float32.",
    )
    no_prefetch: bool = _forced(False, "--force-no-prefetch", help="Have FSDP prefetch no parameters in backward.")
    gradient_sync: bool = _forced(
        False,
        "--force-gradient-sync",
        help="Have FSDP reduce gradients in each backward, also under no_sync and set_requires_gradient_sync(False).",
    )
    bfloat16: bool = _forced(False, "--precision", Precision.AMP.value, "--dtype", AutocastDtype.BF16.value)
    low_weights: bool = _forced(False, "--precision", Precision.BF16.value)

    def kinds(self) -> tuple[str, ...]:
        """The names of the fields that change something."""
        return tuple(item.name for item in fields(self) if getattr(self, item.name) != item.default)

    def options(self) -> list[str]:
        """The options of ``ampmem profile`` that force these changes; a batch size of 0 has none."""
        options: dict[str, ForcedOption] = forced_options()
        values = {name: getattr(self, name) for name in self.kinds()}
        return [
            word for name, value in values.items() if value or value is False for word in options[name].written(value)
        ]


def forced_options() -> dict[str, ForcedOption]:
    """The option that forces each change, by its field in :class:`Forced`."""
    return {item.name: item.metadata["option"] for item in fields(Forced)}


NOTHING_FORCED = Forced()

WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable for the size of cuBLAS's workspaces."""


class Device(StrEnum):
    """The device whose memory is recorded."""

    AUTO = "auto"
    """The GPU if torch sees one, else the CPU."""
    CPU = "cpu"
    CUDA = "cuda"
    SIMULATED = "sim"
    """A GPU that does not exist."""


class Files(StrEnum):
    """What happens to the files that the script writes."""

    WRITE = "write"
    """The files are written."""
    PROTECT = "protect"
    """The files go to memory and are gone after the run, so the user's own files stay as they were."""


class StepOn(StrEnum):
    """The event that ends a step."""

    FOUND = "found"
    """Found automatically: optimizer updates, or backwards in a script without updates."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """Each single update."""
    FORWARD = "forward"
    """Each outermost forward of a model: inference."""
    EVALUATION = "evaluation"
    """Each outermost forward of the first evaluation in a script that trains, which alone is recorded."""


OF_INFERENCE = (StepOn.FORWARD, StepOn.EVALUATION)
"""The ends of steps that have neither a backward nor an update."""


class SourceKind(StrEnum):
    """The source of a recording's allocator events."""

    CUDA = "cuda"
    CPU = "cpu"
    SIMULATED = "simulated"
    SNAPSHOT = "snapshot"


class Communication(StrEnum):
    """The purpose of memory for distributed training."""

    REDUCE_BUCKETS = "reduce_buckets"
    """Gradients of several parameters in one buffer, to be reduced over the ranks."""
    ALL_GATHER = "all_gather"
    """Inputs and outputs of an all-gather, before they are put in place."""
    REDUCE_SCATTER = "reduce_scatter"
    """Inputs and outputs of a reduction, if no gradient stays in them."""
    UNSHARDED_PARAMETERS = "unsharded_parameters"
    """Whole parameters, of which each rank keeps only a part."""
    UNSHARDED_GRADIENTS = "unsharded_gradients"
    """Gradients of whole parameters, until they are reduced and freed."""
    RECEIVE_BUFFERS = "receive_buffers"
    """Buffers that another rank sends to: activations and their gradients between pipeline stages."""
    BROADCAST = "broadcast"
    """Buffers that one rank sends and others receive."""
    ALL_REDUCE = "all_reduce"
    """Buffers that the ranks sum up, if they are none of the above."""
    ALL_TO_ALL = "all_to_all"
    """Buffers that every rank sends to every other."""


class Mark(StrEnum):
    """An instant of a step at which its memory is looked at."""

    AFTER_FORWARD = "after_forward"
    """Just before the step's last backward starts."""
    AFTER_BACKWARD = "after_backward"
    """Just after that backward ends."""
    AFTER_OPTIMIZER = "after_optimizer"
    """Just after the step's last optimizer update."""
    PEAK = "peak"
    """The instant of the step with the most requested bytes."""


STEP_MARKS = (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD, Mark.AFTER_OPTIMIZER)
"""The marks that the script reaches; the peak is found afterwards."""

ASSUMABLE = ("nonzero", "unique")
"""Ops whose result has a size that depends on values, which a simulated device does not have: ``--assume`` gives it.
An index by a mask is ``nonzero``."""
