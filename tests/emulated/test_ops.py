"""What ops allocate on the emulated runtime, and what a simulated device says of them: to the byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import emulation  # noqa: E402
import ops  # noqa: E402

CASES = (
    r"^(sdpa( causal| dropout| packed| d=(80|128)| cross| short| gqa| bool mask odd| trained bias| 3d| math causal)?"
    r"|sdpa efficient (d=(80|160|256)|many)|attention by hand causal|mha|layer_norm( permuted| tall)?|rms_norm( tall)?"
    r"|group_norm( channels-last)?|batch_norm|cross_entropy( 2d channels-last)?|bce_with_logits( weights)?|softmax"
    r"( permuted| back)?|act (gelu|silu|mish|swiglu)|dropout|maximum|clamp tensors|var_mean\(-1\)|embedding|roll|take"
    r"|F\.(un)?fold|linear( transposed)?|addmm|conv 3x3|scatter_add|cat|sort long) \[(bf16|amp)\]$"
)
"""Those of the set "large" that are run here; ``ops.py --check`` runs all of them."""
RECURRENT = r"^lstm layers=2 .* batch=16 .*\[(f32|amp)\]$"


@pytest.mark.parametrize(("name", "only"), [("large", CASES), ("recurrent", RECURRENT)])
def test_what_differs_is_known(name: str, only: str) -> None:
    import torch

    if torch.__version__.partition("+")[0] != emulation.TORCH:
        pytest.skip(f"the known differences are those of torch {emulation.TORCH}")
    with pytest.raises(SystemExit) as ended:
        ops.main(["--check", "--set", name, "--only", only])
    assert ended.value.code == 0, ended.value.code


def difference(factor: float, *, kept: int = 0, sizes: tuple[int, ...] = (8,)) -> ops.Difference:
    emulated = ops.Phase(sizes=(8,), peak=100, kept=0)
    simulated = ops.Phase(sizes=sizes, peak=round(100 * factor), kept=kept)
    return ops.Difference(name="op", precision="f32", phase="forward", emulated=emulated, simulated=simulated)


def test_phases_are_sums_of_what_is_requested() -> None:
    events = [(True, 10), (True, ops.WORKSPACE), (True, 20), (False, 10), (True, 5), (False, ops.WORKSPACE)]
    assert ops.Phase.of(events) == ops.Phase(sizes=(10, 20, 5), peak=30, kept=25)


def test_a_new_difference_and_one_that_is_gone_are_told() -> None:
    equal, worse, order = difference(1), difference(0.5, kept=-3), difference(1, sizes=(4, 4))
    assert [each.text for each in (equal, worse, order)] == ["equal", "x0.50 keeps 0->-3", "sequence"]
    assert ops.changes({}, [equal]) == []
    assert ops.changes(ops.known([worse]), [worse]) == []
    assert ops.changes({}, [order])[0].startswith("op forward [f32]: known as equal, is sequence: emulated (8,)")
    assert ops.changes(ops.known([worse]), [equal])[0].startswith(
        "op forward [f32]: known as x0.50 keeps 0->-3, is equal"
    )


def test_the_page_has_the_known_differences() -> None:
    sets = json.loads(ops.KNOWN.read_text(encoding="utf-8"))
    text = ops.PAGE.read_text(encoding="utf-8")
    assert text.partition(ops.BEGIN)[2].partition(ops.END)[0].strip().splitlines() == ops.table(sets)
