"""What there is to say of one program: what it needs, how it is run, and what is expected of it."""

from dataclasses import dataclass

PRECISIONS = ("fp32", "amp", "amp-nocache")
STATIC = ("parameters", "gradients", "optimizer_state", "cast_copies")
"""What can be compared with sums over tensors, which the program prints (``programs/sums.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script in ``programs/`` that trains with a library, recorded for two steps in each of ``precisions``.

    ``own`` are the arguments with which the library itself trains in a low precision, recorded as it is; ``None``
    where the script's own autocast is all there is. ``options`` are ampmem's, such as ``--assume``.

    It is expected to work. ``assumes`` has a part of each note or warning that says what was taken for granted, beyond
    what every run says; with one, it works with an assumption. ``stops`` is what the message says that ends it.

    ``equal`` are the categories whose bytes equal the sums after backward; of copies of the weights, those that the
    step's forward made. ``why`` says why the others do not. ``not_on_cpu`` says why the program is not compared with
    itself on the CPU. ``quick`` programs are run by the tests.
    """

    name: str
    packages: tuple[str, ...]
    file: str
    arguments: str = ""
    options: str = ""
    own: str | None = None
    precisions: tuple[str, ...] = PRECISIONS
    equal: tuple[str, ...] = STATIC
    why: str = ""
    not_on_cpu: str = ""
    assumes: tuple[str, ...] = ()
    stops: str = ""
    quick: bool = False

    @property
    def expected(self) -> str:
        """What the table is to say."""
        if self.stops:
            return STOPS
        return ASSUMES if self.assumes else WORKS


WORKS = "works"
ASSUMES = "works with an assumption"
STOPS = "stops"
FAILS = "fails"
"""It does none of what is expected."""
