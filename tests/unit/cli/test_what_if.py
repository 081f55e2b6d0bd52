from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.build import RUN, Story, write

from ampmem.cli.show import show
from ampmem.errors import UsageError
from ampmem.events import Phase
from ampmem.vocabulary import SourceKind

MIB = 1 << 20


def recorded(tmp_path: Path, source: SourceKind) -> str:
    """A run that holds 33 MiB and then 65 MiB."""
    story = Story(weight=10, begins=Phase.BACKWARD)
    story.alloc(0x100000, 33 * MIB)
    story.alloc(0x10000000, 65 * MIB)
    story.free(0x100000, 0x10000000)
    story.end()
    return str(write(tmp_path / "run.ampmem", story.recording(run=replace(RUN, source=source))))


def what_if(file: str, *settings: str) -> Result:
    options = [word for setting in settings for word in ("--what-if", setting)]
    return CliRunner().invoke(show, [*options, file])


def test_each_setting_is_laid_beside_the_default(tmp_path: Path) -> None:
    done = what_if(recorded(tmp_path, SourceKind.CUDA), "roundup_power2_divisions=4", "expandable_segments")
    rows = [line.split("  ") for line in done.output.splitlines() if "MiB" in line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    # 2 MiB for the parameter; 33 and 65 MiB round up to 34 and 66, or to a quarter of a power of two: 40 and 80.
    assert cells[0] == ["roundup_power2_divisions=4", "102.0 MiB", "122.0 MiB", "+20.0 MiB"]
    # Pages of 20 MiB in one segment: 98 MiB take five.
    assert cells[1] == ["expandable_segments", "102.0 MiB", "102.0 MiB", "0 B"]
    assert max(map(len, done.output.splitlines())) <= 100


def test_a_colon_is_as_good_as_an_equals_sign(tmp_path: Path) -> None:
    file = recorded(tmp_path, SourceKind.SNAPSHOT)
    named = what_if(file, "expandable_segments:True").output.replace(":True", "=True")
    assert named == what_if(file, "expandable_segments=True").output


def test_the_cpu_has_no_such_settings(tmp_path: Path) -> None:
    done = what_if(recorded(tmp_path, SourceKind.CPU), "expandable_segments")
    assert isinstance(done.exception, UsageError) and "record on a GPU" in str(done.exception)


@pytest.mark.parametrize("setting", ["nonsense", "max_split_size_mb=many", "max_split_size_mb"])
def test_what_is_no_setting_is_refused(tmp_path: Path, setting: str) -> None:
    assert isinstance(what_if(recorded(tmp_path, SourceKind.CUDA), setting).exception, UsageError)
