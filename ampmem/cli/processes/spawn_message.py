"""A message to a process that a script spawns, which makes recording begin there.

The module imports little, as most such processes are not ranks.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing import process
from typing import Any

from ampmem.patching import patch

_BEGUN = (process.BaseProcess, "_bootstrap")

# Runs where the spawned process unpickles its data, before it has its parent's sys.path. An error here must not affect
# the script.
_CODE = """
import sys
sys.path.append({root!r})
try:
    from ampmem.cli.processes.spawn_message import wait_for_start
    wait_for_start({root!r}, {state!r})
except Exception:
    pass
finally:
    sys.path.remove({root!r})
"""


class SpawnMessage:
    """An object whose pickle runs code when Python loads it; ``state`` is pickled too, and loaded only by a rank."""

    def __init__(self, root: str, state: object) -> None:
        self._code = _CODE.format(root=root, state=pickle.dumps(state))

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


def wait_for_start(root: str, state: bytes) -> None:
    """Wait until the process begins its work, when it has imported the script's main module."""

    def wrap(bootstrap: Callable[..., Any]) -> Callable[..., Any]:
        def begin(spawned: Any, *arguments: Any, **options: Any) -> Any:
            undo()
            if "torch.distributed" in sys.modules:
                spawned.run = _recorded(spawned.run, root, state)
            return bootstrap(spawned, *arguments, **options)

        return begin

    undo = patch(*_BEGUN, wrap)


def _recorded(run: Any, root: str, state: bytes) -> Any:
    try:
        if root not in sys.path:
            sys.path.append(root)
        from ampmem.cli.processes.spawned_rank import SpawnedRank

        return SpawnedRank(pickle.loads(state)).around(run)
    except Exception:  # any error here must not affect the script
        return run
