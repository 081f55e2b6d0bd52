"""What GitHub shows of a check: a table, and the lines that grew; whatever the names are, they stay text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from checked import MIB, result, run

from ampmem.reporters.export.github import ANNOTATIONS, commands, harmless, markdown
from ampmem.reporters.text.check import render_check

HOSTILE = "x`|](javascript:1)<b>\n::error::y\r%0A::stop-commands::z\x1b[2J, @me #1 ##[error]"


def test_a_table_of_limits_and_of_what_grew() -> None:
    text = markdown([result(run(saved=3 * MIB), run(), activations="5MiB")], Path("/elsewhere"))
    lines = text.split("\n")
    assert lines[0].startswith("### ❌ run&#58; broken&#58; peak 4.0 MiB, 2.0 MiB more than the 2.0 MiB of main.ampmem")
    assert "| activations | budget | 5.0 MiB | 3.0 MiB | kept |" in lines
    assert "| peak | baseline | 2.0 MiB | 4.0 MiB | **BROKEN by 2.0 MiB** |" in lines
    grew = "| 2.0 MiB | 1.0 MiB | 3.0 MiB | activations | mm in encoder.0 | /repo/net.py&#58;7 Net.forward |"
    assert lines.count(grew) == 1
    assert "| net.py&#58;7 Net.forward |" in markdown([result(run(saved=3 * MIB), run())], Path("/repo"))
    assert markdown([result(run(), peak="1GiB")], Path()).startswith("### ✅ run&#58; kept&#58; peak, ")


def test_the_lines_that_grew_are_annotated_in_the_users_files() -> None:
    found = list(commands([result(run(saved=3 * MIB), run(), activations="2MiB")], Path("/repo")))
    assert found[0].startswith("::error title=ampmem check::run: broken: peak 4.0 MiB")
    assert found[1:] == [
        "::error file=net.py,line=7,title=ampmem check::peak grew by 2.0 MiB here: activations, mm in encoder.0"
    ]
    assert len(list(commands([result(run(saved=3 * MIB), run())], Path("/elsewhere")))) == 1
    assert list(commands([result(run(), run(), peak="1GiB")], Path("/repo"))) == []


def test_all_that_grew_at_a_line_is_in_its_annotation_and_a_few_bytes_elsewhere_are_not() -> None:
    changed = result(run(saved=3 * MIB, kept=MIB), run(), growth=0)
    (peak,) = [broken for broken in changed.broken if broken.key == "peak"]
    (first, *_) = peak.grew
    again = replace(first, op="aten::tanh", before=0, after=MIB // 2)
    tiny = replace(first, op="aten::mean", source_line="/repo/net.py:20 Net.forward", before=0, after=4)
    more = replace(peak, grew=(first, again, tiny))
    (growth,) = [broken for broken in changed.broken if broken.key == "growth"]
    here = replace(growth, grew=tuple(replace(each, source_line=first.source_line) for each in growth.grew))
    found = list(commands([replace(changed, broken=(more, here))], Path("/repo")))[1:]
    assert found == [
        "::error file=net.py,line=7,title=ampmem check::peak grew by 2.5 MiB here: activations, mm in encoder.0, and 1 "
        "more; 1.0 MiB stay here from the end of step 0 to the end of step 1: other, clone"
    ]
    only_tiny = replace(changed, broken=(replace(peak, grew=(tiny,)),))
    assert "line=20,title=ampmem check::peak grew by 4 B here" in list(commands([only_tiny], Path("/repo")))[1]


def test_without_a_baseline_there_are_the_module_and_the_line_of_what_is_largest() -> None:
    found = result(run(saved=3 * MIB), peak="1MiB", activations="1MiB")
    lines = markdown([found], Path("/repo")).split("\n")
    assert "| 3.0 MiB | activations | mm in encoder.0 | net.py&#58;7 Net.forward |" in lines
    # In a terminal it is in two lines.
    told = " ".join(render_check(found).split())
    assert "3.0 MiB activations mm in encoder.0 at /repo/net.py:7 Net.forward" in told
    assert list(commands([found], Path("/repo")))[1:] == [
        "::error file=net.py,line=7,title=ampmem check::3.0 MiB of peak are allocated here: activations, "
        "mm in encoder.0"
    ]


def test_of_a_summary_there_are_the_modules() -> None:
    lines = markdown([result(run(saved=3 * MIB), run(), summary=True)], Path("/repo")).split("\n")
    at = lines.index("| grew by | before | after | category | module |")
    assert lines[at + 2] == "| 2.0 MiB | 1.0 MiB | 3.0 MiB | activations | - |"
    assert "| 2.0 MiB | 1.0 MiB | 3.0 MiB | activations | encoder.0 |" in lines


def test_no_heading_is_empty() -> None:
    found = result(run(saved=3 * MIB), run(), activations="2MiB")
    nothing = replace(found, broken=tuple(replace(each, grew=()) for each in found.broken))
    assert "**peak" not in markdown([nothing], Path("/repo"))
    for each in (found, result(run(saved=3 * MIB), peak=1, activations=1), result(run(kept=1), run(), growth=0)):
        lines = [line for line in markdown([each], Path("/repo")).split("\n") if line]
        headings = [i for i, line in enumerate(lines) if line.startswith("**")]
        assert headings
        for i in headings:
            assert "the same as for" in lines[i] or "|" in lines[i + 1] or "another instant" in lines[i + 1], lines[i]


def test_what_has_only_moved_is_in_no_annotation() -> None:
    changed = result(run(saved=3 * MIB), run())
    moved = tuple(replace(each, grew=(), moved=each.grew) for each in changed.broken)
    assert len(list(commands([replace(changed, broken=moved)], Path("/repo")))) == 1
    assert "2.0 MiB are more than at the baseline's instant" in markdown(
        [replace(changed, broken=moved)], Path("/repo")
    )


@pytest.mark.parametrize("file", ["/repo/a,b:c%.py", f"/repo/{HOSTILE}.py", "/repo/../etc/x.py", "/repo/\0.py"])
def test_hostile_names_are_no_commands(file: str) -> None:
    found = list(commands([result(run(saved=3 * MIB, module=HOSTILE, file=file), run(), peak=1)], Path("/repo")))
    assert 1 <= len(found) <= ANNOTATIONS
    for command in found:
        assert command.isprintable()
        properties, _, message = command.removeprefix("::error ").partition("::")
        values = dict(each.split("=", 1) for each in properties.split(","))
        assert set(values) <= {"file", "line", "title"}
        assert not re.search(r"[:,\r\n]", "".join(values.values()))
        assert not re.search(r"%(?!25)", message)


def test_hostile_names_are_no_markup() -> None:
    text = markdown(
        [result(run(saved=3 * MIB, module=HOSTILE, file=f"/repo/{HOSTILE}"), run(), label=HOSTILE, peak=1)], Path("/x")
    )
    assert not re.search(r"[`<>\[\]@\\]|javascript:|::", text)
    assert all(character.isprintable() for character in text.replace("\n", ""))
    shown = re.sub(r"&#\d+;", "", text)
    assert not re.search(r"[&#](?!## )", shown.replace("### ", ""))
    # A row has as many cells as its table, whatever is in them.
    assert {line.count("|") for line in text.split("\n") if line.startswith("| 3.0 MiB")} == {7}


def test_no_line_of_a_log_is_a_command() -> None:
    text = "a\n::error::b\n  ::error::c\n\x1b[31m::error::d\nx ##[error]e"
    for line in harmless(text).split("\n"):
        assert not re.sub(r"\x1b\[[0-9;]*m", "", line).lstrip().startswith("::")
        assert "##[" not in line
    assert harmless("a :: b\nc") == "a :: b\nc"
