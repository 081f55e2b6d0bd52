"""``show`` at four widths is as it was last read; ``tests/support/golden_texts.py`` says how to make the files anew."""

import pytest
from support.golden_texts import FOLDER, texts

NAMES = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The texts as they are now, by the name of their file."""
    return dict(texts())


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_as_it_did(made: dict[str, str], name: str) -> None:
    assert made[name] == (FOLDER / name).read_text(encoding="utf-8")


def test_each_text_has_a_file_and_each_file_a_text(made: dict[str, str]) -> None:
    assert sorted(made) == NAMES
