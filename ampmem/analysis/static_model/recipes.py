"""Recipes of static training memory, and the published formulas: bytes per parameter of each component.

A recipe is a precision (which copies there are, in which type) with an optimizer (which tensors it keeps). Static
memory is alive from one step to the next, so it has no activations and no temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampmem.analysis.timeline.categories import Category
from ampmem.errors import UsageError
from ampmem.vocabulary import Mark

COMPONENTS: tuple[Category, ...] = (
    Category.PARAMETERS,
    Category.CAST_COPIES,
    Category.GRADIENTS,
    Category.MASTER_COPIES,
    Category.OPTIMIZER_STATE,
)
"""The components of static memory, in the order of display."""

ADAM8BIT_BLOCK = 256
"""Elements that share one scale. Source: ``init_state`` in bitsandbytes' ``optim/optimizer.py``."""

ADAM8BIT_SMALLEST = 4096
"""Tensors of fewer elements keep float32 states. Source: ``min_8bit_size`` in the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor that an optimizer keeps for each parameter tensor."""

    name: str
    """PyTorch's key in ``optimizer.state``: ``exp_avg``, ``momentum_buffer``, …"""
    elements: float
    """Elements per parameter element; 0.0 for a tensor that does not grow with the parameter: the model leaves it
    out."""
    itemsize: int | None
    """Bytes per element; ``None`` if the tensor has the dtype of the optimized tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerModel:
    """The tensors that an optimizer keeps between steps, without scalars such as ``step``."""

    key: str
    title: str
    states: tuple[StateTensor, ...]
    source: str

    def bytes_per_element(self, itemsize: int) -> float:
        """Bytes of state per element of an optimized tensor whose elements have ``itemsize`` bytes."""
        return sum(state.elements * (itemsize if state.itemsize is None else state.itemsize) for state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionModel:
    """The copies of a parameter and its gradient, in bytes per parameter."""

    key: str
    title: str
    parameters: float
    cast_copies: float = 0.0
    gradients: float
    master_copies: float = 0.0
    optimized_itemsize: int = 4
    """Bytes per element of the tensors that the optimizer updates."""
    transient_casts: bool = False
    """Whether the cast copies are freed by the end of backward."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision with an optimizer."""

    precision: PrecisionModel
    optimizer: OptimizerModel

    @property
    def components(self) -> Mapping[str, float]:
        """Bytes per parameter of each of :data:`COMPONENTS`, including transient casts."""
        precision = self.precision
        return {
            Category.PARAMETERS: precision.parameters,
            Category.CAST_COPIES: precision.cast_copies,
            Category.GRADIENTS: precision.gradients,
            Category.MASTER_COPIES: precision.master_copies,
            Category.OPTIMIZER_STATE: self.optimizer.bytes_per_element(precision.optimized_itemsize),
        }

    @property
    def total(self) -> float:
        """Bytes per parameter alive after backward, so without transient casts."""
        return self.peak - (self.precision.cast_copies if self.precision.transient_casts else 0.0)

    @property
    def peak(self) -> float:
        """Bytes per parameter with all copies alive at once."""
        return sum(self.components.values())


_TRANSFORMERS = (
    "Hugging Face Transformers documentation, Anatomy of Model's Memory: "
    "https://github.com/huggingface/transformers/blob/249ef81/docs/source/en/model_memory_anatomy.md"
)
_MEGATRON = (
    "Megatron Core User Guide, Distributed Optimizer: "
    "https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html"
)
_PURE_HALF = "Hugging Face Transformers, pull request 21312: https://github.com/huggingface/transformers/pull/21312"

FP32 = PrecisionModel(key="fp32", title="everything in float32", parameters=4.0, gradients=4.0, source=_TRANSFORMERS)
"""16 bytes per parameter with Adam. Source: Hugging Face Transformers documentation, Anatomy of Model's Memory."""

USUAL_AMP = PrecisionModel(
    key="amp-textbook",
    title="AMP, the textbook formula",
    parameters=4.0,
    cast_copies=2.0,
    gradients=2.0,
    source="Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1: https://arxiv.org/abs/1710.03740",
)
"""16 bytes per parameter with Adam: float32 weights, a half copy of them and half gradients.

Source: the storage that Micikevicius et al., Mixed Precision Training, describe in section 3.1.
"""

