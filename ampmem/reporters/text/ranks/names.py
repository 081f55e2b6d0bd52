"""What ranks are called."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.ranks.ranks import GroupKind, Rank, RankGroup


def numbers(ranks: Sequence[int]) -> str:
    """``3``, ``0-6``, ``0-2, 5, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs
    )


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-6``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {numbers(ranks)}"


def place(ranks: Sequence[Rank]) -> str:
    """Where they are in the device mesh, on the axes on which that is the same of all: ``dp 0, tp 1``."""
    meshes = [dict.fromkeys(f"{axis.name} {axis.coordinate}" for axis in rank.mesh) for rank in ranks]
    return ", ".join(axis for axis in meshes[0] if all(axis in mesh for mesh in meshes))


def group_name(group: RankGroup) -> str:
    """``stage 1``, ``dp 0``."""
    return f"{'stage' if group.kind is GroupKind.STAGE else group.axis} {group.coordinate}"
