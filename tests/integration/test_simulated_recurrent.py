"""Recurrent layers on a simulated GPU: packed once, cast once a forward, and counted against sums over tensors."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ampmem
from ampmem.allocator.gpus import find_gpu
from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.training_loop import gradients_through_forward
from ampmem.simulator.start import Simulation

STEPS, BATCH, WIDTH, HIDDEN = 6, 4, 24, 40
KEPT = {nn.RNN: 1, nn.LSTM: 5, nn.GRU: 6}
"""Values of each cell that cuDNN keeps for backward."""
DROPOUT_STATE = 6_488_064
"""Bytes that cuDNN's dropout takes on 132 multiprocessors, as on an H200."""
PRECISIONS = {
    "fp32": {"enabled": False},
    "amp": {"dtype": torch.bfloat16},
    "amp-nocache": {"dtype": torch.bfloat16, "cache_enabled": False},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "layers": (nn.LSTM, {"num_layers": 3}),
    "bidirectional": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "batch first": (nn.LSTM, {"batch_first": True}),
    "dropout": (nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
    "projection": (nn.LSTM, {"num_layers": 2, "proj_size": 16}),
    "projection, both ways": (nn.LSTM, {"num_layers": 2, "proj_size": 16, "bidirectional": True}),
}


@pytest.fixture
def gpu() -> Iterator[None]:
    simulation = Simulation(find_gpu("h100"))
    yield
    simulation.end()


def requested(which: str = "current") -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def size(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def source(layer: nn.RNNBase) -> Tensor:
    shape = (BATCH, STEPS, WIDTH) if layer.batch_first else (STEPS, BATCH, WIDTH)
    return torch.randn(*shape, device="cuda")


def reserve(layer: nn.RNNBase, item: int, cells: int = STEPS * BATCH) -> int:
    """What backward needs: the values of each cell, and the outputs that go from one layer to the next."""
    cells *= 1 + layer.bidirectional
    each, between = KEPT[type(layer)] * HIDDEN, (layer.num_layers - 1) * HIDDEN
    if layer.proj_size:
        each, between = each + HIDDEN + 2 * layer.proj_size, (layer.num_layers - 1) * 2 * layer.proj_size
    kept = cells * (layer.num_layers * each + between) * item
    if layer.dropout:
        kept += cells * between // 8  # a bit for each value
    return 256 + math.ceil(kept / 32) * 32


def states(layer: nn.RNNBase, item: int) -> int:
    """The state, and of an LSTM the cell's, of all layers: the first as the last."""
    widths = [layer.proj_size or HIDDEN] + [HIDDEN] * isinstance(layer, nn.LSTM)
    return layer.num_layers * (1 + layer.bidirectional) * BATCH * sum(widths) * item


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_forward_keeps_the_output_the_states_and_the_reserve(gpu: None, case: str, precision: str) -> None:
    kind, options = CASES[case]
    layer = kind(WIDTH, HIDDEN, **options).cuda()
    weights, x = sum(parameter.numel() for parameter in layer.parameters()), source(layer)
    before = requested()
    with torch.autocast("cuda", **PRECISIONS[precision]):  # type: ignore[arg-type]
        y, last = layer(x)
    item = 4 if precision == "fp32" else 2
    made = size(y) + states(layer, item)
    casts = 0 if precision == "fp32" else weights * item + x.numel() * item
    assert y.dtype == (torch.float32 if precision == "fp32" else torch.float16)
    assert size(*(last if isinstance(last, tuple) else (last,))) == states(layer, item)
    forever = DROPOUT_STATE if layer.dropout else 0
    assert requested() - before == made + states(layer, item) + reserve(layer, item) + casts + forever

    y.float().sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    storages = {gradient.untyped_storage()._cdata for gradient in gradients}
    assert len(storages) == (1 if precision == "fp32" else len(gradients))
    assert requested() - before == made + 4 * weights + forever


def test_the_state_of_dropout_is_made_once_for_each_seed(gpu: None) -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, 2, dropout=0.5).cuda()
    x = source(layer)

    def run() -> tuple[int, int]:
        """Bytes that a forward without gradients adds for good, and at its peak."""
        before = requested()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            layer(x)
        return requested() - before, requested("peak") - before

    layer.eval()
    in_evaluation = run()
    layer.train()
    assert in_evaluation[0] == 0
    assert run()[0] == DROPOUT_STATE
    kept, plain = run()
    assert kept == 0
    for seed in (torch.manual_seed, torch.cuda.manual_seed):
        seed(1)
        kept, peak = run()
        assert kept == 0
        assert peak == max(plain, DROPOUT_STATE + states(layer, 4))  # beside the one of before
        assert run() == (0, plain)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert run() == (0, peak)


@pytest.mark.parametrize(
    ("kind", "options", "time", "batch", "width", "hidden", "dtype", "kept"),
    [
        (nn.LSTM, {"num_layers": 2}, 35, 20, 650, 650, torch.float32, 20_020_256),
        (nn.LSTM, {"num_layers": 2}, 35, 20, 650, 650, torch.bfloat16, 10_010_272),
        (nn.LSTM, {"num_layers": 4, "bidirectional": True}, 200, 32, 80, 512, torch.float32, 602_931_456),
        (nn.LSTM, {"num_layers": 2, "proj_size": 128}, 64, 16, 256, 512, torch.float32, 28_311_808),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.2}, 64, 16, 256, 512, torch.bfloat16, 11_600_128),
        (
            nn.LSTM,
            {"num_layers": 2, "dropout": 0.2, "bidirectional": True},
            64,
            16,
            256,
            512,
            torch.float32,
            46_399_744,
        ),
        (nn.GRU, {"num_layers": 2}, 35, 20, 650, 650, torch.bfloat16, 11_830_272),
        (nn.RNN, {"num_layers": 2, "bidirectional": True}, 400, 16, 80, 320, torch.float32, 49_152_256),
    ],
)
def test_the_reserve_is_what_an_h200_kept(
    gpu: None,
    kind: Any,
    options: dict[str, Any],
    time: int,
    batch: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    kept: int,
) -> None:
    """As measured with cuDNN 9.19."""
    layer = kind(width, hidden, **options, device="cuda", dtype=dtype)
    y, _ = layer(torch.randn(time, batch, width, device="cuda", dtype=dtype))
    node = y.grad_fn
    while not hasattr(node, "_saved_result3"):
        node = node.next_functions[0][0]
    assert node._saved_result3.nbytes == kept


