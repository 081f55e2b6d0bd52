"""The verdict on the static model: every byte has a name, and the names are right."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support import measure
from support.measure import WORKLOADS
from support.precisions import PRECISIONS, all_judged, judged, part, record, terms, workload
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.static_model.recipes import adam8bit_state
from ampmem.events import Fact
from ampmem.workloads import reuse

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]

NORMS = (nn.LayerNorm, nn.BatchNorm2d)
COUNTERS = "scalars of the optimizer: step"
NO_NORMS = "norms: their parameters were not cast"
NO_EMBEDDINGS = "embeddings: their parameters were not cast"
FREED = "copies freed before this mark: nothing kept them"
CHECKPOINTED = "copies freed before this mark: backward made them again, as checkpointing does"
AGAIN = "copies made again for another use, without the cache"
ZEROED = "gradients freed before this mark"
FROZEN = "frozen parameters"
TIED = "tied weights: a tensor for each name"
NOT_YET = "no optimizer state before the first update"
SKIPPED = "no optimizer state yet: the loss scaler skipped the updates"
NO_OPTIMIZER = "parameters that no optimizer of this process has updated"
NO_GRADIENTS = "no gradient: it was not seen in the recording"
LATER = "no gradient before this mark: the first came later"

MIB = 2**20


def elements(models: Iterable[nn.Module], *kinds: type[nn.Module]) -> int:
    """Elements of the parameters of the modules of these kinds; of all without any."""
    modules = [module for model in models for module in model.modules() if not kinds or isinstance(module, kinds)]
    return sum({id(p): p.numel() for module in modules for p in module.parameters(recurse=False)}.values())


# -- the workloads, in every forced --------------------------------------------------------------


@pytest.mark.parametrize("forced", PRECISIONS)
def test_sixteen_bytes_per_parameter_after_backward_and_the_copies_of_forward(forced: str) -> None:
    """Four layers of 1024 x 1024 used twice, for-loop Adam: the same script in three precisions."""
    analysis = analyse(record(lambda: reuse.train(measure.options("fp32", steps=3)), forced))
    count = 4 * 1024 * 1024
    cached = {"fp32": 0, "amp": 8 * MIB, "amp-nocache": 14 * MIB}[forced]
    for verdict in all_judged(analysis)[1:]:
        total = part(verdict, "after_backward", "total")
        assert total.model_bytes == 16 * count
        assert total.measured_bytes == 16 * count + 16
        assert {term.why: (term.bytes, term.tensors) for term in total.terms} == {COUNTERS: (16, 4)}
        assert (verdict.recipe.bytes_per_param, verdict.recipe.precision) == (
            16,
            "fp32" if forced == "fp32" else "autocast",
        )
        assert verdict.recipe.peak_bytes_per_param == (16 if forced == "fp32" else 18)
        forward = part(verdict, "after_forward", "cast_copies")
        assert forward.model_bytes == (0 if forced == "fp32" else 8 * MIB)
        assert forward.measured_bytes == cached
        # The batch needs no gradient, so nobody saves the first layer's first copy.
        assert {term.why: (term.bytes, term.tensors) for term in forward.terms} == (
            {AGAIN: (6 * MIB, 3)} if forced == "amp-nocache" else {}
        )
        for mark in ("after_backward", "after_optimizer"):
            assert part(verdict, mark, "cast_copies").measured_bytes == 0


CASES = [(name, "fp32", forced) for name in WORKLOADS for forced in PRECISIONS] + [
    (name, precision, "as-is") for name in WORKLOADS for precision in PRECISIONS
]


@pytest.mark.parametrize(("name", "precision", "forced"), CASES)
def test_every_step_of_every_workload_holds(name: str, precision: str, forced: str) -> None:
    analysis, run = workload(name, precision, forced)
    count = elements(run.models)
    state, updates = measure.state(*run.optimizers), len(run.optimizers)
    tensors = sum(1 for model in run.models for _ in model.parameters())
    scalars = 0 if name == "resnet" else 4 * tensors  # SGD counts no steps
    per_parameter = 4 if name == "resnet" else 8
    for index, verdict in enumerate(all_judged(analysis)):
        for mark in ("after_forward", "after_backward", "after_optimizer"):
            assert part(verdict, mark, "parameters").measured_bytes == measure.parameters(*run.models) == 4 * count
            assert terms(verdict, mark, "parameters") == {}
            assert part(verdict, mark, "master_copies").measured_bytes == 0
        assert part(verdict, "after_optimizer", "optimizer_state").measured_bytes == state
        assert part(verdict, "after_optimizer", "optimizer_state").model_bytes == per_parameter * count
        assert terms(verdict, "after_optimizer", "optimizer_state") == ({COUNTERS: scalars} if scalars else {})
        assert (
            part(verdict, "after_backward", "gradients").measured_bytes == run.gradients[updates * index + updates - 1]
        )
        if index == 0 and updates == 1:
            assert terms(verdict, "after_backward", "optimizer_state") == {NOT_YET: -per_parameter * count}
            assert LATER in terms(verdict, "after_forward", "gradients") or name == "accumulate"


@pytest.mark.parametrize(("name", "precision", "forced"), CASES)
def test_what_is_not_cast_is_named_with_its_bytes(name: str, precision: str, forced: str) -> None:
    analysis, run = workload(name, precision, forced)
    mode = precision if forced == "as-is" else forced
    found = terms(all_judged(analysis)[-1], "after_forward", "cast_copies")
    if mode == "fp32":
        assert found == {}
        return
    norms = elements(run.models, *NORMS)
    embeddings = elements(run.models, nn.Embedding)
    all_of = elements(run.models)
    expected = {NO_NORMS: -2 * norms, NO_EMBEDDINGS: -2 * embeddings}
    if name == "reuse":
        width = measure.EXTRA["reuse"]["width"]
        expected[AGAIN] = 3 * 2 * width**2 if mode == "amp-nocache" else 0
        freed = 0
    elif name == "checkpointed":
        model = run.models[0]
        again = analysis.casts.steps[-1].recomputed.bytes
        expected[CHECKPOINTED] = -again
        freed = all_of - norms - model.outputs.weight.numel() - again // 2
    else:
        freed = all_of - norms - embeddings - sum(p.numel() for p in saved_weights(run.models))
    expected[FREED] = -2 * freed
    assert found == {why: size for why, size in expected.items() if size}


def saved_weights(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    return [module.weight for model in models for module in model.modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("forced", PRECISIONS)
def test_gradients_that_zero_grad_freed_are_named(forced: str) -> None:
    analysis, run = workload("gpt", "fp32", forced)
    verdict = all_judged(analysis)[-1]
    count = elements(run.models)
    assert part(verdict, "after_forward", "gradients").measured_bytes == 0
    assert terms(verdict, "after_forward", "gradients") == {ZEROED: -4 * count}
    assert terms(verdict, "after_optimizer", "gradients") == {}


@pytest.mark.parametrize("forced", PRECISIONS)
def test_the_generators_step_of_a_gan(forced: str) -> None:
    """At the last backward of a step the generator's gradients are gone, and the discriminator's are there."""
    analysis, run = workload("gan", "fp32", forced)
    generator = elements(run.models[:1])
    first, last = all_judged(analysis)
    assert terms(last, "after_forward", "gradients") == {ZEROED: -4 * generator}
    assert terms(first, "after_forward", "gradients") == {LATER: -4 * generator}
    discriminator_tensors = len(list(run.models[1].parameters()))
    assert terms(first, "after_forward", "optimizer_state") == {
        NOT_YET: -8 * generator,
        COUNTERS: 4 * discriminator_tensors,
    }


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("forced", ["as-is", *PRECISIONS])
def test_a_skipped_first_update_leaves_out_eight_bytes_per_parameter(forced: str, steps: int) -> None:
    if forced == "fp32":  # no scaler scales there, so none skips
        analysis, run = workload("accumulate", "fp32", forced, steps=3)
        assert [step.skipped_update for step in analysis.recording.steps] == [False] * 3
        all_judged(analysis)
        return
    analysis, run = workload("accumulate", "fp32", forced, scaler="on", skip_first=True, steps=steps)
    count, tensors = elements(run.models), len(list(run.models[0].parameters()))
    verdicts = all_judged(analysis)
    assert [step.skipped_update for step in analysis.recording.steps] == [True, False, False][:steps]
    for mark, why in (("after_forward", NOT_YET), ("after_backward", NOT_YET), ("after_optimizer", SKIPPED)):
        state = part(verdicts[0], mark, "optimizer_state")
        assert (state.model_bytes, state.measured_bytes) == (8 * count, 0)
        assert terms(verdicts[0], mark, "optimizer_state") == {why: -8 * count}
    if steps > 1:
        assert terms(verdicts[1], "after_backward", "optimizer_state") == {SKIPPED: -8 * count}
        for mark in ("after_forward", "after_backward", "after_optimizer"):
            assert terms(verdicts[2], mark, "optimizer_state") == {COUNTERS: 4 * tensors}


# -- models of the tests' own -----------------------------------------------------------------


class Net(nn.Module):
    """All kinds: an embedding, a norm, layers with and without bias, one of them an island of float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(30, 32)
        self.up = nn.Linear(32, 64)
        self.island = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.tokens(x)).relu()
        with torch.autocast("cpu", enabled=False):
            x = self.island(x.float())
        return self.down(self.norm(x))


