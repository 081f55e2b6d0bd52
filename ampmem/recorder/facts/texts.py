"""Numbers for texts: names, modules, ops and stacks repeat, so columns hold their ids."""

from __future__ import annotations


class Texts:
    """Gives every distinct text an id; 0 is the empty text."""

    def __init__(self) -> None:
        self._ids = {"": 0}
        self._values = [""]
        self._new: list[str] = []

    def id(self, text: str) -> int:
        """The id of ``text``, a new one at its first use."""
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids)
            storable = text.encode("utf-8", "backslashreplace").decode()  # file names may hold lone surrogates
            self._values.append(storable)
            self._new.append(storable)
        return known

    def value(self, text_id: int) -> str:
        """The text behind an id."""
        return self._values[text_id]

    def take_new(self) -> list[str]:
        """The texts first used since the last call, in the order of their ids."""
        new, self._new = self._new, []
        return new
