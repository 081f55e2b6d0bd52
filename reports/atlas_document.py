"""The file of the atlas: one line per point, sorted, so that the order in which points are made does not matter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from atlas_models import MODELS, AtlasModel
from atlas_search import BASE, PAIR, SECOND, Curve, Size, fitting, wanted
from atlas_train import ADAMW, OPTIMIZERS, PRECISIONS, Setting

Point: TypeAlias = dict[str, Any]
Document: TypeAlias = dict[str, Any]

SCHEMA = "ampmem.atlas/1"
SETTING = ("model", "optimizer", "checkpointing", "precision", "batch")
"""The fields of a point that identify its run; the others are its results."""
_LISTS = ("compiled", "points")
"""The lists of points in the file: runs with the model compiled, and all others."""
_PLACES = {model.name: place for place, model in enumerate(MODELS)}


def new_document(about: Mapping[str, str | int]) -> Document:
    """A document without points; ``about`` says how the points are made."""
    return {"schema": SCHEMA, "about": dict(about), "points": []}


def read_document(path: Path, about: Mapping[str, str | int]) -> Document:
    """The document at ``path`` with ``about`` replaced; without such a file a document without points."""
    if not path.exists():
        return new_document(about)
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found | {"about": dict(about)}


def write_document(document: Document, path: Path) -> None:
    """Write ``document``; readers of ``path`` see the old or the new file, never a part."""
    beside = path.with_suffix(".new")
    beside.write_text(text_of(document), encoding="utf-8")
    beside.replace(path)


def text_of(document: Document) -> str:
    """The text of the document's file."""
    head = {name: value for name, value in document.items() if name not in _LISTS}
    lists = [_list_of(name, document[name]) for name in _LISTS if name in document]
    return ", ".join([json.dumps(head)[:-1], *lists]) + "}\n"


def _list_of(name: str, points: Iterable[Point]) -> str:
    lines = ",\n".join(line_of(point) for point in sorted(points, key=_order))
    return f'"{name}": [\n{lines}\n]'


def line_of(point: Point) -> str:
    """The line of a point in the file, without the comma."""
    return json.dumps(point, separators=(",", ":"))


def _order(point: Point) -> tuple[Any, ...]:
    precision, optimizer = PRECISIONS.index(point["precision"]), OPTIMIZERS.index(point["optimizer"])
    place = _PLACES.get(point["model"], len(_PLACES))
    return place, point["model"], optimizer, point["checkpointing"], precision, point["batch"]


def setting_of(point: Point) -> Setting:
    """The run of ``point``."""
    return Setting(**{name: point[name] for name in SETTING})


Group: TypeAlias = tuple[str, str, bool]
"""A model, an optimizer, and whether it is checkpointed: the precisions are compared within a group."""


def groups_of(models: Iterable[AtlasModel]) -> list[Group]:
    """All groups of ``models``: each model with AdamW, then with SGD, then with checkpointing.

    Checkpointing is run with AdamW only: it changes the activations, and SGD only the optimizer state.
    """
    chosen = tuple(models)
    plain = [(model.name, optimizer, False) for optimizer in OPTIMIZERS for model in chosen]
    return plain + [(model.name, ADAMW, True) for model in chosen if model.checkpointing]


def wanted_of(points: Iterable[Point], group: Group, room: int, *, fine: bool) -> list[Setting]:
    """The runs that the curves of ``group`` still lack; all precisions are compared with AdamW only."""
    name, optimizer, checkpointing = group
    plain, compared, second = (name, ADAMW, False), PRECISIONS, SECOND
    points = [point for point in points if point["model"] == name]
    if group != plain:
        compared = PAIR
        second = max(fitting(curves_of(points, plain)[BASE]), default=SECOND)
    return [
        Setting(model=name, optimizer=optimizer, checkpointing=checkpointing, precision=precision, batch=batch)
        for precision, batch in wanted(curves_of(points, group), room, compared, second, fine=fine)
    ]


def wanted_compiled(document: Document, model: str) -> list[Setting]:
    """The runs with ``model`` compiled that ``document`` still lacks: FP32 and AMP, at both ends of FP32's curve."""
    fits = fitting(curves_of(document["points"], (model, ADAMW, False))[BASE])
    settings = (
        Setting(model=model, optimizer=ADAMW, checkpointing=False, precision=precision, batch=batch)
        for batch in (sorted({min(fits), max(fits)}) if fits else ())
        for precision in PAIR
    )
    made = [setting_of(point) for point in document.get("compiled", ())]
    return [setting for setting in settings if setting not in made]


def curves_of(points: Iterable[Point], group: Group) -> dict[str, Curve]:
    """The sizes of a group's points, by precision and batch; every precision has an entry."""
    found: dict[str, dict[int, Size]] = {precision: {} for precision in PRECISIONS}
    for point in points:
        if group_of(point) == group:
            size = Size(peak=point.get("peak", 0), fits=point["fit"] == "fits")
            found[point["precision"]][point["batch"]] = size
    return {precision: dict(sorted(curve.items())) for precision, curve in found.items()}


def group_of(point: Point) -> Group:
    """The group of ``point``."""
    return point["model"], point["optimizer"], point["checkpointing"]


def whole_groups(document: Document) -> list[Point]:
    """The points of groups whose curves have their ends and break-even; other groups say too little yet."""
    points, room = document["points"], document["about"]["memory"]
    groups = dict.fromkeys(map(group_of, points))
    whole = {group for group in groups if not wanted_of(points, group, room, fine=False)}
    return [point for point in sorted(points, key=_order) if group_of(point) in whole]
