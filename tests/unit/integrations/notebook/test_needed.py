"""Which earlier cells a cell needs, and what is left out."""

import pytest

from ampmem.integrations.notebook.cells import Needed, cells_needed, untold

CELLS = {
    1: "import torch\nfrom torch import nn",
    2: "def train(): return step(model)",
    3: "model = nn.Linear(1, 1)",
    4: "model = wrap(model)",
    5: "def wrap(m): return m",
    6: "for i in range(3): train()",
    7: "def step(m): return m",
    8: "this is no python",
    9: "model.half()",
}
KNOWN = {"torch", "nn", "train", "model", "wrap", "i", "step", "batch"}


def cells_for(code: str, *before: str) -> tuple[int, ...]:
    """The numbers of the cells ``before``, from 1 on, that ``code`` needs."""
    return cells_needed(code, dict(enumerate(before, 1)), KNOWN).cells


def test_every_cell_that_binds_a_name_is_needed_and_those_that_they_need() -> None:
    assert cells_needed("nn.ReLU()", CELLS, KNOWN) == Needed(cells=(1,), missing=())
    assert cells_needed("model", {1: CELLS[1], 3: CELLS[3]}, KNOWN) == Needed(cells=(1, 3), missing=())
    assert cells_needed("model", CELLS, KNOWN) == Needed(cells=(1, 3, 4, 5), missing=())
    assert cells_needed("train()", CELLS, KNOWN) == Needed(cells=(1, 2, 3, 4, 5, 7), missing=())


TRAIN = "batch = 8\ndef train():\n    return torch.randn(batch, model)"


@pytest.mark.parametrize(
    "again",
    [
        "batch = 2048",
        "batch //= 2",
        "del batch",
        "import sizes as batch",
        "for batch in (1, 2): pass",
        "if True:\n    batch = 4",
        "batch.size = 4",
        "batch['size'] = 4",
        "from sizes import *",
        "get_ipython().run_cell_magic('time', '', 'batch = 4')",
    ],
)
def test_what_a_function_reads_and_a_later_cell_binds_anew_is_not_forgotten(again: str) -> None:
    assert cells_for("train()", "import torch\nmodel = 3", TRAIN, "unused = 1", again) == (1, 2, 4)


def test_a_call_that_binds_through_global_is_needed() -> None:
    larger = "def larger():\n    global batch\n    batch = 4096"
    assert cells_for("train()", "import torch\nmodel = 3", TRAIN, larger, "larger()") == (1, 2, 3, 4)
    through = "def even():\n    larger()"
    assert cells_for("train()", "import torch\nmodel = 3", TRAIN, larger, through, "x = even()") == (1, 2, 3, 4, 5)


def test_what_the_cell_itself_binds_first_needs_no_other() -> None:
    assert cells_for("batch = 4\ndef f(): return batch\nf()", "batch = 8") == ()


def test_what_is_only_used_or_changed_in_place_is_not_run_and_said() -> None:
    chosen = cells_needed("train()", CELLS, KNOWN).cells
    assert untold("train()", CELLS, chosen) == {6: ("train",), 9: ("model",)}
    assert untold("torch", CELLS, (1,)) == {}


def test_what_nobody_can_tell_is_said_of_cells_that_run_too() -> None:
    before = {
        1: "get_ipython().run_line_magic('env', 'A=1')\nbatch = 8",
        2: "exec('batch = 9')",
        3: "setattr(batch, 'x', 1)",
    }
    assert cells_needed("batch", before, KNOWN).cells == (1,)
    assert untold("batch", before, (1,)) == {1: ("%env",), 2: ("exec",), 3: ("batch",)}


def test_a_name_that_no_cell_binds_is_missing_unless_a_cell_imports_everything() -> None:
    assert cells_needed("data", CELLS, {*KNOWN, "data"}) == Needed(cells=(), missing=("data",))
    assert cells_needed("data", {1: "from tools import *"}, {"data"}) == Needed(cells=(1,), missing=())


def test_a_name_that_there_is_not_is_the_scripts_own_error() -> None:
    assert cells_needed("undefined", CELLS, KNOWN) == Needed(cells=(), missing=())


def test_a_cell_that_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        cells_needed("this is no python", CELLS, KNOWN)
