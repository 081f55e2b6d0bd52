"""All hooks of a session except forward's: those that find the ends of steps, and those of a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ampmem.names import CASTS_COMPILED
from ampmem.patching import Undo
from ampmem.recorder.facts.log import Log, Texts
from ampmem.recorder.hooks import boundaries, children
from ampmem.recorder.hooks.backward import BackwardHooks
from ampmem.recorder.hooks.boundaries import Calls
from ampmem.recorder.hooks.communication import CollectiveHooks, CommunicationHooks, DataParallelHooks
from ampmem.recorder.hooks.conflicts import LetGo, let_go_of_swapped, make_way_for_history, make_way_for_profilers
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.hooks.modules import ModuleHooks, UnseenByCompiled, quiet_compiled_modules
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.marker import Marker
from ampmem.recorder.models.models import Models
from ampmem.recorder.options import Options
from ampmem.recorder.ranks.places import Places
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.sources.base import Source
from ampmem.recorder.steering.arms import ArmSeen


class Hooks:
    """Makes all hooks; each ``install`` returns its undo.

    ``hold_tensors`` lists the other holders of weak references, which must let go when tensors are swapped.
    """

    def __init__(
        self,
        listener: Listener,
        source: Source,
        log: Log,
        models: Models,
        texts: Texts,
        update: RunningUpdate,
        arm_seen: ArmSeen,
        options: Options,
        *,
        hold_tensors: Sequence[LetGo],
    ) -> None:
        self.optimizers = OptimizerHooks(listener, log, models, texts, update)
        communication = CommunicationHooks(listener, log, models, texts, arm_seen)
        self.modules = ModuleHooks(listener, log, models, update.stacks, arm_seen, communication.follow)
        step_on = options.step_on
        self.data_parallel = DataParallelHooks(listener, log, texts)
        self.calls = Calls(step_on, listener) if isinstance(step_on, Marker) else None
        self.places = Places(options.place)
        self.compiled = UnseenByCompiled(
            lambda: listener.recording and not self.modules.in_forward(),
            listener.compiled_in_place,
            lambda: log.casts if listener.recording and arm_seen.on() else None,
            lambda: listener.remark(CASTS_COMPILED),
        )
        self.early: list[Callable[[], Undo]] = [
            self.optimizers.install,
            BackwardHooks(listener, log.misses).install,
            partial(children.install, listener),
            self.places.install,
            quiet_compiled_modules,
            self.compiled.install,
            self.data_parallel.install,
            CollectiveHooks(listener, log, texts).install,
            partial(let_go_of_swapped, (*hold_tensors, self.optimizers.let_go), log.misses),
        ]
        """Hooks installed from the start: those that find the ends of steps, and those that see objects being made."""
        if self.calls is not None:
            self.early.append(self.calls.install)
        self.others: list[Callable[[], Undo]] = [
            partial(boundaries.install_data, listener, log.misses),
            communication.install,
        ]
        """Hooks installed only while recording."""
        if source.uses_profiler:
            self.others.append(partial(make_way_for_profilers, listener))
        if source.uses_history:
            self.others.append(partial(make_way_for_history, listener))
