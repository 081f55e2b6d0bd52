"""The rank of this process according to torch.distributed, and its place in the script's device mesh."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import distributed

from ampmem.events import MeshAxis, PlaceRecord
from ampmem.patching import Undo, patch_call
from ampmem.recorder.torch_private.distributed import NEW_MESH


class Places:
    """Finds the place of this process; ``known`` is the launcher's answer, if any."""

    def __init__(self, known: PlaceRecord | None) -> None:
        self._place = known
        self._mesh: tuple[MeshAxis, ...] = ()
        self._stages: tuple[int, ...] = ()
        self._stage_count = 0

    def install(self) -> Undo:
        """Follow the meshes that the script makes; returns the undo."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def made(mesh: Any, *arguments: Any, **options: Any) -> None:
                original(mesh, *arguments, **options)
                self._keep_largest(mesh)

            return made

        return patch_call(*NEW_MESH, wrap)

    def now(self) -> PlaceRecord | None:
        """The place of this process by now; ``None`` if it is not known to be one of several."""
        if distributed.is_available() and distributed.is_initialized():
            place = self._place or PlaceRecord(rank=0, world_size=1)
            self._place = replace(place, rank=distributed.get_rank(), world_size=distributed.get_world_size())
        if self._place is None:
            return None
        if not self._stages:
            self._find_stages()
        return replace(self._place, mesh=self._mesh, stages=self._stages, stage_count=self._stage_count)

    def _find_stages(self) -> None:
        """Find the pipeline stages of this process among all objects, if the script has imported pipelines.

        Patching them would mean importing the module first, which is slow, and most scripts have none.
        """
        kind = getattr(sys.modules.get("torch.distributed.pipelining"), "PipelineStage", None)
        if not isinstance(kind, type):
            return
        with suppress(Exception):  # stages of a future torch, or half constructed
            found = [each for each in gc.get_objects() if kind in type(each).__mro__]
            self._stage_count = max((int(stage.num_stages) for stage in found), default=0)
            here = {int(stage.stage_index) for stage in found if stage.num_stages == self._stage_count}
            self._stages = tuple(sorted(here))

    def _keep_largest(self, mesh: Any) -> None:
        """Keep ``mesh`` if it covers more ranks than the one before, or as many with more axes."""
        try:
            axes = _axes_of(mesh)
        except Exception:  # a mesh of a future torch must not make the script fail
            return
        if _size_of(axes) > _size_of(self._mesh):
            self._mesh = axes


def _size_of(axes: tuple[MeshAxis, ...]) -> tuple[int, int]:
    """Number of ranks, and number of axes."""
    return math.prod(axis.size for axis in axes), len(axes)


def _axes_of(mesh: Any) -> tuple[MeshAxis, ...]:
    """The axes of ``mesh``; none if this process is not in it."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return ()
    names = mesh.mesh_dim_names or [str(axis) for axis in range(len(mesh.shape))]
    return tuple(
        MeshAxis(name=str(name), size=int(size), coordinate=int(coordinate))
        for name, size, coordinate in zip(names, mesh.shape, coordinates, strict=True)
    )
