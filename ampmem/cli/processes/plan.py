"""What the command line of ``ampmem profile`` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ampmem.cli.options.assume import assumed_data
from ampmem.cli.options.shared import ScriptOptions, simulated_gpu
from ampmem.cli.processes.rank_names import place_rank
from ampmem.events import PlaceRecord
from ampmem.output.files import claim
from ampmem.recorder.ranks.environment import Launched
from ampmem.recording import SUFFIX, rank_file, rank_of
from ampmem.vocabulary import Arm

if TYPE_CHECKING:
    from ampmem.recorder.options import Options
    from ampmem.simulator.start import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The command line; ``launched`` where a launcher has started this process as one of several."""

    script: ScriptOptions
    arm: Arm
    seed: int | None
    run_to_end: bool
    output: Path | None
    html: Path | None
    snapshot: Path | None
    quiet: bool
    report_to: Path | None
    times_into: Path | None
    names_into: Path | None
    launched: Launched | None

    @property
    def place_known(self) -> PlaceRecord | None:
        """Which process of a job this is, as its launcher says, or as the command line has it simulated."""
        if self.launched is not None:
            return self.launched.place
        world_size = self.script.world_size
        return None if world_size is None else PlaceRecord(rank=self.script.rank or 0, world_size=world_size)

    def path(self, title: str, number: int = 1) -> Path:
        """The recording to write; from the second ``number`` on with that in its name.

        A rank that is simulated has its own in it, unless ``compare`` or ``fit`` has chosen the name.
        """
        path = self.output or Path(f"{title}.{number}{SUFFIX}" if number > 1 else f"{title}{SUFFIX}")
        size = self.script.world_size or 1
        if size == 1 or self.report_to is not None or rank_of(path) is not None:
            return path
        return rank_file(path, self.script.rank or 0, size)

    @property
    def numbered(self) -> bool:
        """Whether a recording that is there makes this one take another name."""
        return self.output is None and not self.script.force

    def place(self, title: str, *, spawns: bool = False) -> tuple[Path, str]:
        """The recording to write, and a line that says so; a numbered one is there from now on, without a step.

        ``spawns`` says that the script may start ranks itself, and need not train in this process.
        """
        if self.launched is not None:
            job, force = partial(self.path, title), self.script.force
            return place_rank(job, self.launched, numbered=self.numbered, force=force)
        number = claim(lambda number: [self.path(title, number)]) if self.numbered else 1
        path = self.path(title, number)
        taken = f"; {self.path(title)} exists already (--force replaces it)" if number > 1 else ""
        if spawns:
            return path, f"recording this process to {path} if it trains, and ranks that it spawns to their own{taken}"
        return path, f"recording to {path}{taken}"

    def simulate(self) -> Simulation | None:
        """Put the device in place that is to be simulated, if there is one."""
        gpu = simulated_gpu(self.script.device, self.script.gpu)
        assumed = assumed_data(self.script.device, self.script.assume)
        if gpu is None or assumed is None:
            return None
        try:
            from ampmem.simulator.start import Simulation
            from ampmem.simulator.world import World
        except (ImportError, AttributeError) as error:  # a part of torch is not where it was
            from ampmem.simulator.refusal import refusal

            raise refusal(error) from error
        size = self.script.world_size
        world = None if size is None else World(rank=self.script.rank or 0, size=size)
        return Simulation(gpu, assumed=assumed, world=world)

    def options(
        self, path: Path, *, timed: bool = False, place: PlaceRecord | None = None, baseline: bool = False
    ) -> Options:
        """What the recorder is told. Importing torch takes seconds: what is wrong is said before that."""
        from ampmem.recorder.marker import step_on_of
        from ampmem.recorder.options import DTYPES, Options

        script = self.script
        return Options(
            path=path.absolute(),
            script=script.name,
            arguments=script.arguments,
            steps=script.steps,
            skip=script.skip,
            timed=timed,
            stacks=script.stacks,
            force=script.force or self.numbered or place is not None or self.launched is not None,
            baseline=baseline,
            arm=self.arm,
            dtype=None if script.dtype is None else DTYPES[script.dtype],
            device=script.device,
            synchronize=script.synchronize,
            step_on=step_on_of(script.step_on),
            place=place or self.place_known,
            assume=script.assume,
        )