class Decorated(Net):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Outside(Net):
    """No autocast at all but the island."""


TOKENS = torch.arange(24).reshape(4, 6)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float().square().mean()


Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def trained(
    model: nn.Module, make: Make = AdamW, inputs: Tensor = TOKENS, steps: int = 2, forced: str = "as-is"
) -> tuple[Analysis, list[int], Optimizer]:
    """The analysis of a short training, the gradients' bytes after each backward, and the optimizer."""
    gradients: list[int] = []
    optimizers: list[Optimizer] = []

    def run() -> None:
        optimizer = make(list(model.parameters()))
        optimizers.append(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model, inputs).backward()
            gradients.append(measure.gradients(model))
            optimizer.step()

    analysis = analyse(record(run, forced))
    for verdict, found in zip(all_judged(analysis), gradients, strict=True):
        assert part(verdict, "after_backward", "gradients").measured_bytes == found
        assert part(verdict, "after_optimizer", "optimizer_state").measured_bytes == measure.state(optimizers[0])
        assert part(verdict, "after_optimizer", "parameters").measured_bytes == measure.parameters(model)
    return analysis, gradients, optimizers[0]


@pytest.mark.parametrize("forced", PRECISIONS)
@pytest.mark.parametrize("kind", [Decorated, Outside])
def test_decorated_forwards_and_islands_of_float32(kind: type[Net], forced: str) -> None:
    model = kind()
    analysis, _, _ = trained(model, forced=forced)
    found = terms(judged(analysis), "after_forward", "cast_copies")
    expected = {
        NO_NORMS: -2 * 2 * 64,
        NO_EMBEDDINGS: -2 * 30 * 32,
        "other parameters that were not cast": -2 * (64 * 64 + 64),
        FREED: -2 * 64,
    }
    assert found == ({} if forced == "fp32" else expected)
    assert analysis.recording.precision.wrapped == (kind is Outside and forced != "fp32")


