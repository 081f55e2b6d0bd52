"""The published formulas of static training memory as data, and which of them a measured run agrees with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampmem.analysis.static_model.static_model import COMPONENTS, Recipe
from ampmem.analysis.timeline.categories import Category
from ampmem.vocabulary import Mark

TOLERANCE = 0.01
"""Share of the measured static sum by which a formula, or a part of it, may be off and still match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A formula as its authors give it, for Adam on one device; all numbers are bytes per parameter."""

    key: str
    title: str
    parameters: float
    cast_copies: float
    gradients: float
    master_copies: float
    optimizer_state: float
    total: float
    """What the authors call the total; not always the sum of the parts."""
    counts: str
    """What it counts, in one sentence."""
    source: str

    @property
    def components(self) -> Mapping[str, float]:
        """The parts, in the order of :data:`~ampmem.analysis.static_model.static_model.COMPONENTS`."""
        return {component: float(getattr(self, component)) for component in COMPONENTS}


_ACCELERATE = (
    "Hugging Face Accelerate, estimate_training_usage in commands/estimate.py: "
    "https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/estimate.py"
)
_TRANSFORMERS = (
    "Hugging Face Transformers documentation, Anatomy of Model's Memory: "
    "https://github.com/huggingface/transformers/blob/249ef81/docs/source/en/model_memory_anatomy.md"
)
_MEGATRON = (
    "Megatron Core User Guide, Distributed Optimizer: "
    "https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html"
)
_DEEPSPEED = (
    "DeepSpeed documentation, Memory Requirements: "
    "https://github.com/deepspeedai/DeepSpeed/blob/master/docs/code-docs/source/memory.rst"
)

_FORMULAS = (
    Published(
        key="accelerate-fp32",
        title="accelerate estimate-memory, float32",
        parameters=4.0,
        cast_copies=0.0,
        gradients=4.0,
        master_copies=0.0,
        optimizer_state=8.0,
        total=16.0,
        counts="Four times the model: weights, gradients and Adam's two moments.",
        source=_ACCELERATE,
    ),
    Published(
        key="accelerate-mixed",
        title="accelerate estimate-memory, float16",
        parameters=4.0,
        cast_copies=0.0,
        gradients=6.0,
        master_copies=0.0,
        optimizer_state=8.0,
        total=8.0,
        counts="The largest part and not the sum; the gradients are counted in float32 and again in float16.",
        source=_ACCELERATE,
    ),
    Published(
        key="transformers-fp32",
        title="Transformers documentation, float32",
        parameters=4.0,
        cast_copies=0.0,
        gradients=4.0,
        master_copies=0.0,
        optimizer_state=8.0,
        total=16.0,
        counts="Weights, gradients and AdamW's two moments, all in float32.",
        source=_TRANSFORMERS,
    ),
    Published(
        key="transformers-mixed",
        title="Transformers documentation, mixed precision",
        parameters=4.0,
        cast_copies=2.0,
        gradients=4.0,
        master_copies=0.0,
        optimizer_state=8.0,
        total=18.0,
        counts="Float32 weights with a float16 copy that stays, float32 gradients and AdamW's two moments.",
        source=_TRANSFORMERS,
    ),
    Published(
        key="transformer-math",
        title="EleutherAI, Transformer Math 101",
        parameters=2.0,
        cast_copies=0.0,
        gradients=4.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=18.0,
        counts="Half weights, a float32 copy counted with the optimizer (12), and gradients in float32, "
        "the calculator's default; half gradients make it 16.",
        source="EleutherAI cookbook, calculator to https://blog.eleuther.ai/transformer-math/: "
        "https://github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py",
    ),
    Published(
        key="megatron-fp32-grads",
        title="Megatron-LM, half weights and float32 gradients",
        parameters=2.0,
        cast_copies=0.0,
        gradients=4.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=18.0,
        counts="Without the distributed optimizer; with it 6 + 12/d on each of d data-parallel ranks.",
        source=_MEGATRON,
    ),
    Published(
        key="megatron-half-grads",
        title="Megatron-LM, half weights and half gradients",
        parameters=2.0,
        cast_copies=0.0,
        gradients=6.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=20.0,
        counts="Without the distributed optimizer; with it 4 + 16/d, so a float32 copy of the gradients is in it.",
        source=_MEGATRON,
    ),
    Published(
        key="zero-paper",
        title="ZeRO paper",
        parameters=2.0,
        cast_copies=0.0,
        gradients=2.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=16.0,
        counts="Half weights and gradients, and K = 12: a float32 copy of the weights and Adam's two moments.",
        source="Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020: "
        "https://arxiv.org/abs/1910.02054",
    ),
    Published(
        key="deepspeed-zero3",
        title="DeepSpeed estimator, ZeRO-3",
        parameters=2.0,
        cast_copies=0.0,
        gradients=4.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=18.0,
        counts="On one rank, without the gathered layer: half weights, and weights, gradients and moments in float32.",
        source=_DEEPSPEED,
    ),
    Published(
        key="mt-nlg",
        title="Megatron-Turing NLG 530B",
        parameters=2.0,
        cast_copies=0.0,
        gradients=6.0,
        master_copies=4.0,
        optimizer_state=8.0,
        total=20.0,
        counts="Weights and gradients in half and again in float32, and Adam's two moments.",
        source="Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, 2022: "
        "https://arxiv.org/abs/2201.11990",
    ),
    Published(
        key="pure-bf16",
        title="pure bfloat16",
        parameters=2.0,
        cast_copies=0.0,
        gradients=2.0,
        master_copies=0.0,
        optimizer_state=4.0,
        total=8.0,
        counts="Weights, gradients and Adam's two moments, all in bfloat16.",
        source="Hugging Face Transformers, pull request 21312: https://github.com/huggingface/transformers/pull/21312",
    ),
)

PUBLISHED: Mapping[str, Published] = {formula.key: formula for formula in _FORMULAS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What static memory was in a recorded step, in bytes."""

    parameters: int
    """Elements, trainable or not."""
    step: int
    mark: Mark
    """The instant of ``static``: ``after_backward``, or ``after_optimizer`` when the state was only there then."""
    static: Mapping[str, int]
    after_forward: Mapping[str, int] | None

    @property
    def static_bytes(self) -> int:
        """The sum of ``static``."""
        return sum(self.static.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Whether a formula agrees with a run within :data:`TOLERANCE`: in its total, and in each of its parts."""

    total: bool
    split: bool


def match_recipe(recipe: Recipe, measured: Measured) -> Match:
    """A recipe against a run, without the casts that are gone after backward."""
    parts = dict(recipe.components)
    if recipe.precision.transient_casts:
        parts[Category.CAST_COPIES] = 0.0
    return _match(recipe.static, parts, measured)


def match_published(formula: Published, measured: Measured) -> Match:
    """A published formula against a run."""
    return _match(formula.total, formula.components, measured)


def _match(total: float, parts: Mapping[str, float], measured: Measured) -> Match:
    slack = TOLERANCE * measured.static_bytes

    def near(per_parameter: float, size: int) -> bool:
        return abs(per_parameter * measured.parameters - size) <= slack

    return Match(
        total=near(total, measured.static_bytes),
        split=all(near(parts[component], measured.static[component]) for component in COMPONENTS),
    )
