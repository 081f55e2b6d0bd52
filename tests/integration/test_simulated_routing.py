"""What a simulated device answers about data that it does not have: checks are passed, and routing is even."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampmem.allocator.gpus import find_gpu
from ampmem.simulator.assumed import Assumed
from ampmem.simulator.start import Simulation

pytestmark = pytest.mark.slow

TOKENS, WIDTH, EXPERTS = 512, 16, 8
EVEN = "routing is assumed even: "
Route = Callable[[Tensor, Tensor, "Experts"], Tensor]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulated = Simulation(find_gpu("h100"))
    yield simulated
    simulated.end()


class Experts(nn.Module):
    """Linear experts behind a router; ``rows`` has the number of rows of each call."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.route = route
        self.rows: dict[int, int] = {}

    def run(self, expert: int, x: Tensor) -> Tensor:
        self.rows[expert] = self.rows.get(expert, 0) + len(x)
        return self.experts[expert](x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.route(x, self.gate(x), self)


def by_where(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    weights, chosen = logits.topk(2)
    out = torch.zeros_like(x)
    for i in range(EXPERTS):
        row, nth = torch.where(chosen == i)
        out[row] += weights[row, nth, None] * experts.run(i, x[row])
    return out


def by_mask(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = logits.softmax(-1).topk(2, dim=-1)[1]
    out = torch.zeros_like(x)
    for i in range(EXPERTS):
        mask = (chosen == i).any(dim=-1)
        if mask.any():
            out[mask] += experts.run(i, x[mask])
    return out


def by_hits(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    mask = F.one_hot(logits.topk(2)[1], EXPERTS + 1).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        if hit[0] == EXPERTS:
            continue
        _, token = torch.where(mask[hit[0]])
        out.index_add_(0, token, experts.run(int(hit[0]), x[token]))
    return out


def by_counts(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = logits.topk(2)[1]
    counts = chosen.new_zeros((len(chosen), EXPERTS))
    counts.scatter_(1, chosen, 1)
    order = chosen.view(-1).argsort()
    parts = x[order // 2].split(counts.sum(0).cpu().tolist())
    out = torch.cat([experts.run(i, part) for i, part in enumerate(parts)])
    return torch.zeros_like(x).index_add_(0, order // 2, out)


def by_float_counts(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = logits.argmax(1)
    counts = torch.zeros(EXPERTS, device="cuda").scatter_add_(0, chosen, torch.ones(TOKENS, device="cuda"))
    out = torch.zeros_like(x)
    for i in range(EXPERTS):
        if counts[i] > 0:
            out = out.masked_scatter((chosen == i)[:, None], experts.run(i, x[chosen == i]))
    return out


def by_bincount(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = logits.max(-1).indices
    parts = x[chosen.argsort(stable=True)].split(chosen.bincount(minlength=EXPERTS).tolist())
    return torch.cat([experts.run(i, part) for i, part in enumerate(parts)])


def by_histogram(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = logits.argsort(dim=-1, descending=True)[:, 0]
    parts = x.split(torch.histc(chosen, bins=EXPERTS, min=0, max=EXPERTS - 1).tolist())
    return torch.cat([experts.run(i, part) for i, part in enumerate(parts)])


def by_unique(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    out = torch.zeros_like(x)
    for expert in chosen.unique():
        rows = (chosen == expert).nonzero().squeeze(1)
        if rows.numel():
            out = out.index_copy(0, rows, experts.run(int(expert), x[rows]))
    return out


def by_list(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    rows: dict[int, list[int]] = {}
    for row, expert in enumerate(logits.argmax(-1).tolist()):
        rows.setdefault(expert, []).append(row)
    return torch.cat([experts.run(expert, x[found]) for expert, found in rows.items()])


def by_capacity(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    chosen = F.one_hot(logits.argmax(-1), EXPERTS)
    chosen = chosen * (chosen.cumsum(0) <= TOKENS // EXPERTS)
    mask = chosen.bool()
    out = x.clone()
    for i in mask.sum(0).nonzero(as_tuple=True)[0]:
        out[mask[:, i]] = experts.run(int(i), x[mask[:, i]])
    return out


def by_padded_choice(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    """As NLLB-MoE: padding that nobody knows is taken out of the mask."""
    chosen = F.one_hot(logits.argmax(-1), EXPERTS) * (torch.rand(TOKENS, 1, device="cuda") > 0).long()
    out = torch.zeros_like(x)
    for i in torch.greater(chosen.sum(0), 0).nonzero():
        (rows,) = torch.where(chosen[:, i[0]])
        out.index_add_(0, rows, experts.run(int(i), x[rows]))
    return out


def by_gates(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    """As Shazeer's dispatcher: whoever has a gate is chosen."""
    top, chosen = logits.topk(3)
    gates = torch.zeros_like(logits).scatter(1, chosen[:, :2], top[:, :2].softmax(1))
    rows = gates.nonzero()[gates.nonzero().sort(0)[1][:, 1], 0]
    parts = x[rows].split((gates > 0).sum(0).tolist())
    out = torch.cat([experts.run(i, part) for i, part in enumerate(parts)])
    return torch.zeros_like(x).index_add_(0, rows, out)


def by_gates_in_place(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    top, chosen = logits.topk(2)
    gates = torch.zeros_like(logits)
    gates.scatter_(1, chosen, top.softmax(1))
    out = torch.zeros_like(x)
    for i in range(EXPERTS):
        rows = gates[:, i].nonzero().squeeze(1)
        out[rows] += experts.run(i, x[rows])
    return out


def by_second_choice(x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    """As GShard: the second choice is the first one without the first choice."""
    first = F.one_hot(logits.argmax(-1), EXPERTS).bool()
    second = F.one_hot(logits.masked_fill(first, -math.inf).argmax(-1), EXPERTS).bool()
    out = torch.zeros_like(x)
    for i in range(EXPERTS):
        rows = torch.where(first[:, i] | second[:, i])[0]
        if rows.numel() == 0:
            continue
        out[rows] += experts.run(i, x[rows])
    return out


ROUTES: dict[Route, int] = {
    by_padded_choice: 1,
    by_gates: 2,
    by_gates_in_place: 2,
    by_second_choice: 2,
    by_where: 2,
    by_mask: 2,
    by_hits: 2,
    by_counts: 2,
    by_float_counts: 1,
    by_bincount: 1,
    by_histogram: 1,
    by_unique: 1,
    by_list: 1,
    by_capacity: 1,
}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_each_expert_gets_the_same_number_of_rows_without_an_assumption(simulation: Simulation, route: Route) -> None:
    experts = Experts(route).cuda()
    experts(torch.randn(TOKENS, WIDTH, device="cuda")).sum().backward()
    assert experts.rows == dict.fromkeys(range(EXPERTS), TOKENS * ROUTES[route] // EXPERTS)
    assert all(parameter.grad is not None for parameter in experts.experts.parameters())
    (note,) = [text for text in simulation.device.assumptions if text.startswith(EVEN)]
    assert f" at {__file__}:" in note
    assert not any(text.startswith("a yes-or-no question") for text in simulation.device.assumptions)
    assert not simulation.device.warnings


def test_the_peak_is_that_of_the_fraction_which_a_user_would_give() -> None:
    def peak(assumed: Assumed) -> int:
        simulated = Simulation(find_gpu("h100"), assumed=assumed)
        try:
            experts = Experts(by_where).cuda()
            experts(torch.randn(TOKENS, WIDTH, device="cuda")).sum().backward()
            return torch.cuda.max_memory_allocated()
        finally:
            simulated.end()

    assert peak(Assumed()) == peak(Assumed(fractions={"nonzero": 1 / EXPERTS}))
    assert peak(Assumed()) != peak(Assumed(fractions={"nonzero": 2 / EXPERTS}))


ACCURACIES: list[Callable[[Tensor, Tensor], object]] = [
    lambda logits, labels: (logits.argmax(1) == labels).sum().item(),
    lambda logits, labels: (logits.argmax(1) == labels).float().mean().item(),
    lambda logits, labels: logits.max(1)[1].eq(labels).sum().cpu(),
    lambda logits, labels: logits.topk(5)[1].t().eq(labels[None]).reshape(-1).float().sum(0).tolist(),
    lambda logits, labels: logits.argmax(1).cpu().numpy(),
    lambda logits, labels: logits.argmax(1).tolist(),
    lambda logits, labels: logits.argmax(1).eq(labels).cpu(),
    lambda logits, labels: torch.bincount(labels * EXPERTS + logits.argmax(1), minlength=EXPERTS**2).cpu(),
]


@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_a_classifier_s_accuracy_is_not_routing(
    simulation: Simulation, accuracy: Callable[[Tensor, Tensor], object]
) -> None:
    model = nn.Linear(WIDTH, EXPERTS).cuda()
    labels = torch.randint(EXPERTS, (TOKENS,)).cuda()
    accuracy(model(torch.randn(TOKENS, WIDTH, device="cuda")), labels)
    (note,) = simulation.device.assumptions
    assert note.startswith("choices that the script read from the device were made up: ")
    assert not simulation.device.warnings


def test_a_choice_of_fewer_rows_than_classes_says_nothing(simulation: Simulation) -> None:
    logits = torch.randn(4, 50_000, device="cuda")
    assert logits.argmax(-1).tolist() == [1] * 4  # as any number that nobody knows
    assert not any(text.startswith(EVEN) for text in simulation.device.assumptions)


LARGE = 1 << 20
CHECKS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.isfinite(x).all(),
    lambda x: ~torch.isnan(x).any(),
    lambda x: ~(x != x).any(),
    lambda x: (x == x).all(),
    lambda x: ~torch.isinf(x).any(),
    lambda x: (x.abs() < math.inf).all(),
    lambda x: (torch.isnan(x) | torch.isinf(x)).sum() == 0,
    lambda x: torch.isnan(x).logical_not().all(),
    lambda x: ~torch.isnan(x.sum()),
    lambda x: (x > 0).any(),
    lambda x: (x > 0).any(dim=-1).any(),
    lambda x: (x > 0).all(),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, LARGE])
def test_a_check_is_passed_as_in_a_healthy_run(
    simulation: Simulation, check: Callable[[Tensor], Tensor], size: int
) -> None:
    assert check(torch.randn(size, 1, device="cuda"))


def test_an_answer_that_would_raise_is_not_given(simulation: Simulation) -> None:
    x = torch.randn(8, device="cuda")
    if (x < 0).any():
        raise AssertionError
    if x.sum() > 3 or not x.max() < 5:
        raise AssertionError
    rounds = 0
    while (x > 2).any():
        rounds += 1
    assert rounds == 1


def distributions(x: Tensor) -> Iterator[torch.distributions.Distribution]:
    d = torch.distributions
    yield d.Categorical(logits=x)
    yield d.Categorical(probs=x.softmax(-1))
    yield d.Normal(x, x.exp())
    yield d.Independent(d.Normal(x, x.exp()), 1)
    yield d.TransformedDistribution(d.Normal(x, x.exp()), [d.TanhTransform(cache_size=1)])
    yield d.Bernoulli(logits=x)
    yield d.Beta(x.exp(), x.exp())
    yield d.Dirichlet(x.exp())
    yield d.OneHotCategorical(logits=x)
    yield d.Poisson(x.exp())
    yield d.LogNormal(x, x.exp())


def test_distributions_take_their_arguments_and_samples(simulation: Simulation) -> None:
    leaf = torch.randn(32, 4, device="cuda", requires_grad=True)
    for each in distributions(leaf):
        each.log_prob(each.sample()).mean().backward()
    assert leaf.grad is not None
