"""Makes reports/atlas.json and reports/atlas.html: what mixed precision does to the memory of many models.

    python reports/make_atlas.py --jobs 2

runs each model of atlas_models.py on a simulated GPU, so it needs none, and writes the file after each run. It makes
only the runs that the file does not have; after an interruption the same command goes on. With --compiled it compiles
the models, in FP32 and under AMP, at batch size 1 and at the largest that fits in FP32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from atlas_document import (
    Document,
    Group,
    Point,
    groups_of,
    read_document,
    wanted_compiled,
    wanted_of,
    write_document,
)
from atlas_models import BY_NAME, MODELS, AtlasModel
from atlas_page import page_of
from atlas_points import Task, in_children, make_point, warm_up
from atlas_train import GPU, Setting

from ampmem.allocator.gpus import find_gpu
from ampmem.units import format_bytes
from ampmem.version import __version__

REPORTS = Path(__file__).parent
Run: TypeAlias = Callable[[Iterator[Task], int], Iterator[Point | str]]
LIBRARIES = ("transformers", "diffusers")


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", metavar="NAME,...", help="only these; all by default")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many runs to make at once")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no run after so long")
    parser.add_argument("--json", type=Path, default=REPORTS / "atlas.json", metavar="FILE")
    parser.add_argument("--html", type=Path, default=REPORTS / "atlas.html", metavar="FILE")
    parser.add_argument("--compiled", action="store_true", help="only the runs with the model compiled")
    parser.add_argument("--page-only", action="store_true", help="make no run, only the page of the file that is there")
    parser.add_argument("--emulated", type=Path, metavar="FILE", help="take in what atlas_emulated.py wrote")
    options = parser.parse_args()
    document = read_document(options.json, about())
    if options.emulated:
        document["emulated"] = json.loads(options.emulated.read_text(encoding="utf-8"))
        write_document(document, options.json)
    if not options.page_only:
        make_all(document, chosen(options.models), options)
    options.html.write_text(page_of(document), encoding="utf-8")


def about() -> dict[str, str | int]:
    """How the runs are made: versions and settings."""
    versions = {name: version(name) for name in LIBRARIES if find_spec(name)}
    gpu = find_gpu(GPU)
    return {"ampmem": __version__, "torch": torch.__version__, **versions, "gpu": gpu.name, "memory": gpu.total_memory}


def chosen(names: str | None) -> tuple[AtlasModel, ...]:
    """The models with these names, from the libraries that are installed."""
    if names is None:
        return tuple(model for model in MODELS if find_spec(model.library))
    unknown = [name for name in names.split(",") if name not in BY_NAME]
    if unknown:
        sys.exit(f"unknown model {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    return tuple(BY_NAME[name] for name in names.split(","))


def make_all(document: Document, models: Sequence[AtlasModel], options: argparse.Namespace) -> None:
    """Add the runs that ``document`` lacks, and write it after each."""
    for model in models:
        import_module(model.library)
    warm_up()
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    if options.compiled:
        made = compiled_points(document, models, options.jobs, end)
    else:
        made = every_point(document, groups_of(models), options.jobs, end)
    try:
        for point in made:
            print(said_of(point), flush=True)
            write_document(document, options.json)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")


def every_point(
    document: Document,
    groups: Sequence[Group],
    jobs: int,
    end: float | None = None,
    make: Callable[[Setting], Point] = make_point,
    run: Run = in_children,
) -> Iterator[Point]:
    """The points that the curves of ``groups`` still need, each added to ``document``, until the time ``end``.

    First every curve gets its ends and the points around its break-even, then the finer points.
    """
    passes = ((group, fine) for fine in (False, True) for group in groups)
    tasks = (partial(points_of_group, document, group, end, make, fine=fine) for group, fine in passes)
    for made in run(tasks, jobs):
        if isinstance(made, str):
            print(f"a run failed, so the rest of its curves is left out:\n{made}", file=sys.stderr)
        else:
            document["points"].append(made)
            yield made


def compiled_points(
    document: Document, models: Sequence[AtlasModel], jobs: int, end: float | None = None
) -> Iterator[Point]:
    """The compiled runs that ``document`` lacks, each in a process of its own, until the time ``end``."""

    def run(setting: Setting) -> Iterator[Point]:
        if end is None or time.monotonic() < end:
            yield make_point(setting, compiled=True)

    tasks = (partial(run, setting) for model in models for setting in wanted_compiled(document, model.name))
    for made in in_children(tasks, jobs):
        if isinstance(made, str):
            print(f"a run failed:\n{made}", file=sys.stderr)
        else:
            document.setdefault("compiled", []).append(made)
            yield made


def points_of_group(
    document: Document, group: Group, end: float | None, make: Callable[[Setting], Point], *, fine: bool
) -> Iterator[Point]:
    """The points that the curves of one group still need; no run begins after the time ``end``."""
    points, room = list(document["points"]), document["about"]["memory"]
    while settings := wanted_of(points, group, room, fine=fine):
        for setting in settings:
            if end is not None and time.monotonic() > end:
                return
            points.append(make(setting))
            yield points[-1]


def said_of(point: Point) -> str:
    """One line about a run that has ended."""
    more = ", checkpointing" if point["checkpointing"] else ""
    result = format_bytes(point["peak"]) if "peak" in point else ""
    return (
        f"{point['model']}, {point['optimizer']}{more}, {point['precision']}, batch {point['batch']}: "
        f"{point.get('refused') or point['fit']} {result}".rstrip()
    )


if __name__ == "__main__":
    main()