def test_parameters_are_views_of_one_buffer(gpu: None) -> None:
    before = requested()
    for device in ("cpu", "cuda"):
        layer = nn.LSTM(WIDTH, HIDDEN, 2, device=device).cuda()
        names = dict(layer.named_parameters())
        assert len({parameter.untyped_storage()._cdata for parameter in names.values()}) == 1
        assert requested() - before == size(*names.values())
        assert names["weight_hh_l1"].shape == (4 * HIDDEN, HIDDEN)
        assert names["weight_hh_l1"].is_leaf
        del layer, names
    again = nn.LSTM(WIDTH, HIDDEN, device="cuda").half()
    assert requested() - before == size(*again.parameters())


@pytest.mark.parametrize("projection", [0, 16])
def test_without_biases_the_buffer_has_them_and_gradients_are_copies(gpu: None, projection: int) -> None:
    before = requested()
    layer = nn.LSTM(WIDTH, HIDDEN, bias=False, proj_size=projection).cuda()
    biases, weights = 2 * 4 * HIDDEN * 4, size(*layer.parameters())
    assert requested() - before == weights + biases
    x = source(layer)
    y, _ = layer(x)
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    y.sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert len({gradient.untyped_storage()._cdata for gradient in gradients}) == len(gradients)
    assert requested() - before == weights - states(layer, 4) - reserve(layer, 4)


def test_backward_needs_copies_where_the_batch_comes_first(gpu: None) -> None:
    """In the order of steps: those of the output's gradient and of the input, beside all that it gives."""
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True).cuda()
    x = source(layer).requires_grad_()
    y, _ = layer(x)
    gradient = torch.ones_like(y.contiguous())
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    weights = size(*layer.parameters())
    zeros, of_states = states(layer, 4), states(layer, 4)
    inputs = zeros + size(x) + size(gradient) + size(x)
    in_weights = zeros + size(x) + of_states + size(x) + weights
    assert requested("peak") - before == max(inputs, in_weights)
    assert size(x.grad) == size(x)
    assert requested() - before == size(x) + weights - states(layer, 4) - reserve(layer, 4)


def test_packed_sequences_count_the_steps_that_are_there(gpu: None) -> None:
    lengths = [6, 4, 4, 1]
    layer = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True).cuda()
    packed = pack_padded_sequence(source(layer), lengths, batch_first=True)
    assert packed.data.shape == (sum(lengths), WIDTH)
    before = requested()
    y, last = layer(packed)
    assert y.data.shape == (sum(lengths), HIDDEN)
    assert requested() - before == size(y.data, *last) + states(layer, 4) + reserve(layer, 4, sum(lengths))
    padded, _ = pad_packed_sequence(y, batch_first=True)
    assert padded.shape == (4, 6, HIDDEN)
    padded.sum().backward()
    assert size(*(parameter.grad for parameter in layer.parameters())) == size(*layer.parameters())


