"""What differs where torch is built for CUDA: CUPTI behind the profiler, numbers that are on the device."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._profiler import ProfilerActivity
from torch.overrides import TorchFunctionMode

from ampmem.recorder.sources import window
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.late import LateNumber, number_of
from ampmem.recorder.torch_private import general


def late(query: Any) -> LateNumber:
    number = LateNumber.__new__(LateNumber)
    number._copy = torch.tensor(2.5)
    number._event = SimpleNamespace(query=query)  # type: ignore[assignment]
    return number


def refuse() -> bool:
    raise RuntimeError("CUDA error")


def test_a_late_number_is_there_when_the_device_has_come_that_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert late(lambda: True).value() == 2.5
    assert late(lambda: False).value() is None


def test_no_event_is_queried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert late(lambda: pytest.fail("queried")).value() is None


def test_a_device_that_has_failed_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert late(refuse).value() is None


def test_the_copy_of_a_failed_device_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for query, stays in ((refuse, True), (lambda: True, False), (lambda: False, False)):
        number = late(query)
        copy = weakref.ref(number._copy)
        del number
        assert (copy() is not None) == stays


def test_a_copy_that_was_begun_on_a_failed_device_is_never_freed() -> None:
    number = late(refuse)
    del number._event
    copy = weakref.ref(number._copy)
    del number
    assert copy() is not None


class Calls(TorchFunctionMode):
    """Counts calls of torch's functions, as a script may."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Stream:
    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_late_number_is_the_hosts_wherever_the_script_has_its_tensors_made(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def pinned(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    loss = torch.tensor([2.5])
    with torch.device(device), Calls() as calls:
        monkeypatch.setattr(torch, "empty", pinned)
        number = LateNumber(loss)
        monkeypatch.setattr(torch, "empty", empty)
        values = number.value(), number_of(loss)
    assert number._copy.device.type == "cpu"
    assert values == (2.5, 2.5)
    assert calls.count == 0


class OpFields(SimpleNamespace):
    """Those of a node, and not of a call of CUDA's runtime."""


def node(name: str, fields: type[SimpleNamespace], *children: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        children=list(children),
        start_time_ns=1,
        end_time_ns=9,
        start_tid=1,
        extra_fields=fields(sequence_number=3),
    )


def test_calls_of_the_cuda_runtime_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "OP_FIELDS", OpFields)
    launch = node("cudaLaunchKernel", SimpleNamespace)
    markers = [node(window.MARKER, OpFields) for _ in range(2 * window.MARKERS)]
    marks = [window.ClockMark(1, 5, 9)] * window.MARKERS
    seen = window.EventTree([*markers, launch, node("MmBackward0", OpFields, launch)]).observed((marks, marks))
    assert [seen.names[name] for name in seen.spans[:, 2].tolist()] == ["MmBackward0"]


def test_the_profiler_is_asked_for_no_calls_of_the_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = general.prepare_profiler

    def prepare(config: Any, activities: Any, *rest: Any) -> None:
        asked.append((set(activities), *rest))
        real(config, activities, *rest)

    monkeypatch.setattr(general, "prepare_profiler", prepare)
    profile = window.Window()
    for filters in (True, False) if general.FILTERS else (False,):
        monkeypatch.setattr(general, "FILTERS", filters)
        profile.start()
        profile.take(go_on=False)
    assert asked[-1] == ({ProfilerActivity.CPU},)
    if len(asked) == 2:
        activities, parts = asked[0]
        assert activities == {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        assert not any("CUDA" in part for kinds in parts.values() for part in kinds)


def test_an_allocator_that_the_script_asks_for_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert TorchCuda().problem() == (
        "the script asks for the allocator 'cudaMallocAsync' after torch was imported with 'native'; remove the "
        "backend from the script's settings"
    )


def test_a_cache_that_is_turned_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    assert TorchCuda().problem() is None
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in str(TorchCuda().problem())
