"""What convolutions allocate besides: which kernels run, in which memory format, and what cuDNN asks for."""

import gzip
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.snapshots import real

from ampmem.allocator.gpus import GPUS
from ampmem.simulator.scratch.convolutions import (
    DATA,
    FORWARD,
    SCHEMA,
    WEIGHT,
    Convolution,
    convolution_of,
    memory_format,
    read_table,
    table_for,
)

MIB = 1 << 20
aten = torch.ops.aten


def convolution(
    source: tuple[int, ...],
    weight: tuple[int, ...],
    target: tuple[int, ...],
    *,
    stride: int = 1,
    groups: int = 1,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
    passes: tuple[str, ...] = (FORWARD,),
) -> Convolution:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, w, y = (torch.empty(shape, dtype=dtype, device="meta") for shape in (source, weight, target))
    return Convolution(
        source=x.to(memory_format=layout),
        weight=w,
        target=y,
        stride=(stride, stride),
        padding=(1, 1),
        dilation=(1, 1),
        transposed=False,
        groups=groups,
        passes=passes,
    )


PLAIN = convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 28, 28), passes=(FORWARD, DATA, WEIGHT))
X, W, Y = 8 * 64 * 28 * 28 * 4, 32 * 64 * 9 * 4, 8 * 32 * 28 * 28 * 4


def test_the_most_is_a_copy_of_all_tensors() -> None:
    assert PLAIN.most({}) == X + W + Y + 4 * MIB


def test_a_kernel_of_1x1_may_ask_for_128_mib() -> None:
    assert convolution((8, 64, 28, 28), (32, 64, 1, 1), (8, 32, 28, 28)).most({}) == 128 * MIB + 32 * 64 * 4


def test_the_most_is_limited_by_the_environment() -> None:
    assert PLAIN.most({"CUDNN_CONV_WSCAP_DBG": "1"}) == MIB
    assert PLAIN.most({"CUDNN_CONV_WSCAP_DBG": "100"}) == PLAIN.most({"CUDNN_CONV_WSCAP_DBG": ""}) == PLAIN.most({})


def test_an_algorithm_is_chosen_for_each_pass_shape_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    same = convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 28, 28))
    others = [
        convolution((9, 64, 28, 28), (32, 64, 3, 3), (9, 32, 28, 28)),
        convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 14, 14), stride=2),
        convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 28, 28), channels_last=True),
        convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 28, 28), dtype=torch.float16),
    ]
    known = PLAIN.key(FORWARD)
    assert same.key(FORWARD) == known
    assert len({known, PLAIN.key(DATA), PLAIN.key(WEIGHT), *(other.key(FORWARD) for other in others)}) == 7
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic)
    assert same.key(FORWARD) != known


def test_channels_last_tensors_are_taken_as_they_are() -> None:
    found = convolution((8, 64, 28, 28), (32, 64, 3, 3), (8, 32, 28, 28), channels_last=True)
    assert found.format is memory_format(found.source, found.weight) is torch.channels_last
    assert found.course("result") == ("result", W)  # the weight is not in that format


@pytest.mark.parametrize(
    ("channels_last", "dtype", "asked"),
    [
        (False, torch.float32, False),
        (False, torch.bfloat16, False),
        (False, torch.float16, True),
        (True, torch.float32, True),
    ],
)
def test_pytorch_has_its_own_depthwise_kernels(channels_last: bool, dtype: torch.dtype, asked: bool) -> None:
    found = convolution(
        (8, 64, 28, 28), (64, 1, 3, 3), (8, 64, 28, 28), groups=64, channels_last=channels_last, dtype=dtype
    )
    assert found.depthwise and found.by_cudnn is asked
    assert (found.most({}) > 0) is asked