def test_nothing_is_kept_without_gradients_or_in_evaluation(gpu: None) -> None:
    layer = nn.GRU(WIDTH, HIDDEN).cuda()
    x = source(layer)
    before = requested()
    with torch.no_grad():
        y, last = layer(x)
        assert requested() - before == size(y, last)
    y, last = layer.eval()(x)
    assert requested() - before == size(y, last) + states(layer, 4)
    with pytest.raises(RuntimeError, match="can only be called in training mode"):
        y.sum().backward()


def test_weights_that_are_not_one_piece_are_copied_at_every_call(gpu: None) -> None:
    layer = nn.LSTM(WIDTH, HIDDEN).cuda()
    layer.weight_hh_l0.data = torch.ones_like(layer.weight_hh_l0)
    x = source(layer)
    before = requested()
    with pytest.warns(UserWarning, match="not contiguous in memory"):
        y, last = layer(x)
    weights = size(*layer.parameters())
    assert requested() - before == size(y, *last) + states(layer, 4) + reserve(layer, 4) + weights
    layer.flatten_parameters()
    assert len({parameter.untyped_storage()._cdata for parameter in layer.parameters()}) == 1


def test_a_copy_of_a_layer_is_packed_too(gpu: None) -> None:
    layer = nn.LSTM(WIDTH, HIDDEN).cuda()
    before = requested()
    twin = copy.deepcopy(layer)
    assert requested() - before == size(*twin.parameters())
    assert len({parameter.untyped_storage()._cdata for parameter in twin.parameters()}) == 1


def test_step_by_step_where_the_script_has_no_cudnn(gpu: None) -> None:
    layer = nn.LSTM(WIDTH, HIDDEN).cuda()
    with torch.backends.cudnn.flags(enabled=False):
        y, _ = layer(source(layer))
    assert y.grad_fn.name() == "StackBackward0"
    y.sum().backward()


@pytest.mark.parametrize("precision", ["amp", "amp-nocache"])
def test_the_casts_are_the_parameters_each_once_a_forward(precision: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(WIDTH, HIDDEN, 2), nn.Linear(HIDDEN, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0]).float().square().mean()
            return out

    with ampmem.profile(device="sim", gpu="h100") as prof:
        model = Model().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", **PRECISIONS[precision]):  # type: ignore[arg-type]
                loss = model(torch.randn(STEPS, BATCH, WIDTH, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    summary = prof.summary()
    assert {row.name: (row.copies, row.bytes) for row in summary.casts.by_parameter} == {
        name: (2, 2 * 2 * count) for name, count in elements.items()
    }
    total, in_rnn = sum(elements.values()), sum(n for name, n in elements.items() if name.startswith("rnn"))
    assert summary.parameters.cast_eligible == total
    for step in summary.steps:
        marks = step.marks.after_forward, step.marks.after_backward
        assert marks[0] is not None
        assert marks[1] is not None
        assert marks[0]["cast_copies"] == 2 * (in_rnn + elements["head.weight"])  # nobody saves a bias
        assert marks[1]["gradients"] == marks[1]["parameters"] == 4 * total
    assert summary.conservation.residual_bytes == 0
    assert summary.prediction is not None
    assert "cuDNN's workspaces in recurrent layers" in summary.prediction.not_modelled


@pytest.mark.parametrize("early", [False, True])
def test_late_gradients_are_all_of_them_though_they_lie_in_one_buffer(early: bool) -> None:
    """What dropping them takes off the peak is what a run takes less that drops them."""

    def peak_of(profile: ampmem.Profile) -> int:
        peak = profile.summary().peak
        assert peak is not None
        return peak.bytes

    profiles = [trained_simulated(early=when) for when in (early, True)]
    late = gradients_through_forward(TrainingRun(analysis=analyse(profiles[0].recording())))
    assert (late is None) == early
    if late is not None:
        assert late.bytes == 4 * (8 * HIDDEN * (WIDTH + HIDDEN + 2) // 2 + 7 * HIDDEN + 7)
        assert late.off_peak == peak_of(profiles[0]) - peak_of(profiles[1]) > 0


def trained_simulated(*, early: bool) -> ampmem.Profile:
    """Three steps of an LSTM and a layer, whose gradients go right after the update or only after the next forward."""
    with ampmem.profile(device="sim", gpu="h100") as profile:
        layer, head = nn.LSTM(WIDTH, HIDDEN).cuda(), nn.Linear(HIDDEN, 7).cuda()
        optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
        for _ in range(3):
            loss = head(layer(source(layer))[0]).square().sum()
            torch.empty(1 << 20, device="cuda")  # the peak
            if not early:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if early:
                optimizer.zero_grad()
    return profile
