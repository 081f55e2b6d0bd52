"""Which rank this process is, as torch.distributed knows it, and where it lies in the script's device mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import distributed

from ampmem.events import MeshAxis, PlaceRecord
from ampmem.patching import Undo, patch
from ampmem.recorder.torch_private_distributed import NEW_MESH


class Places:
    """Knows the place by now; ``known`` is what the launcher has told, if there is one."""

    def __init__(self, known: PlaceRecord | None) -> None:
        self._place = known
        self._mesh: tuple[MeshAxis, ...] = ()

    def install(self) -> Undo:
        """Note the meshes that the script makes; returns what undoes it."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def made(mesh: Any, *arguments: Any, **options: Any) -> None:
                original(mesh, *arguments, **options)
                self._made(mesh)

            return made

        return patch(*NEW_MESH, wrap)

    def now(self) -> PlaceRecord | None:
        """Where this process is; ``None`` where nothing says that it is one of several."""
        if distributed.is_available() and distributed.is_initialized():
            place = self._place or PlaceRecord(rank=0, world_size=1)
            self._place = replace(place, rank=distributed.get_rank(), world_size=distributed.get_world_size())
        if self._place is None:
            return None
        return replace(self._place, mesh=self._mesh)

    def _made(self, mesh: Any) -> None:
        """Keep what says the most: of meshes over as many ranks the one with the most axes."""
        try:
            axes = _axes_of(mesh)
        except Exception:  # a mesh of a kind that does not exist yet is none of the script's trouble
            return
        if _says(axes) > _says(self._mesh):
            self._mesh = axes


def _says(axes: tuple[MeshAxis, ...]) -> tuple[int, int]:
    ranks = 1
    for axis in axes:
        ranks *= axis.size
    return ranks, len(axes)


def _axes_of(mesh: Any) -> tuple[MeshAxis, ...]:
    """The axes of ``mesh``; none where this process is not in it."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return ()
    names = mesh.mesh_dim_names or [str(axis) for axis in range(len(mesh.shape))]
    return tuple(
        MeshAxis(name=str(name), size=int(size), coordinate=int(coordinate))
        for name, size, coordinate in zip(names, mesh.shape, coordinates, strict=True)
    )
