"""Which option of a script's is named to someone who forgot it: one that its own code has, or none."""

from pathlib import Path

import pytest

from ampmem.cli.processes.end_messages import how_to_use_the_gpu

PLAIN = "move the model and the batch to the device cuda, as for a real GPU"


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        ("p.add_argument('--accel', action='store_true')", (), "does the script need its option --accel?"),
        ("p.add_argument('--use-cuda', action='store_true')", (), "does the script need its option --use-cuda?"),
        ("p.add_argument('--device', default='cpu')", (), "does the script need its option --device cuda?"),
        ("p.add_argument('--gpu', type=int)", (), "does the script need its option --gpu?"),
        ("@click.option('--cuda/--no-cuda')\ndef f(): ...", (), "does the script need its option --cuda?"),
        (
            "p.add_argument('--gpu', type=int)\np.add_argument('--cuda', action='store_true')",
            (),
            "does the script need its option --cuda?",
        ),
        (
            "p.add_argument('--no-accel', action='store_true')",
            ("--no-accel",),
            "the script was given --no-accel: leave it out",
        ),
        ("p.add_argument('--no-accel', action='store_true')", (), PLAIN),
        ("p.add_argument('--accel', action='store_true')", ("--accel",), PLAIN),
        ("p.add_argument('--ngpu', type=int)\np.add_argument('--num-gpu')", (), PLAIN),
        ("", ("--device", "cpu"), "the script was given --device cpu: give it --device cuda"),
        (
            "",
            ("--size=3", "trainer.device=cpu"),
            "the script was given trainer.device=cpu: give it trainer.device=cuda",
        ),
        ("", ("--name", "cpu"), PLAIN),
        ("", (), PLAIN),
        ("this is no Python", (), PLAIN),
    ],
)
def test_what_is_said(tmp_path: Path, code: str, arguments: tuple[str, ...], said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code, encoding="utf-8")
    assert how_to_use_the_gpu(str(script), arguments) == said


def test_a_script_that_is_gone_is_not_spoken_of(tmp_path: Path) -> None:
    assert how_to_use_the_gpu(str(tmp_path / "gone.py"), ()) == PLAIN
