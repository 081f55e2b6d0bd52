"""The simulated rank and number of ranks of this process, and the environment that shows them to the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampmem.patching import Undo, added, set_variables, undone_together
from ampmem.simulator.where import stop

GPUS_PER_NODE = 8
"""Ranks per machine, one GPU each; the last machine has the rest."""

MASTER = ("127.0.0.1", "29500")
"""Address and port that scripts read; nothing connects to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """``rank`` of ``size``, as ``torchrun`` numbers them over machines of :data:`GPUS_PER_NODE` GPUs."""

    rank: int = 0
    size: int = 1

    @property
    def node(self) -> int:
        """The index of this rank's machine."""
        return self.rank // GPUS_PER_NODE

    @property
    def local_rank(self) -> int:
        """The number of this rank on its machine, which is also the number of its GPU."""
        return self.rank % GPUS_PER_NODE

    @property
    def local_size(self) -> int:
        """Number of ranks, and GPUs, on this rank's machine."""
        return min(GPUS_PER_NODE, self.size - self.node * GPUS_PER_NODE)

    def environment(self) -> dict[str, str]:
        """The environment variables that ``torchrun`` would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(-(-self.size // GPUS_PER_NODE)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": MASTER[0],
            "MASTER_PORT": MASTER[1],
        }


ALONE = World()

_entered: list[World] = []


def here() -> World:
    """The current world of this process; :data:`ALONE` unless :func:`enter` was called."""
    return _entered[-1] if _entered else ALONE


@undone_together
def enter(world: World) -> Iterator[Undo]:
    """Enter ``world``, and set its environment variables; returns the undo of both."""
    _entered.append(world)
    yield added("simulated worlds", f"rank {world.rank} of {world.size}", lambda: _entered.remove(world))
    yield set_variables(world.environment())


def check_index(index: int | None) -> None:
    """Raise an error for a GPU other than this rank's: only that one is simulated."""
    world = here()
    if index is None or index == world.local_rank:
        return
    if world.size > 1:
        raise stop(
            f"only rank {world.rank} is simulated, whose GPU is cuda:{world.local_rank}, and the script uses "
            f"cuda:{index}; let the script use the device of LOCAL_RANK"
        )
    raise stop(f"only one GPU is simulated, cuda:0, and the script uses cuda:{index}; run the script on one device")
