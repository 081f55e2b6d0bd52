"""The training scripts really train, in every precision, and the same seed gives the same losses."""

import math
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampmem.workloads import accumulate, bert, checkpointed, gan, gpt, resnet, reuse
from ampmem.workloads.common import LEARNING_RATES, WorkloadOptions, batches, data_loader, make_optimizer

pytestmark = pytest.mark.slow

NAMES = ("gpt", "bert", "resnet", "reuse", "gan", "accumulate", "checkpointed")
TINY = WorkloadOptions(preset="tiny")

Losses = Callable[..., list[str]]


@pytest.fixture
def losses(capsys: pytest.CaptureFixture[str]) -> Losses:
    """Runs a workload's command line in process, and gives the losses that it printed."""

    def run(name: str, *arguments: str, steps: int = 2) -> list[str]:
        common = ["--preset", "tiny", "--device", "cpu", "--steps", str(steps)]
        import_module(f"ampmem.workloads.{name}").main([*common, *arguments])
        lines = capsys.readouterr().out.splitlines()
        matches = [re.fullmatch(r"step (\d+) loss (\S+\.\d{6})", line) for line in lines]
        assert [match and match[1] for match in matches] == [str(step) for step in range(steps)]
        return [match[2] for match in matches if match]

    return run


@pytest.fixture
def forwards() -> Iterator[list[Any]]:
    """Every module call while the test runs: the module, the output's dtype, and whether casts are cached."""
    seen: list[Any] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen.append((module, output.dtype, torch.is_autocast_cache_enabled()))

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    yield seen
    handle.remove()


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_finite_and_repeat(losses: Losses, name: str) -> None:
    first = losses(name, "--precision", "amp")
    assert all(math.isfinite(float(loss)) for loss in first)
    assert losses(name, "--precision", "amp") == first


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_changes_the_first_loss_and_the_optimizer_the_second(losses: Losses, name: str) -> None:
    default, other = losses(name), losses(name, "--optimizer", "adagrad")
    assert all(math.isfinite(float(loss)) for loss in (*default, *other))
    assert losses(name, "--seed", "1", steps=1)[0] != default[0] == other[0]
    assert default[1] != other[1]


@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "cached"),
    [
        ("gpt", ["--dtype", "fp16"], torch.float32, True),
        ("gpt", ["--precision", "amp"], torch.bfloat16, True),
        *((name, ["--precision", "amp-nocache"], torch.bfloat16, False) for name in NAMES),
        *((name, ["--precision", "amp", "--dtype", "fp16"], torch.float16, True) for name in NAMES),
    ],
)
def test_the_precision_is_the_one_asked_for(
    losses: Losses, forwards: list[Any], name: str, arguments: list[str], dtype: torch.dtype, cached: bool
) -> None:
    losses(name, *arguments, steps=1)
    matmuls = [call for call in forwards if isinstance(call[0], nn.Linear | nn.Conv2d | nn.ConvTranspose2d)]
    assert {call[1] for call in matmuls} == {dtype}
    if dtype != torch.float32:
        assert {call[2] for call in matmuls} == {cached}


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_each_optimizer_steps(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer(name, [parameter], foreach=False)
    assert type(optimizer).__name__.lower() == name.split("-")[0]
    assert optimizer.defaults["foreach"] is False
    assert optimizer.defaults.get("momentum", 0) == (0.9 if name == "sgd-momentum" else 0)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert (parameter < 1).all()


def test_batches_go_on_over_epochs() -> None:
    loader = data_loader(torch.arange(4), batch_size=2, seed=0)
    found = [(step, batch) for step, (batch,) in batches(loader, 5)]
    assert [step for step, _ in found] == [0, 1, 2, 3, 4]
    assert sorted(torch.cat([found[0][1], found[1][1]]).tolist()) == [0, 1, 2, 3]


def test_gpt_does_not_see_the_future() -> None:
    model, _, loader = gpt.build(TINY)
    text = next(iter(loader))[0][:, :-1]
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 512
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_gpt_tied_shares_one_weight(losses: Losses) -> None:
    tied, untied = gpt.build(TINY, tied=True)[0], gpt.build(TINY)[0]
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    assert losses("gpt", "--tied") != losses("gpt")


def test_bert_ignores_padding() -> None:
    model = bert.build(TINY)[0].eval()
    tokens = torch.randint(1, 512, (2, 32))
    mask = torch.arange(32).expand(2, 32) < 20
    changed = torch.where(mask, tokens, 1)
    assert torch.equal(model(tokens, mask), model(changed, mask))
    assert not torch.equal(model(tokens, torch.ones_like(mask)), model(changed, torch.ones_like(mask)))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # As published: GPT-2, and ResNet-50 with 1000 classes.
        (lambda: gpt.GPT(gpt.PRESETS["full"], tied=True), 124_439_808),
        (lambda: resnet.ResNet(resnet.PRESETS["full"]), 25_557_032),
    ],
)
def test_full_models_have_the_published_size(model: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in model().parameters()) == parameters


def test_reuse_calls_each_layer_twice(losses: Losses, forwards: list[Any]) -> None:
    losses("reuse", "--layers", "3", "--width", "16", "--precision", "amp", steps=1)
    calls = [module for module, _, _ in forwards if isinstance(module, nn.Linear)]
    assert [calls.count(layer) for layer in dict.fromkeys(calls)] == [2, 2, 2]
    assert {tuple(layer.weight.shape) for layer in calls} == {(16, 16)}