@pytest.mark.parametrize(
    ("channels", "size", "image", "stride", "dilation", "asked"),
    [  # as the host side of PyTorch 2.14 decided on a device that says yes to everything
        (64, (4,), (128,), 1, 1, True),
        (64, (4,), (128,), 2, 1, False),
        (64, (3, 3), (28, 28), 1, 1, True),
        (512, (3, 3), (28, 28), 1, 1, True),
        (16, (3, 3), (28, 28), 1, 1, False),
        (512, (7, 7), (28, 28), 1, 1, False),
        (512, (3, 3), (28, 28), 1, 2, False),
        (64, (3, 3, 3), (8, 8, 8), 1, 1, False),
    ],
)
def test_cudnn_is_asked_for_some_depthwise_convolutions_in_float16(
    channels: int, size: tuple[int, ...], image: tuple[int, ...], stride: int, dilation: int, asked: bool
) -> None:
    made = torch.empty(2, channels, *image, dtype=torch.float16, device="meta")
    weight = torch.empty(channels, 1, *size, dtype=torch.float16, device="meta")
    found = replace(
        PLAIN,
        source=made,
        weight=weight,
        target=made,
        stride=(stride,) * len(size),
        dilation=(dilation,) * len(size),
        groups=channels,
    )
    assert found.depthwise and found.by_cudnn is asked


def test_a_gradient_of_one_dimension_that_was_expanded_is_copied() -> None:
    x, w, y = torch.empty(1, 4, 8), torch.empty(4, 1, 3), torch.empty(()).expand(1, 4, 6)
    args = (y, x, w, [0], [1], [0], [1], False, [0], 4, [True, True, False])
    found = convolution_of(aten.convolution_backward.default, args, (x, w, None))
    assert found.course(("x", "w", None)) == (4 * 6 * 4, "w", "x")


def test_copies_are_given_back_between_the_gradients() -> None:
    x, w, y = torch.empty(1, 4, 6, 6), torch.empty(8, 4, 3, 3), torch.empty(1, 8, 6, 6).transpose(2, 3)
    rows = x.contiguous(memory_format=torch.channels_last)
    args = (y, rows, w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)
    results = ("x", "w", "bias")
    made = convolution_of(aten.convolution_backward.default, args, results).course(results)
    size, weight = 8 * 36 * 4, 8 * 4 * 9 * 4
    assert made == (size, "x", weight, -weight, "w", -size)


