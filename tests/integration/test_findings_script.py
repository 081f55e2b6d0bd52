"""What ampmem tells about how a script trains, on runs that have it and on runs that have not."""

import functools
import gc
import inspect

import pytest
import torch
from support import measure
from support.findings import findings, linears, profiled, recorded
from support.measure import options
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import ampmem
from ampmem.analysis.answer import verdict_of_one
from ampmem.reporters.text.answer import wording
from ampmem.units import format_bytes
from ampmem.workloads import accumulate

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]


# -- the optimizer ----------------------------------------------------------------------------


def adam(*, batch_size: int, **implementation: bool) -> ampmem.Profile:
    model = linears(256, 256, 256, 256)
    optimizer = AdamW(model.parameters(), **implementation)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(batch_size, 256)).square().mean().backward()
        optimizer.step()

    return profiled(step)


def test_foreach_temporaries_are_what_a_fused_update_saves() -> None:
    foreach, fused = adam(batch_size=2, foreach=True), adam(batch_size=2, fused=True)
    found = findings(foreach)["foreach-temporaries"]
    outside = [_own_peak(profile) for profile in (foreach, fused)]
    assert found.off_peak == outside[0] - outside[1] > 0
    assert "fused=True" in found.change
    assert "foreach-temporaries" not in findings(fused)
    assert "foreach-temporaries" not in findings(adam(batch_size=2, foreach=False))
    # The peak is elsewhere: the update makes no difference.
    assert "foreach-temporaries" not in findings(adam(batch_size=4096, foreach=True))


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_advice_on_foreach_names_what_the_optimizer_takes(kind: type[torch.optim.Optimizer]) -> None:
    model = linears(256, 256, 256, 256)
    settings = {"weight_decay": 0.1} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), foreach=True, **settings)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 256)).square().mean().backward()
        optimizer.step()

    advice = findings(profiled(step))["foreach-temporaries"]
    fused = "fused" in inspect.signature(kind).parameters
    assert advice.change == f"{kind.__name__}(..., {'fused=True' if fused else 'foreach=False'})"
    assert advice.severity == ("advice" if fused else "info")


def _own_peak(profile: ampmem.Profile) -> int:
    """Without what belongs to nobody, which is what earlier tests left behind."""
    peak = profile.summary().peak
    return peak.bytes - peak.categories["other"]


def test_a_scaler_that_has_skipped_all_updates() -> None:
    gc.collect()
    with ampmem.profile() as profile:
        accumulate.train(options("fp32", steps=1), scaler="on", skip_first=True)
    assert "skipped every update" in findings(profile)["state-not-there-yet"].message
    with ampmem.profile() as profile:
        accumulate.train(options("fp32", steps=2), scaler="on", skip_first=True)
    assert "state-not-there-yet" not in findings(profile)


# -- gradients --------------------------------------------------------------------------------


def test_gradients_that_are_zeroed_after_forward() -> None:
    for precision in measure.PRECISIONS:
        found = findings(recorded("gan", precision))["gradients-through-forward"]
        gan = measure.workload("gan")
        models, _, _ = gan.build(options(precision))
        assert found.bytes == measure.parameters(*models)
        assert "they are freed later" in found.message
    for name in ("gpt", "accumulate", "checkpointed"):
        assert "gradients-through-forward" not in findings(recorded(name, "amp"))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_in_place(set_to_none: bool, micro_batches: int) -> None:
    model = linears(32, 64, 16)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(micro_batches):
            model(torch.randn(2, 32)).square().mean().backward()
        optimizer.step()

    found = findings(profiled(step))
    # With several backwards per update the gradients have to be there in forward anyway.
    assert ("gradients-through-forward" in found) == (not set_to_none and micro_batches == 1)
    if not set_to_none and micro_batches == 1:
        assert found["gradients-through-forward"].bytes == measure.parameters(model)
        assert "in place" in found["gradients-through-forward"].message
        assert "set_to_none=True" in found["gradients-through-forward"].change


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_of_parameters_that_are_in_no_optimizer(whole: bool) -> None:
    model = linears(32, 64, 16)
    optimizer = SGD(model.parameters() if whole else model[-1].parameters(), lr=0.1)

    def step(_: int) -> None:
        if whole:
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        model(torch.randn(2, 32)).square().mean().backward()
        optimizer.step()

    change = findings(profiled(step))["gradients-through-forward"].change
    assert change == f"{'optimizer' if whole else 'model'}.zero_grad(set_to_none=True) before forward"


def test_one_step_has_no_forward_after_an_update() -> None:
    assert "gradients-through-forward" not in findings(recorded("gan", "fp32", steps=1))


