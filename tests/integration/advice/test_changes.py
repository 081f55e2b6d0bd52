"""Advice is followed here: each change is made, and the peak falls by what the finding has said."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampmem
from ampmem.analysis.findings.base import NOTABLE_BYTES
from ampmem.analysis.summary import Summary
from ampmem.units import format_bytes

pytestmark = pytest.mark.slow

STEPS = 3
SCALARS = 16
"""Bytes of what a change that is about large tensors leaves in place, such as a loss."""


def autocast(**options: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def low_weights_under_autocast(changed: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1000)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with nullcontext() if changed else autocast():
            loss = F.cross_entropy(model(torch.randn(256, 64, dtype=torch.bfloat16)), torch.zeros(256).long())
        loss.backward()
        optimizer.step()


def foreach(changed: bool) -> None:
    """The largest parameter is most of the model: ``foreach=False`` would take more, ``fused`` takes nothing."""
    model = nn.Sequential(nn.Embedding(2000, 64), nn.Flatten(), nn.Linear(64, 64))
    how = {"fused": True} if changed else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 2000, (8, 1))).square().mean().backward()
        optimizer.step()


def foreach_of_a_loaded_state(changed: bool) -> None:
    """``load_state_dict`` puts the saved setting back, so the option must be in the loaded state."""
    model = nn.Sequential(nn.Embedding(2000, 64), nn.Flatten(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    zeros = [torch.zeros_like(each) for each in model.parameters()]
    states = {place: {"step": torch.ones(()), "exp_avg": zero, "exp_avg_sq": zero} for place, zero in enumerate(zeros)}
    saved = optimizer.state_dict() | {"state": copy.deepcopy(states)}
    del zeros, states
    if changed:
        for group in saved["param_groups"]:
            group["fused"], group["foreach"] = True, None
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.load_state_dict(saved)
    del saved
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 2000, (8, 1))).square().mean().backward()
        optimizer.step()


def logits(changed: bool) -> None:
    """A variable holds the logits through backward, which does not need them."""
    model = nn.Sequential(nn.Embedding(2048, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2048))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        logits = model(torch.randint(0, 2048, (256,)))
        loss = F.cross_entropy(logits * 1.0, torch.randint(0, 2048, (256,)))
        if changed:
            del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shrunk_loss(changed: bool) -> None:
    """The loss is a number in the memory of the losses of all elements, which PyTorch's mse_loss shrinks to it."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = torch.randn(512, 512)
        loss = F.mse_loss(model(inputs), inputs)
        if changed:
            loss = loss * 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Returning(nn.Module):
    """As a language model that computes its loss in forward: the peak is there, with the step before's logits."""

    def __init__(self, output: type[dict[str, Tensor]] = dict) -> None:
        super().__init__()
        self.body, self.head, self.output = nn.Embedding(2048, 32), nn.Linear(32, 2048), output

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(tokens))
        shifted = logits[:-1].contiguous()
        return self.output(loss=F.cross_entropy(shifted, tokens[1:]), logits=logits)


def logits_of_a_loss_in_forward(changed: bool) -> None:
    model = Returning()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss, logits = model(torch.randint(0, 2048, (256,))).values()
        if changed:
            del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Output(OrderedDict[str, Tensor]):
    """As that of transformers: its items are attributes, too, and setting one to ``None`` leaves the item."""

    def __post_init__(self) -> None:
        self.__dict__.update(self)


def entry_of_an_output(changed: bool) -> None:
    """The loss is in the same output, so that the output itself must stay."""
    model = Returning(Output)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        out: Any = model(torch.randint(0, 2048, (256,)))
        if changed:
            out["logits"] = None
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(changed: bool) -> None:
    """Each micro-batch's logits are held through its own backward."""
    model = nn.Sequential(nn.Embedding(2048, 32), nn.Linear(32, 2048))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for _ in range(2):
            logits = model(torch.randint(0, 2048, (256,)))
            loss = F.cross_entropy(logits * 1.0, torch.randint(0, 2048, (256,)))
            if changed:
                del logits
            (loss / 2).backward()
            logits = None
        optimizer.step()
        optimizer.zero_grad()


