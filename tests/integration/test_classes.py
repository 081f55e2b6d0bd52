"""What programs of other kinds than one model and one optimizer hold: each category against sums over tensors."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from support import measure, precisions
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

import ampmem
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category

pytestmark = pytest.mark.usefixtures("clean_start")
clean_start = measure.clean_start
alone = precisions.alone

Program = Callable[[], Mapping[str, int]]


def mlp(width: int = 64, out: int = 8) -> nn.Sequential:
    """A small model of two layers."""
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, out))


def recorded(program: Program) -> tuple[Summary, Mapping[str, int]]:
    """The summary of ``program``, and what it says itself that is alive at its end."""
    torch.manual_seed(0)
    with ampmem.profile() as prof:
        sums = program()
    return prof.summary(), sums


def after_update(summary: Summary) -> dict[str, int]:
    """Bytes by category after the last update."""
    live = summary.steps[-1].marks.after_optimizer
    assert live is not None
    return {str(category): size for category, size in live.items() if size}


def all_explained(summary: Summary) -> bool:
    """Whether nothing of the static model is left over, in any step's verdict."""
    return bool(summary.static_model) and all(component.holds for component in summary.static_model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], steps: int = 3) -> None:
    """Steps that leave the gradients in place."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(torch.randn(4, 32))).backward()
        optimizer.step()


def averaged(*, evaluated: bool = False, by_torch: bool = False, unseen: bool = False) -> Program:
    """An average of the weights beside the model: of timm's kind, torch's own, or one that nothing registers."""

    def program() -> dict[str, int]:
        model = mlp()
        average: nn.Module = AveragedModel(model) if by_torch else nn.ModuleDict({"module": copy.deepcopy(model)})
        if unseen:
            average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            train(model, optimizer, lambda out: out.square().mean(), steps=1)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                if evaluated:
                    average["module"](torch.randn(4, 32))  # type: ignore[operator, index]
        return sums_of([model], optimizer, [average])

    return program


_ALIVE: list[nn.Module] = []
"""What the last program has made: it is there until the recording has ended."""


def sums_of(models: list[nn.Module], optimizer: torch.optim.Optimizer, untrained: list[nn.Module]) -> dict[str, int]:
    """The sums over what is trained, and over what is not."""
    _ALIVE[:] = [*models, *untrained]
    return {
        "parameters": measure.parameters(*models),
        "gradients": measure.gradients(*models),
        "optimizer_state": measure.state(optimizer),
        "untrained": measure.parameters(*untrained),
        "count": sum(p.numel() for model in models for p in model.parameters()),
        "others": sum(p.numel() for model in untrained for p in model.parameters()),
    }


def teacher(*, frozen: bool) -> Program:
    """A teacher of another width that runs without gradients, or frozen with gradients on."""

    def program() -> dict[str, int]:
        student, known = mlp(), mlp(width=256)
        known.requires_grad_(not frozen)
        optimizer = torch.optim.AdamW(student.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            batch = torch.randn(4, 32)
            with torch.set_grad_enabled(frozen):
                wanted = known(batch).detach()
            (student(batch) - wanted).square().mean().backward()
            optimizer.step()
        return sums_of([student], optimizer, [known])

    return program


class Learner(nn.Module):
    """As BYOL and MoCo have it: an online network and its slow twin in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.online = mlp()
        self.target = copy.deepcopy(self.online)

    def forward(self, batch: Tensor) -> Tensor:
        """The distance of the two."""
        with torch.no_grad():
            wanted = self.target(batch)
        distance: Tensor = self.online(batch) - wanted
        return distance


def slow_twin() -> dict[str, int]:
    """The twin is a part of the module that is trained, and runs without gradients."""
    learner = Learner()
    optimizer = torch.optim.AdamW(learner.online.parameters())
    train(learner, optimizer, lambda distance: distance.square().mean())
    return sums_of([learner.online], optimizer, [learner.target])


@pytest.mark.parametrize(
    "program",
    [
        averaged(),
        averaged(evaluated=True),
        averaged(by_torch=True),
        averaged(unseen=True),
        teacher(frozen=True),
        teacher(frozen=False),
        slow_twin,
    ],
    ids=["ema", "evaluated ema", "swa", "unregistered copy", "frozen teacher", "teacher", "byol"],
)
def test_what_nothing_trains_is_counted_apart(program: Program) -> None:
    summary, sums = recorded(program)
    live = after_update(summary)
    for category in ("parameters", "gradients", "optimizer_state", "untrained"):
        assert live[category] == sums[category], category
    counts = summary.parameters
    assert (counts.count, counts.bytes) == (sums["count"], sums["parameters"])
    assert (counts.untrained_count, counts.untrained_bytes) == (sums["others"], sums["untrained"])
    assert all_explained(summary)
    assert summary.static_recipe is not None and summary.static_recipe.bytes_per_param == 16


