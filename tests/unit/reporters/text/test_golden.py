"""``show`` at four widths is as it was last read; ``tests/unit/golden_texts.py`` says how to make the files anew."""

from __future__ import annotations

import pytest
from golden_texts import FOLDER, texts

TEXTS = dict(texts())


@pytest.mark.parametrize("name", TEXTS)
def test_it_reads_as_it_did(name: str) -> None:
    assert TEXTS[name] == (FOLDER / name).read_text(encoding="utf-8")


def test_there_is_no_file_that_nothing_makes() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(TEXTS)
