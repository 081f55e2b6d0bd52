"""A device that is simulated for one block of a process that goes on after it."""

import gc
import json
import operator
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.simulated_runs import torch_now
from torch import nn

import ampmem
from ampmem.allocator.gpus import find_gpu
from ampmem.errors import ModelElsewhere, NothingRecorded, UsageError
from ampmem.events import Action, Phase
from ampmem.recording import read
from ampmem.simulator.device import DeviceEvent
from ampmem.simulator.start import Simulation
from ampmem.simulator.where import NotSimulated

PARAMETERS = 2 * (64 * 64 + 64) * 4
"""Bytes of :func:`model`'s parameters."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cuda", steps: int = 2) -> None:
    for _ in range(steps):
        module(torch.randn(8, 64, device=device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def simulated(**options: object) -> ampmem.Summary:
    with ampmem.profile(device="sim", gpu="h100", **options) as prof:  # type: ignore[arg-type]
        module = model().cuda()
        train(module, torch.optim.AdamW(module.parameters()))
    return prof.summary()


def on_the_cpu() -> tuple[list[float], ampmem.Summary]:
    """What a training on the CPU comes to, and its recording."""
    gc.collect()  # what earlier tests have left is alive, too
    torch.manual_seed(1)
    module = model()
    with ampmem.profile(device="cpu") as prof:
        train(module, torch.optim.AdamW(module.parameters()), "cpu")
    return [value for parameter in module.parameters() for value in parameter.flatten().tolist()], prof.summary()


def left_behind() -> list[object]:
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    return [torch_now(), torch.accelerator.current_accelerator(), threads]


def in_a_forked_child() -> int:
    """The exit code of a child that runs a backward."""
    child = os.fork()
    if not child:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_name_of_a_gpu_is_enough_where_torch_sees_none() -> None:
    with ampmem.profile(gpu="4090") as prof:
        module = model().cuda()
        train(module, torch.optim.AdamW(module.parameters()))
    assert (prof.summary().source, prof.summary().device.name) == ("simulated", "NVIDIA GeForce RTX 4090")
    assert "(CUDA context; measured on such GPUs)" in "\n".join(prof.recording().remarks)
    assert not torch.cuda.is_available()


def test_a_gpu_without_readings_of_its_context_says_so() -> None:
    with ampmem.profile(device="sim", gpu="p100") as prof:
        module = model().cuda()
        train(module, torch.optim.AdamW(module.parameters()))
    assert (
        "assumed: from 80.0 MiB to 896.0 MiB of the device is used outside of the allocator (CUDA context; such GPUs "
        "were not measured: the range of all GPUs)"
    ) in prof.recording().remarks


def test_a_block_is_recorded_after_backward_has_run_and_again() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    first, second = simulated(), simulated()
    assert first.source == "simulated"
    assert first.device.name == "NVIDIA H100 80GB HBM3"
    assert first.conservation.residual_bytes == 0
    for summary in (first, second):
        at_peak = summary.peak.categories
        assert (at_peak["parameters"], at_peak["optimizer_state"]) == (PARAMETERS, 2 * PARAMETERS)
    assert first.peak.bytes == second.peak.bytes
    assert [step.peak.bytes for step in first.steps] == [step.peak.bytes for step in second.steps]


def test_nothing_of_it_is_left_in_torch() -> None:
    simulated()  # whose imports stay
    torch.manual_seed(0)
    numbers = torch.get_rng_state()
    before = left_behind()
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim"):
        assert torch.cuda.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with pytest.raises(ZeroDivisionError), ampmem.profile(device="sim", assume=["compile=eager"]):
        torch.compile(lambda value: value + 1)(torch.ones(1, device="cuda"))
        raise ZeroDivisionError
    assert left_behind() == before
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not torch.cuda.is_available()


def test_code_compiled_in_a_block_stops_in_it_alone() -> None:
    compiled = torch.compile(lambda value: value + 1, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim"):
        inside = torch.compile(lambda value: value + 1, backend="aot_eager")
        for each in (compiled, inside):
            with pytest.raises(
                NotSimulated, match=rf'{Path(__file__).name}:.*; assume=\["compile=eager"\] runs it uncompiled'
            ):
                each(torch.ones(1, device="cuda"))
    assert compiled(torch.ones(1)) == inside(torch.ones(1)) == 2


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(2.0)


def filled(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, device=x.device) + torch.as_tensor(1.0) + torch.ones([2], device=x.device)


def activated(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79 * x * (1 + 0.044 * x * x)))


def drawn(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    return x + torch.rand([2], generator=generator).sum()


def given(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return x


SCRIPTED = [doubled, filled, activated, drawn, given]


def builtins_of_torchscript() -> list[str]:
    """What TorchScript takes for functions that the simulation replaces."""
    names = torch.jit._builtins._get_builtin_table().values()  # type: ignore[attr-defined]
    return sorted(name for name in names if name in ("aten::Generator", "aten::save", "aten::load", "aten::compile"))


def test_torchscript_compiles_in_a_block_what_it_compiles_without_one() -> None:
    before = builtins_of_torchscript()
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim"):
        x = torch.randn(2, device="cuda")
        for function in SCRIPTED:
            scripted = torch.jit.script(function)
            for _ in range(3):  # it is optimized after the first calls
                assert (scripted(x).device.type, scripted(x).shape) == ("cuda", (2,)), function
    assert builtins_of_torchscript() == before
    assert torch.equal(torch.jit.script(doubled)(torch.ones(2)), torch.full((2,), 2.0))


def test_lists_with_tensors_of_the_device_become_tensors() -> None:
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim"):
        with torch.device("cuda"):
            assert torch.tensor([1.0]).device.type == "cuda"
            assert torch.as_tensor([1.0]).device.type == "cuda"
        three, half = torch.full((), 3, device="cuda"), torch.tensor(0.5).cuda()
        assert torch.tensor([[three, half], [1, 2]]).tolist() == [[3.0, 0.5], [1.0, 2.0]]
        assert torch.as_tensor([three, 4]).tolist() == [3, 4]
        assert torch.asarray([half]).tolist() == torch.Tensor([half]).tolist() == [0.5]
        assert torch.tensor([three], device="cuda").item() == half.new_tensor([three], dtype=torch.int64).item() == 3
        with pytest.raises(ValueError, match="only one element tensors"):
            torch.tensor([torch.ones(2, device="cuda")])
    assert torch.tensor([torch.tensor(3)]).tolist() == [3]


def test_a_parameter_moves_to_the_device_with_its_weak_references_and_hooks() -> None:
    seen: list[str] = []
    with ampmem.profile(device="sim") as prof:
        module = nn.Linear(8, 8)
        weight, reference = module.weight, weakref.ref(module.weight)
        weight.register_hook(lambda gradient: seen.append("hook"))
        last = weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
        module.bias.grad = torch.ones(8)
        optimizer = torch.optim.SGD(module.parameters())
        module.cuda()
        assert reference() is module.weight is weight and weight.is_cuda
        assert module.bias.grad.is_cuda
        module(torch.ones(2, 8, device="cuda")).sum().backward()
        assert seen == ["hook", "after"]
        optimizer.step()
        last.remove()
        module.half()
        module(torch.ones(2, 8, device="cuda", dtype=torch.half)).sum().backward()
        assert seen == ["hook", "after", "hook"]
        other = nn.Parameter(torch.ones(8))
        kept = weakref.ref(other)
        other.data = other.data.cuda()
        assert kept() is other and other.is_cuda
    assert prof.summary().peak.categories["parameters"] > 0


def graph_of(module: nn.Module) -> object:
    return sum(parameter.square().sum() for parameter in module.parameters())


HELD: list[Callable[[nn.Module], object]] = [
    lambda module: module.weight[0],
    lambda module: torch.cat([each.flatten() for each in module.parameters()]),
    lambda module: module(torch.zeros(1, 8)),
    graph_of,
    nn.utils.weight_norm,
    nn.utils.parametrizations.weight_norm,
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("held", HELD, ids=["view", "flat", "dry run", "norm", "weight_norm", "parametrized"])
def test_a_parameter_that_a_graph_or_a_view_holds_moves_and_leaves_no_reference(
    held: Callable[[nn.Module], object],
) -> None:
    with ampmem.profile(device="sim") as prof:
        module = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(module.parameters())
        references = [weakref.ref(each) for each in module.parameters()]
        kept = held(module)
        parameters = list(module.parameters())
        module.cuda()
        assert all(map(operator.is_, module.parameters(), parameters))
        assert {each.device.type for each in parameters} == {"cuda"}
        module(torch.ones(2, 8, device="cuda")).sum().backward()
        assert all(each.grad is not None and each.grad.is_cuda for each in parameters)
        optimizer.step()
        optimizer.zero_grad()
        module.cpu()
        module.cuda()
        before = torch.cuda.memory_allocated()
        del kept, module, optimizer, parameters
        gc.collect()
        assert not any(reference() is not None for reference in references)
        assert torch.cuda.memory_allocated() < before
    assert prof.summary().peak.categories["parameters"] > 0


def test_a_parameter_of_a_scripted_module_cannot_move_and_says_what_to_do() -> None:
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim"):
        module = nn.Linear(8, 8)
        kept = torch.jit.script(module)
        with pytest.raises(RuntimeError, match="Couldn't swap") as moved:
            module.cuda()
        assert kept is not None
    assert isinstance(moved.value.__cause__, NotSimulated)
    assert str(moved.value.__cause__).endswith(
        ": a parameter cannot be moved to a simulated device while a scripted module has it; move the module to the "
        "device first, then call torch.jit.script"
    )


def test_training_on_the_cpu_is_the_same_before_and_after() -> None:
    values, before = on_the_cpu()
    simulated()
    again, after = on_the_cpu()
    assert again == values
    assert [step.peak.bytes for step in after.steps] == [step.peak.bytes for step in before.steps]
    assert after.peak.categories == before.peak.categories
    assert in_a_forked_child() == 0


def test_a_model_from_before_the_block_can_be_moved_into_it_and_says_afterwards_that_it_has_no_values() -> None:
    module = model()
    with ampmem.profile(module, device="sim") as prof:
        module.cuda()
        train(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert prof.summary().peak.categories["parameters"] == PARAMETERS
    gone = "a tensor of a simulated device was used after the block"
    for use in (
        lambda: module(torch.ones(8, 64)),
        lambda: module[0].weight.sum().item(),
        lambda: module.cpu(),
        lambda: module.state_dict(),
        lambda: module[0].weight.sum().backward(),
    ):
        with pytest.raises(NotSimulated, match=f"{Path(__file__).name}:.*{gone}"):
            use()
    assert tuple(module[0].weight.shape) == (64, 64)
    assert "FakeTensor" in repr(module[0].weight)


def test_a_model_from_an_earlier_block_says_in_the_next_one_that_it_has_no_values() -> None:
    module = model()
    with ampmem.profile(module, device="sim"):
        train(module.cuda(), torch.optim.SGD(module.parameters(), lr=0.1))
    for use in (
        lambda: module(torch.ones(8, 64, device="cuda")),
        lambda: torch.ones(64, 64, device="cuda") + module[0].weight,
        lambda: module.cpu(),
        lambda: module.cuda(),
    ):
        with pytest.raises(RuntimeError) as raised, ampmem.profile(module, device="sim"):
            use()
        error = raised.value.__cause__ or raised.value  # Module.cuda has its own above it
        assert isinstance(error, NotSimulated)
        assert "a tensor of a simulated device was used after the block" in str(error)
    with ampmem.profile(device="sim") as prof:
        fresh = model().cuda()
        train(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    assert prof.summary().warnings == ()  # nothing was caught in it


def test_blocks_are_not_nested_and_the_outer_one_goes_on() -> None:
    with ampmem.profile(device="sim", gpu="h100") as outer:
        with pytest.raises(UsageError, match="cannot be nested"), ampmem.profile(device="sim"):
            pass
        with pytest.raises(UsageError, match="cannot be nested"), ampmem.profile(device="cpu"):
            pass
        module = model().cuda()
        train(module, torch.optim.AdamW(module.parameters()))
    assert outer.summary().peak.bytes == simulated().peak.bytes


def test_a_real_gpu_that_is_used_is_not_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.raises(UsageError, match=r"already uses a real GPU.*CUDA_VISIBLE_DEVICES"),
        ampmem.profile(device="sim"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "h100", "device": "cpu"}, "^gpu= simulates a GPU, and device='cpu' records a real device: leave one"),
        (
            {"assume": ["nonzero=1"], "device": "cpu"},
            "^assume= is for a simulated GPU only: give device='sim' or gpu=, too",
        ),
        ({"device": "sim", "gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"device": "sim", "gpu": ""}, "gpu= is empty; give one of "),
        ({"device": "sim", "gpu": "10MiB"}, "gpu=10MiB leaves nothing"),
        ({"device": "sim", "assume": "nonzero=2"}, "assume=nonzero=2: give a fraction"),
        ({"device": "sim", "assume": ["nonzero=2"]}, "assume=nonzero=2: give a fraction"),
        ({"device": "sim", "assume": ["nonzero=1", "nonzero=1"]}, "assume=: nonzero is given twice"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message), ampmem.profile(**options):  # type: ignore[arg-type]
        pass


def test_a_block_with_nothing_on_the_device_has_nothing_to_show() -> None:
    with pytest.warns(RuntimeWarning, match="no model was seen"), ampmem.profile(device="sim") as empty:
        pass
    with pytest.raises(NothingRecorded):
        empty.summary()
    module = model()
    with pytest.warns(RuntimeWarning, match="none of its 4 parameters"), ampmem.profile(device="sim") as elsewhere:
        train(module, torch.optim.SGD(module.parameters(), lr=0.1), "cpu")
    with pytest.raises(ModelElsewhere):
        elsewhere.summary()


def test_a_block_says_what_it_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    with ampmem.profile(device="sim", gpu="rtx3060") as prof:
        labels = torch.randint(0, 1000, (64,), device="cuda")
        module = nn.Linear(64, int(labels.max()) + 1, device="cuda")
        train(module, torch.optim.SGD(module.parameters(), lr=0.1))
    summary, said = prof.summary(), capsys.readouterr().err
    made_up = [text for text in summary.warnings if "was taken as 1" in text]
    assert made_up and all(f"ampmem: warning: {text}" in said for text in made_up)
    assert made_up[0] in json.loads(summary.to_json())["warnings"]
    assert any(note.startswith("simulated: no GPU") for note in summary.notes)


def test_a_block_that_is_left_by_an_error_has_no_verdict() -> None:
    with pytest.raises(KeyboardInterrupt), ampmem.profile(device="sim", gpu="h100") as prof:
        module = model().cuda()
        train(module, torch.optim.SGD(module.parameters(), lr=0.1))
        raise KeyboardInterrupt
    prediction = prof.summary().prediction
    assert prediction is not None and prediction.fit == "not-known"


def test_memory_that_runs_out_does_so_in_the_block() -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(
            torch.OutOfMemoryError,
            match=r"has 592.0 MiB, of which 512.0 MiB is free.* 80.0 MiB is assumed to be in use outside of",
        ),
        ampmem.profile(device="sim", gpu="592MiB"),
    ):
        warnings.simplefilter("ignore")
        nn.Linear(20_000, 20_000, device="cuda")


@pytest.mark.parametrize("assume", [["nonzero=0.25"], "nonzero=0.25"])
def test_data_that_the_device_has_not_can_be_assumed(assume: str | list[str]) -> None:
    with ampmem.profile(device="sim", assume=assume) as prof:
        module = model().cuda()
        found = torch.ones(8, device="cuda").nonzero()
        train(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert found.shape == (2, 1)
    assert prof.summary().conservation.residual_bytes == 0
    said = "assumed: nonzero finds 0.25 of the elements, as assume= says"
    assert any(note.startswith(said) for note in read(prof.path).notes)


def test_what_has_to_be_assumed_is_told_as_a_block_takes_it() -> None:
    advice = r'with assume=\["nonzero=FRACTION"\], or '
    with pytest.raises(NotSimulated, match=advice), ampmem.profile(device="sim"):
        torch.ones(8, device="cuda").add(1).nonzero()


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "l1_loss"])
def test_losses_that_are_kept_hold_what_they_hold_on_a_cpu(name: str) -> None:
    """Some hold the memory of every element's loss."""

    def held(on: str, **how: str) -> int:
        kept = []
        with ampmem.profile(**how) as prof:
            model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Sigmoid()).to(on)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                target = torch.full((16, 64), 0.5, device=on)
                loss = getattr(torch.nn.functional, name)(model(torch.ones(16, 8, device=on)), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                kept.append(loss)
        first, *_, last = (step.marks.after_optimizer for step in prof.summary().steps)
        assert first is not None
        assert last is not None
        return last["activations"] - first["activations"]

    simulated = held("cuda", device="sim", gpu="h100")
    assert simulated == held("cpu", device="cpu") == 2 * 4 * (1 if name == "l1_loss" else 16 * 64)


def test_a_linear_layer_on_an_input_that_is_not_contiguous_adds_its_bias_in_place() -> None:
    """As a GPU does: its result is there once, in training and in inference mode."""
    with ampmem.profile(gpu="h100") as prof:
        model = nn.Linear(64, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(7, 4, 64, device="cuda").transpose(0, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                model(torch.randn(7, 4, 64, device="cuda").transpose(0, 1))
            product = torch.randn(7, 4, 64, device="cuda") @ model.weight.t()
            _ = product + model.bias  # which the script asks for, and which a GPU makes room for
    events = prof.recording().events
    made = (events.action == Action.ALLOC) & (events.bytes == 4 * 7 * 512 * 4)
    phases = [Phase(code) for code in events.phase[made & (events.step == 1)].tolist()]
    # Step 1 begins after the first update, with an inference and a product.
    assert phases.count(Phase.EVALUATION) == 1
    assert phases.count(Phase.FORWARD) == 1
    assert phases.count(Phase.BETWEEN) == 2


@pytest.mark.parametrize(
    ("name", "shapes", "forward", "backward"),
    [
        ("rms_norm", [(4, 256, 1024)], [2097152, 4096], [2097152]),
        ("silu", [(4, 256, 1024)], [2097152], [2097152]),
        ("mish", [(4, 256, 1024)], [2097152], [2097152]),
        ("maximum", [(4, 256, 1024)] * 2, [2097152], [1048576, 2097152] * 4),
        ("binary_cross_entropy_with_logits", [(512, 1024)] * 2, None, [1048576]),
        ("var_mean", [(512, 5000)], [1024, 1024], [1024, 5120000, 1024, 5120000, 5120000, 5120000]),
        ("take", [(512, 1000)], [1024], [1024000]),
    ],
)
def test_an_op_allocates_what_pytorchs_cuda_build_does(
    name: str, shapes: list[tuple[int, ...]], forward: list[int] | None, backward: list[int]
) -> None:
    """In bfloat16, to the byte; the sizes are those of tests/emulated/ops.py."""
    calls: dict[str, Callable[..., object]] = {
        "rms_norm": lambda x: nn.functional.rms_norm(x, (1024,)),
        "silu": nn.functional.silu,
        "mish": nn.functional.mish,
        "maximum": torch.maximum,
        "binary_cross_entropy_with_logits": lambda x, y: nn.functional.binary_cross_entropy_with_logits(x, y.detach()),
        "var_mean": lambda x: torch.var_mean(x, dim=-1),
        "take": lambda x: torch.take(x, torch.zeros(512, dtype=torch.int64, device="cuda")),
    }
    simulation = Simulation(find_gpu("a100-80"))
    try:
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
        made: list[int] = []

        def note(event: DeviceEvent) -> None:
            if event.action == Action.ALLOC:
                made.append(event.bytes)

        simulation.device.recorder = note
        result = calls[name](*inputs)
        outs = [out for out in (result if isinstance(result, tuple) else (result,)) if isinstance(out, torch.Tensor)]
        assert forward is None or made == (forward if name != "take" else [4096, *forward])
        grads = [torch.ones_like(out) for out in outs]
        made.clear()
        torch.autograd.backward(outs, grads)
        assert sorted(made) == sorted(backward)  # the order of some is the compiler's
    finally:
        simulation.end()


def test_a_caught_out_of_memory_keeps_nothing_of_the_scripts() -> None:
    """As scripts do that look for the largest batch."""

    def attempt(batch: int) -> weakref.ref[torch.Tensor]:
        inputs = torch.ones(batch, 8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([inputs] * 3)
        return weakref.ref(inputs)

    with ampmem.profile(device="sim", gpu="1GiB"):
        module = model().cuda()
        train(module, torch.optim.SGD(module.parameters()))
        before = torch.cuda.memory_allocated()
        inputs = attempt(1 << 24)
        assert (inputs(), torch.cuda.memory_allocated()) == (None, before)


class Cache:
    """Keeps what a step gives it."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_who_holds_tensors_of_the_device_is_named() -> None:
    cache = Cache()
    with ampmem.profile(device="sim", gpu="h100", steps=4) as prof:
        module = model().cuda()
        module.mask = [torch.zeros(2**18, device="cuda")]  # type: ignore[assignment]
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(4):
            train(module, optimizer, steps=1)
            cache.kept.append(torch.zeros(2**18, device="cuda"))
    summary = prof.summary()
    (growth,) = [each.message for each in summary.findings if each.code == "steady-growth"]
    assert "the last one 1.0 MiB, held by Cache.kept[*]" in growth
    names = {each.name: each.bytes for each in summary.top}
    assert names["mask[0]"] == 2**20, names


class Chooses(nn.Module):
    """Runs one of its experts, an attention whose own modules never run, and weights that are used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.attention = nn.MultiheadAttention(8, 2)
        self.table = nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts[1](x) @ self.table.weight
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def test_trained_modules_that_never_ran_are_a_warning() -> None:
    with ampmem.profile(device="sim", gpu="h100") as prof:
        module = Chooses().cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            module(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (said,) = prof.summary().warnings
    assert "2 of 6 trained modules never ran, such as experts.0: " in said
