"""What it costs to protect the user's files: milliseconds from the call until the script can start.

    python tests/benchmarks/protection.py [ROUNDS]

Prints the median and the maximum for each way that this machine allows, and for a process that is only forked.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ampmem.cli.processes import kernel

LIMIT = 2 << 30


def seconds(protect: Callable[[], object]) -> float | None:
    """How long ``protect`` took in a forked child; ``None`` if this machine does not allow it."""
    given, taken = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        try:
            protect()
        except OSError:
            os._exit(1)
        os.write(taken, repr(time.perf_counter() - began).encode())
        os._exit(0)
    os.close(taken)
    with os.fdopen(given) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return float(text) if text else None


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    here = [Path.cwd()]
    ways: dict[str, Callable[[], object]] = {
        "forked only": lambda: None,
        "overlays, as root": functools.partial(kernel.overlay_everything, here, LIMIT, as_root=True),
        "overlays, user namespace": functools.partial(kernel.overlay_everything, here, LIMIT, as_root=False),
        "Landlock": functools.partial(kernel.landlock, here),
    }
    for name, protect in ways.items():
        taken = [each * 1e3 for each in (seconds(protect) for _ in range(rounds)) if each is not None]
        shown = f"{statistics.median(taken):6.1f} ms, at most {max(taken):.1f}" if taken else "not allowed here"
        print(f"{name:26}{shown}")


if __name__ == "__main__":
    main()
