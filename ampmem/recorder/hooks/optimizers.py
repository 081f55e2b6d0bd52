"""Hooks of optimizers and GradScaler: updates, optimizer state, and the optimizer's own copies of parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MemberDescriptorType
from typing import Any, TypeAlias

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampmem.events import Fact, OptimizerRecord, ParameterRecord
from ampmem.names import StateName
from ampmem.patching import Undo, added, hook, patch_call, undone_together
from ampmem.recorder.facts.addresses import PLAIN
from ampmem.recorder.facts.guests import attributes_of, gradient_of, is_tensor, states_of
from ampmem.recorder.facts.log import Repeated
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Slot, parameter_record
from ampmem.recorder.models.optimizers import Optimizers, chosen_from, is_master, parameters_of, partition_of, twins_of
from ampmem.recorder.sources.cuda.late import LateNumber, number_of
from ampmem.recorder.torch_private import general as private

_Names: TypeAlias = dict[int, list[tuple[int, int]]]
"""Text ids of name and module, by ``id`` of the parameter; a flat copy has those of all parameters in it."""
_Pairs: TypeAlias = Sequence[tuple[Slot, torch.Tensor]]
_NOBODYS = [(0, 0)]
"""Text ids for a parameter of which nothing is known."""
_NO_TENSORS = frozenset((int, float, bool, str, type(None)))
"""Types that contain no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """A parameter that only an optimizer has: what it is, and which parameters it copies."""

    parameter: weakref.ref[torch.Tensor]
    fact: Fact
    names: list[tuple[int, int]]