def several_holders(changed: bool) -> None:
    """The same logits are in two variables: both must go."""
    model = nn.Sequential(nn.Embedding(2048, 32), nn.Linear(32, 2048))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        logits = outputs = model(torch.randint(0, 2048, (256,)))
        loss = F.cross_entropy(logits * 1.0, torch.randint(0, 2048, (256,)))
        if changed:
            del logits, outputs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation_with_a_graph(changed: bool) -> None:
    """A variable keeps the graph of an evaluation, with autocast's copy of the weight, through the next step."""
    layer, head = nn.Linear(256, 256), nn.Linear(256, 256)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()])
    for step in range(STEPS + 1):
        with autocast():
            loss = head(layer(torch.randn(16, 256))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with autocast(), torch.no_grad() if changed else nullcontext():
                kept = torch.randn(64, 256)
                for _ in range(20):
                    kept = torch.tanh(layer(kept))


def evaluation_with_gradients_on(changed: bool) -> None:
    """The graph of each batch lives until its number is taken."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(512, 128)
    for _ in range(STEPS):
        model(batch[:16]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad() if changed else nullcontext():
            for _ in range(2):
                (model(batch) * 1).sum().item()


def kept_results(changed: bool) -> None:
    """A list keeps the result of each batch, through the next evaluation."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(128, 64)
    for _ in range(STEPS):
        model(batch[:16]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept: list[Tensor | float] = []
        with torch.no_grad():
            for _ in range(5):
                result = model(batch)
                kept.append(result.sum().item() if changed else result)
                del result


class Metric(nn.Module):
    """Keeps what it is given, as a metric of torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = None
        self.kept: dict[str, list[Tensor]] = {"results": []}


class Evaluation:
    """Keeps each batch's result in a metric: two levels below the variable ``self`` are its lists."""

    def __init__(self) -> None:
        self.metric = Metric()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))

    def train(self, *, changed: bool) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        batch = torch.randn(128, 64)
        for _ in range(STEPS):
            self.model(batch[:16]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.metric.kept["results"] = []
            with torch.no_grad():
                for _ in range(5):
                    result = self.model(batch)
                    self.metric.kept["results"].append(result.sum() if changed else result)
                    del result


def results_in_a_metric(changed: bool) -> None:
    """A metric that an object holds keeps the result of each batch, in a list that a dictionary holds."""
    Evaluation().train(changed=changed)


def concatenated_results(changed: bool) -> None:
    """Each batch's result is concatenated with those before, which exist twice for a moment."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(128, 64)
    for _ in range(STEPS):
        model(batch[:16]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = torch.empty(0, 256)
        with torch.no_grad():
            for _ in range(5):
                if changed:
                    model(batch).sum().item()
                else:
                    kept = torch.cat([kept, model(batch)])


def late_gradients(changed: bool) -> None:
    """Gradients are dropped only when the next forward is over, which is where the peak is."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = torch.randn(512, 64)
        loss = (model(inputs) - inputs.repeat(16, 1).cos().view(16, 512, 64).mean(0)).square().mean()
        if not changed:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if changed:
            optimizer.zero_grad()


def zeroed_in_place(changed: bool) -> None:
    """Gradients that are filled with zeros are there in the next forward, which is where the peak is."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = torch.randn(512, 64)
        loss = (model(inputs) - inputs.repeat(16, 1).cos().view(16, 512, 64).mean(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=changed)


def outputs_of_the_step_before(changed: bool) -> None:
    """A variable holds what the model gave until the next forward, which is where the peak is, assigns it anew."""
    model = nn.Linear(32, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        large = torch.ones(2048, 2048)
        del large
        outputs = {"logits": model(torch.randn(256, 32))}
        outputs["logits"].square().mean().backward()
        if changed:
            del outputs
        optimizer.step()
        optimizer.zero_grad()


def loss_in_chunks(changed: bool) -> None:
    """The float32 copies of the logits are most of the peak."""
    model = nn.Linear(32, 4096)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def part(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")

    for _ in range(STEPS):
        inputs, targets = torch.randn(512, 32), torch.randint(0, 4096, (512,))
        with autocast():
            out = model(inputs)
            if changed:
                pairs = zip(out.chunk(8), targets.chunk(8), strict=True)
                loss = sum(checkpoint(part, *pair, use_reentrant=False) for pair in pairs) / 512
            else:
                loss = part(out, targets) / 512
            del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def softmax(changed: bool) -> None:
    """Attention written by hand keeps its weights in float32."""
    model = nn.Linear(64, 192)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        with autocast():
            q, k, v = model(torch.randn(2, 4, 256, 64)).chunk(3, -1)
            if changed:
                out = F.scaled_dot_product_attention(q, k, v)
            else:
                out = torch.softmax(q @ k.transpose(-2, -1) / 8, -1, dtype=torch.float32).to(q.dtype) @ v
            loss = out.float().square().mean()
            del q, k, v, out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def cache_on(changed: bool) -> None:
    """Each use of a weight makes a copy of its own, and autograd keeps them all."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        with autocast(cache_enabled=changed):
            hidden = torch.randn(4, 256, requires_grad=True)
            for _ in range(6):
                hidden = model(hidden)
            loss = hidden.float().square().mean()
            del hidden
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_inside(changed: bool) -> None:
    """Nobody but autocast's cache needs the copy of the first weight, which lives through backward."""
    model = nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 256, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = torch.randn(8, 512)
        with autocast():
            loss = model(inputs).float().square().mean()
            if not changed:
                loss.backward()
        if changed:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def region_around_the_loop(changed: bool) -> None:
    """The cache keeps its copies through the update, which is where the peak is."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with nullcontext() if changed else autocast():
        for _ in range(STEPS):
            with autocast() if changed else nullcontext():
                loss = model(torch.randn(4, 128)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def graph_kept(changed: bool) -> None:
    """The graph of a result that no backward starts from keeps the copies of the weights through the update."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        with autocast():
            loss = model(torch.randn(4, 128)).float().square().mean()
        loss.backward()
        with autocast():
            kept = model(torch.randn(4, 128))
        if changed:
            kept = kept.detach()
        optimizer.step()
        optimizer.zero_grad()


def teacher(changed: bool) -> None:
    """The cache keeps the copies of a model that runs without gradients until the region ends."""
    large = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = torch.randn(4, 256)
        with autocast():
            with torch.no_grad(), autocast(cache_enabled=not changed):
                target = large(inputs)
            loss = (model(inputs) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Masked(nn.Module):
    """Casts its mask for a whole batch, or first."""

    def __init__(self, changed: bool) -> None:
        super().__init__()
        self.changed = changed
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, scores: Tensor) -> Tensor:
        if self.changed:
            mask = self.mask.to(torch.bfloat16).expand(len(scores), -1, -1)
        else:
            mask = self.mask.expand(len(scores), -1, -1).to(torch.bfloat16)
        return (scores * self.scale.to(torch.bfloat16)) * mask


def expanded(changed: bool) -> None:
    model = Masked(changed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        with autocast():
            loss = model(torch.randn(32, 64, 64, dtype=torch.bfloat16)).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gan(changed: bool) -> None:
    """Between the two updates of a step the critic's gradients are there, whatever is dropped at the step's end."""
    generator = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 512))
    critic = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    ours, theirs = (torch.optim.SGD(model.parameters(), 0.1) for model in (generator, critic))
    for _ in range(STEPS):
        real, noise = torch.randn(16, 512), torch.randn(128, 64)
        with torch.no_grad():
            fake = generator(noise[:16])
        loss = critic(real).mean() - critic(fake).mean()
        if not changed:
            theirs.zero_grad()
        loss.backward()
        del fake, loss
        theirs.step()
        fake = generator(noise)
        loss = -critic(fake).mean()
        large = (fake.repeat(8, 1) * 1.0).cos()
        del fake, large
        if not changed:
            ours.zero_grad()
        loss.backward()
        del loss
        ours.step()
        if changed:
            ours.zero_grad()
            theirs.zero_grad()


