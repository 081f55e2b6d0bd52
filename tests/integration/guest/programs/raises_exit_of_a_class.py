"""SystemExit of a class of the program's own, with a code that is no number."""

from _training import train_alone


class Enough(SystemExit):
    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise TypeError("not to be shown")


train_alone(1)
raise Enough("enough")
