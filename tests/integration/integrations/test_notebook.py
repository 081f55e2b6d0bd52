"""The notebook in docs/, run by a real kernel, and what a browser makes of its outputs in a hostile page."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.ready_python import ready_python

import ampmem

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each cell of the notebook shows, by the cell's id."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", ready_python())
        patched.setenv("PYTHONPATH", str(Path(ampmem.__file__).parents[1]))
        patched.setenv("IPYTHONDIR", str(folder))
        run = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
        run.execute()
    assert list(folder.glob("*.ampmem")) == []
    return {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}


def texts(outputs: list[Any]) -> list[str]:
    return [each["data"]["text/plain"] for each in outputs if "data" in each]


def test_every_cell_shows_what_the_notebook_says(outputs: dict[str, list[Any]]) -> None:
    value, page = texts(outputs["record"])
    assert value == "True"
    assert page.startswith("ampmem: The first 3 steps of In [4] were recorded (--steps 3).")
    assert texts(outputs["last"])[0].startswith("The peak is ")
    (compared,) = texts(outputs["compare"])
    assert compared.startswith("ampmem: Each precision ran In [2], In [3] and In [6] in a fresh process, with seed 0.")
    assert "amp-nocache" in compared
    (simulated,) = texts(outputs["simulate"])
    assert "NVIDIA H100 80GB HBM3 (simulated): peak " in simulated


def test_only_what_is_meant_to_be_is_shown_and_pages_stay_small(outputs: dict[str, list[Any]]) -> None:
    pages = [each for name in ("record", "compare", "simulate") for each in outputs[name] if "data" in each]
    frames = [each["data"]["text/html"] for each in pages if "text/html" in each["data"]]
    assert len(frames) == 3
    assert all(frame.count("<iframe ") == 1 and len(frame) < 1_200_000 for frame in frames)
    for shown in outputs.values():
        assert all(each["output_type"] != "error" for each in shown)
        assert all(each.get("name") != "stdout" for each in shown)