def one_of_two_optimizers(changed: bool) -> None:
    """The update of the second optimizer is the peak once the first has no temporaries."""
    wide, less = (nn.ModuleList(nn.Linear(128, 128) for _ in range(layers)) for layers in (6, 1))
    how = {"fused": True} if changed else {"foreach": True}
    optimizers = (torch.optim.Adam(wide.parameters(), **how), torch.optim.AdamW(less.parameters(), foreach=True))
    for _ in range(STEPS):
        hidden = torch.randn(4, 128)
        for layer in (*wide, *less):
            hidden = layer(hidden)
        hidden.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Case(NamedTuple):
    train: Callable[[bool], None]
    code: str
    exact: bool = True
    """Whether the peak falls by just what is said, or by that at least, as the finding then says."""


CASES = (
    Case(low_weights_under_autocast, "autocast-widens", exact=False),
    Case(foreach, "foreach-temporaries"),
    Case(foreach_of_a_loaded_state, "foreach-temporaries"),
    Case(logits, "outputs-kept"),
    Case(shrunk_loss, "outputs-kept"),
    Case(logits_of_a_loss_in_forward, "outputs-kept"),
    Case(entry_of_an_output, "outputs-kept"),
    Case(accumulated, "outputs-kept"),
    Case(several_holders, "outputs-kept"),
    Case(evaluation_with_a_graph, "no-grad-missing", exact=False),
    Case(late_gradients, "gradients-through-forward"),
    Case(zeroed_in_place, "gradients-through-forward"),
    Case(outputs_of_the_step_before, "outputs-kept"),
    Case(loss_in_chunks, "fp32-activations", exact=False),
    Case(softmax, "fp32-activations", exact=False),
    Case(cache_on, "cache-on-saves", exact=False),
    Case(backward_inside, "autocast-in-backward", exact=False),
    Case(region_around_the_loop, "copies-survive"),
    Case(graph_kept, "copies-survive", exact=False),
    Case(teacher, "cache-off-saves", exact=False),
    Case(expanded, "expanded-buffer-cast"),
    Case(gan, "gradients-through-forward"),
    Case(evaluation_with_gradients_on, "no-grad-missing", exact=False),
    Case(kept_results, "predictions-kept", exact=False),
    Case(concatenated_results, "predictions-kept", exact=False),
    Case(results_in_a_metric, "predictions-kept", exact=False),
    Case(one_of_two_optimizers, "foreach-temporaries"),
)


