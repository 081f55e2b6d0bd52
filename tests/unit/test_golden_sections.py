"""The files of texts hold no text that no test compares with, and a changed text fails its test."""

from pathlib import Path

import pytest
from support.golden_sections import Golden, sections

FILES = sorted(Path(__file__).parent.rglob("test_*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_text_is_of_a_test(file: Path) -> None:
    source = file.with_suffix(".py").read_text(encoding="utf-8")
    assert [name for name in sections(file) if f"def {name.split('[')[0].split()[0]}(" not in source] == []


def test_a_text_that_changed_or_is_not_there_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden(tmp_path / "test_x.txt", "test_it", tmp_path)
    for text, part in (("two\nlines", ""), (f"in {tmp_path}", "again")):
        with pytest.raises(AssertionError):
            golden(text, part)
        with monkeypatch.context() as patch:
            patch.setenv("AMPMEM_GOLDEN", "write")
            golden(text, part)
        golden(text, part)
        with pytest.raises(AssertionError):
            golden(f"{text}!", part)
    assert sections(golden.file) == {"test_it": "two\nlines\n", "test_it again": "in HERE\n"}
