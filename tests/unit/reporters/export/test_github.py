"""What GitHub shows of a check: a table, and the lines that grew; whatever the names are, they stay text."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.checked import MIB, result, run
from support.golden_sections import Golden

from ampmem.analysis.budgets.check import CheckResult
from ampmem.reporters.export.github import ANNOTATIONS, commands, harmless, markdown

HOSTILE = "x`|](javascript:1)<b>\n::error::y\r%0A::stop-commands::z\x1b[2J, @me #1 ##[error]"


def moved() -> CheckResult:
    """What grew at the peak was there at another instant."""
    changed = result(run(saved=3 * MIB), run())
    return replace(changed, broken=tuple(replace(each, grew=(), moved=each.grew) for each in changed.broken))


RESULTS = {
    "grew": lambda: result(run(saved=3 * MIB), run(), activations="5MiB"),
    "kept": lambda: result(run(), run(), peak="1GiB"),
    "largest, without a baseline": lambda: result(run(saved=3 * MIB), peak="1MiB", activations="1MiB"),
    "modules of a summary": lambda: result(run(saved=3 * MIB), run(), summary=True),
    "only moved": moved,
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_table_and_the_annotations(name: str, golden: Golden) -> None:
    found = RESULTS[name]()
    golden("\n".join((markdown([found], Path("/repo")), *commands([found], Path("/repo")))))


def test_a_line_of_another_repository_is_not_annotated() -> None:
    found = result(run(saved=3 * MIB), run())
    assert len(list(commands([found], Path("/elsewhere")))) == 1
    assert "| /repo/net.py&#58;7 Net.forward |" in markdown([found], Path("/elsewhere"))


def test_all_that_grew_at_a_line_is_in_its_annotation_and_a_few_bytes_elsewhere_are_not(golden: Golden) -> None:
    changed = result(run(saved=3 * MIB, kept=MIB), run(), growth=0)
    (peak,) = [broken for broken in changed.broken if broken.key == "peak"]
    (first, *_) = peak.grew
    again = replace(first, op="aten::tanh", before=0, after=MIB // 2)
    tiny = replace(first, op="aten::mean", source_line="/repo/net.py:20 Net.forward", before=0, after=4)
    more = replace(peak, grew=(first, again, tiny))
    (growth,) = [broken for broken in changed.broken if broken.key == "growth"]
    here = replace(growth, grew=tuple(replace(each, source_line=first.source_line) for each in growth.grew))
    golden("\n".join(commands([replace(changed, broken=(more, here))], Path("/repo"))))
    golden("\n".join(commands([replace(changed, broken=(replace(peak, grew=(tiny,)),))], Path("/repo"))), "only tiny")


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
    assert {line.count("|") for line in text.split("\n") if re.match(r"\| +3.0 MiB", line)} == {7}


def test_no_line_of_a_log_is_a_command() -> None:
    text = "a\n::error::b\n  ::error::c\n\x1b[31m::error::d\nx ##[error]e"
    for line in harmless(text).split("\n"):
        assert not re.sub(r"\x1b\[[0-9;]*m", "", line).lstrip().startswith("::")
        assert "##[" not in line
    assert harmless("a :: b\nc") == "a :: b\nc"
