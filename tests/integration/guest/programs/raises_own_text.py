"""A message of a class of the program's own, none of whose methods work."""

from _training import train_alone


class Text(str):
    def _fails(self, *_: object) -> str:
        raise TypeError("not with this text")

    strip = splitlines = encode = __getitem__ = __add__ = __format__ = __len__ = _fails  # type: ignore[assignment]


class Odd(Exception):
    def __str__(self) -> str:
        return Text("odd\nand more")


train_alone(1)
raise Odd
