"""A course's notebook that measures a perceptron in several precisions.

Each was measured after the cells before it, in one process. Which GPU it was in 2025 is assumed: no output says so, and
the notebook's text speaks of a V100 machine, which may be older than its figures.
"""

from published.runs import Precision, PublishedRun

_NOTEBOOK = "mryab/efficient-dl-systems"
_OTHER_CELLS = "not explained; the notebook has run other cells before, and what they left on the GPU is not known"
_BEFORE = (
    "possible: PyTorch took cuBLAS's workspaces, 16.25 MiB, outside of its allocator then; without them the prediction "
    "is 2 MiB low, and what the notebook's other cells left on the GPU is not known"
)
_FORMER = {"full": "", "half": "full", "mixed": "full,half", "scaled": "full,half,mixed"}
"""What the notebook ran before each."""
_PRECISIONS: dict[str, Precision] = {"full": "fp32", "half": "fp16", "mixed": "amp-fp16", "scaled": "amp-fp16"}


def _run(year: int, place: str, how: str, real: int, gpu: str, *, rounded: bool, old: bool) -> PublishedRun:
    after = ("--after", _FORMER[how]) if _FORMER[how] else ()
    return PublishedRun(
        key=f"efficient-dl-systems/mlp-{year}-{how}",
        source=f"{_NOTEBOOK} (branch {year}): {place}, cell outputs",
        family="mlp",
        precision=_PRECISIONS[how],
        gpu=gpu,
        gpu_assumed=year == 2025,
        address=f"https://github.com/{_NOTEBOOK}/blob/{year}/{place}",
        what="allocated",
        real=real + 500_000 if rounded else real,
        resolution=1_000_000 if rounded else 0,
        why=_BEFORE if old else _OTHER_CELLS,
        command=("mlp.py", "6144", how, *after, *(("--gradients-stay",) if old else ())),
    )


_PLACE_2025 = "week03_fast_pipelines/seminar/practice.ipynb"
_PLACE_2022 = "week05_fast_pipelines/practice.ipynb"

RUNS = (
    _run(2025, _PLACE_2025, "full", 2_271_000_000, "h100", rounded=True, old=False),
    _run(2025, _PLACE_2025, "half", 2_063_000_000, "h100", rounded=True, old=False),
    _run(2025, _PLACE_2025, "mixed", 2_327_000_000, "h100", rounded=True, old=False),
    _run(2025, _PLACE_2025, "scaled", 2_535_000_000, "h100", rounded=True, old=False),
    _run(2022, _PLACE_2022, "full", 2_380_749_824, "v100", rounded=False, old=True),
    _run(2022, _PLACE_2022, "half", 2_431_095_808, "v100", rounded=False, old=True),
    _run(2022, _PLACE_2022, "mixed", 2_500_275_200, "v100", rounded=False, old=True),
    _run(2022, _PLACE_2022, "scaled", 2_896_737_280, "v100", rounded=False, old=True),
)