def test_a_backward_computes_what_it_is_asked_for() -> None:
    x, w, y = (torch.empty(1, 4, 6, 6), torch.empty(4, 4, 3, 3), torch.empty(1, 4, 6, 6))
    args = (y, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    found = convolution_of(aten.convolution_backward.default, args, (None, w, None))
    assert found.passes == (WEIGHT,)
    assert (found.source is x, found.weight is w, found.target is y, found.groups) == (True, True, True, 1)


# -- against a real GPU ---------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """One pass that a real GPU computed: its result, and the workspace it asked for, 0 where there is none."""

    name: str
    result: int
    workspace: int


def resnet_50() -> Iterator[Convolution]:
    """Its convolutions at batch size 1, in the order in which forward runs them."""
    yield convolution((1, 3, 224, 224), (64, 3, 7, 7), (1, 64, 112, 112), stride=2)
    channels, side = 64, 56
    for blocks, width, first_stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            end = side // stride
            yield convolution((1, channels, side, side), (width, channels, 1, 1), (1, width, side, side))
            yield convolution((1, width, side, side), (width, width, 3, 3), (1, width, end, end), stride=stride)
            yield convolution((1, width, end, end), (4 * width, width, 1, 1), (1, 4 * width, end, end))
            if block == 0:
                shape = (4 * width, channels, 1, 1)
                yield convolution((1, channels, side, side), shape, (1, 4 * width, end, end), stride=stride)
            channels, side = 4 * width, end


def asked_for(path: Path) -> list[Asked]:
    """From the frames of a snapshot's trace."""
    with path.open("rb") as file:
        trace = next(each for each in pickle.load(file)["device_traces"] if each)
    found: list[Asked] = []
    for entry in (entry for entry in trace if entry["action"] == "alloc"):
        frames = " ".join(frame["name"] for frame in entry["frames"])
        name = next((passed for word, passed in _FRAMES.items() if word in frames), None)
        if name is None:
            continue
        if "run_conv_plan" in frames:
            found[-1] = found[-1]._replace(workspace=entry["size"])
        else:
            found.append(Asked(name, entry["size"], 0))
    return found


_FRAMES = {
    "cudnn_convolution_backward_weight": WEIGHT,
    "raw_cudnn_convolution_backward_weight_out": WEIGHT,
    "cudnn_convolution_backward_input": DATA,
    "cudnn_convolution_forward": FORWARD,
}


def test_the_workspaces_of_a_real_gpu() -> None:
    """All are within the most, and the forward ones of 3×3 are a copy of what is read."""
    asked = asked_for(real("resnet50_fp32_3steps"))
    layers = list(resnet_50())
    forward = [each for each in asked if each.name == FORWARD]
    assert len(forward) == 3 * len(layers)
    exact = 0
    for layer, run in zip(layers * 3, forward, strict=True):
        assert run.result == layer.target.numel() * 4
        assert run.workspace <= layer.most({})
        if not layer.pointwise and layer.weight.shape[1] != 3:
            assert 0 <= run.workspace - 4 * (layer.source.numel() + layer.weight.numel()) < 0.4 * MIB
            exact += 1
    assert exact == 3 * 16


def test_the_workspaces_of_a_real_backward() -> None:
    """Each is within the most that is assumed for some layer with a result of that size."""
    asked = asked_for(real("resnet50_fp32_3steps"))
    layers = [replace(layer, passes=(DATA, WEIGHT)) for layer in resnet_50()]
    most: Counter[tuple[str, int]] = Counter()
    for layer in layers:
        for name, made in zip(layer.passes, (layer.source, layer.weight), strict=True):
            most[name, made.numel() * 4] = max(layer.most({}), most[name, made.numel() * 4])
    backward = [each for each in asked if each.name != FORWARD]
    assert len(backward) == 3 * (2 * len(layers) - 1)  # the first layer's input needs no gradient
    assert all(each.workspace <= most[each.name, each.result] for each in backward)


# -- tables of workspaces that were measured ------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    shape = {"batch": 8, "channels": 64, "out": 32, "image": 28, "kernel": 3, "stride": 1, "padding": 1, "groups": 1}
    made = {
        "kind": "convolution",
        "pass": FORWARD,
        "dtype": "tf32",
        "benchmark": False,
        "shape": shape | {"channels_last": 0},
        "temporary": 12345,
        "kept": 0,
        "error": None,
    }
    return made | changes


def write(folder: Path, name: str, *rows: dict[str, Any], schema: str = SCHEMA, **machine: Any) -> Path:
    named = {"gpu": GPUS["h100"].name, "torch": "2.13.0+cu130", "cudnn": 91002} | machine
    path = folder / name
    path.write_text(json.dumps({"schema": schema, "machine": named, "rows": list(rows)}), encoding="utf-8")
    return path


def test_a_table_counts_for_its_gpu_and_torch(tmp_path: Path) -> None:
    write(tmp_path, "older.json", row(temporary=1))
    write(tmp_path, "newer.json", row(), cudnn=91500)
    found = table_for(GPUS["h100"], "2.13.0+cpu", tmp_path)
    assert found.of(PLAIN, FORWARD, benchmark=False) == 12345
    assert found.source == "measured on NVIDIA H100 80GB HBM3 with torch 2.13.0+cu130 and cuDNN 91500"
    assert table_for(GPUS["h100"], "2.14.0", tmp_path) is table_for(GPUS["h200"], "2.13.0", tmp_path) is None


def test_a_table_may_be_compressed(tmp_path: Path) -> None:
    path = write(tmp_path, "table.json", row())
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert table_for(GPUS["h100"], "2.13.0", tmp_path).of(PLAIN, FORWARD, benchmark=False) == 12345


def test_the_table_of_an_h200_is_there() -> None:
    found = table_for(GPUS["h200"], "2.11.0")
    assert (found.cudnn, len(found.sizes)) == (91900, 1728)
    known = convolution((32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), dtype=torch.bfloat16)
    assert found.of(known, FORWARD, benchmark=False) == 25_763_987


def test_only_what_was_measured_is_known(tmp_path: Path) -> None:
    failed = row(**{"pass": DATA, "error": "out of memory"})
    found = read_table(write(tmp_path, "table.json", row(), failed))
    assert found.of(PLAIN, DATA, benchmark=False) is found.of(PLAIN, FORWARD, benchmark=True) is None
    other = convolution((9, 64, 28, 28), (32, 64, 3, 3), (9, 32, 28, 28))
    oblong = convolution((8, 64, 28, 14), (32, 64, 3, 3), (8, 32, 28, 14))
    assert found.of(other, FORWARD, benchmark=False) is found.of(oblong, FORWARD, benchmark=False) is None


def test_a_table_of_another_schema_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a table of schema"):
        read_table(write(tmp_path, "table.json", schema="other/1"))
