"""An exception that cannot say what it is: its ``__str__`` raises, in the middle of a step."""

from _training import train_alone


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


train_alone(1)
raise Wordless
