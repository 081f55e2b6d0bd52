"""What a term is: one reason why a component differs from what the static model tells, and the tensors that have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ampmem.analysis.json.jsonable import NOT_IN_JSON, Signed

NAMED = 3
"""So many of a term's tensors are named, the largest."""


class TermKind(StrEnum):
    """Why there are more bytes than the model has, or fewer; the values are the words, of a type or a name where
    there is one in question. Each says what was seen, and no more.
    """

    FROZEN = "frozen parameters"
    TIED = "tied weights: a tensor for each of the names"
    OVERLAPPING = "parameters that lie in part in another's memory: a tensor for the whole of each"
    PADDING = "padding of shards, so that those of all ranks are equally long"
    ROUNDING = "rounding up to the allocator's blocks"

    PARAMETER_TYPE = "kept in {about}"
    PARAMETERS_GONE = "parameters freed before this mark"
    PARAMETERS_LATER = "parameters made after this mark"
    PARAMETERS_MOVED = "earlier memory of a parameter that is still alive"
    PARAMETERS_KEPT = "copies of parameters that an optimizer keeps to put them back: {about}"
    PARAMETER_COPIES = "parameters of modules that did not run, such as copies of the model"
    AROUND_PARAMETERS = "memory around parameters that are views of a larger buffer"

    GRADIENT_TYPE = "gradients in {about}"
    ONE_GRADIENT_OF_TWO = "only one of the two gradients is alive: the parameter's or its master copy's"
    SEVERAL_GRADIENTS = "more than one gradient of a parameter is alive"
    SPARSE_GRADIENTS = "sparse gradients: their indices and values instead of all elements"
    GRADIENTS_FREED = "gradients freed before this mark"
    GRADIENTS_LATER = "no gradient before this mark: the first came later"
    NO_GRADIENTS = "no gradient: none of theirs was seen in the recording"
    FUNCTIONAL_GRADIENTS = "no gradient of theirs: those that torch.func gives are the script's own tensors"
    GRADIENTS_OF_INPUTS = "gradients of inputs"
    AROUND_GRADIENTS = "memory around gradients that are views of a larger buffer"

    MASTER_TYPE = "master copies in {about}"
    NO_MASTER = "parameters without a master copy in this process"
    MASTERS_GONE = "master copies freed before this mark"
    MASTERS_LATER = "master copies made after this mark"
    MORE_MASTERS = "more master copies than the model tells"
    AROUND_MASTERS = "memory around master copies that are views of a larger buffer"

    COPIES_FREED_WITH_GRAPH = "copies freed before this mark, with the graph that had saved them"
    COPIES_NOT_SAVED = "copies freed before this mark: nothing kept them"
    COPIES_CHECKPOINTED = "copies freed before this mark: backward made them again, as checkpointing does"
    COMPILED = "no cast was seen: casts inside compiled code cannot be identified"
    NORMS_NOT_CAST = "norms: no cast of their parameters was made"
    EMBEDDINGS_NOT_CAST = "embeddings: no cast of them was made"
    DOUBLES_NOT_CAST = "float64 parameters, which autocast does not cast"
    NOT_CAST = "other parameters of which no cast was made"
    CASTS_OF_THE_SCRIPT = "casts that are not autocast's"
    COPIES_IN_CACHE = "copies that the cache still holds: autocast has not been left"
    COPIES_IN_GRAPH = "copies that autograd had saved and that are still alive"
    COPIES_ELSEWHERE = "copies that autograd had not saved and that are still alive"
    COPIES_OF_WHOLES = "copies of whole parameters, of which this rank keeps a shard"
    COPY_TYPE = "copies in another type than the model tells"
    COPIES_OF_EARLIER_STEPS = "copies of an earlier step that are still alive"
    COPIES_MADE_AGAIN = "copies made again for another use: no cache served it"
    COPIES_OF_UNTRAINED = "copies of parameters that nothing trains"
    COPIES_OF_VIEWS_TOO = "copies of views of a parameter, besides the whole"
    COPIES_OF_VIEWS_ONLY = "copies of views of a parameter instead of the whole"

    STATE_TYPE = "state of {about} parameters"
    FACTORED_STATE = "rows and columns instead of full second moments"
    SCALES_OF_BLOCKS = "scales of the blocks, and small tensors kept in float32"
    STATES_LATER = "states that came after this mark: {about}"
    STATES_GONE = "states freed before this mark: {about}"
    SCALARS = "scalars of the optimizer: {about}"
    UNKNOWN_STATE = "state that the model does not have: {about}"
    AROUND_STATES = "memory around states that are views of a larger buffer"
    STATE_FREED = "optimizer state freed before this mark"
    NOT_OPTIMIZED = "parameters that no optimizer of this process has updated"
    UPDATES_SKIPPED = "no optimizer state yet: the loss scaler skipped the updates"
    NO_UPDATE_YET = "no optimizer state before the first update"
    STATE_LATER = "no optimizer state yet: theirs came with an update after this mark"
    NEVER_A_GRADIENT = "no optimizer state: they have had no gradient"

    def words(self, about: str) -> str:
        """The words for one type, or one name, in question."""
        return self.value.format(about=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One reason for a difference between what the model has and what was measured.

    ``tensors`` is how many have it, and ``names`` are the parameters that the largest of them belong to, at most
    :data:`NAMED`; empty where they belong to none.
    """

    kind: TermKind = field(metadata=NOT_IN_JSON)
    why: str
    bytes: Signed
    tensors: int
    names: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Sum:
    """What is known of one reason so far; ``sizes`` by name of parameter."""

    bytes: int = 0
    tensors: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, size: int, tensors: int, sizes: Iterable[tuple[str, int]]) -> None:
        self.bytes += size
        self.tensors += tensors
        for name, part in sizes:
            self.sizes[name] = self.sizes.get(name, 0) + part

    def largest(self) -> tuple[str, ...]:
        """The names with the most bytes; of equal ones the first seen."""
        return tuple(sorted(self.sizes, key=lambda name: -abs(self.sizes[name]))[:NAMED])


class TermSums:
    """Bytes, tensors and names by reason, in order of first mention."""

    def __init__(self) -> None:
        self._sums: dict[tuple[TermKind, str], _Sum] = {}
        self.complete = True
        """Whether nothing was added without a kind."""

    def add(self, kind: TermKind | None, size: float, name: str = "", *, tensors: int = 1, about: str = "") -> None:
        """``size`` bytes, of so many ``tensors``, more than the model has; nothing when that is 0.

        ``name`` is the parameter that they belong to. Without a ``kind`` there is no evidence of why: those bytes stay
        unexplained.
        """
        if size and kind is None:
            self.complete = False
        elif size and kind is not None:
            sizes = [(name, round(size))] if name else []
            self._sums.setdefault((kind, kind.words(about)), _Sum()).add(round(size), tensors, sizes)

    def listed(self) -> tuple[Term, ...]:
        """The terms, largest first; what came to 0 is left out."""
        terms = [
            Term(kind=kind, why=why, bytes=found.bytes, tensors=found.tensors, names=found.largest())
            for (kind, why), found in self._sums.items()
            if found.bytes
        ]
        return tuple(sorted(terms, key=lambda term: -abs(term.bytes)))

    @classmethod
    def sum(cls, parts: Iterable[TermSums]) -> TermSums:
        """All of ``parts`` together."""
        together = cls()
        for part in parts:
            together.complete &= part.complete
            for key, found in part._sums.items():
                if found.bytes:
                    together._sums.setdefault(key, _Sum()).add(found.bytes, found.tensors, found.sizes.items())
        return together
