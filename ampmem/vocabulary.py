"""Words that commands, recordings and JSON share, each spelled only here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Arm(StrEnum):
    """A precision mode of a script."""

    AS_IS = "as-is"
    """The script's own precision."""
    FP32 = "fp32"
    """Without autocast and GradScaler."""
    AMP = "amp"
    """With autocast and its weight cache."""
    AMP_NOCACHE = "amp-nocache"
    """With autocast, without its weight cache."""

    @property
    def autocast(self) -> bool:
        """Whether autocast is on in this arm."""
        return self in AUTOCAST_ARMS


FORCED_ARMS = (Arm.FP32, Arm.AMP, Arm.AMP_NOCACHE)
"""The arms that ampmem can force on a script."""

AUTOCAST_ARMS = (Arm.AMP, Arm.AMP_NOCACHE)


class AutocastDtype(StrEnum):
    """The dtype that autocast casts to."""

    BF16 = "bf16"
    FP16 = "fp16"


COMPILED = "compiled"
"""The folder of ampmem's cache for what ``torch.compile`` makes for simulated GPUs."""
LOW_PRECISION = ("bfloat16", "float16")
"""The names of the types that autocast casts to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Changes that save memory and that ampmem can force on a script; by default none.

    ``checkpoint`` has patterns of module names; ``offload`` moves tensors saved for backward to the CPU; ``foreach`` is
    the optimizers' implementation, ``None`` for the script's own; ``allocator`` are settings of CUDA's caching
    allocator; ``batch_size`` is the most samples that a DataLoader may put into a batch; ``loss_chunks`` is the number
    of chunks in which the loss is computed, each again in backward, 0 for no chunks. ``bfloat16`` is autocast to that
    type, which is the precision ``amp``. ``bucket_view`` makes DistributedDataParallel's gradients views of its
    buckets; ``reshard`` makes FSDP free whole parameters after forward, and gather them again for backward; ``policy``
    makes it gather them in bfloat16, and modules compute with those; ``no_prefetch`` makes it gather nothing ahead in
    backward. ``free_gradients`` sets gradients to ``None`` right after the update. ``no_cache`` is autocast without its
    weight cache, which is the precision ``amp-nocache``; ``workspace`` is the setting of cuBLAS's workspaces.
    """

    checkpoint: tuple[str, ...] = ()
    offload: bool = False
    foreach: bool | None = None
    fused: bool = False
    allocator: str = ""
    batch_size: int | None = None
    bfloat16: bool = False
    bucket_view: bool = False
    reshard: bool = False
    policy: bool = False
    no_prefetch: bool = False
    loss_chunks: int = 0
    free_gradients: bool = False
    no_cache: bool = False
    workspace: str = ""

    def kinds(self) -> tuple[str, ...]:
        """The names of the fields that change something."""
        return tuple(item.name for item in fields(self) if getattr(self, item.name) != item.default)

    def options(self) -> list[str]:
        """The options of ``ampmem profile`` that force these changes."""
        options = ["--force-checkpoint", ",".join(self.checkpoint)] if self.checkpoint else []
        options += ["--force-offload"] if self.offload else []
        options += [] if self.foreach is None else ["--force-foreach", str(self.foreach).lower()]
        options += ["--force-fused"] if self.fused else []
        options += ["--force-chunked-loss", str(self.loss_chunks)] if self.loss_chunks else []
        options += ["--force-free-gradients"] if self.free_gradients else []
        options += ["--force-allocator", self.allocator] if self.allocator else []
        options += ["--force-workspace", self.workspace] if self.workspace else []
        options += ["--precision", Arm.AMP_NOCACHE.value] if self.no_cache else []
        # 0 means no batch size to force
        options += ["--force-batch-size", str(self.batch_size)] if self.batch_size else []
        options += ["--force-bucket-view"] if self.bucket_view else []
        options += ["--force-reshard"] if self.reshard else []
        options += ["--force-policy"] if self.policy else []
        options += ["--force-no-prefetch"] if self.no_prefetch else []
        return options + (["--precision", Arm.AMP.value, "--dtype", AutocastDtype.BF16.value] if self.bfloat16 else [])


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
    """They are written."""
    PROTECT = "protect"
    """They go to memory and are gone with the run, so the user's own files are as before."""


class StepOn(StrEnum):
    """What ends a step."""

    FOUND = "found"
    """Found automatically: optimizer updates, or backward without them."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """Each single update."""
    FORWARD = "forward"
    """Each outermost forward of a model: inference."""


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
"""Ops whose result's size depends on data, which a simulated device does not have, and can be given by ``--assume``;
masks are ``nonzero``."""
