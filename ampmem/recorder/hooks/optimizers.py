"""Optimizers: when they update, their state, their own copies of parameters, the GradScaler."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ampmem.events import Fact, OptimizerRecord, ParameterRecord
from ampmem.recorder.hooks.patch import patch
from ampmem.recorder.log import storage_address
from ampmem.recorder.models import parameter_record

if TYPE_CHECKING:
    from ampmem.recorder.session import Session


class OptimizerHooks:
    """Tells the session about updates and logs what an update leaves behind."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.stepping: list[int] = []
        """``id`` of each optimizer whose ``step`` is running: wrappers step inside each other."""
        self._records: dict[int, OptimizerRecord] = {}
        self.own_parameters: dict[str, ParameterRecord] = {}
        """Parameters that only an optimizer knows, no module."""

    def install(self) -> Callable[[], None]:
        """Register the hooks and wrap ``GradScaler.step``; returns what undoes it."""
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before)
        after = torch_optimizer.register_optimizer_step_post_hook(self._after)
        undo = [patch(GradScaler, "step", self._wrap_scaler), patch(Optimizer, "__init__", self._wrap_init)]

        def remove() -> None:
            before.remove()
            after.remove()
            for entry in undo:
                entry()

        return remove

    def records(self) -> list[OptimizerRecord]:
        """The optimizers that have made an update."""
        return list(self._records.values())

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.on_thread():
            return
        if self.stepping:  # one in another, or an earlier step raised
            running = _running_steps()
            running.discard(id(optimizer))
            self.stepping = [stepping for stepping in self.stepping if stepping in running]
        self.stepping.append(id(optimizer))
        if self._session.recording:
            self.note_gradients(optimizer)
            self._session.optimizer_started(type(optimizer).__name__)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.on_thread() or id(optimizer) not in self.stepping:
            return
        del self.stepping[self.stepping.index(id(optimizer)) :]
        if self._session.recording:
            self._records[id(optimizer)] = OptimizerRecord(
                class_name=type(optimizer).__name__, implementation=implementation(optimizer)
            )
            self.note_state(optimizer)
        if not self.stepping:
            found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler on fused optimizers
            skipped = isinstance(found_inf, torch.Tensor) and bool(found_inf)
            self._session.updated(id(optimizer), skipped=skipped)

    def note_gradients(self, optimizer: Optimizer) -> None:
        """Log the gradients that ``optimizer`` is about to use, master copies' among them."""
        names = self._names()
        for _, _, parameter in _parameters(optimizer):
            if parameter.grad is not None:
                name = names.get(id(parameter), (0, 0))
                self._session.log.fact(Fact.GRADIENT, storage_address(parameter.grad), *name)

    def note_state(self, optimizer: Optimizer) -> None:
        """Log ``optimizer``'s state and the parameters that are its own."""
        session = self._session
        names = self._names()
        self._note_own_parameters(optimizer, names)
        for parameter, state in list(optimizer.state.items()):
            name_id, path = names.get(id(parameter), (0, 0))
            of = session.texts.value(name_id)
            for key, tensor in _tensors(state, ""):
                text = session.texts.id(f"{key} of {of}" if of else key)
                session.log.fact(Fact.OPTIMIZER_STATE, storage_address(tensor), text, path)

    def _names(self) -> dict[int, tuple[int, int]]:
        """``id`` of each module parameter to the text ids of its name and module."""
        return {id(p): (slot.name_id, slot.path_id) for slot, p in self._session.models.parameters()}

    def _note_own_parameters(self, optimizer: Optimizer, names: dict[int, tuple[int, int]]) -> None:
        """Twins of module parameters are master copies; tensors no module knows are parameters."""
        session = self._session
        optimized = {id(parameter) for _, _, parameter in _parameters(optimizer)}
        twinless = [(slot, p) for slot, p in session.models.parameters() if id(p) not in optimized]
        for group, index, parameter in _parameters(optimizer):
            if id(parameter) in names:
                continue
            twin = next((pair for pair in twinless if _is_twin(pair[1], parameter)), None)
            if twin is not None:
                twinless.remove(twin)
                name, path, fact = twin[0].name_id, twin[0].path_id, Fact.MASTER_COPY
            else:
                text = f"{type(optimizer).__name__}.param_groups[{group}][{index}]"
                self.own_parameters[text] = parameter_record(text, parameter)
                name, path, fact = session.texts.id(text), 0, Fact.PARAMETER
            names[id(parameter)] = (name, path)
            session.log.fact(fact, storage_address(parameter), name, path)
            if parameter.grad is not None:
                session.log.fact(Fact.GRADIENT, storage_address(parameter.grad), name, path)

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            session.add_optimizer(optimizer)

        return __init__

    def _wrap_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled() or not session.on_thread():
                return original(scaler, optimizer, *args, **kwargs)
            session.scaled(scaler.get_scale())
            updates = session.updates
            session.optimizer_started(type(optimizer).__name__)
            result = original(scaler, optimizer, *args, **kwargs)
            if session.updates == updates:
                session.updated(id(optimizer), skipped=True)
            return result

        return step


def _running_steps() -> set[int]:
    """``id`` of each optimizer whose ``step`` is on the Python stack."""
    running: set[int] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # The wrapper around every optimizer's step, which also calls the hooks, has it as ``self``.
        if frame.f_code.co_filename == torch_optimizer.__file__:
            running.add(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return running


def implementation(optimizer: Optimizer) -> str:
    """``foreach``, ``fused`` or ``for-loop``: how ``optimizer`` runs its update."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None or "foreach" not in group:
        return "foreach" if group.get("foreach") else "for-loop"
    _, foreach = torch_optimizer._default_to_fused_or_foreach(
        group["params"], group.get("differentiable", False), use_fused=False
    )
    return "foreach" if foreach else "for-loop"


def _parameters(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield group_index, index, parameter


def _is_twin(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether ``copy`` can be ``parameter`` in another precision."""
    return parameter.shape == copy.shape and parameter.dtype != copy.dtype


def _tensors(value: Any, key: str, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a state of any nesting and class, with its dotted key."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
        return
    seen = seen | {id(value)}
    parts: Any
    if isinstance(value, torch.Tensor):
        if not hasattr(value, "__tensor_flatten__"):
            yield key, value
            return
        parts = ((name, getattr(value, name)) for name in value.__tensor_flatten__()[0])
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = enumerate(value)
    else:
        parts = _attributes(value)
    for name, part in parts:
        yield from _tensors(part, f"{key}.{name}" if key else str(name), seen)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of any class holds, in its dictionary and in its slots."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = base.__dict__.get(name)  # None for __dict__, __weakref__ and mangled names
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
