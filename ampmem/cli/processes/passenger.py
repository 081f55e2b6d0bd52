"""What is sent along with a process that a script spawns, and has it begin here.

Imports little: most such processes are not ranks.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing import process
from typing import Any

from ampmem.patching import patch

_BEGUN = (process.BaseProcess, "_bootstrap")

# Run where the process unpickles what it was sent, before it has the path of the one that sent it. Whatever goes wrong
# is none of the script's.
_BOARD = """
import sys
sys.path.append({root!r})
try:
    from ampmem.cli.processes.passenger import board
    board({root!r}, {state!r})
except Exception:
    pass
finally:
    sys.path.remove({root!r})
"""


class Passenger:
    """Pickles to code that Python alone can run; ``state`` is pickled, too, and opened only by a rank."""

    def __init__(self, root: str, state: object) -> None:
        self._code = _BOARD.format(root=root, state=pickle.dumps(state))

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


def board(root: str, state: bytes) -> None:
    """Wait for the process to begin, which has imported what the script's main module does by then."""

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
    except Exception:  # whatever it is, it is none of the script's
        return run
