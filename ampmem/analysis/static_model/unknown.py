"""What a recording would have to say before a rule of thumb can be held against it."""

from __future__ import annotations

from ampmem.events import Recording
from ampmem.names import NOT_KNOWN
from ampmem.vocabulary import Arm, SourceKind


def unknown_of(recording: Recording) -> tuple[str, ...]:
    """What is not known of ``recording`` that a recipe is made of; empty where all of it is.

    A run that was recorded has said it. A snapshot has no types, no names, and often no update: only casts tell that
    parameters are float32 and the run is under autocast, and only the profiler's names tell the optimizer.
    """
    if recording.run.source != SourceKind.SNAPSHOT:
        return ()
    names = [optimizer.class_name for optimizer in recording.optimizers]
    known = {
        "precision": recording.arm.name != Arm.AS_IS,
        "parameters": bool(recording.parameters),
        "optimizer": bool(names) and NOT_KNOWN not in names,
    }
    return tuple(what for what, is_known in known.items() if not is_known)
