"""What ampmem tells about mixed precision, on runs that have it and on runs that have not."""

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from support import measure
from support.commands import ampmem as command
from support.findings import findings, linears, profiled, recorded
from support.measure import options
from torch import Tensor, nn

import ampmem
from ampmem.analysis.estimate import break_even, first_saving
from ampmem.recording import read
from ampmem.workloads import checkpointed

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]

HALF = 2
"""Bytes of a bfloat16 element."""


def autocast(**rest: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **rest)


# -- does it pay? -----------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_float16_wants_a_scaler(scaled: bool) -> None:
    model = linears(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(2, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = findings(profiled(step))
    assert ("fp16-without-scaler" in found) == (not scaled)
    assert "fp16-without-scaler" not in findings(recorded("gpt", "amp"))


def activations_and_copies(precision: str, batch_size: int) -> tuple[int, int]:
    live = recorded("gpt", precision, batch_size=batch_size).summary().steps[-1].marks.after_forward
    assert live is not None
    return live["activations"], live["cast_copies"]


def test_runs_below_and_above_the_break_even_batch_size_bracket_it() -> None:
    (fp32, _), (amp, copies) = activations_and_copies("fp32", 2), activations_and_copies("amp", 2)
    even = break_even(2, copies, fp32 - amp)
    assert even == pytest.approx(3.394, abs=0.001)
    first = first_saving(2, copies, fp32 - amp)
    assert first == 4
    assert sum(activations_and_copies("amp", first - 1)) > sum(activations_and_copies("fp32", first - 1))
    assert sum(activations_and_copies("amp", first)) < sum(activations_and_copies("fp32", first))


def test_amp_saves_nothing_below_it_and_something_above() -> None:
    below, above = (findings(recorded("gpt", "amp", batch_size=size)) for size in (3, 4))
    assert below["amp-saves-nothing"].severity == "warning"
    # The peak is in the update, so no batch size is one from which on it falls; that of the end of forward is evidence.
    assert "batch size" not in below["amp-saves-nothing"].message
    assert any(line.startswith("break-even at batch size 3.") for line in below["amp-saves-nothing"].evidence)
    assert above["amp-saves"].severity == "info"
    for found, code, size in ((below, "amp-saves-nothing", 3), (above, "amp-saves", 4)):
        cost = sum(activations_and_copies("amp", size)) - sum(activations_and_copies("fp32", size))
        assert found[code].bytes == abs(cost)
    assert not {"amp-saves", "amp-saves-nothing"} & findings(recorded("gpt", "fp32", batch_size=3)).keys()


@pytest.mark.parametrize("name", ["resnet", "reuse", "gan", "accumulate", "checkpointed", "bert"])
def test_the_estimate_from_one_run_is_what_two_runs_measure(name: str) -> None:
    live = {
        precision: recorded(name, precision).summary().steps[-1].marks.after_forward for precision in ("fp32", "amp")
    }
    measured = live["fp32"]["activations"] - live["amp"]["activations"] - live["amp"]["cast_copies"]
    found = findings(recorded(name, "amp"))
    told = found["amp-saves"].bytes if "amp-saves" in found else -(found["amp-saves-nothing"].bytes or 0)
    # BERT pools a slice, which keeps the whole tensor in FP32; the GAN casts the targets of its loss.
    tolerance = {"bert": 0.1, "gan": 0.001}.get(name, 0)
    assert told == pytest.approx(measured, abs=tolerance * live["fp32"]["activations"])


def halves_and_cubes(*, amp: bool) -> ampmem.Profile:
    """As GPT-2's activation: one half of a product is as large as what is cast, and younger."""
    model = linears(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast(enabled=amp):
            made = model(torch.randn(32, 64))
            half = 0.5 * made
            cubes = made.float().pow(3.0)
            del made
            loss = (half * (1.0 + cubes)).sum()
        loss.backward()
        optimizer.step()

    return profiled(step)


def test_the_estimate_knows_what_was_cast() -> None:
    live = {amp: halves_and_cubes(amp=amp).summary().steps[-1].marks.after_forward for amp in (False, True)}
    alike = ("activations", "inputs", "cast_copies")  # in FP32 the input itself is saved, and no copy of it
    measured = sum(live[False][category] - live[True][category] for category in alike)
    found = findings(halves_and_cubes(amp=True))
    assert (found["amp-saves"].bytes if "amp-saves" in found else -found["amp-saves-nothing"].bytes) == measured


def test_a_peak_in_backward_is_not_judged_by_the_end_of_forward() -> None:
    """Copies of weights as large as what the activations save; backward's temporaries are halves."""
    model = linears(512, 512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def profile(*, amp: bool, batch: int) -> ampmem.Profile:
        def step(_: int) -> None:
            with autocast(enabled=amp):
                loss = model(torch.randn(batch, 512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return profiled(step)

    run = profile(amp=True, batch=16)
    assert run.summary().peak.phase == "backward"
    found = findings(run)["amp-saves-nothing"]
    assert found.severity == "info"
    assert "keep FP32" not in found.change
    assert "the peak is in backward" in found.change


def test_autocast_without_an_effect() -> None:
    def run(*layers: nn.Module) -> ampmem.Profile:
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(_: int) -> None:
            optimizer.zero_grad()
            with autocast():
                loss = model(torch.randint(10, (4,))).square().mean()
            loss.backward()
            optimizer.step()

        return profiled(step)

    found = findings(run(nn.Embedding(10, 16), nn.LayerNorm(16)))
    assert found["no-autocast-effect"].severity == "warning"
    assert found["no-autocast-effect"].message.startswith("autocast was on, but no parameter")
    assert "no-autocast-effect" not in findings(run(nn.Embedding(10, 16), nn.Linear(16, 4)))


@pytest.mark.parametrize("low", [False, True])
def test_where_weights_are_in_16_bits_no_estimate_is_made_but_what_makes_float32_is_told(low: bool) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dtype = torch.bfloat16 if low else torch.float32
            self.base = nn.Linear(64, 256, dtype=dtype).requires_grad_(False)
            self.adapter, self.head = nn.Linear(64, 256), nn.Linear(256, 8)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.base(inputs) + self.adapter(inputs).float()  # float32, whichever type the weights have
            return cast(Tensor, self.head(F.gelu(hidden)))

    model = Adapted()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast():
            loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()

    found = findings(profiled(step))
    assert bool(found.keys() & {"amp-saves", "amp-saves-nothing"}) is not low
    if low:
        assert found["fp32-activations"].bytes == 512 * 256 * 4
        assert found["fp32-activations"].change.startswith("aten::add in (model) makes the input of aten::gelu float32")


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_without_a_fused_kernel(grouped: bool) -> None:
    """The CPU's fused kernels take no mask that learns, and the math kernel keeps float32 weights."""
    project, optimizers = nn.Linear(32, 32), []
    optimizers.append(torch.optim.SGD(project.parameters(), lr=0.1))

    def step(_: int) -> None:
        optimizers[0].zero_grad()
        with autocast():
            q = project(torch.randn(2, 64, 32)).view(2, 64, 4, 8).transpose(1, 2)
            k = q[:, :2]
            mask = torch.zeros(2, 1, 64, 64, dtype=torch.bfloat16, requires_grad=True)
            y = F.scaled_dot_product_attention(q, k if grouped else q, k if grouped else q, mask, enable_gqa=grouped)
            loss = y.float().square().mean()
        loss.backward()
        optimizers[0].step()

    found = findings(profiled(step))
    told = found["attention-kernel"]
    assert found["fp32-activations"].message.endswith("kept for aten::_safe_softmax.")
    assert "ran its math kernel" in told.message
    assert told.bytes == 2 * 4 * 64 * 64 * 4
    assert ("in place of enable_gqa" in told.change) == grouped
    assert "allow_fp16_bf16_reduction_math_sdp" not in told.change  # it is CUDA's


# -- cast copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_backward_inside_the_region(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast():
            loss = model(torch.randn(4, 16)).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()

    found = findings(profiled(step))
    assert ("autocast-in-backward" in found) == inside
    if inside:
        # Of the first layer's weight backward needs nothing, the batch gets no gradient; of biases never.
        assert found["autocast-in-backward"].bytes == (16 * 32 + 32 + 8) * HALF
    assert "copies-survive" not in found


def test_a_region_that_ampmem_opens_ends_before_backward(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.randn(8, 64)).float().pow(2).mean().backward()\n"
        "    optimizer.step()\n",
        encoding="utf-8",
    )
    done = command(tmp_path, "profile", "--precision", "amp", "-o", "run.ampmem", "train.py")
    assert done.returncode == 0, done.stderr
    assert [step.autocast_in_backward for step in read(tmp_path / "run.ampmem").steps] == [False, False]


def test_a_region_that_stays_open_across_updates() -> None:
    model = linears(32, 64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()

    with autocast():
        found = findings(profiled(step))
    assert found["copies-survive"].bytes == HALF * sum(p.numel() for p in model.parameters())
    assert "stays open" in found["copies-survive"].message
    assert any("0.weight" in line for line in found["copies-survive"].evidence)
    assert "copies-grow" not in found
    assert "copies-survive" not in findings(recorded("gpt", "amp"))


def test_graphs_that_are_kept_keep_cast_copies() -> None:
    model = linears(32, 64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast():
            kept.append(model(torch.randn(4, 32)))
            loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()

    found = findings(profiled(step))
    second = model[1].weight.numel() * HALF  # the first layer's is not saved
    assert found["copies-grow"].bytes == 2 * second
    assert found["copies-survive"].bytes == 2 * second
    assert "stays open" not in found["copies-survive"].message
    assert "copies-grow" not in findings(recorded("gpt", "amp"))


@pytest.mark.parametrize("name", ["reuse", "gan"])
def test_what_the_cache_saves_is_told_alike_with_it_and_without_it(name: str) -> None:
    costs = findings(recorded(name, "amp"))["cache-off-costs"]
    saves = findings(recorded(name, "amp-nocache"))["cache-on-saves"]
    assert costs.bytes == saves.bytes
    assert "cache-on-saves" not in findings(recorded(name, "amp"))
    assert "cache-off-costs" not in findings(recorded(name, "amp-nocache"))
    assert not {"cache-off-costs", "cache-on-saves"} & findings(recorded("gpt", "amp")).keys()


def test_reuse_of_four_wide_layers_to_the_byte() -> None:
    copies, told = {}, {}
    for precision, code in (("amp", "cache-off-costs"), ("amp-nocache", "cache-on-saves")):
        with ampmem.profile(stacks=False) as profile:
            measure.workload("reuse").train(options(precision, steps=1))
        (step,) = profile.summary().steps
        assert step.marks.after_forward is not None
        copies[precision] = step.marks.after_forward["cast_copies"]
        told[precision] = findings(profile)[code].bytes
    assert told == {"amp": 6291456, "amp-nocache": 6291456}
    assert copies["amp-nocache"] - copies["amp"] == 6291456


def teacher_and_student(*, cache: bool) -> ampmem.Profile:
    teacher, student = linears(256, 256, 256, 256), linears(256, 8)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(4, 256)
        with autocast(cache_enabled=cache):
            with torch.no_grad():
                target = teacher(inputs)[:, :8]
            loss = F.mse_loss(student(inputs), target)
        loss.backward()
        optimizer.step()

    return profiled(step)


def test_copies_that_only_the_cache_keeps() -> None:
    cached, uncached = teacher_and_student(cache=True), teacher_and_student(cache=False)
    found = findings(cached)["cache-off-saves"]
    assert found.bytes == cached.summary().casts.peak_bytes - uncached.summary().casts.peak_bytes
    assert found.bytes == (2 * 256 * 256 + 256 * 8) * HALF
    assert "cache-off-saves" not in findings(uncached)
    assert "cache-off-saves" not in findings(recorded("gpt", "amp"))


def test_the_cache_under_checkpointing() -> None:
    found = findings(recorded("checkpointed", "amp"))["cache-off-saves"]
    peaks = [recorded("checkpointed", precision).summary().casts.peak_bytes for precision in ("amp", "amp-nocache")]
    # Less by the biases of a recomputed block: checkpointing hides that only the cache holds those.
    biases = (128 + 512 + 128 + 384 - 128) * HALF
    assert found.bytes == peaks[0] - peaks[1] - biases


def test_recomputation_casts_again() -> None:
    model, _, _ = checkpointed.build(options("amp"))
    inside = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    expected = sum(p.numel() * HALF for module in inside for p in module.parameters())
    assert findings(recorded("checkpointed", "amp"))["recompute-recasts"].bytes == expected
    assert "recompute-recasts" not in findings(recorded("checkpointed", "fp32"))
    assert "recompute-recasts" not in findings(recorded("gpt", "amp"))


# -- activations ------------------------------------------------------------------------------


def test_norms_on_a_float32_stream() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 64), *(nn.LayerNorm(64) for _ in range(4)), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast():
            loss = model(torch.randint(10, (64, 8))).square().mean()
        loss.backward()
        optimizer.step()

    found = findings(profiled(step))["fp32-activations"]
    rows = 64 * 8
    norms = 4 * (rows * 64 + 2 * rows) * 4  # the inputs, and a mean and a deviation per row
    assert found.evidence[0].startswith("kept for aten::native_layer_norm")
    assert found.bytes is not None and norms <= found.bytes <= norms + 4 * rows * 4 + 16
    assert "norms" in found.change
    # The peak of this one is in the update, where no activations are alive.
    assert "fp32-activations" not in findings(recorded("gpt", "amp"))
    assert "fp32-activations" not in findings(recorded("gpt", "fp32"))


class Masked(nn.Module):
    """Attention scores with a mask that is cast before or after it is expanded."""

    mask: Tensor

    def __init__(self, *, expand_first: bool) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.register_buffer("mask", torch.zeros(1, 32, 32))
        self.expand_first = expand_first

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        if self.expand_first:
            mask = self.mask.expand(len(x), 32, 32).to(query.dtype)
        else:
            mask = self.mask.to(query.dtype).expand(len(x), 32, 32)
        return (query @ query.transpose(1, 2) + mask).softmax(-1)


@pytest.mark.parametrize("expand_first", [False, True])
def test_a_buffer_that_is_cast_after_it_was_expanded(expand_first: bool) -> None:
    model = Masked(expand_first=expand_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with autocast():
            loss = model(torch.randn(8, 32, 16)).square().mean()
        loss.backward()
        optimizer.step()

    found = findings(profiled(step))
    assert ("expanded-buffer-cast" in found) == expand_first
    if expand_first:
        assert found["expanded-buffer-cast"].bytes == 7 * 32 * 32 * HALF
