"""What can be written after %%ampmem."""

from pathlib import Path

import pytest

from ampmem.errors import UsageError
from ampmem.integrations.notebook.recorded import STEPS, CellOptions, help_text, parse

PLAIN = CellOptions(
    device="auto",
    gpu=None,
    steps=STEPS,
    skip=0,
    step_on=None,
    arm="as-is",
    compare=False,
    cells=None,
    output=None,
    html=None,
    force=False,
    last=False,
    help=False,
)


def test_without_options_a_cell_is_recorded_as_it_is() -> None:
    assert parse("") == PLAIN


def test_what_is_written_is_taken() -> None:
    options = parse("--device sim --gpu h100 --steps 2 --skip 1 --precision amp -o 'a b.ampmem' --html p.html --force")
    assert (options.device, options.gpu, options.steps, options.skip, options.arm) == ("sim", "h100", 2, 1, "amp")
    assert (options.output, options.html, options.force) == (Path("a b.ampmem"), Path("p.html"), True)
    assert parse("--compare --skip 2 --step-on __main__.step").step_on == "__main__.step"
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
