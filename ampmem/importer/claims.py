"""What is said of a block of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.events import Fact


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact about an allocation; ``seen`` when a frame says it and nothing had to be concluded.

    ``at_death`` says that it was seen when the allocation was freed, not when it was made.
    """

    allocation: int
    fact: Fact
    name: str
    seen: bool
    at_death: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that is taken for a parameter; an update may put a new block in the place of its first one."""

    blocks: tuple[int, ...]
    name: str
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """All claims, and the parameters. ``half`` says that half-size casts show the parameters to be float32.

    ``from_forward`` are the allocations from before the trace that a forward has made.
    """

    claims: tuple[Claim, ...]
    parameters: tuple[Parameter, ...]
    notes: tuple[str, ...]
    half: bool
    from_forward: frozenset[int]
