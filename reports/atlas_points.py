"""Makes one point of the atlas: a run on a simulated GPU, and the results from its summary."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from atlas_document import Point
from atlas_train import FP32, GPU, Setting, train

import ampmem
from ampmem.analysis.activations import ActivationGroup, plain_groups
from ampmem.analysis.estimate import Fit
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import PRECISION_COPIES, Category
from ampmem.errors import AmpmemError


def make_point(setting: Setting, *, compiled: bool = False) -> Point:
    """Run ``setting`` in this process; ``refused`` has the line of a simulation that cannot run compiled."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ampmem.profile(gpu=GPU, stacks=False) as prof:
            try:
                train(setting, compiled=compiled)
            except torch.OutOfMemoryError:
                return asdict(setting) | {"fit": Fit.DOES_NOT_FIT.value}
            except AmpmemError as error:
                return asdict(setting) | {"refused": str(error)}
    return asdict(setting) | results_of(prof.summary(), setting.precision)


def results_of(summary: Summary, precision: str) -> dict[str, Any]:
    """The results of a run's summary that are kept: sizes in bytes.

    In FP32 all activations are FP32, so they are not listed.
    """
    prediction, peak = summary.prediction, summary.peak
    if prediction is None or prediction.fit is Fit.DOES_NOT_FIT:
        return {"fit": Fit.DOES_NOT_FIT.value}
    forward = summary.last_step.marks.after_forward or {}
    in_fp32 = {} if precision == FP32 else {"in_fp32": kept_in_fp32(summary.activations)}
    return {
        "fit": prediction.fit.value,
        "parameters": summary.parameters.count,
        "peak": peak.said,
        "at_most": prediction.most_allocated,
        "reserved": [prediction.least_reserved, prediction.most_reserved],
        "phase": str(peak.phase),
        "at_peak": {str(category): size for category, size in peak.categories.items() if size},
        "activations": forward.get(Category.ACTIVATIONS, 0),
        "copies": sum(forward.get(Category(category), 0) for category in PRECISION_COPIES),
        **in_fp32,
        "residual": summary.conservation.residual_bytes,
        "findings": sorted({finding.code for finding in summary.findings}),
        "warnings": len(summary.warnings),
    }


def kept_in_fp32(activations: Iterable[ActivationGroup]) -> dict[str, int]:
    """The bytes of the float32 activations by purpose, largest first."""
    return {group.kind: group.bytes for group in plain_groups(activations) if group.dtype == "float32"}


WARMING_UP = Setting(model="DLRM", optimizer="adamw", checkpointing=False, precision="amp", batch=1)


def warm_up() -> None:
    """Do in this process what every run does first, so that a child forked from it starts seconds sooner."""
    make_point(WARMING_UP)


Task: TypeAlias = Callable[[], Iterator[Point]]
"""A function that makes some points, one after the other."""


def in_children(tasks: Iterator[Task], jobs: int) -> Iterator[Point | str]:
    """The points of all ``tasks`` as they are made, each task in a forked process, ``jobs`` at once.

    The next task is taken from ``tasks`` only when a process is free. A task that fails gives its traceback last. Runs
    of one model share a process, so that the work of its first run is done once.
    """
    running: dict[Any, BaseProcess] = {}
    try:
        while True:
            while len(running) < jobs and (task := next(tasks, None)) is not None:
                here, process = start(task)
                running[here] = process
            if not running:
                return
            for connection in wait(list(running)):
                try:
                    yield connection.recv()
                except EOFError:
                    process = running.pop(connection)
                    process.join()
                    if process.exitcode:
                        yield f"the process ended with exit code {process.exitcode}"
    finally:
        for process in running.values():
            process.kill()


def start(task: Task) -> tuple[Connection, BaseProcess]:
    """A child process that runs ``task``, and the connection through which it sends its points."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(task, there))
    process.start()
    there.close()
    return here, process


def _child(task: Task, there: Connection) -> None:
    try:
        for point in task():
            there.send(point)
    except BaseException:
        there.send(traceback.format_exc())
    finally:
        there.close()
        sys.stdout.flush()