@pytest.mark.parametrize(
    ("train", "change"),
    [
        (
            foreach_of_a_loaded_state,
            'group["fused"] = True for each group in the param_groups of the state that the script loads, before '
            "optimizer.load_state_dict(...), which puts the saved setting back",
        ),
        (
            results_in_a_metric,
            "compute the metric for each batch and keep its number, not `self.metric.kept['results']`",
        ),
        (entry_of_an_output, "out['logits'] = None after the loss, if nothing reads it later"),
    ],
)
def test_the_change_is_written_as_it_must_be_made(train: Callable[[bool], None], change: str) -> None:
    assert change in [each.change for each in recorded(Case(train, ""), changed=False).findings]


def recorded(case: Case, *, changed: bool) -> Summary:
    torch.manual_seed(0)
    with ampmem.profile() as prof:
        case.train(changed)
    return prof.summary()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.train.__name__)
def test_the_peak_falls_by_what_the_advice_says(case: Case) -> None:
    before, after = recorded(case, changed=False), recorded(case, changed=True)
    (told,) = [finding for finding in before.findings if finding.code == case.code]
    assert told.off_peak is not None, told
    less = before.peak.bytes - after.peak.bytes
    assert less >= told.off_peak - SCALARS
    if case.exact:
        assert less <= told.off_peak
    else:
        assert told.at_least and told.at_least in told.saves
    again = [finding for finding in after.findings if finding.code == case.code]
    assert [finding.off_peak for finding in again if (finding.off_peak or 0) > told.off_peak // 4] == []


def test_the_variable_that_holds_the_outputs_is_named() -> None:
    (told,) = [
        finding
        for finding in recorded(Case(logits, "outputs-kept"), changed=False).findings
        if finding.code == "outputs-kept"
    ]
    line = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "logits = model(" in text
    )
    assert told.message.endswith(f"held by the local variable `logits` of logits ({Path(__file__).name}:{line}).")
    assert told.change == "del logits after the loss, if nothing reads it later"


@pytest.mark.parametrize("sizes", [(64, 64, 64), (16, 256), (256, 16)])
def test_each_way_to_update_has_the_number_that_a_run_of_it_has(sizes: tuple[int, ...]) -> None:
    def peak(**how: bool) -> Summary:
        with ampmem.profile() as prof:
            model = nn.ModuleList(nn.Linear(size, 128, bias=False) for size in sizes)
            optimizer = torch.optim.AdamW(model.parameters(), **how)
            for _ in range(STEPS):
                optimizer.zero_grad()
                sum(layer(torch.ones(1, layer.in_features)).sum() for layer in model).backward()
                optimizer.step()
        return prof.summary()

    before = peak(foreach=True)
    (told,) = [finding for finding in before.findings if finding.code == "foreach-temporaries"]
    for option, how in (("fused=True", {"fused": True}), ("foreach=False", {"foreach": False})):
        saved = before.peak.bytes - peak(**how).peak.bytes
        words = f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} at the peak"
        if abs(saved) < NOTABLE_BYTES:
            words = "the same peak"
        assert f"{option}: {words}" in told.evidence