def test_reuse_is_the_same_in_every_preset_and_loops_over_parameters() -> None:
    for preset in ("tiny", "small", "full"):
        model, optimizer, (inputs, _) = reuse.build(WorkloadOptions(preset=preset))
        assert [tuple(p.shape) for p in model.parameters()] == [(1024, 1024)] * 4
        assert inputs.shape == (8, 1024)
        assert type(optimizer) is torch.optim.Adam
        assert optimizer.defaults["foreach"] is False


def test_gan_trains_the_discriminator_without_touching_the_generator() -> None:
    (generator, discriminator), _, real = gan.build(TINY)
    fake = generator(torch.randn(len(real), 16))
    gan.discriminator_loss(discriminator, real, fake).backward()
    assert all(p.grad is None for p in generator.parameters())
    assert all(p.grad is not None for p in discriminator.parameters())
    gan.generator_loss(discriminator, fake).backward()
    assert all(p.grad is not None for p in generator.parameters())


def test_accumulated_gradients_are_those_of_one_big_batch() -> None:
    scaler = accumulate.build_scaler(TINY)
    gradients = []
    for join in (False, True):
        model, optimizer, micro = accumulate.build(TINY, accumulation=3)
        assert len(micro) == 3
        if join:
            micro = [(torch.cat([x for x, _ in micro]), torch.cat([y for _, y in micro]))]
        accumulate.update(TINY, model, optimizer, scaler, micro)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("scaler", ["off", "on"])
def test_gradients_are_unscaled_before_they_are_clipped(scaler: str) -> None:
    model, optimizer, micro = accumulate.build(TINY)
    far = [(inputs, 1000 * targets) for inputs, targets in micro]
    accumulate.update(TINY, model, optimizer, accumulate.build_scaler(TINY, scaler), far)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm.item() == pytest.approx(accumulate.MAX_NORM, rel=1e-3)


def test_accumulate_skips_only_the_overflowing_update() -> None:
    options = WorkloadOptions(preset="tiny", precision="amp", dtype=torch.float16)
    model, optimizer, micro = accumulate.build(options)
    scaler = accumulate.build_scaler(options)
    before = [p.detach().clone() for p in model.parameters()]
    scale = 65536.0

    accumulate.update(options, model, optimizer, scaler, micro, overflow=True)
    assert scaler.get_scale() == scale / 2
    assert not optimizer.state
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    accumulate.update(options, model, optimizer, scaler, micro)
    assert scaler.get_scale() == scale / 2
    assert len(optimizer.state) == len(before)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("arguments", [["--precision", "amp", "--dtype", "fp16"], ["--scaler", "on"]])
def test_skip_first_trains_one_step_late(losses: Losses, arguments: list[str]) -> None:
    skipping, plain = losses("accumulate", "--skip-first", *arguments, steps=3), losses("accumulate", *arguments)
    assert skipping[0] == skipping[1] == plain[0]
    assert skipping[2] != skipping[1]


@pytest.mark.parametrize(
    ("scaler", "options", "enabled"),
    [
        ("auto", WorkloadOptions(dtype=torch.float16), False),
        ("auto", WorkloadOptions(precision="amp"), False),
        ("auto", WorkloadOptions(precision="amp", dtype=torch.float16), True),
        ("on", WorkloadOptions(), True),
        ("off", WorkloadOptions(precision="amp", dtype=torch.float16), False),
    ],
)
def test_the_scaler_is_on_where_it_should_be(scaler: str, options: WorkloadOptions, enabled: bool) -> None:
    assert accumulate.build_scaler(options, scaler).is_enabled() is enabled


@pytest.mark.parametrize("arguments", [[], ["--use-reentrant"]])
def test_checkpointed_blocks_run_again_in_backward(losses: Losses, forwards: list[Any], arguments: list[str]) -> None:
    found = losses("checkpointed", *arguments)
    calls = [m for m, _, _ in forwards if isinstance(m, nn.Linear) and m.out_features == 3 * m.in_features]
    # Two steps of two blocks, each run twice. (Only the first layers: the second run stops where all is recomputed.)
    assert len(calls) == 2 * 2 * 2
    assert found == losses("checkpointed")


def test_checkpointed_passes_on_the_implementation() -> None:
    for use_reentrant in (False, True):
        model, _, (inputs, _) = checkpointed.build(TINY, use_reentrant=use_reentrant)
        nodes, names = [model(inputs).grad_fn], set()
        while nodes:
            node = nodes.pop()
            names.add(node.name())
            nodes += [parent for parent, _ in node.next_functions if parent is not None]
        assert ("CheckpointFunctionBackward" in names) is use_reentrant


@pytest.mark.parametrize(
    ("name", "arguments", "hint"),
    [
        ("gpt", ["--preset", "huge"], "huge"),
        ("gpt", ["--device", "cuda"], "no CUDA device is available"),
        ("reuse", ["--optimizer", "lion"], "lion"),
        ("accumulate", ["--skip-first", "--precision", "amp"], "--scaler on"),
    ],
)
def test_what_cannot_run_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, arguments: list[str], hint: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        import_module(f"ampmem.workloads.{name}").main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert hint in err


@pytest.mark.parametrize("name", NAMES)
def test_help_returns(capsys: pytest.CaptureFixture[str], name: str) -> None:
    import_module(f"ampmem.workloads.{name}").main(["--help"])
    out = capsys.readouterr().out
    assert f"python -m ampmem.workloads.{name}" in out
    assert "--precision" in out
