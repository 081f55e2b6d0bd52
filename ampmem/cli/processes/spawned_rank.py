"""A process that the script has spawned, recorded as a rank once it joins a process group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ampmem.cli.processes import end_messages
from ampmem.cli.processes.messages import Audience, OfRank, Parent, StepEnded
from ampmem.cli.processes.plan import Orders, place_rank, tell_name
from ampmem.errors import AmpmemError
from ampmem.events import PlaceRecord
from ampmem.failure import failure_of
from ampmem.patching import Undo, patch
from ampmem.recorder.evaluation import ThenEvaluation
from ampmem.recorder.ranks.environment import Launched
from ampmem.recorder.ranks.places import Places
from ampmem.recorder.ranks.together import Together
from ampmem.recorder.script import stops_in
from ampmem.recorder.session import Session
from ampmem.recorder.steering.stopping import Stopper
from ampmem.recorder.torch_private.distributed import GROUP_MADE
from ampmem.recording import remove_claim


class SpawnedRank:
    """Runs the function of the spawned process, and records it."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._session: Session | None = None
        self._both: ThenEvaluation | None = None
        self._audience: Audience | None = None
        self._stopper = Stopper()
        self._together = Together(several=True)
        self._tried = False
        self._path = Path()

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that records ``run``."""

        def recorded() -> None:
            undo = self._watch()
            failure: BaseException | None = None
            try:
                run()
            except BaseException as error:
                failure = error
                if not stops_in(error):
                    raise
            finally:
                undo()
                self._end_of_rank(failure)

        return recorded

    def _watch(self) -> Undo:
        """Patch torch so that recording begins once there is a process group; returns the undo function."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def update(group: Any) -> Any:
                result = original(group)
                if group is not None and not self._tried:
                    self._tried = True
                    self._begin()
                return result

            return update

        return patch(*GROUP_MADE, wrap)

    def _begin(self) -> None:
        place = Places(PlaceRecord(rank=0, world_size=1, job=self._orders.job)).now()
        if place is None or place.rank < 0 or place.world_size < 2:
            return
        orders, plan = self._orders, self._orders.plan
        known = Launched(place=place, here=range(place.world_size))
        audience: Audience = OfRank(known) if plan.report_to is None else Parent(plan.protected.real(plan.report_to))
        near = Path() if Path.cwd() == orders.directory else orders.directory
        path = None
        try:
            name, greeting = place_rank(
                lambda number: plan.protected.real(near / plan.path(orders.title, number)),
                known,
                numbered=plan.numbered,
                force=plan.script.force,
            )
            path = name
            options = plan.options(name, place=place, baseline=True)
            session = Session(options, on_step=partial(self._step_ended, audience), on_done=self._stop_ranks)
            self._both = ThenEvaluation(session, audience.complain, force=plan.script.force)
            session.start()
        except AmpmemError as error:
            if path is not None:
                remove_claim(path)
            audience.complain(str(error))
            return
        self._session, self._audience, self._path = session, audience, name
        tell_name(orders.names, name)
        audience.say(greeting)

    def _step_ended(self, audience: Audience, done: int) -> None:
        self._together.step_ended()
        audience.step(StepEnded(done=done, wanted=self._orders.plan.script.steps))

    def _stop_ranks(self) -> None:
        """Stop this rank with all others after the last step, if the script's own process only waits for them."""
        if self._orders.plan.run_to_end:
            if self._both is not None:
                self._both.begin()
            return
        waits = (
            "" if self._orders.joining.exists() else "the script's own process does more than wait for this one to end"
        )
        self._stopper.spared = self._together.why_not(waits) or ""
        if not self._stopper.spared:
            with suppress(OSError):
                self._orders.stopped.touch()
            self._stopper.stop()
        if self._session is not None and self._audience is not None:
            self._audience.say(end_messages.why_not_stopped(self._path, self._stopper))

    def _end_of_rank(self, failure: BaseException | None) -> None:
        session, both, audience = self._session, self._both, self._audience
        if session is None or both is None or audience is None or session.forked():
            return
        self._stopper.ended(failure)
        if failure is not None and stops_in(failure):
            failure = None
        if failure is None:
            self._together.over()
        elif not isinstance(failure, SystemExit):
            both.failed(failure_of(failure))
        try:
            both.close(failure)
            self._say(session, audience, failure)
            if (evaluation := both.recorded()) is not None:
                audience.say(end_messages.what_was_evaluated(evaluation, self._path))
        except AmpmemError as error:
            audience.complain(str(error))

    def _say(self, session: Session, audience: Audience, failure: BaseException | None) -> None:
        path = self._path
        if failure is not None:
            audience.complain(end_messages.left_by_failure(session, path, self._stopper))
            return
        session.check()
        stopper = None if self._orders.plan.run_to_end else self._stopper
        audience.say(end_messages.what_was_recorded(session, path, stopper))