AUTOCAST = PrecisionModel(
    key="autocast",
    title="what torch.autocast does",
    parameters=4.0,
    cast_copies=2.0,
    gradients=4.0,
    transient_casts=True,
    source="PyTorch, cached_cast in aten/src/ATen/autocast_mode.cpp, and https://docs.pytorch.org/docs/stable/amp.html",
)
"""16 bytes per parameter with Adam after backward, 2 more per cast parameter while the half copies live.

The gradient of a float32 leaf is float32. The model takes every parameter as cast; norms and embeddings are not.
Source: ``cached_cast`` in PyTorch's ``aten/src/ATen/autocast_mode.cpp``, and measurement.
"""

HALF_MASTER = PrecisionModel(
    key="half-master",
    title="half weights and a float32 master",
    parameters=2.0,
    gradients=2.0,
    master_copies=4.0,
    source="Rajbhandari et al., ZeRO, SC 2020, section 3.1: https://arxiv.org/abs/1910.02054",
)
"""16 bytes per parameter with Adam: Apex O2, DeepSpeed FP16.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 3.1.
"""

HALF_MASTER_FP32_GRADIENTS = PrecisionModel(
    key="half-master-fp32-gradients",
    title="half weights, float32 master and gradients",
    parameters=2.0,
    gradients=4.0,
    master_copies=4.0,
    source=_MEGATRON,
)
"""18 bytes per parameter with Adam. Source: Megatron Core User Guide, Distributed Optimizer."""

HALF_MASTER_FP32_ACCUMULATION = PrecisionModel(
    key="half-master-fp32-accumulation",
    title="half weights and gradients, float32 master and accumulated gradients",
    parameters=2.0,
    gradients=6.0,
    master_copies=4.0,
    source="Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B: "
    "https://arxiv.org/abs/2201.11990",
)
"""20 bytes per parameter with Adam. Source: Smith et al., Megatron-Turing NLG 530B, section on memory efficiency."""

PURE_HALF = PrecisionModel(
    key="pure-half",
    title="everything in bfloat16 or float16",
    parameters=2.0,
    gradients=2.0,
    optimized_itemsize=2,
    source=_PURE_HALF,
)
"""8 bytes per parameter with Adam. Source: Hugging Face Transformers, pull request 21312, and PyTorch's Adam."""

PRECISIONS: Mapping[str, PrecisionModel] = {
    precision.key: precision
    for precision in (
        FP32,
        USUAL_AMP,
        AUTOCAST,
        HALF_MASTER,
        HALF_MASTER_FP32_GRADIENTS,
        HALF_MASTER_FP32_ACCUMULATION,
        PURE_HALF,
    )
}


def _torch(key: str, title: str, module: str, *names: str) -> OptimizerModel:
    """An optimizer of PyTorch's whose states all have the parameter's shape and dtype."""
    states = tuple(StateTensor(name=name, elements=1.0, itemsize=None) for name in names)
    return OptimizerModel(key=key, title=title, states=states, source=f"PyTorch, torch/optim/{module}.py")


ADAFACTOR = OptimizerModel(
    key="adafactor",
    title="Adafactor",
    states=tuple(StateTensor(name=name, elements=0.0, itemsize=None) for name in ("row_var", "col_var", "variance")),
    source="PyTorch, torch/optim/_adafactor.py; Shazeer and Stern, 2018: https://arxiv.org/abs/1804.04235",
)
"""Sub-linear state; :func:`adafactor_state` has the exact bytes. Source: ``torch/optim/_adafactor.py``."""