def test_frozen_weights_that_gradients_go_through_are_the_models_own() -> None:
    def program() -> dict[str, int]:
        base = mlp()
        base[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(base[2].parameters())
        train(base, optimizer, lambda out: out.square().mean())
        return {"parameters": measure.parameters(base)}

    summary, sums = recorded(program)
    assert after_update(summary)["parameters"] == sums["parameters"] == summary.parameters.bytes
    assert summary.parameters.untrained_bytes == 0


class Caches(nn.Module):
    """Makes a mask and a table in its first forward, and keeps its newest hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.mask: Tensor | None = None
        self.tables: dict[str, Tensor] = {}
        self.hidden: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        """As attention does with its mask: autograd saves that."""
        if self.mask is None:
            self.mask = torch.ones(64, 64, dtype=torch.bool).triu(1)
            self.tables["cos"] = torch.randn(64, 64)
        self.hidden = self.layers[1](self.layers[0](batch)).masked_fill(self.mask[:4], 0.0) * self.tables["cos"][:4]
        out: Tensor = self.layers[2](self.hidden)
        return out


def test_what_a_modules_attribute_keeps_from_the_first_forward_on_is_a_buffer() -> None:
    def program() -> dict[str, int]:
        model = Caches()
        _ALIVE[:] = [model]
        train(model, torch.optim.SGD(model.parameters(), 0.1), lambda out: out.square().mean())
        return {"buffers": measure.total([model.mask, *model.tables.values()]), "hidden": 4 * 64 * 4}

    summary, sums = recorded(program)
    live = after_update(summary)
    assert live["buffers"] == sums["buffers"] == 64 * 64 * 5
    assert live["activations"] == sums["hidden"]  # it is made anew in each step
    names = {entry.name for entry in summary.top if entry.category == "buffers"}
    assert names == {"mask", "tables['cos']"}


class OwnAdam:
    """As Keras has it: no optimizer of torch's, whose moments are made in the first forward."""

    class Variable:
        """What wraps a tensor."""

        def __init__(self, tensor: Tensor) -> None:
            self._value = tensor

    def __init__(self) -> None:
        self._momentums: list[OwnAdam.Variable] = []

    def build(self, parameters: list[nn.Parameter]) -> None:
        """Make the moments, once."""
        if not self._momentums:
            self._momentums += [self.Variable(torch.zeros_like(each)) for each in parameters]

    def step(self, parameters: list[nn.Parameter]) -> None:
        """One update."""
        with torch.no_grad():
            for each, moment in zip(parameters, self._momentums, strict=True):
                assert each.grad is not None
                moment._value.lerp_(each.grad, 0.1)
                each.sub_(moment._value)

    def zero_grad(self, parameters: list[nn.Parameter]) -> None:
        """Let the gradients go."""
        for each in parameters:
            each.grad = None


def test_what_another_librarys_optimizer_keeps_is_optimizer_state() -> None:
    model, optimizer = mlp(), OwnAdam()
    parameters = list(model.parameters())

    def program() -> dict[str, int]:
        model.register_forward_pre_hook(lambda *_: optimizer.build(parameters))
        for _ in range(3):
            optimizer.zero_grad(parameters)
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step(parameters)
        return {"optimizer_state": measure.total(each._value for each in optimizer._momentums)}

    summary, sums = recorded(program)
    live = summary.steps[-1].marks.after_backward
    assert live is not None
    assert live[Category.OPTIMIZER_STATE] == sums["optimizer_state"] == measure.parameters(model)
    assert live[Category.ACTIVATIONS] == 4  # the loss
    assert all_explained(summary)


def fast_weights() -> dict[str, int]:
    """MAML: the inner loop's weights stand in for the module's own."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            loss = functional_call(model, weights, (torch.randn(4, 32),)).square().mean()
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {key: weights[key] - 0.01 * grad for key, grad in zip(weights, found, strict=True)}
            del loss, found
        functional_call(model, weights, (torch.randn(4, 32),)).square().mean().backward()
        optimizer.step()
    return {
        "parameters": measure.parameters(model),
        "gradients": measure.gradients(model),
        "activations": measure.total(weights.values()),
    }


def swapped_data() -> dict[str, int]:
    """The master weights are kept beside the model, whose ``data`` is low precision in forward and backward alone."""
    model = mlp()
    parameters = list(model.parameters())
    masters = [each.data.clone() for each in parameters]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(3):
        optimizer.zero_grad()
        for each, master in zip(parameters, masters, strict=True):
            each.data = master.bfloat16()
        model(torch.randn(4, 32).bfloat16()).float().square().mean().backward()
        for each, master in zip(parameters, masters, strict=True):
            assert each.grad is not None
            gradient, each.grad = each.grad.float(), None
            each.data = master
            each.grad = gradient
            del gradient
        optimizer.step()
    return {
        "master_copies": measure.total(masters),
        "gradients": measure.gradients(model),
        "optimizer_state": measure.state(optimizer),
    }


def flat_master_of_some() -> dict[str, int]:
    """The weights of two layers, with others in between, are trained through one flat float32 tensor."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16), nn.Linear(16, 16)).bfloat16()
    some = [model[0].weight, model[2].weight]
    flat = nn.Parameter(torch.cat([each.detach().float().view(-1) for each in some]))
    rest = [each for each in model.parameters() if all(each is not other for other in some)]
    optimizers = [torch.optim.AdamW([flat]), torch.optim.SGD(rest, 0.1)]
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
        flat.grad = torch.cat([each.grad.float().view(-1) for each in some])
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for each, master in zip(some, flat.split([each.numel() for each in some]), strict=True):
                each.copy_(master.view_as(each))
    return {
        "parameters": measure.parameters(model),
        "master_copies": measure.total([flat]),
        "gradients": measure.gradients(model) + measure.total([flat.grad]),
        "optimizer_state": measure.state(*optimizers),
    }


class Sam(torch.optim.Optimizer):
    """Keeps a copy of the parameters from one step to the next, and puts it back."""

    def __init__(self, parameters: list[nn.Parameter], *, swaps: bool) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        self.swaps = swaps

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        for each in self.param_groups[0]["params"]:
            self.state[each]["old_p"] = each.data.clone()
            each.add_(each.grad, alpha=0.1)

    @torch.no_grad()
    def second_step(self) -> None:
        """Put back, and update."""
        for each in self.param_groups[0]["params"]:
            if self.swaps:
                each.data = self.state[each]["old_p"]
            else:
                each.copy_(self.state[each]["old_p"])
        self.base.step()


def sharpness(*, swaps: bool) -> Program:
    """Two forwards and backwards in a step."""

    def program() -> dict[str, int]:
        model = mlp()
        optimizer = Sam(list(model.parameters()), swaps=swaps)
        _ALIVE[:] = [model]
        for _ in range(3):
            for update in (optimizer.first_step, optimizer.second_step):
                model.zero_grad()
                model(torch.randn(4, 32)).square().mean().backward()
                update()
        copies = [state["old_p"] for state in optimizer.state.values()]
        return {
            "parameters": measure.parameters(model),
            "gradients": measure.gradients(model),
            "optimizer_state": measure.state(optimizer.base) + (0 if swaps else measure.total(copies)),
        }

    return program


def gradients_of_inputs() -> dict[str, int]:
    """Adversarial training: the gradient of the batch makes the next batch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        batch = torch.randn(4, 32, requires_grad=True)
        model(batch).square().mean().backward()
        assert batch.grad is not None
        attacked = (batch + batch.grad.sign()).detach()
        optimizer.zero_grad()
        model(attacked).square().mean().backward()
        optimizer.step()
    assert batch.grad is not None
    return {
        "parameters": measure.parameters(model),
        "gradients": measure.gradients(model) + measure.total([batch.grad]),
        "inputs": measure.total([batch, attacked]),
    }


def doubles() -> dict[str, int]:
    """A float64 model under autocast, which casts none of it."""
    model = mlp().double()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 32, dtype=torch.float64)).square().mean()
        loss.backward()
        del loss
        optimizer.step()
    return {
        "parameters": measure.parameters(model),
        "gradients": measure.gradients(model),
        "optimizer_state": measure.state(optimizer),
    }


KEPT = "copies of parameters that an optimizer keeps to put them back: old_p"
DOUBLES = "float64 parameters, which autocast does not cast"


@pytest.mark.parametrize(
    ("program", "rest", "term"),
    [
        (fast_weights, set(), ""),
        (flat_master_of_some, set(), "parameters without a master copy in this process"),
        (swapped_data, set(), "parameters freed before this mark"),
        (sharpness(swaps=True), {"inputs"}, KEPT),
        (sharpness(swaps=False), {"inputs"}, ""),
        (gradients_of_inputs, set(), "gradients of inputs"),
        (doubles, set(), DOUBLES),
    ],
    ids=[
        "maml",
        "flat master of some",
        "swapped data",
        "sam",
        "sam that copies back",
        "gradients of inputs",
        "float64 under autocast",
    ],
)
def test_each_category_is_the_sum_over_its_tensors(program: Program, rest: set[str], term: str) -> None:
    summary, sums = recorded(program)
    live = after_update(summary)
    assert {category: size for category, size in live.items() if category not in rest} == sums
    assert all_explained(summary)
    if term:
        assert term in {each.why for component in summary.static_model for each in component.terms}


def test_swapped_data_is_half_precision_with_a_master() -> None:
    summary, sums = recorded(swapped_data)
    live = summary.steps[-1].marks.after_forward
    assert live is not None
    assert live[Category.PARAMETERS] * 2 == live[Category.MASTER_COPIES] == sums["master_copies"]
    assert summary.parameters.bytes == live[Category.PARAMETERS]
    assert summary.static_recipe is not None and summary.static_recipe.precision == "half-master-fp32-gradients"
    assert (summary.precision.name, summary.static_recipe.bytes_per_param) == ("as-is", 18)


class FourBit(nn.Linear):
    """Packs two weights into a byte and keeps a scale for each 64, as bitsandbytes does; trained by its low rank."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        blocks = self.weight.data.view(-1, 64)
        self.scale = blocks.abs().amax(1)
        levels = ((blocks / self.scale[:, None] + 1) * 7.5).round().to(torch.uint8).view(-1)
        self.weight.requires_grad_(False)
        self.weight.data = levels[::2] << 4 | levels[1::2]
        self.low_rank = nn.Parameter(torch.zeros(64, 64))

    def forward(self, batch: Tensor) -> Tensor:
        """Unpacks the weights for the length of a matrix product."""
        levels = torch.stack([self.weight >> 4, self.weight & 15], 1).view(-1, 64)
        weight = (levels.float() / 7.5 - 1) * self.scale[:, None]
        return nn.functional.linear(batch, weight, self.bias) + batch @ self.low_rank


def test_weights_packed_into_bytes_are_parameters_and_their_scales_are_the_modules() -> None:
    def program() -> dict[str, int]:
        model = nn.Sequential(FourBit(), FourBit())
        _ALIVE[:] = [model]
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        return {
            "parameters": measure.parameters(model),
            "gradients": measure.gradients(model),
            "optimizer_state": measure.state(optimizer),
            "buffers": measure.total([model[0].scale, model[1].scale]),
        }

    summary, sums = recorded(program)
    assert after_update(summary) == sums
    packed = 2 * 64 * 64 // 2
    assert summary.parameters.bytes == sums["parameters"] == packed + 2 * (64 + 64 * 64) * 4
    assert all_explained(summary)


class Kept:
    """What a script keeps beside its training, in the ways that scripts do."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [each.detach().clone() for each in model.parameters()]
        self.metric = {"states": [torch.zeros(900) for _ in range(3)]}


class Remembers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*mlp())
        self.cache = [torch.zeros(2000) for _ in range(4)]


def train_beside_others(kept_model: list[nn.Module]) -> ampmem.Profile:
    """Training beside a checkpoint, copies of the weights, a cache, states of a metric, and a replay buffer."""
    model = Remembers()
    checkpoint = {"model": {name: each.clone() for name, each in model.state_dict().items()}, "step": 3}
    teacher = copy.deepcopy(mlp()).requires_grad_(False)
    kept, replay = Kept(model), torch.zeros(5000)
    with ampmem.profile() as prof:
        train(model, torch.optim.AdamW(model.parameters()), lambda out: out.square().mean())
    kept_model.append(model)
    del checkpoint, teacher, kept, replay
    return prof


def test_who_holds_what_training_does_not_need_is_named_with_its_line() -> None:
    model: list[nn.Module] = []
    summary = train_beside_others(model).summary()
    size = measure.total(model[0].parameters())
    assert {each.holder: (each.category, each.bytes, each.tensors) for each in summary.holders} == {
        "checkpoint['model']": (Category.OTHER, size, 4),
        "kept.shadow": (Category.OTHER, size, 4),
        "teacher": (Category.UNTRAINED, size, 4),
        "model.cache": (Category.BUFFERS, 4 * 8000, 4),
        "replay": (Category.OTHER, 20_000, 1),
        "kept.metric['states']": (Category.OTHER, 3 * 3600, 3),
    }
    first = train_beside_others.__code__.co_firstlineno
    places = {each.holder: each.place for each in summary.holders}
    assert places["checkpoint['model']"] == f"test_classes.py:{first + 3} (in train_beside_others)"
    assert places["kept.shadow"] == places["replay"] == f"test_classes.py:{first + 5} (in train_beside_others)"


def test_a_parameter_that_keeps_the_flat_weights_of_others_is_named() -> None:
    torch.manual_seed(0)
    flat, other = torch.zeros(3000), nn.Linear(32, 8)
    other.bias = nn.Parameter(flat[:8])
    del flat
    with ampmem.profile() as prof:
        train(other, torch.optim.SGD(other.parameters(), lr=0.1), lambda out: out.square().mean())
    (held,) = (each for each in prof.summary().holders if each.category is Category.PARAMETERS)
    assert (held.holder, held.bytes) == ("bias", (3000 - 8) * 4)