# -- other optimizers -------------------------------------------------------------------------


class OnlyM(Optimizer):
    """A momentum of float32, an extra tensor for every parameter, and a counter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["step"] = torch.zeros_like(p, dtype=torch.float32), torch.zeros(())
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"], alpha=group["lr"])


class Base(OnlyM):
    """Made once, so that its ``step`` calls torch's hooks, as that of :class:`Rows` does, which calls it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()


class Rows(Base):
    """A row of sums besides, which has no bytes per element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("rows", torch.zeros(7 + p.shape[0]))


class AdamW8bit(Optimizer):
    """Keeps what bitsandbytes' class of that name keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.maps = torch.zeros(256), torch.zeros(256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    kind = torch.float32 if p.numel() < 4096 else torch.uint8
                    for which in ("1", "2"):
                        state[f"state{which}"] = torch.zeros_like(p, dtype=kind)
                        if kind is torch.uint8:
                            state[f"qmap{which}"] = self.maps[int(which) - 1]
                            state[f"absmax{which}"] = torch.zeros(-(-p.numel() // 256))
                p.sub_(p.grad, alpha=group["lr"])


SIMPLE: dict[str, tuple[Make, int, str]] = {
    "sgd": (lambda p: SGD(p, lr=0.01), 0, "SGD"),
    "momentum": (lambda p: SGD(p, lr=0.01, momentum=0.9), 4, "SGD with momentum"),
    "amsgrad": (lambda p: Adam(p, amsgrad=True), 12, "Adam or AdamW with amsgrad"),
    "adagrad": (Adagrad, 4, "Adagrad"),
    "nadam": (NAdam, 8, "NAdam"),
    "rmsprop": (RMSprop, 4, "RMSprop"),
    "rmsprop-momentum": (lambda p: RMSprop(p, momentum=0.9), 8, "RMSprop with momentum"),
    "rmsprop-centered": (lambda p: RMSprop(p, centered=True, momentum=0.9), 12, "centered RMSprop with momentum"),
    "only-m": (OnlyM, 4, "OnlyM, as seen"),
    "rows": (Rows, 4, "Rows, as seen"),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_other_optimizers(name: str) -> None:
    Base([torch.zeros(1)])
    make, per_parameter, title = SIMPLE[name]
    model = Net()
    analysis, _, optimizer = trained(model, make)
    verdict, count = judged(analysis), elements([model])
    assert verdict.recipe.optimizer == (title,)
    assert verdict.recipe.bytes_per_param == 8 + per_parameter
    state = part(verdict, "after_optimizer", "optimizer_state")
    assert state.model_bytes == per_parameter * count
    states = [state for state in dict(optimizer.state).values() if isinstance(state, dict)]
    keys = [key for state in states for key, t in state.items() if isinstance(t, Tensor) and t.dim() == 0]
    expected = {f"scalars of the optimizer: {key}": 4 * keys.count(key) for key in keys}
    if name == "rows":
        expected["state that the rule does not have: rows"] = sum(4 * (7 + p.shape[0]) for p in model.parameters())
    assert terms(verdict, "after_optimizer", "optimizer_state") == expected


def test_adafactor_keeps_rows_and_columns() -> None:
    model = Net()
    analysis, _, _ = trained(model, Adafactor)
    kept = sum(4 * (sum(p.shape) if p.dim() == 2 else p.numel()) for p in model.parameters())
    verdict = judged(analysis)
    assert part(verdict, "after_optimizer", "optimizer_state").model_bytes == 0
    assert terms(verdict, "after_optimizer", "optimizer_state") == {
        "rows and columns instead of full second moments": kept,
        COUNTERS: 4 * len(list(model.parameters())),
    }


class LowRank(Optimizer):
    """Moments of the projected gradient, as GaLore and APOLLO keep them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                state.setdefault(key, torch.zeros(4, p.shape[1]) if p.dim() == 2 else torch.zeros_like(p))


class Stacked(LowRank):
    """One moment for all matrices of a shape, which the first of them has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        matrices = [p for p in self.param_groups[0]["params"] if p.dim() == 2]
        for p in self.param_groups[0]["params"]:
            if p.dim() != 2 or p is matrices[0]:
                shape = (len(matrices), *p.shape) if p.dim() == 2 else p.shape
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(key, torch.zeros(shape))


@pytest.mark.parametrize("name", ["AdamW", "Own"])
@pytest.mark.parametrize(("base", "elements"), [(LowRank, 4 * 64), (Stacked, 64 * 64)])
def test_state_that_has_not_the_shape_of_its_parameter_is_as_seen(
    base: type[Optimizer], elements: int, name: str
) -> None:
    layers = [nn.Linear(64, 64) for _ in range(3)]
    analysis, _, _ = trained(nn.Sequential(*layers), type(name, (base,), {}), torch.randn(4, 64))
    verdict = judged(analysis)
    found = terms(verdict, "after_optimizer", "optimizer_state")
    unknown = {f"state that the rule does not have: {key}": 3 * 4 * elements for key in ("exp_avg", "exp_avg_sq")}
    assert {why: size for why, size in found.items() if why in unknown} == unknown
    assert f"{name}, as seen" in verdict.recipe.optimizer


def test_a_gradient_that_is_dropped_before_the_update_leaves_no_state() -> None:
    """As DINO freezes its last layer for an epoch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def run() -> None:
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, torch.randn(4, 8)).backward()
            for p in model[1].parameters():
                p.grad = None
            optimizer.step()

    analysis = analyse(record(run))
    all_judged(analysis)
    found = terms(judged(analysis), "after_optimizer", "optimizer_state")
    assert found["no optimizer state: these parameters' gradients were dropped before each update"] == -8 * (64 + 8)


def test_gradients_of_torch_func_under_autocast() -> None:
    """Copies of the weights are torch.func's own tensors, of which none is alive at the end of forward."""
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, inputs).pow(2).mean()

    def run() -> None:
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            parameters = dict(model.named_parameters())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                gradients = torch.func.grad(loss)(parameters)
                fast = loss({name: value - 0.01 * gradients[name] for name, value in parameters.items()})
            optimizer.zero_grad()
            fast.backward()
            optimizer.step()

    analysis = analyse(record(run))
    all_judged(analysis)
    found = terms(judged(analysis), "after_forward", "cast_copies")
    assert found == {"no copy of the parameter: torch.func casts the script's own tensors": -2 * 2 * (64 + 8)}


def test_lbfgs_keeps_flat_vectors_for_its_first_parameter() -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        optimizer, inputs = LBFGS(model.parameters(), max_iter=3), torch.randn(4, 6)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    all_judged(analyse(record(run)))


def test_eight_bit_adam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 65))
    analysis, _, _ = trained(model, AdamW8bit, torch.randn(4, 64))
    verdict, count = judged(analysis), elements([model])
    kept = sum(adam8bit_state(p.numel()) for p in model.parameters())
    assert kept != 2 * count
    assert verdict.recipe.bytes_per_param == 10
    assert part(verdict, "after_optimizer", "optimizer_state").measured_bytes == kept + 2 * 1024
    assert terms(verdict, "after_optimizer", "optimizer_state") == {
        "scales of the blocks, and small tensors kept in float32": kept - 2 * count,
        "state that the rule does not have: qmap1": 1024,
        "state that the rule does not have: qmap2": 1024,
    }
    assert kept == sum(
        2 * p.numel() + 8 * -(-p.numel() // 256) if p.numel() >= 4096 else 8 * p.numel() for p in model.parameters()
    )


# -- other models -----------------------------------------------------------------------------


@pytest.mark.parametrize("forced", PRECISIONS)
def test_frozen_layers(forced: str) -> None:
    model = Net()
    model.tokens.requires_grad_(False)
    model.up.requires_grad_(False)
    frozen = elements([model.tokens, model.up])
    analysis, _, _ = trained(model, forced=forced)
    verdict = judged(analysis)
    assert terms(verdict, "after_backward", "gradients") == {FROZEN: -4 * frozen}
    assert terms(verdict, "after_optimizer", "optimizer_state")[FROZEN] == -8 * frozen
    assert terms(verdict, "after_forward", "parameters") == {}


def test_parameters_that_no_optimizer_has_and_parameters_that_no_step_uses() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(11, 3)

    model = Unused()
    analysis, _, _ = trained(model, lambda p: AdamW(list(p)[1:]))
    verdict, unused = judged(analysis), 11 * 3 + 3
    state = terms(verdict, "after_optimizer", "optimizer_state")
    assert state == {
        NO_OPTIMIZER: -8 * 30 * 32,
        "no optimizer state: these parameters have had no gradient": -8 * unused,
        COUNTERS: 4 * (len(list(model.parameters())) - 1 - 2),
    }
    assert terms(verdict, "after_backward", "gradients") == {NO_GRADIENTS: -4 * unused}
    assert terms(all_judged(analysis)[0], "after_backward", "optimizer_state")[NO_OPTIMIZER] == -8 * 30 * 32


@pytest.mark.parametrize("forced", PRECISIONS)
@pytest.mark.parametrize("same", [True, False])
def test_tied_weights(forced: str, same: bool) -> None:
    """One Parameter under two names; or two Parameters over one storage, each with a gradient of its own."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            weight = self.tokens.weight
            self.head.weight = weight if same else nn.Parameter(weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tokens(x))

    model, count = Tied(), 50 * 16
    analysis, _, _ = trained(model, forced=forced)
    verdict = judged(analysis)
    assert part(verdict, "after_backward", "parameters").model_bytes == 4 * count
    assert terms(verdict, "after_backward", "gradients") == ({} if same else {TIED: 4 * count})
    counters = 4 if same else 8
    tied = {} if same else {TIED: 8 * count}
    assert terms(verdict, "after_optimizer", "optimizer_state") == {COUNTERS: counters} | tied
    copies = part(verdict, "after_forward", "cast_copies")
    assert copies.measured_bytes == (0 if forced == "fp32" else 2 * count)
    assert copies.terms == ()


@pytest.mark.parametrize("forced", PRECISIONS)
def test_parameters_that_are_views_of_one_flat_buffer(forced: str) -> None:
    model, spare = Net(), 100

    def flatten() -> None:
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters) + spare)
        start = 0
        for p in parameters:
            view = flat[start : start + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            start += p.numel()

    flatten()
    analysis, _, _ = trained(model, forced=forced)
    verdict = judged(analysis)
    around = {"memory around parameters that are views of a larger buffer": 4 * spare}
    assert terms(verdict, "after_backward", "parameters") == around
    facts, texts = analysis.recording.facts, analysis.recording.texts
    cast = {texts[name] for name in facts.name[facts.fact == Fact.CAST_COPY]}
    assert cast == (set() if forced == "fp32" else {"up.weight", "up.bias", "down.weight"})


# -- half precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)
    analysis, _, _ = trained(model, lambda p: Adam(p, lr=1e-4), torch.randn(4, 32).to(dtype))
    verdict = judged(analysis)
    assert (verdict.recipe.precision, verdict.recipe.bytes_per_param) == ("pure-half", 8)
    assert part(verdict, "after_backward", "total").model_bytes == 8 * elements([model])
    assert terms(verdict, "after_backward", "total") == {COUNTERS: 16}


def test_one_layer_in_half_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 32), nn.Linear(32, 8).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.small(self.large(x).bfloat16())

    model, small = Mixed(), 32 * 8 + 8
    analysis, _, _ = trained(model, inputs=torch.randn(4, 64))
    verdict = judged(analysis)
    assert verdict.recipe.precision == "fp32"
    assert terms(verdict, "after_backward", "parameters") == {"kept in bfloat16": -2 * small}
    assert terms(verdict, "after_backward", "gradients") == {"gradients in bfloat16": -2 * small}
    state = terms(verdict, "after_backward", "optimizer_state")
    assert state == {"state of bfloat16 parameters": -4 * small, COUNTERS: 16}


def with_masters(*, keep_half: bool, norm: bool = False) -> tuple[Analysis, nn.Module]:
    """Half weights, float32 masters in the optimizer; ``keep_half``: the half gradients live on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64) if norm else nn.Identity(), nn.Linear(64, 16)).bfloat16()

    def run() -> None:
        masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        optimizer = AdamW(masters)
        for _ in range(2):
            loss_of(model, torch.randn(4, 32).bfloat16()).backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad = p.grad.float() if master.grad is None else master.grad.copy_(p.grad)
                if not keep_half:
                    p.grad = None
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)
            if keep_half:
                model.zero_grad(set_to_none=False)

    return analyse(record(run)), model