@functools.cache
def zeroing(when: str, *, micro_batches: int, batch_size: int) -> ampmem.Profile:
    """A loop that zeroes as Lightning does (in a closure, after the first forward), in place, or after the update."""
    model = linears(256, 512, 256, 256)
    optimizer = AdamW(model.parameters(), fused=True)

    def closure(micro_batch: int) -> Tensor:
        loss = model(torch.randn(batch_size, 256)).square().mean()
        if when == "late" and micro_batch == 0:
            optimizer.zero_grad()
        loss.backward()
        return loss

    def step(_: int) -> None:
        if when == "in place":
            optimizer.zero_grad(set_to_none=False)
        for micro_batch in range(micro_batches - 1):
            closure(micro_batch)
        optimizer.step(lambda: closure(micro_batches - 1))  # type: ignore[arg-type, return-value]
        if when == "at once":
            optimizer.zero_grad()

    step(0)  # what is recorded has gradients from before
    return profiled(step)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("when", ["late", "in place"])
def test_what_gradients_take_off_the_peak_is_what_it_lacks_without_them(when: str, micro_batches: int) -> None:
    lowered = []
    for batch_size in (64, 1024, 2048):
        before = zeroing(when, micro_batches=micro_batches, batch_size=batch_size)
        after = zeroing("at once", micro_batches=micro_batches, batch_size=batch_size)
        assert "gradients-through-forward" not in findings(after)
        found = findings(before).get("gradients-through-forward")
        if found is not None:
            assert (found.off_peak or 0) == _own_peak(before) - _own_peak(after)
            lowered.append(found.off_peak)
    if micro_batches == 1:
        assert any(lowered), "gradients are what makes the peak of a small batch"
    elif when == "late":
        assert lowered[1:] == [None, None], "at the peak are those that this step has made itself"
    else:
        assert lowered == []


# -- what is left behind ----------------------------------------------------------------------


def test_outputs_of_a_forward_that_is_over() -> None:
    # Logits of 2 x 32 x 512 and the loss; the peak is in the update.
    for precision, itemsize in (("fp32", 4), ("amp", 2)):
        found = findings(recorded("gpt", precision))["outputs-kept"]
        assert found.bytes == 2 * 32 * 512 * itemsize + 4
        assert any("gpt.py" in line for line in found.evidence)


@pytest.mark.parametrize("keep", [False, True])
def test_outputs_of_the_step_before(keep: bool) -> None:
    model = linears(16, 16, 4096)
    optimizer = SGD(model.parameters(), lr=0.1)
    previous: list[Tensor] = []

    def step(_: int) -> None:
        optimizer.zero_grad()
        out = model(torch.randn(64, 16))
        out.square().mean().backward()
        optimizer.step()
        if keep:
            previous[:] = [out]

    profile = profiled(step)
    assert profile.summary().steps[-1].peak.phase == "backward"
    assert ("outputs-kept" in findings(profile)) == keep
    if keep:
        assert findings(profile)["outputs-kept"].bytes == 64 * 4096 * 4
    assert "steady-growth" not in findings(profile)


def test_a_state_that_the_next_step_uses_is_not_left_over() -> None:
    cell = nn.GRUCell(16, 256)
    optimizer = SGD(cell.parameters(), lr=0.1)
    state = [torch.zeros(512, 256)]

    def step(_: int) -> None:
        optimizer.zero_grad()
        state[0] = cell(torch.randn(512, 16), state[0].detach())
        state[0].square().mean().backward()
        optimizer.step()

    assert "outputs-kept" not in findings(profiled(step))


@pytest.mark.parametrize("keep", [False, True])
def test_growth(keep: bool) -> None:
    model = linears(16, 1024)
    optimizer = SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []

    def step(_: int) -> None:
        optimizer.zero_grad()
        out = model(torch.randn(4, 16))
        out.square().mean().backward()
        optimizer.step()
        if keep:
            kept.append(out.detach())

    found = findings(profiled(step, 4))
    assert ("steady-growth" in found) == keep
    if keep:
        assert found["steady-growth"].bytes == kept[0].untyped_storage().nbytes()
        assert any("test_findings_script.py" in line for line in found["steady-growth"].evidence)
        assert "outputs-kept" not in found


