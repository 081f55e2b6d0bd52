"""Words that commands, recordings and JSON share: each is spelled here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Arm(StrEnum):
    """A precision mode of a script."""

    AS_IS = "as-is"
    """What the script does by itself."""
    FP32 = "fp32"
    """Autocast and GradScaler are off."""
    AMP = "amp"
    """Autocast is on, with its cache of weights."""
    AMP_NOCACHE = "amp-nocache"
    """Autocast is on, without that cache."""

    @property
    def autocast(self) -> bool:
        """Whether autocast is on in this arm."""
        return self in AUTOCAST_ARMS


FORCED_ARMS = (Arm.FP32, Arm.AMP, Arm.AMP_NOCACHE)
"""What ampmem can force on a script."""

AUTOCAST_ARMS = (Arm.AMP, Arm.AMP_NOCACHE)


class AutocastDtype(StrEnum):
    """What autocast is to cast to."""

    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Changes that save memory and that ampmem forces on a script; by default none.

    ``checkpoint`` has patterns of module names; ``offload`` moves what forward saves for backward to the CPU;
    ``foreach`` is how optimizers are to update, ``None`` for what the script says; ``allocator`` are settings of CUDA's
    caching allocator; ``batch_size`` is the most samples that a DataLoader may put into a batch; ``loss_chunks`` is in
    how many chunks the loss is computed, each again in backward, 0 for one. ``bfloat16`` is autocast to that type,
    which is the precision ``amp``. ``bucket_view`` has DistributedDataParallel's gradients be views of its buckets;
    ``reshard`` has FSDP give up whole parameters after forward, and gather them for backward anew; ``policy`` has it
    gather them in bfloat16, and modules compute with those; ``no_prefetch`` has it gather nothing ahead in backward.
    ``free_gradients`` sets gradients to ``None`` right after the update. ``no_cache`` is autocast without its weight
    cache, which is the precision ``amp-nocache``; ``workspace`` is what cuBLAS's workspaces are to be.
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
        """The options of ``ampmem profile`` that say so."""
        options = ["--force-checkpoint", ",".join(self.checkpoint)] if self.checkpoint else []
        options += ["--force-offload"] if self.offload else []
        options += [] if self.foreach is None else ["--force-foreach", str(self.foreach).lower()]
        options += ["--force-fused"] if self.fused else []
        options += ["--force-chunked-loss", str(self.loss_chunks)] if self.loss_chunks else []
        options += ["--force-free-gradients"] if self.free_gradients else []
        options += ["--force-allocator", self.allocator] if self.allocator else []
        options += ["--force-workspace", self.workspace] if self.workspace else []
        options += ["--precision", Arm.AMP_NOCACHE.value] if self.no_cache else []
        options += ["--force-batch-size", str(self.batch_size)] if self.batch_size else []  # 0: there is none to force
        options += ["--force-bucket-view"] if self.bucket_view else []
        options += ["--force-reshard"] if self.reshard else []
        options += ["--force-policy"] if self.policy else []
        options += ["--force-no-prefetch"] if self.no_prefetch else []
        return options + (["--precision", Arm.AMP.value, "--dtype", AutocastDtype.BF16.value] if self.bfloat16 else [])


NOTHING_FORCED = Forced()

WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that says how large cuBLAS's workspaces are."""


class Device(StrEnum):
    """Whose memory to record."""

    AUTO = "auto"
    """The GPU where torch sees one, or else the CPU."""
    CPU = "cpu"
    CUDA = "cuda"
    SIMULATED = "sim"
    """A GPU that is not there."""


class StepOn(StrEnum):
    """What ends a step."""

    FOUND = "found"
    """What ampmem finds: updates of optimizers, or backward where there are none."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """Each single update."""
    FORWARD = "forward"
    """Each outermost forward of a model: inference."""


class SourceKind(StrEnum):
    """Where the allocator events of a recording come from."""

    CUDA = "cuda"
    CPU = "cpu"
    SIMULATED = "simulated"
    SNAPSHOT = "snapshot"


class Communication(StrEnum):
    """What memory of distributed training is for."""

    REDUCE_BUCKETS = "reduce_buckets"
    """Gradients of several parameters side by side, to be reduced over the ranks."""
    ALL_GATHER = "all_gather"
    """What an all-gather is given and what it fills, before that is put in place."""
    REDUCE_SCATTER = "reduce_scatter"
    """What a reduction is given and what it fills, where no gradient stays in that."""
    UNSHARDED_PARAMETERS = "unsharded_parameters"
    """Whole parameters, of which each rank keeps a part only."""
    UNSHARDED_GRADIENTS = "unsharded_gradients"
    """Gradients of those, until they are reduced and thrown away."""
    RECEIVE_BUFFERS = "receive_buffers"
    """What another rank sends to: activations and their gradients between the stages of a pipeline."""
    BROADCAST = "broadcast"
    """What one rank sends to others, where they receive it."""
    ALL_REDUCE = "all_reduce"
    """What the ranks add up, where that is neither of the above."""
    ALL_TO_ALL = "all_to_all"
    """What every rank sends to every other."""


class Mark(StrEnum):
    """An instant of a step at which memory is looked at."""

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
"""Ops whose result depends on data, which a simulated device has not, and of which ``--assume`` can say how much it is;
masks are ``nonzero``."""