def test_half_weights_and_masters_with_float32_gradients_only() -> None:
    analysis, model = with_masters(keep_half=False)
    first, last = all_judged(analysis)
    count = elements([model])
    # The half gradients live from the end of backward until they are copied, so this is the recipe of both.
    assert last.recipe.precision == "half-master-fp32-accumulation"
    one = "only one of the two gradients is alive: the parameter's or its master copy's"
    assert terms(last, "after_optimizer", "gradients") == {one: -2 * count}
    # In the first step no mark has both: gradients of 4 B a parameter are expected, and those of bfloat16 are there.
    assert first.recipe.precision == "half-master-fp32-gradients"
    assert terms(first, "after_backward", "gradients") == {"gradients in bfloat16": -2 * count}
    assert part(last, "after_optimizer", "master_copies").measured_bytes == 4 * count
    assert part(last, "after_optimizer", "total").measured_bytes == (2 + 4 + 4 + 8) * count + 16


def test_half_weights_and_masters_with_both_gradients() -> None:
    analysis, model = with_masters(keep_half=True)
    first, last = all_judged(analysis)
    count = elements([model])
    assert (last.recipe.precision, last.recipe.bytes_per_param) == ("half-master-fp32-accumulation", 20)
    for mark in ("after_backward", "after_optimizer"):
        total = part(last, mark, "total")
        assert (total.model_bytes, total.measured_bytes) == (20 * count, 20 * count + 16)
        assert terms(last, mark, "total") == {COUNTERS: 16}
    assert part(first, "after_optimizer", "gradients").measured_bytes == 6 * count


def test_embeddings_with_sparse_gradients() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(30, 16, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(x)

    def run() -> None:
        model = Sparse()
        optimizer = SGD(model.parameters(), lr=0.1)
        loss_of(model, TOKENS).backward()
        optimizer.step()

    (verdict,) = all_judged(analyse(record(run)))
    assert terms(verdict, "after_backward", "gradients") == {
        # The values only: the indices are the batch itself.
        "sparse gradients: their indices and values instead of all elements": 4 * 16 * (TOKENS.numel() - 30)
    }
