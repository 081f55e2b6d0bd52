"""What ampmem says about categories is, to the byte, what the tensors themselves add up to."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support import measure
from support.measure import EXTRA, PRECISIONS, WORKLOADS, assert_conserved, options
from support.precisions import workload
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop

import ampmem
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.summary import Summary, summary_of
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Phase, Recording
from ampmem.workloads import accumulate

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]

HALF = 2
"""Bytes of a bfloat16 element."""


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def batch() -> Tensor:
    return torch.randn(8, 32)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, inputs).backward()
    optimizer.step()


# -- workloads --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A workload under ampmem, and what its tensors added up to at the end."""

    analysis: Analysis
    gradients: list[int]
    parameters: int
    buffers: int
    state: int
    copied: int
    """Bytes of the copies of :func:`saved_weights`, once each."""

    def summary(self) -> Summary:
        return summary_of(self.analysis)

    def recording(self) -> Recording:
        return self.analysis.recording


@functools.cache
def recorded(name: str, precision: str) -> Recorded:
    analysis, run = workload(name, precision)
    return Recorded(
        analysis=analysis,
        gradients=run.gradients,
        parameters=measure.parameters(*run.models),
        buffers=measure.buffers(*run.models),
        state=measure.state(*run.optimizers),
        copied=sum(weight.numel() * HALF for weight in saved_weights(name, run.models)),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_static_memory_of_workloads(name: str, precision: str) -> None:
    run = recorded(name, precision)
    summary = run.summary()
    assert len(summary.steps) == 2
    assert summary.precision.name == precision
    after_backward, after_optimizer = summary.steps[-1].marks.after_backward, summary.steps[-1].marks.after_optimizer
    assert after_optimizer["parameters"] == summary.parameters.bytes == run.parameters > 0
    assert after_optimizer["buffers"] == run.buffers
    assert after_optimizer["optimizer_state"] == run.state > 0
    assert after_optimizer["master_copies"] == 0
    assert after_backward["gradients"] == run.gradients[-1] > 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_categories_of_workloads_are_conserved(name: str, precision: str) -> None:
    assert_conserved(recorded(name, precision))


def saved_weights(name: str, models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The weights whose cast copies backward needs.

    Backward reads the weight of a linear layer or a convolution for the gradient of its input; of a
    bias it reads nothing, so a bias' copy dies with autocast's cache, before backward starts.
    """
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    modules = [(path, m) for model in models for path, m in model.named_modules() if isinstance(m, kinds)]
    if name == "checkpointed":
        # The blocks are run again in backward, and the batch, which the first layer gets, needs no gradient.
        modules = [(path, module) for path, module in modules if path == "outputs"]
    return [module.weight for _, module in modules]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_cast_copies_after_forward(name: str, precision: str) -> None:
    run = recorded(name, precision)
    # The GAN's generator step goes through both models, once each: the discriminator's own graph is gone by then.
    expected = 0 if precision == "fp32" else run.copied
    if (name, precision) == ("reuse", "amp-nocache"):
        # A copy for each of two uses, but for the first layer's first: the batch needs no gradient.
        expected = 2 * expected - EXTRA["reuse"]["width"] ** 2 * HALF
    assert run.summary().steps[-1].marks.after_forward["cast_copies"] == expected
    if precision != "fp32":
        assert measure.count_casts(name, precision) == expected


def test_what_the_weight_cache_saves_is_all_that_it_changes() -> None:
    found = {}
    for precision in ("amp", "amp-nocache"):
        found[precision] = recorded("reuse", precision).summary().steps[-1].marks.after_forward
    width = EXTRA["reuse"]["width"]
    expected = dict(found["amp"]) | {"cast_copies": found["amp"]["cast_copies"] + 3 * width * width * HALF}
    assert found["amp-nocache"] == expected


# -- optimizers -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam-amsgrad": functools.partial(Adam, amsgrad=True),
    "rmsprop-momentum": functools.partial(RMSprop, momentum=0.9),
    "sgd": functools.partial(SGD, lr=0.1),
    "sgd-momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "adafactor": Adafactor,
    "adamw-foreach": functools.partial(AdamW, foreach=True),
    "adamw-for-loop": functools.partial(AdamW, foreach=False),
    "adamw-fused": functools.partial(AdamW, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    with ampmem.profile() as profile:
        model, found = small_model(), []
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.register_step_pre_hook(lambda *_: found.append(measure.gradients(model)))
        for _ in range(2):
            train_step(model, optimizer, batch())
    summary = profile.summary()
    assert len(summary.steps) == 2
    for step, gradients in zip(summary.steps, found, strict=True):
        assert step.marks.after_backward["gradients"] == gradients == measure.parameters(model)
        assert step.marks.after_optimizer["parameters"] == measure.parameters(model)
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(optimizer)
    assert (measure.state(optimizer) == 0) == (name == "sgd")
    assert summary.optimizer[0].implementation == {"adamw-foreach": "foreach", "adamw-fused": "fused"}.get(
        name, "for-loop"
    )
    assert_conserved(profile)


def test_foreach_temporaries_are_not_optimizer_state() -> None:
    with ampmem.profile() as profile:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        optimizer = AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            train_step(model, optimizer, torch.randn(1, 256))
    peak = profile.summary().steps[-1].peak
    assert peak.phase == "optimizer"
    assert peak.categories["optimizer_state"] == measure.state(optimizer)
    assert peak.categories["parameters"] == measure.parameters(model)
    assert peak.categories["gradients"] == measure.parameters(model)
    assert peak.temporaries_by_phase["optimizer"] >= measure.parameters(model)
    # Not only at the peak: the state of the second update is the first one's at every event of it.
    analysis = analyse(profile.recording())
    inside = (analysis.recording.events.phase == Phase.OPTIMIZER) & (analysis.recording.events.step == 1)
    assert inside.any()
    assert set(analysis.timeline.series(Category.OPTIMIZER_STATE)[1:][inside]) == {measure.state(optimizer)}


def test_state_of_any_nesting_and_class() -> None:
    class Plain:
        def __init__(self, like: Tensor) -> None:
            self.tensor = torch.ones_like(like)

    @dataclasses.dataclass(slots=True)
    class Slotted:
        tensor: Tensor
        step: int = 0

    class Nesting(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["flat"] = torch.zeros_like(p)
                        state["nested"] = {"deep": [torch.zeros(7), (torch.zeros(9), {"deeper": torch.zeros(11)})]}
                        state["plain"] = Plain(p)
                        state["slotted"] = [Slotted(torch.ones_like(p))]
                        state["queue"] = collections.deque([torch.zeros(13)])
                        state["view"] = state["flat"].view(-1)
                        state["name"] = "text"
                    p.sub_(p.grad, alpha=group["lr"])

    with ampmem.profile() as profile:
        model = small_model()
        optimizer = Nesting(model.parameters())
        for _ in range(2):
            train_step(model, optimizer, batch())
    for step in profile.summary().steps:
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(optimizer)
    tensors = len(list(model.parameters()))
    assert measure.state(optimizer) == 3 * measure.parameters(model) + tensors * (7 + 9 + 11 + 13) * 4
    assert_conserved(profile)


def test_lbfgs_with_a_closure() -> None:
    backwards = []
    with ampmem.profile() as profile:
        model = small_model()
        optimizer, inputs = LBFGS(model.parameters(), max_iter=4), batch()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            backwards.append(measure.gradients(model))
            return loss

        for _ in range(2):
            optimizer.step(closure)
    summary = profile.summary()
    assert len(backwards) > len(summary.steps) == 2
    assert summary.steps[-1].marks.after_optimizer["optimizer_state"] == measure.state(optimizer) > 0
    assert summary.steps[-1].marks.after_backward["gradients"] == backwards[-1]
    assert_conserved(profile)


# -- models -----------------------------------------------------------------------------------


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    with ampmem.profile() as profile:
        model, found = Tied(), []
        optimizer = AdamW(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: found.append(measure.gradients(model)))
        for _ in range(2):
            train_step(model, optimizer, torch.randint(50, (4, 8)))
    summary = profile.summary()
    marks = summary.steps[-1].marks
    assert summary.parameters.count == 50 * 16
    assert marks.after_optimizer["parameters"] == measure.parameters(model) == 50 * 16 * 4
    assert marks.after_backward["gradients"] == found[-1] == 50 * 16 * 4
    assert marks.after_optimizer["optimizer_state"] == measure.state(optimizer) == 2 * 50 * 16 * 4 + 4
    assert_conserved(profile)


def test_tied_gpt_holds_one_cast_copy_of_the_shared_weight() -> None:
    module = measure.workload("gpt")
    with ampmem.profile() as profile, measure.watched(module) as run:
        module.train(options("amp"), tied=True)
    marks = profile.summary().steps[-1].marks
    assert marks.after_optimizer["parameters"] == measure.parameters(*run.models)
    assert marks.after_backward["gradients"] == run.gradients[-1]
    assert marks.after_optimizer["optimizer_state"] == measure.state(*run.optimizers)
    expected = sum(weight.numel() * HALF for weight in saved_weights("gpt", run.models))
    assert marks.after_forward["cast_copies"] == expected


def test_frozen_layers_have_neither_gradients_nor_state() -> None:
    with ampmem.profile() as profile:
        model, found = small_model(), []
        model[0].requires_grad_(False)
        optimizer = AdamW(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: found.append(measure.gradients(model)))
        for _ in range(2):
            train_step(model, optimizer, batch())
    summary, trained = profile.summary(), measure.parameters(model[2])
    marks = summary.steps[-1].marks
    assert marks.after_backward["gradients"] == found[-1] == trained
    assert marks.after_optimizer["optimizer_state"] == measure.state(optimizer) == 2 * trained + 2 * 4
    assert marks.after_optimizer["parameters"] == measure.parameters(model)
    assert summary.parameters.trainable == trained // 4


def test_half_model_with_master_copies() -> None:
    with ampmem.profile() as profile:
        model = small_model().bfloat16()
        masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        optimizer = AdamW(masters)
        for _ in range(2):
            model.zero_grad()
            optimizer.zero_grad()
            loss_of(model, batch().bfloat16()).backward()
            after_backward = measure.gradients(model) + measure.total(m.grad for m in masters)
            for parameter, master in zip(model.parameters(), masters, strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
    summary = profile.summary()
    elements = sum(p.numel() for p in model.parameters())
    for step in summary.steps:
        marks = step.marks
        assert marks.after_optimizer["parameters"] == measure.parameters(model) == 2 * elements
        assert marks.after_optimizer["master_copies"] == measure.total(masters) == 4 * elements
        assert marks.after_optimizer["optimizer_state"] == measure.state(optimizer)
        assert marks.after_backward["gradients"] == after_backward == 2 * elements
        assert marks.after_optimizer["gradients"] == (2 + 4) * elements
        assert marks.after_forward["cast_copies"] == 0
    assert summary.precision.name == "as-is"
    assert_conserved(profile)


def test_gradients_taken_inside_forward() -> None:
    """A model that computes forces; all casts count, those after the inner backward too."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.last = nn.Linear(16, 24), nn.Linear(16, 40)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)
            return self.last(force)

    with ampmem.profile() as profile:
        model = Forces()
        optimizer = AdamW(model.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, torch.randn(8, 16))
        loss.backward()
        before_update = measure.gradients(model)
        optimizer.step()
    (step,) = profile.summary().steps
    assert step.marks.after_forward["cast_copies"] == (16 * 24 + 16 * 40) * HALF
    assert step.marks.after_backward["gradients"] == before_update
    assert step.marks.after_optimizer["optimizer_state"] == measure.state(optimizer)
    assert_conserved(profile)


# -- steps ------------------------------------------------------------------------------------


def test_scaler_skips_the_first_update() -> None:
    with ampmem.profile() as profile, measure.watched(accumulate) as run:
        accumulate.train(options("fp32", steps=3), scaler="on", skip_first=True)
    summary = profile.summary()
    assert [step.skipped_update for step in summary.steps] == [True, False, False]
    first = summary.steps[0].marks
    assert {marks["optimizer_state"] for marks in (first.after_forward, first.after_backward)} == {0}
    assert first.after_optimizer["optimizer_state"] == 0
    assert summary.steps[0].loss_scale == 2.0**16
    assert summary.steps[1].loss_scale == 2.0**15
    for step in summary.steps[1:]:
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(*run.optimizers) > 0
    assert summary.steps[0].marks.after_backward["gradients"] == run.gradients[-1]
    assert_conserved(profile)


def test_scaler_skips_inside_a_fused_optimizer() -> None:
    """The scaler hands a fused optimizer its verdict: ``step`` runs, and makes the state, but updates nothing."""
    with ampmem.profile() as profile:
        model = small_model()
        optimizer = AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu")
        for overflow in (True, False):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, batch()))
            (loss * float("inf") if overflow else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    summary = profile.summary()
    assert [step.skipped_update for step in summary.steps] == [True, False]
    for step in summary.steps:
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(optimizer) > 0


def test_a_round_of_two_optimizers_is_one_step() -> None:
    run = recorded("gan", "fp32")
    assert len(run.summary().steps) == 2
    assert len(run.gradients) == 4


def test_three_critic_updates_per_generator_update_are_one_step() -> None:
    with ampmem.profile() as profile:
        generator, critic = small_model(), nn.Linear(16, 1)
        generator_optimizer, critic_optimizer = Adam(generator.parameters()), Adam(critic.parameters())
        for _ in range(2):
            for _ in range(3):
                critic_optimizer.zero_grad()
                (critic(generator(batch()).detach()).mean() - critic(torch.randn(8, 16)).mean()).backward()
                critic_optimizer.step()
            generator_optimizer.zero_grad()
            (-critic(generator(batch())).mean()).backward()
            before_update = measure.gradients(generator, critic)
            generator_optimizer.step()
    summary = profile.summary()
    assert len(summary.steps) == 2
    for step in summary.steps:
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(generator_optimizer, critic_optimizer)
        assert step.marks.after_backward["gradients"] == before_update
    assert_conserved(profile)


def test_micro_batches_are_inside_one_step() -> None:
    profile = recorded("accumulate", "fp32")
    assert len(profile.summary().steps) == 2
    phases = profile.recording().phases
    for step in (0, 1):
        assert ((phases.step == step) & (phases.phase == Phase.BACKWARD)).sum() == accumulate.ACCUMULATION


def test_an_optimizer_from_before_does_not_hold_the_step_open() -> None:
    """As in a notebook, where the last cell's optimizer lives on."""
    before = small_model()
    idle = AdamW(before.parameters())
    train_step(before, idle, batch())
    with ampmem.profile() as profile:
        model = small_model()
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            train_step(model, optimizer, batch())
    assert len(profile.summary().steps) == 2


def test_prof_step_overrides_the_updates() -> None:
    with ampmem.profile() as profile:
        model = small_model()
        optimizer = AdamW(model.parameters())
        # From the first call on only the calls count, so the first update comes after it at the earliest.
        loss_of(model, batch()).backward()
        profile.step()
        for _ in range(2):
            for _ in range(2):
                train_step(model, optimizer, batch())
            profile.step()
    summary = profile.summary()
    assert [step.index for step in summary.steps] == [0, 1, 2]
    assert summary.steps[0].marks.after_optimizer is None
    for step in summary.steps[1:]:
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(optimizer)
    assert_conserved(profile)


def test_optimizers_that_step_inside_backward() -> None:
    with ampmem.profile() as profile:
        model = small_model()
        optimizers = {p: AdamW([p]) for p in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            loss_of(model, batch()).backward()
    summary = profile.summary()
    assert len(summary.steps) == 3
    assert measure.gradients(model) == 0
    for step in summary.steps:
        assert step.marks.after_backward["gradients"] == 0
        assert step.marks.after_optimizer["optimizer_state"] == measure.state(*optimizers.values())
        assert step.marks.after_optimizer["parameters"] == measure.parameters(model)
    assert_conserved(profile)