class OptimizerHooks:
    """Reports updates, and logs the state and gradients of optimizers."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._models, self._update = listener, listener.models, listener.update
        log = self._log = listener.log
        self._handle: Any = None
        """Handle of the hook that is called after each step."""
        self._updates = 0
        """Number of updates so far, including skipped ones."""
        self._records: dict[int, OptimizerRecord] = {}
        self.own_parameters: dict[str, ParameterRecord] = {}
        """Parameters that only an optimizer has, by name."""
        self._own: dict[int, _Own] = {}
        """Parameters that only an optimizer has, by ``id``."""
        self._waiting: list[OptimizerRecord] = []
        """Optimizers that had made no update when memory ran out."""
        self._numbers: dict[int, int] = {}
        """Index in ``_records`` of each optimizer, by ``id``."""
        self._shells: set[int] = set()
        """``id`` of each wrapper, in whose step another optimizer has stepped: that one may hold the state."""
        self._counts: dict[int, int] = {}
        """Number of parameters of each optimizer when it was last noted."""
        self.generation = 0
        """Number of times that something new was noted."""
        self._states_of = log.misses.guarded(states_of)
        self._look_into = log.misses.guarded(lambda state: list(_tensors(state, "")))
        self._state_names: dict[tuple[str, int], int] = {}
        """Text ids of state tensors by key and parameter, cached because each step needs them."""
        self._optimized: dict[str, int] = {}
        """Index of the optimizer that updates each parameter, or its master copy, by the parameter's name."""
        self._wider: set[str] = set()
        """Names of the parameters that an update found in a wider dtype than the forward before it."""
        self._made: list[weakref.ref[Optimizer]] = []
        """Optimizers made while recording."""
        self._gradients: dict[int, Repeated] = defaultdict(lambda: Repeated(log))
        self._states: dict[int, Repeated] = defaultdict(lambda: Repeated(log))
        """What each step logs anew, by the ``id`` of the optimizer."""
        self._told = Optimizers(died=lambda _: None)
        """The optimizers that the listener was told of."""
        self._idle: set[str] = set()
        """Names of the parameters of optimizers that made no update."""

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Register the hooks and wrap ``GradScaler.step``; returns the undo."""
        yield hook(private.on_step_before, self._log.misses.guarded(self._before))
        handle = self._handle = private.on_step_after(self._log.misses.guarded(self._after))
        yield added(private.on_step_after.__module__, private.on_step_after.__name__, handle.remove)
        yield patch_call(*private.SCALER_STEP, self._wrap_scaler)
        yield patch_call(*private.OPTIMIZER_INIT, self._wrap_init)

    def records(self) -> list[OptimizerRecord]:
        """Optimizers that made an update or whose update a GradScaler skipped, then those that made none."""
        return [*self._records.values(), *self._waiting]

    def assign(self, record: ParameterRecord) -> ParameterRecord:
        """``record`` with the index of its optimizer, if known."""
        optimizer = self._optimized.get(record.name)
        held = optimizer is not None or record.name in self._idle
        if (record.optimizer, record.held) == (optimizer, held):
            return record
        return replace(record, optimizer=optimizer, held=held)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._listener.on_thread():
            return
        self._go_last()
        # Torch calls no hook after a step that raised: such a step looks as if it still ran.
        stepping = self._update.stepping
        if stepping:  # a step inside another, or an earlier step raised
            running = private.running_steps()
            running[id(optimizer)] -= 1  # this one
            # A class whose step calls its base's step has two entries.
            stepping[:] = [entry for n, entry in enumerate(stepping) if stepping[:n].count(entry) < running[entry]]
        stepping.append(id(optimizer))
        if self._listener.recording:
            self.note_gradients(optimizer)
            if id(optimizer) not in self._records and self._states_of(optimizer):  # this update may replace the state
                self._note_tensors(optimizer, self._names(optimizer, before=True), named=True)
            self._listener.optimizer_started(type(optimizer).__name__)

    def _note_swapped(self, optimizer: Optimizer, pairs: _Pairs) -> None:
        """Log as master copies the parameters that ``optimizer`` updates in a wider dtype than forward uses.

        It takes two such steps: in one step alone the model may have been converted in between.
        """
        models = self._models
        updated: set[int] | None = None
        for slot, parameter in pairs:
            width = models.widths.get(slot.name_id)
            if width is None or parameter.element_size() <= width:
                continue
            if updated is None:
                updated = {id(parameter) for _, _, parameter in _parameters(optimizer)}
            if id(parameter) not in updated:
                continue
            if slot.name in self._wider:
                models.swapped.add(slot.name)
                self._log.about(Fact.MASTER_COPY, parameter, slot.name_id, slot.path_id)
            self._wider.add(slot.name)

    def _go_last(self) -> None:
        """Move our hook to the end of the step hooks.

        Torch iterates over them, and ours may end the recording, which removes it.
        """
        # An OrderedDict in the order of registration; the last one sees what all others have done, too.
        hooks = None if self._handle is None else self._handle.hooks_dict_ref()
        if hooks and next(reversed(hooks)) != self._handle.id:
            hooks.move_to_end(self._handle.id)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._update.stepping
        if not self._listener.on_thread() or id(optimizer) not in stepping:
            return
        while stepping.pop() != id(optimizer):
            pass
        if stepping:
            self._listener.optimizer_inside(id(optimizer))
            self._shells.add(stepping[-1])
        if self._listener.recording:
            self.note_state(optimizer)
            if not stepping:
                self._note_others(optimizer)
        if not stepping:
            found = private.found_inf(optimizer)  # GradScaler sets it on fused optimizers
            skipped = False if found is None else number_of(found)
            self._updated(optimizer, skipped)
        if optimizer not in self._told:  # not before: what it will wait for has not been followed in this step
            self._tell(optimizer)

    def _note_others(self, optimizer: Optimizer) -> None:
        """Log the state of optimizers whose ``step`` is never called: SAM's have two methods of other names."""
        self._made = [made for made in self._made if made() is not None]
        for reference in self._made:
            other = reference()
            if other is None or other is optimizer or id(other) in self._records or not self._states_of(other):
                continue
            self._note_tensors(other, self._names(other, before=True), named=True)

    def _updated(self, optimizer: Optimizer, skipped: float | LateNumber | None) -> None:
        self._updates += 1
        self._listener.updated(id(optimizer), skipped=skipped)

    def note_gradients(self, optimizer: Optimizer) -> None:
        """Log the gradients that ``optimizer`` is about to use, including those of master copies."""
        known = not self._wider and not self._renamed()
        self._gradients[id(optimizer)].log(
            self._models.version,
            (lambda reader, number, key: reader.gradients(number, key, optimizer)) if known else None,
            lambda: self._note_gradients(optimizer),
        )

    def _renamed(self) -> bool:
        """Whether a parameter may have another name than at the last :meth:`Models.note`."""
        return self._models.changed or bool(self._own)

    def _note_gradients(self, optimizer: Optimizer) -> None:
        pairs = list(self._models.parameters())
        names = self._names(optimizer, pairs, before=True)
        about = self._log.about
        for _, _, parameter in _parameters(optimizer):
            gradient = gradient_of(parameter)
            if gradient is not None:
                for name, path in names.get(id(parameter), _NOBODYS):
                    about(Fact.GRADIENT, gradient, name, path)
        self._note_swapped(optimizer, pairs)

    def note_state(self, optimizer: Optimizer) -> None:
        """Log ``optimizer``'s state and the parameters that only it has."""
        known = self._counts.get(id(optimizer)) == _count(optimizer) and not self._renamed()
        self._states[id(optimizer)].log(
            self._models.version,
            (lambda reader, number, key: reader.state(number, key, optimizer)) if known else None,
            lambda: self._note_state(optimizer),
        )

    def _note_state(self, optimizer: Optimizer) -> None:
        names = self._names(optimizer)
        self._note_optimizer(optimizer, names)
        self._note_tensors(optimizer, names)

    def note_kept(self, optimizer: Optimizer) -> None:
        """Log the state of ``optimizer``, if it has any."""
        if self._states_of(optimizer):
            self._log.misses.guarded(self.note_state)(optimizer)

    def note_waiting(self, optimizers: Iterable[Optimizer]) -> None:
        """Note which optimizers have made no update, and their parameters; called when memory ran out."""
        names = {id(parameter): slot.name_id for slot, parameter in self._models.parameters()}
        for optimizer in optimizers:
            if id(optimizer) in self._records:
                continue
            number = len(self._records) + len(self._waiting)
            self._waiting.append(replace(_record(optimizer), stepped=False))
            self.generation += 1
            for _, _, parameter in _parameters(optimizer):
                if id(parameter) in names:
                    self._optimized.setdefault(self._log.texts.value(names[id(parameter)]), number)

    def note_idle(self, optimizers: Iterable[Optimizer]) -> list[Any]:
        """Log the state of optimizers that made no update, for the parameters that models have.

        Returns the state of each parameter that is logged by now, of all optimizers.
        """
        names = {id(parameter): [(slot.name_id, slot.path_id)] for slot, parameter in self._models.parameters()}
        logged: list[Any] = []
        for optimizer in optimizers:
            idle = id(optimizer) not in self._records
            if idle:
                self._note_tensors(optimizer, names, named=True)
                theirs = (names.get(id(parameter), []) for parameter in parameters_of(optimizer))
                self._idle |= {self._log.texts.value(name) for known in theirs for name, _ in known}
            states = self._states_of(optimizer) or ()
            logged += [state for parameter, state in states if not idle or id(parameter) in names]
        return logged

    def _note_tensors(self, optimizer: Optimizer, names: _Names, *, named: bool = False) -> None:
        """Log the tensors of ``optimizer``'s state; if ``named``, only for parameters that have a name."""
        about, state_names = self._log.about, self._state_names
        for parameter, state in self._states_of(optimizer) or ():
            if named and id(parameter) not in names:
                continue
            tensors = _plain_tensors(state) or self._look_into(state) or []
            for name, path in names.get(id(parameter), _NOBODYS):
                for key, tensor in tensors:
                    if is_master(key, tensor, parameter):
                        about(Fact.MASTER_COPY, tensor, name, path)
                    else:
                        known = state_names.get((key, name))
                        about(Fact.OPTIMIZER_STATE, tensor, known or self._state_name(key, name), path)

    def _state_name(self, key: str, parameter: int) -> int:
        """Text id of the state tensor ``key`` of the ``parameter`` with that text id."""
        state = StateName(state=key, parameter=self._log.texts.value(parameter))
        found = self._state_names[key, parameter] = self._log.texts.id(str(state))
        return found

    def _note_optimizer(self, optimizer: Optimizer, names: _Names) -> None:
        """Keep a record of ``optimizer``, which made an update or had it skipped."""
        self._note_own_parameters(optimizer)
        count = _count(optimizer)
        if self._counts.get(id(optimizer)) == count:
            return
        self._counts[id(optimizer)] = count
        self.generation += 1
        self._records[id(optimizer)] = _record(optimizer)
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        if id(optimizer) in self._shells and not self._states_of(optimizer):
            return  # the inner optimizers know their parameters, which may be fewer in this process
        for _, _, parameter in _parameters(optimizer):
            for name, _ in names[id(parameter)]:
                self._optimized[self._log.texts.value(name)] = number

    def _names(self, optimizer: Optimizer, pairs: _Pairs | None = None, *, before: bool = False) -> _Names:
        """Text ids for each parameter of the modules and of ``optimizer``. ``pairs`` are the parameters of the models.

        ``before`` an update a copy still equals its parameter, but the model may not have run.
        """
        if pairs is None:
            pairs = list(self._models.parameters())
        names = {id(parameter): [(slot.name_id, slot.path_id)] for slot, parameter in pairs}
        if all(id(parameter) in names for _, _, parameter in _parameters(optimizer)):
            return names  # as a rule
        optimized = {id(parameter) for _, _, parameter in _parameters(optimizer)}
        twinless = [pair for pair in pairs if id(pair[1]) not in optimized]
        for group, index, parameter in _parameters(optimizer):
            if id(parameter) not in names:
                known = self._own.get(id(parameter))
                if known is None or known.parameter() is not parameter:
                    known = self._copy_of(parameter, twinless)
                    if known is None and before:
                        continue
                    known = known or self._only_in(optimizer, group, index, parameter)
                    self._own[id(parameter)] = known
                names[id(parameter)] = known.names
                twinless = [pair for pair in twinless if (pair[0].name_id, pair[0].path_id) not in known.names]
        return names

    def _copy_of(self, parameter: torch.Tensor, twinless: Sequence[tuple[Slot, torch.Tensor]]) -> _Own | None:
        """``parameter`` as a copy of some of the ``twinless`` parameters; ``None`` if it is not one."""
        # Engines for mixed precision copy parameters one by one, all into one flat tensor, or a slice per rank.
        candidates = [candidate for _, candidate in twinless]
        twins: Sequence[int] = twins_of(parameter, candidates) or partition_of(parameter, candidates)
        reached = sum(candidates[place].numel() for place in twins)
        if reached < parameter.numel():  # what looks like padding may be parameters further on
            chosen = chosen_from(parameter, candidates)
            twins = chosen if sum(candidates[place].numel() for place in chosen) > reached else twins
        names = [(twinless[place][0].name_id, twinless[place][0].path_id) for place in twins]
        return _Own(parameter=weakref.ref(parameter), fact=Fact.MASTER_COPY, names=names) if names else None

    def _only_in(self, optimizer: Optimizer, group: int, index: int, parameter: torch.Tensor) -> _Own:
        """A parameter that no module has, only ``optimizer``."""
        text = f"{type(optimizer).__name__}.param_groups[{group}][{index}]"
        self.own_parameters[text] = parameter_record(text, parameter)
        return _Own(parameter=weakref.ref(parameter), fact=Fact.PARAMETER, names=[(self._log.texts.id(text), 0)])

    def _note_own_parameters(self, optimizer: Optimizer) -> None:
        """Log ``optimizer``'s parameters that no module has.

        Those that copy a module's parameters are master copies, all others are parameters.
        """
        for _, _, parameter in _parameters(optimizer):
            # The id of a freed parameter may be another's by now.
            own = self._own.get(id(parameter))
            if own is None or own.parameter() is not parameter:
                continue
            for name, path in own.names:
                self._log.about(own.fact, parameter, name, path)
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self._log.about(Fact.GRADIENT, gradient, name, path)

    def let_go(self, tensors: tuple[torch.Tensor, ...]) -> Undo:
        """Let go of ``tensors``, which are about to be swapped; each keeps its role."""
        held = []
        for tensor in tensors:
            own = self._own.get(id(tensor))
            if own is not None and own.parameter() is tensor:
                del self._own[id(tensor)]
                held.append((tensor, own.fact, own.names))

        def take() -> None:
            for tensor, fact, names in held:
                self._own[id(tensor)] = _Own(parameter=weakref.ref(tensor), fact=fact, names=names)

        return take

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))
            made(optimizer)

        made = self._log.misses.guarded(self._tell)
        return __init__

    def _tell(self, optimizer: Optimizer) -> None:
        """Tell the listener of ``optimizer``, which was made, or has made its first update here."""
        self._told.add(optimizer)
        self._listener.optimizer_made(optimizer)

    def _wrap_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # A scaler that skips an update does not call the optimizer's step: then the number of updates stays.
            updates = started(scaler, optimizer)
            result = original(scaler, optimizer, *args, **kwargs)
            if updates is not None and self._updates == updates:
                skipped(optimizer)
            return result

        guarded = self._log.misses.guarded
        started, skipped = guarded(self._scaled), guarded(self._skipped)
        return step

    def _scaled(self, scaler: GradScaler, optimizer: Optimizer) -> int | None:
        """Note that ``scaler`` is about to update; returns the number of updates before."""
        if not self._listener.on_thread() or not scaler.is_enabled():
            return None
        scale = private.scale_of(scaler)  # get_scale() would synchronize with the device
        self._listener.scaled(scaler.get_scale() if scale is None else number_of(scale))
        self._listener.optimizer_started(type(optimizer).__name__)
        return self._updates

    def _skipped(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler skipped the update of ``optimizer``."""
        if self._listener.recording:
            self.note_state(optimizer)  # state of earlier updates, which the next one may replace
        self._updated(optimizer, True)


def _record(optimizer: Optimizer) -> OptimizerRecord:
    bases = [base.__name__ for base in type(optimizer).__mro__[1:] if issubclass(base, Optimizer)]
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    simple = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, type(None)))}
    return OptimizerRecord(
        class_name=type(optimizer).__name__,
        implementation=implementation(optimizer),
        bases=tuple(bases),
        settings=simple,
    )


def implementation(optimizer: Optimizer) -> str:
    """How ``optimizer`` runs its update: ``foreach``, ``fused`` or ``for-loop``."""
    group = optimizer.param_groups[0]
    # The defaults of foreach and fused are decided by torch at each step, and are not in the group.
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None or "foreach" not in group:
        return "foreach" if group.get("foreach") else "for-loop"
    _, foreach = private.fused_or_foreach(group["params"], group.get("differentiable", False), use_fused=False)
    return "foreach" if foreach else "for-loop"


def _count(optimizer: Optimizer) -> int:
    """Number of parameters of ``optimizer``."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _parameters(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield group_index, index, parameter


def _plain_tensors(state: Any) -> list[tuple[str, torch.Tensor]] | None:
    """:func:`_tensors` of a dictionary of plain tensors and numbers, the usual state; ``None`` for any other state."""
    if type(state) is not dict:
        return None
    found: list[tuple[str, torch.Tensor]] = []
    for name, part in state.items():
        if type(name) is not str:
            return None
        if type(part) in PLAIN:
            found.append((name, part))
        elif type(part) not in _NO_TENSORS:
            return None
    return found


def _tensors(value: Any, key: str, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a state of any nesting and class, with its dotted key."""
    kind = type(value)
    if id(value) in seen or issubclass(kind, (str, bytes, int, float, type(None))):
        return
    seen = seen | {id(value)}
    parts: Any
    if is_tensor(value):
        if not hasattr(value, "__tensor_flatten__"):
            yield key, value
            return
        inner = [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
        inner = [(name, part) for name, part in inner if is_tensor(part)]
        # A wrapper of one tensor, such as DTensor, gets that tensor's key.
        parts = inner if len(inner) > 1 else [("", part) for _, part in inner]
    elif issubclass(kind, dict):
        parts = dict.items(value)  # not its class's own items()
    elif issubclass(kind, Mapping):
        parts = value.items()
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        parts = enumerate(value)
    else:
        parts = _attributes(value)
    for name, part in parts:
        below = ".".join(filter(None, (key, str(name))))
        if type(part) in PLAIN:  # fast path: most are
            yield below, part
        else:
            yield from _tensors(part, below, seen)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object of any class, in its dictionary and in its slots."""
    yield from list(attributes_of(value).items())
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = base.__dict__.get(name)  # None for __dict__, __weakref__ and mangled names
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # the slot is empty
                    yield name, member.__get__(value)
