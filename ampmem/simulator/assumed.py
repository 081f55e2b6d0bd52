"""What the user says of data that a simulated device has not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """``fractions`` says, by the name of an op whose result depends on the data, how many of the elements it finds;
    ``numbers``, by ``FILE:LINE``, which number the script reads from the device there."""

    fractions: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    def number(self, line: str) -> tuple[str, float] | None:
        """What is read at ``line``, and as which line the user named it: the end of the path is enough."""
        for named, number in self.numbers.items():
            if line == named or line.endswith(os.sep + named):
                return named, number
        return None


NOTHING = Assumed()