ADAM_8BIT = OptimizerModel(
    key="adam-8bit",
    title="8-bit Adam or AdamW of bitsandbytes",
    states=(
        StateTensor(name="state1", elements=1.0, itemsize=1),
        StateTensor(name="state2", elements=1.0, itemsize=1),
        StateTensor(name="absmax1", elements=0.0, itemsize=4),
        StateTensor(name="absmax2", elements=0.0, itemsize=4),
    ),
    source="bitsandbytes, optim/optimizer.py: https://github.com/bitsandbytes-foundation/bitsandbytes",
)
"""2 bytes per parameter, without the scales (0.03 bytes): :func:`adam8bit_state` has the exact bytes.

Source: ``Optimizer2State.init_state`` in bitsandbytes' ``optim/optimizer.py``.
"""

OPTIMIZERS: Mapping[str, OptimizerModel] = {
    model.key: model
    for model in (
        _torch("sgd", "SGD", "sgd"),
        _torch("sgd-momentum", "SGD with momentum", "sgd", "momentum_buffer"),
        _torch("adam", "Adam", "adam", "exp_avg", "exp_avg_sq"),
        _torch("adamw", "AdamW", "adamw", "exp_avg", "exp_avg_sq"),
        _torch("amsgrad", "Adam or AdamW with amsgrad", "adam", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        _torch("adagrad", "Adagrad", "adagrad", "sum"),
        _torch("rmsprop", "RMSprop", "rmsprop", "square_avg"),
        _torch("rmsprop-momentum", "RMSprop with momentum", "rmsprop", "square_avg", "momentum_buffer"),
        _torch("rmsprop-centered", "centered RMSprop", "rmsprop", "square_avg", "grad_avg"),
        _torch(
            "rmsprop-centered-momentum",
            "centered RMSprop with momentum",
            "rmsprop",
            "square_avg",
            "momentum_buffer",
            "grad_avg",
        ),
        _torch("adadelta", "Adadelta", "adadelta", "square_avg", "acc_delta"),
        _torch("adamax", "Adamax", "adamax", "exp_avg", "exp_inf"),
        _torch("nadam", "NAdam", "nadam", "exp_avg", "exp_avg_sq"),
        _torch("radam", "RAdam", "radam", "exp_avg", "exp_avg_sq"),
        _torch("asgd", "ASGD", "asgd", "ax"),
        _torch("rprop", "Rprop", "rprop", "prev", "step_size"),
        ADAFACTOR,
        ADAM_8BIT,
    )
}

_EIGHT_BIT = frozenset({"Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"})
_BITSANDBYTES = frozenset({"Optimizer8bit", "Optimizer1State", "Optimizer2State"})
_ONE_FORM = frozenset({"Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor"})
"""Optimizer classes whose states do not depend on the settings."""
_FORMS = {
    "Adam": ("adam", "amsgrad"),
    "AdamW": ("adamw", "amsgrad"),
    "SGD": ("sgd", "sgd-momentum"),
    "RMSprop": ("rmsprop", "rmsprop-momentum", "rmsprop-centered", "rmsprop-centered-momentum"),
}
"""The models of optimizer classes whose states depend on the settings."""


def recipe(precision: str, optimizer: str) -> Recipe:
    """The recipe with that name and optimizer. Raises :class:`UsageError` for unknown names, listing the known ones."""
    for kind, name, choices in (("recipe", precision, PRECISIONS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in choices:
            raise UsageError(f"there is no {kind} {name!r}; choose one of {', '.join(choices)}")
    return Recipe(precision=PRECISIONS[precision], optimizer=OPTIMIZERS[optimizer])


def optimizer_model(class_names: Sequence[str], settings: Mapping[str, object]) -> OptimizerModel | None:
    """The model of an optimizer; ``None`` if it is unknown.

    ``class_names`` are its class and that class's bases, nearest first; ``settings`` are the options of one of its
    parameter groups (``momentum``, ``amsgrad``, ``centered``, …).
    """
    # bitsandbytes' other classes have the names of PyTorch's, and no option of the group says how many bits they keep.
    if is_bitsandbytes(class_names) and not _EIGHT_BIT.intersection(class_names):
        return None
    keys = (_key(name, settings) for name in class_names)
    return next((OPTIMIZERS[key] for key in keys if key is not None), None)


def optimizer_forms(class_names: Sequence[str]) -> tuple[OptimizerModel, ...]:
    """All states that an optimizer of these classes may keep, depending on its options; empty if unknown."""
    for name in class_names:
        if name in _FORMS:
            return tuple(OPTIMIZERS[key] for key in _FORMS[name])
        if name in _ONE_FORM:
            return (OPTIMIZERS[name.lower()],)
        if name in _EIGHT_BIT:
            return (ADAM_8BIT,)
    return ()


def is_bitsandbytes(class_names: Sequence[str]) -> bool:
    """Whether the classes are bitsandbytes': other libraries use the same names."""
    return bool(_BITSANDBYTES.intersection(class_names))


def adafactor_state(shape: Sequence[int], itemsize: int) -> int:
    """Bytes that ``torch.optim.Adafactor`` keeps for a parameter of ``shape``, without the scalar ``step``.

    ``itemsize`` is that of the gradient's elements. One row and one column for each matrix that the last two dimensions
    span; all elements below two dimensions. Source: ``_init_group`` in ``torch/optim/_adafactor.py``.
    """
    if len(shape) < 2:
        return math.prod(shape) * itemsize
    *leading, rows, columns = shape
    return math.prod(leading) * (rows + columns) * itemsize


def adam8bit_state(elements: int) -> int:
    """Bytes that bitsandbytes' blockwise 8-bit Adam keeps for a parameter with ``elements`` elements.

    Two ``uint8`` states and two float32 scales per block, or two float32 states below :data:`ADAM8BIT_SMALLEST`
    elements; without the two maps of 1 KiB that all parameters share. Source: ``Optimizer2State.init_state`` in
    bitsandbytes' ``optim/optimizer.py``.
    """
    if elements < ADAM8BIT_SMALLEST:
        return 2 * 4 * elements
    return 2 * elements + 2 * 4 * math.ceil(elements / ADAM8BIT_BLOCK)


def _key(class_name: str, settings: Mapping[str, object]) -> str | None:
    """The key in :data:`OPTIMIZERS` for the class ``class_name``; ``None`` if there is none."""
    if class_name in _EIGHT_BIT:
        return ADAM_8BIT.key
    match class_name:
        case "Adam" | "AdamW":
            return "amsgrad" if settings.get("amsgrad") else class_name.lower()
        case "SGD":
            return "sgd-momentum" if settings.get("momentum") else "sgd"
        case "RMSprop":
            centered = "-centered" if settings.get("centered") else ""
            return f"rmsprop{centered}{'-momentum' if settings.get('momentum') else ''}"
        case "Adafactor" if settings.get("beta1") is not None:
            # transformers' Adafactor keeps a first moment then.
            return None
    return class_name.lower() if class_name in _ONE_FORM else None


# The published formulas of static memory as data, and which of them agree with a measured run.

TOLERANCE = 0.01
"""A formula, or a part of it, matches if it is off by at most this share of the measured static sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A formula as its authors give it, for Adam on one device; all numbers are bytes per parameter."""

    key: str
    parameters: float
    cast_copies: float = 0.0
    gradients: float
    master_copies: float = 0.0
    optimizer_state: float = 8.0
    total: float
    """The authors' total, which is not always the sum of the parts."""
    counts: str
    """What the formula counts, in one sentence."""
    source: str

    @property
    def components(self) -> Mapping[str, float]:
        """The parts, in the order of :data:`~ampmem.analysis.static_model.recipes.COMPONENTS`."""
        return {component: float(getattr(self, component)) for component in COMPONENTS}


_ACCELERATE = (
    "Hugging Face Accelerate, estimate_training_usage in commands/estimate.py: "
    "https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/estimate.py"
)
_DEEPSPEED = (
    "DeepSpeed documentation, Memory Requirements: "
    "https://github.com/deepspeedai/DeepSpeed/blob/master/docs/code-docs/source/memory.rst"
)

_FORMULAS = (
    Published(
        key="accelerate-fp32",
        parameters=4.0,
        gradients=4.0,
        total=16.0,
        counts="Four times the model: weights, gradients and Adam's two moments.",
        source=_ACCELERATE,
    ),
    Published(
        key="accelerate-mixed",
        parameters=4.0,
        gradients=6.0,
        total=8.0,
        counts="The largest part, not the sum; the gradients are counted in float32 and again in float16.",
        source=_ACCELERATE,
    ),
    Published(
        key="transformers-fp32",
        parameters=4.0,
        gradients=4.0,
        total=16.0,
        counts="Weights, gradients and AdamW's two moments, all in float32.",
        source=_TRANSFORMERS,
    ),
    Published(
        key="transformers-mixed",
        parameters=4.0,
        cast_copies=2.0,
        gradients=4.0,
        total=18.0,
        counts="Float32 weights with a float16 copy that stays, float32 gradients and AdamW's two moments.",
        source=_TRANSFORMERS,
    ),
    Published(
        key="transformer-math",
        parameters=2.0,
        gradients=4.0,
        master_copies=4.0,
        total=18.0,
        counts="Half weights, a float32 copy counted with the optimizer (12), and gradients in float32, "
        "the calculator's default; half gradients make it 16.",
        source="EleutherAI cookbook, calculator to https://blog.eleuther.ai/transformer-math/: "
        "https://github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py",
    ),
    Published(
        key="megatron-fp32-grads",
        parameters=2.0,
        gradients=4.0,
        master_copies=4.0,
        total=18.0,
        counts="Without the distributed optimizer; with it 6 + 12/d on each of d data-parallel ranks.",
        source=_MEGATRON,
    ),
    Published(
        key="megatron-half-grads",
        parameters=2.0,
        gradients=6.0,
        master_copies=4.0,
        total=20.0,
        counts="Without the distributed optimizer; with it 4 + 16/d, so a float32 copy of the gradients is in it.",
        source=_MEGATRON,
    ),
    Published(
        key="zero-paper",
        parameters=2.0,
        gradients=2.0,
        master_copies=4.0,
        total=16.0,
        counts="Half weights and gradients, and K = 12: a float32 copy of the weights and Adam's two moments.",
        source="Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020: "
        "https://arxiv.org/abs/1910.02054",
    ),
    Published(
        key="deepspeed-zero3",
        parameters=2.0,
        gradients=4.0,
        master_copies=4.0,
        total=18.0,
        counts="On one rank, without the gathered layer: half weights, and weights, gradients and moments in float32.",
        source=_DEEPSPEED,
    ),
    Published(
        key="mt-nlg",
        parameters=2.0,
        gradients=6.0,
        master_copies=4.0,
        total=20.0,
        counts="Weights and gradients in half and again in float32, and Adam's two moments.",
        source="Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, 2022: "
        "https://arxiv.org/abs/2201.11990",
    ),
    Published(
        key="pure-bf16",
        parameters=2.0,
        gradients=2.0,
        optimizer_state=4.0,
        total=8.0,
        counts="Weights, gradients and Adam's two moments, all in bfloat16.",
        source=_PURE_HALF,
    ),
)

PUBLISHED: Mapping[str, Published] = {formula.key: formula for formula in _FORMULAS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The static memory measured in a recorded step, in bytes."""

    parameters: int
    """Elements of all parameters, trainable or not."""
    step: int
    mark: Mark
    """The instant of ``static``: ``after_backward``, or ``after_optimizer`` if the state was only there then."""
    static: Mapping[str, int]
    after_forward: Mapping[str, int] | None

    @property
    def static_bytes(self) -> int:
        """The sum of ``static``."""
        return sum(self.static.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaMatch:
    """Whether a formula agrees with a run within :data:`TOLERANCE`: in its total, and in each part."""

    total: bool
    split: bool


def match(formula: Recipe | Published, measured: Measured) -> FormulaMatch:
    """The match of a recipe (without casts that are freed after backward) or of a published formula with a run."""
    total, parts = formula.total, dict(formula.components)
    if isinstance(formula, Recipe) and formula.precision.transient_casts:
        parts[Category.CAST_COPIES] = 0.0
    slack = TOLERANCE * measured.static_bytes

    def near(per_parameter: float, size: int) -> bool:
        return abs(per_parameter * measured.parameters - size) <= slack

    return FormulaMatch(
        total=near(total, measured.static_bytes),
        split=all(near(parts[component], measured.static[component]) for component in COMPONENTS),
    )