@pytest.mark.parametrize("new", ["", "average", "batch", "length", "graph"])
def test_what_is_new_in_a_step_that_takes_more(new: str) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = SGD(model.parameters(), lr=0.1)
    averages: list[Tensor] = []
    sizes = [256 if new in ("batch", "length") and number == 3 else 16 for number in range(5)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        batch = torch.randn(sizes[number], 64)
        loss = model(batch[None] if new == "length" else batch).square().mean()
        if new == "graph" and number == 3:
            loss = loss + model(torch.randn(sizes[number], 64)).square().mean()
        loss.backward()
        optimizer.step()
        if new == "average" and number == 2:
            averages.extend(each.detach().clone() for each in model.parameters())

    found = findings(profiled(step, 5))
    assert ("larger-step" in found) == bool(new)
    if new == "average":
        size = format_bytes(sum(each.nbytes for each in averages))
        assert "step 3 takes more, where step 2 peaked at " in found["larger-step"].message
        assert f"{size} more in `other` (largest: 64.0 KiB: " in found["larger-step"].message
        assert f"; {size} of it held by `averages`)." in found["larger-step"].message
    if new == "batch":
        assert "(largest: 256.0 KiB: " in found["larger-step"].message  # of 256 times 256 numbers
        assert found["larger-step"].message.endswith("; the batch size is 256, and was 16.")
    if new == "length":
        assert found["larger-step"].message.endswith("; the largest input is [1, 256, 64], and was [1, 16, 64].")
    if new == "graph":
        assert found["larger-step"].message.endswith("; 2 graphs are alive, and 1 then.")


class Caching(nn.Linear):
    """Keeps each result, as a module does that caches without a limit."""

    def __init__(self) -> None:
        super().__init__(64, 256)
        self.cache: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        result = super().forward(batch)
        self.cache.append(result.detach())
        return result


RESULT = 64 * 256 * 4
"""Bytes of a result of the model of :func:`grows`."""


@pytest.mark.parametrize(
    ("kind", "size", "message", "change"),
    [
        ("number", 0, "", ""),
        ("result", RESULT, "the script keeps it in `kept`", "append numbers, not tensors"),
        ("graph", RESULT, "it is the graph of results that the script keeps in `kept`", "append numbers, not tensors"),
        (
            "cache",
            RESULT,
            "a module adds it to its attribute `0.cache`, and nothing empties that",
            "clear it in each step",
        ),
        ("hook", 5 * RESULT, "than the one before (3, 4, 5 tensors), as a hook does", "register hooks once"),
        ("closure", RESULT, "the variable `mean` held it once", "look for a function that keeps it"),
        ("parameter", 3 * RESULT, "step gives an optimizer new parameters", "add each parameter once"),
        (
            "parameter without state",
            RESULT,
            "new parameters: they took 64.0 KiB more in the last one. The newest is `SGD.param_groups[5][0]`.",
            "add each parameter once",
        ),
    ],
)
def test_growth_is_told_by_its_kind(kind: str, size: int, message: str, change: str) -> None:
    model = nn.Sequential(Caching() if kind == "cache" else nn.Linear(64, 256), nn.Tanh())
    optimizer = (SGD if kind == "parameter without state" else AdamW)(model.parameters())
    kept: list[Tensor | float] = []
    hooked: list[Tensor] = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        if kind == "hook":
            model.register_forward_hook(lambda _, __, result: hooked.append(result.detach().clone()))
        if kind == "closure":
            mean = torch.randn(64, 256)
            model.register_forward_hook(lambda _, __, result, mean=mean: result + mean)
        if kind.startswith("parameter"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.randn(64, 256))]})
            optimizer.param_groups[-1]["params"][0].square().sum().backward()
        result = model(torch.randn(64, 64))
        loss = result.square().mean()
        loss.backward(retain_graph=kind == "graph")
        optimizer.step()
        if kind in ("number", "result", "graph"):
            kept.append({"number": loss.item(), "result": result.detach(), "graph": loss}[kind])

    profile = profiled(step, 5)
    found = findings(profile)
    assert ("steady-growth" in found) == bool(size)
    if size:
        finding = found["steady-growth"]
        assert message in finding.message
        assert finding.change.startswith(change)
        assert finding.bytes is not None
        assert abs(finding.bytes - size) <= 64  # numbers of the loss and of the optimizer's steps
        assert any(message in sentence for sentence in wording(verdict_of_one(profile.summary())).more)


def test_two_steps_are_too_few_to_speak_of_growth() -> None:
    kept: list[Tensor] = []
    model = nn.Linear(16, 1024)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        kept.append(model(torch.randn(4, 16)))
        kept[-1].square().mean().backward()
        optimizer.step()

    assert "steady-growth" not in findings(profiled(step, 2))
    kept.clear()
    assert "steady-growth" in findings(profiled(step, 3))


def test_the_workloads_do_not_grow() -> None:
    for name in measure.WORKLOADS:
        assert "steady-growth" not in findings(recorded(name, "amp", steps=3))


def test_a_graph_of_gradients_that_grows_is_told_by_its_cause() -> None:
    """A gradient penalty by backward(create_graph=True): the batch's gradient holds the graph, and that the batch."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:

        def step(_: int) -> None:
            optimizer.zero_grad()
            inputs = torch.randn(64, 64, requires_grad=True)
            model(inputs).sum().backward(create_graph=True)
            sum((each.grad**2).sum() for each in model.parameters() if each.grad is not None).backward()
            optimizer.step()

        found = findings(profiled(step, 4))
    finally:
        gc.enable()
        gc.collect()
    assert "test_findings_script.py" in found["steady-growth"].message
    assert found["steady-growth"].change.startswith("torch.autograd.grad(..., create_graph=True) in place of")
    assert "torch.no_grad()" not in found.get("outputs-kept", found["steady-growth"]).change


def test_a_graph_that_a_second_backward_needs_is_not_an_evaluations() -> None:
    first, second = nn.Linear(256, 256), nn.Linear(256, 256)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        hidden = torch.tanh(first(torch.randn(64, 256)))
        kept = torch.tanh(hidden * 2)
        second(torch.randn(64, 256)).square().mean().backward()
        kept.square().mean().backward(retain_graph=True)
        optimizer.step()

    found = findings(profiled(step, 3))
    assert "outputs-kept" not in found or "torch.no_grad()" not in found["outputs-kept"].change
