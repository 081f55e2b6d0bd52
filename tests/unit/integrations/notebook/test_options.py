"""What can be written after %%ampmem."""

from pathlib import Path

import pytest

from ampmem.allocator.gpus import GPUS
from ampmem.errors import UsageError
from ampmem.integrations.notebook.recorded import STEPS, CellOptions, help_text, parse
from ampmem.recorder.marker import step_on_of
from ampmem.recorder.options import Asked
from ampmem.vocabulary import Device, Precision

PLAIN = CellOptions(
    asked=Asked(steps=STEPS),
    compare=False,
    cells=None,
    output=None,
    html=None,
    light=False,
    last=False,
    help=False,
)


def test_without_options_a_cell_is_recorded_as_it_is() -> None:
    assert parse("") == PLAIN


def test_what_is_written_is_taken() -> None:
    options = parse("--device sim --gpu h100 --steps 2 --skip 1 --precision amp -o 'a b.ampmem' --html p.html --force")
    assert options.asked == Asked(
        device=Device.SIMULATED, gpu=GPUS["h100"], steps=2, skip=1, precision=Precision.AMP, force=True
    )
    assert (options.output, options.html) == (Path("a b.ampmem"), Path("p.html"))
    assert parse("--compare --skip 2 --step-on __main__.step").asked.step_on == step_on_of("__main__.step")
    assert parse("--compare --cells 1,3-5").cells == (1, 3, 4, 5)


@pytest.mark.parametrize(
    "line",
    [
        "--stepz 3",
        "--steps 0",
        "--steps -1",
        "--skip x",
        "--device tpu",
        "--gpu h100 --device cpu",
        "--compare --precision amp",
        "--compare --last",
        "--cells 1",
        "--compare --cells a",
        "--compare --cells 1-",
        "extra",
        "-o 'open",
    ],
)
def test_what_is_wrong_is_said_in_one_line(line: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(line)
    assert str(raised.value).startswith("%%ampmem: ")
    assert "\n" not in str(raised.value)


def test_the_help_has_every_option() -> None:
    for option in (
        "--device",
        "--gpu",
        "--steps",
        "--skip",
        "--step-on",
        "--precision",
        "--compare",
        "--cells",
        "--html",
        "--last",
    ):
        assert option in help_text()
