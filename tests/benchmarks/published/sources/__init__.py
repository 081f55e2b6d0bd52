"""The published runs, a module for each source, which has them in ``RUNS``."""

from importlib import import_module
from pkgutil import iter_modules

from published.runs import PublishedRun


def every_run() -> tuple[PublishedRun, ...]:
    """Those of all modules here, in the order of the modules' names."""
    names = sorted(module.name for module in iter_modules(__path__))
    runs = tuple(run for name in names for run in import_module(f"{__name__}.{name}").RUNS)
    keys = [run.key for run in runs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"two published runs have the key {', '.join(twice)}")
    return runs
