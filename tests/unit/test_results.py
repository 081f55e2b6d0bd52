"""Two files of losses and gradients: whether they are equal bit for bit, or by how much they differ."""

from pathlib import Path

import numpy as np
import pytest

from ampmem.results import ResultsWriter, Values, results_difference


def written(path: Path, *results: tuple[str, Values]) -> Path:
    writer = ResultsWriter(path)
    for what, values in results:
        writer.add(what, values)
    writer.close()
    writer.add("loss", np.array(9.0))  # too late
    return path


LOSS = ("loss", np.array(2.5, dtype=np.float32))
GRADIENT = ("gradient 0 0", np.array([[1.0, -4.0], [np.nan, np.inf]], dtype=np.float32))


def test_equal_results_are_counted(tmp_path: Path) -> None:
    found = results_difference(
        written(tmp_path / "a", LOSS, GRADIENT, GRADIENT), written(tmp_path / "b", *[LOSS, *2 * [GRADIENT]])
    )
    assert (found.losses, found.gradients, found.equal, found.same_kind) == (1, 2, True, True)
    assert (found.largest_loss, found.largest_gradient) == (2.5, 4.0)
    assert (found.loss_difference, found.gradient_difference) == (0, 0)


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ([[1.0, -4.5], [np.nan, np.inf]], 0.5),
        ([[1.0, -4.0], [0.0, np.inf]], np.inf),
        ([[1.0, -4.0], [np.nan, -np.inf]], np.inf),
        ([[np.nan, -4.0], [np.nan, np.inf]], np.inf),
    ],
)
def test_the_largest_difference_is_found(tmp_path: Path, other: list[list[float]], apart: float) -> None:
    changed = ("gradient 0 0", np.array(other, dtype=np.float32))
    found = results_difference(written(tmp_path / "a", LOSS, GRADIENT), written(tmp_path / "b", LOSS, changed))
    assert not found.equal and found.same_kind
    assert (found.loss_difference, found.gradient_difference) == (0, apart)


def test_the_sign_of_zero_is_a_bit(tmp_path: Path) -> None:
    found = results_difference(
        written(tmp_path / "a", ("loss", np.array(0.0))), written(tmp_path / "b", ("loss", np.array(-0.0)))
    )
    assert not found.equal and found.loss_difference == 0


@pytest.mark.parametrize(
    "other", [(LOSS,), (LOSS, GRADIENT, LOSS), (GRADIENT, LOSS), (LOSS, ("gradient 0 0", np.zeros(4)))]
)
def test_other_results_are_not_compared(tmp_path: Path, other: tuple[tuple[str, Values], ...]) -> None:
    found = results_difference(written(tmp_path / "a", LOSS, GRADIENT), written(tmp_path / "b", *other))
    assert not found.equal and not found.same_kind
