"""Texts that people read, compared with a file, so that a test says only what they are made of."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"^==== (.+) ====\n", re.MULTILINE)


def sections(file: Path) -> dict[str, str]:
    """The texts in ``file``, each by the name of its test."""
    if not file.exists():
        return {}
    parts = _HEAD.split(file.read_text(encoding="utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@dataclass(frozen=True)
class Golden:
    """The texts of one test in the file of its module, ``test_X.txt`` beside it.

    ``AMPMEM_GOLDEN=write`` makes those of the tests that run anew; read the difference before you commit it.
    """

    file: Path
    test: str
    folder: Path

    def __call__(self, text: str, part: str = "") -> None:
        """Compare ``text``, where the test's own folder is ``HERE``; ``part`` tells several texts of a test apart."""
        name = f"{self.test} {part}".rstrip()
        known, text = sections(self.file), f"{text}\n".replace(str(self.folder), "HERE")
        if os.environ.get("AMPMEM_GOLDEN") == "write":
            written = (f"==== {each} ====\n{made}" for each, made in sorted({**known, name: text}.items()))
            self.file.write_text("".join(written), encoding="utf-8")
        else:
            assert text == known.get(name)
