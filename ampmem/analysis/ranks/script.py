"""What all ranks of a job run: the script and its arguments, without what tells each process which rank it is."""

from __future__ import annotations

import re

from ampmem.events import RunRecord

_OWN = frozenset({"--local-rank", "--local_rank", "--rank", "--node-rank", "--node_rank"})
"""Options that launchers hand to each process, another value to each."""
_WITH_VALUE = re.compile(r"(--[\w-]+)=.*", re.DOTALL)


def script_of(run: RunRecord) -> str:
    """The script with those of its arguments that are the same for all ranks; of one process, with all."""
    if run.world_size == 1:
        return " ".join((run.script, *run.arguments))
    kept, skip = [run.script], False
    for argument in run.arguments:
        if skip:
            skip = False
        elif argument in _OWN:
            skip = True
        elif (found := _WITH_VALUE.fullmatch(argument)) is None or found[1] not in _OWN:
            kept.append(argument)
    return " ".join(kept)
