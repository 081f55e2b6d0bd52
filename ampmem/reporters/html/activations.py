"""What the activations are for, where they were made and in which type, as bars for the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampmem.analysis.activations import (
    FULL_PRECISION,
    LOW_PRECISION,
    ActivationGroup,
    ActivationPart,
    Saving,
    kind_in_words,
    savings,
)
from ampmem.analysis.modules import ROOT
from ampmem.analysis.ops import plain_kind, plain_op
from ampmem.analysis.summary import Summary
from ampmem.names import natural
from ampmem.units import format_count

MAX_MODULES = 40
MAX_SAVINGS = 100
_OPS = 3
"""How many ops the detail of a kind names."""
_ANY = "*"
_OUTSIDE = "outside the modules"

_Part = tuple[ActivationGroup, ActivationPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionBar:
    """Bytes of activations: ``full`` are float32 or float64, ``low`` bfloat16 or float16, ``other`` no such numbers.

    ``ops`` are those that the bar is about, as torch names them, each with a type of what it saved or made; ``None``
    for what was not seen. ``module`` is the path of the modules that it is about, with ``*`` for any number, and
    ``None`` for none. ``detail`` says more.
    """

    label: str
    detail: str
    full: int
    low: int
    other: int
    ops: tuple[tuple[str | None, str | None], ...]
    module: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionWords:
    """How the parts of :class:`PrecisionBar` are called; empty for one that no activation is of."""

    full: str
    low: str
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsView:
    """What the activations are, and in which type.

    ``kinds`` are by the op that saved them, or where none was seen to save any by the op that made them (``by`` is
    ``saved for`` or ``made by``). ``modules_rest`` is what the modules that are left out come to. ``when`` is
    the instant at which they live, in words.
    """

    when: str
    by: str
    words: PrecisionWords
    whole: PrecisionBar
    kinds: tuple[PrecisionBar, ...]
    modules: tuple[PrecisionBar, ...]
    modules_rest: PrecisionBar | None
    savings: tuple[Saving, ...]
    savings_left_out: int


def activations_view(summary: Summary) -> ActivationsView | None:
    """The activations at the end of forward, or when memory ran out; ``None`` where there are none."""
    parts = [(group, part) for group in summary.activations for part in group.parts]
    if not parts:
        return None
    seen = any(part.saved_for for _, part in parts)
    names = [module.name for module in summary.modules]
    modules = _largest_first(_by_module(parts, names)) if any(part.module for _, part in parts) else ()
    pairs = savings(summary.activations)
    return ActivationsView(
        when="at the end of forward" if summary.last_step.marks.after_forward else "when memory ran out",
        by="saved for" if seen else "made by",
        words=_words(parts, "still " if summary.arm.dtype else ""),
        whole=_bar("all", "", parts),
        kinds=_largest_first(_by_kind(parts) if seen else _by_maker(parts)),
        modules=modules[:MAX_MODULES],
        modules_rest=_together(modules[MAX_MODULES:]),
        savings=pairs[:MAX_SAVINGS],
        savings_left_out=max(0, len(pairs) - MAX_SAVINGS),
    )


def _words(parts: Iterable[_Part], still: str) -> PrecisionWords:
    types = {group.dtype for group, _ in parts}
    full, low = ([each for each in some if each in types] for some in (FULL_PRECISION, LOW_PRECISION))
    rest = types - {*full, *low}
    other = (["masks and indices"] if rest - {None} else []) + (["type not known"] if None in rest else [])
    return PrecisionWords(
        full=f"{still}{' and '.join(full)}" if full else "", low=" and ".join(low), other=", ".join(other)
    )


def _by_kind(parts: Iterable[_Part]) -> Iterator[PrecisionBar]:
    kinds: dict[str, list[_Part]] = {}
    for group, part in parts:
        kinds.setdefault(kind_in_words(group, part), []).append((group, part))
    for kind, mine in kinds.items():
        ops = _largest_ops((part.saved_for, part.bytes) for _, part in mine)
        made = _largest_ops((part.made_by, part.bytes) for _, part in mine)
        held = f"a variable or a checkpoint holds them; made by {_named(made, '')}"
        detail = held if ops == [None] else _named(ops, kind)
        yield _bar(kind, detail, mine, ops=((part.saved_for, group.dtype) for group, part in mine))


def _by_maker(parts: Iterable[_Part]) -> Iterator[PrecisionBar]:
    kinds: dict[str, list[_Part]] = {}
    for group, part in parts:
        kinds.setdefault(plain_kind(part.made_by or "") or "an op that is not known", []).append((group, part))
    for kind, mine in kinds.items():
        ops = _largest_ops((part.made_by, part.bytes) for _, part in mine)
        yield _bar(kind, _named(ops, kind), mine, ops=((part.made_by, group.dtype) for group, part in mine))


def _largest_ops(sizes: Iterable[tuple[str | None, int]]) -> list[str | None]:
    """The ops, that with the most bytes first."""
    sums: dict[str | None, int] = {}
    for op, size in sizes:
        sums[op] = sums.get(op, 0) + size
    return sorted(sums, key=lambda op: -sums[op])


def _named(ops: Sequence[str | None], kind: str) -> str:
    """The largest of ``ops`` in words; empty where the kind says it already."""
    words = list(dict.fromkeys(plain_op(op) for op in ops if op is not None))
    if words == [kind]:
        return ""
    return ", ".join(words[:_OPS]) + (", …" if len(words) > _OPS else "")


def _by_module(parts: Iterable[_Part], names: Iterable[str]) -> Iterator[PrecisionBar]:
    """One bar for each module, and one for repeated ones: ``blocks.0`` to ``blocks.11`` are ``blocks.*``.

    ``names`` are those of all modules: where blocks are checkpointed nothing is kept of what is below them.
    """
    mine: dict[str | None, list[_Part]] = {}
    for group, part in parts:
        mine.setdefault(part.module, []).append((group, part))
    above = {".".join(path[:end]) for path in map(_path, [*mine, *names]) for end in range(1, len(path))}
    folded: dict[str | None, list[str | None]] = {}
    for module in mine:
        folded.setdefault(_folded(module, above), []).append(module)
    for pattern, modules in folded.items():
        inside = [each for module in modules for each in mine[module]]
        detail = f"{format_count(len(modules))} modules" if len(modules) > 1 else ""
        name = modules[0] if len(modules) == 1 else pattern
        yield _bar(name or _OUTSIDE, detail, inside, module=name)


def _path(module: str | None) -> list[str]:
    return [] if module is None or module == ROOT else module.split(".")


def _folded(module: str | None, above: Iterable[str]) -> str | None:
    """``module`` with ``*`` for each number that has modules below it, as the blocks of a transformer have."""
    path = _path(module)
    if not path:
        return module
    return ".".join(
        _ANY if piece.isdecimal() and ".".join(path[: end + 1]) in above else piece for end, piece in enumerate(path)
    )


def _bar(
    label: str,
    detail: str,
    parts: Iterable[_Part],
    *,
    ops: Iterable[tuple[str | None, str | None]] = (),
    module: str | None = None,
) -> PrecisionBar:
    full = low = other = 0
    for group, part in parts:
        if group.dtype in FULL_PRECISION:
            full += part.bytes
        elif group.dtype in LOW_PRECISION:
            low += part.bytes
        else:
            other += part.bytes
    pairs = tuple(dict.fromkeys(ops))
    return PrecisionBar(label=label, detail=detail, full=full, low=low, other=other, ops=pairs, module=module)


def _largest_first(bars: Iterable[PrecisionBar]) -> tuple[PrecisionBar, ...]:
    return tuple(sorted(bars, key=lambda bar: (-(bar.full + bar.low + bar.other), natural(bar.label))))


def _together(bars: Sequence[PrecisionBar]) -> PrecisionBar | None:
    if not bars:
        return None
    sums: Mapping[str, int] = {key: sum(getattr(bar, key) for bar in bars) for key in ("full", "low", "other")}
    return PrecisionBar(label=f"{format_count(len(bars))} more", detail="", ops=(), module=None, **sums)
