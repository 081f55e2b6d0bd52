"""Schemas from dataclasses: every kind of field, and what is no field for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import jsonschema
import pytest

from ampmem.analysis.fine_tuning import estimate_schema
from ampmem.analysis.fit import fit_schema
from ampmem.analysis.jsonable import (
    NOT_IN_JSON,
    AtLeast,
    EachOf,
    Name,
    OneOf,
    Positive,
    Signed,
    named,
    plain,
    schema_of,
)
from ampmem.analysis.summary import summary_schema


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    """An inner object; see :class:`~ampmem.analysis.jsonable.Inner` and ``size``."""

    size: int
    """Bytes of
    it."""


@dataclass(frozen=True, kw_only=True)
class Base:
    first: bool


@dataclass(frozen=True, kw_only=True)
class Outer(Base):
    kind: Literal["a", "b"]
    colour: Colour
    class_name: str = field(metadata=named("class"))
    secret: object = field(default=None, metadata=NOT_IN_JSON)
    ratio: float | None
    word: Annotated[str, OneOf(("x", "y"))]
    change: Signed
    count: Positive
    inner: Inner | None
    all_inner: Annotated[tuple[Inner, ...], AtLeast(1)]
    by_colour: Mapping[Colour, int]
    by_word: Annotated[Mapping[str, Signed], EachOf(("x", "y"))]
    by_name: Mapping[Name, Inner]


def outer(**changes: Any) -> Any:
    """A value as JSON has it, with some of its keys changed."""
    inner = Inner(size=3)
    value: Any = plain(
        Outer(
            first=True,
            kind="a",
            colour=Colour.RED,
            class_name="C",
            ratio=1.5,
            word="x",
            change=-1,
            count=1,
            inner=inner,
            all_inner=(inner,),
            by_colour={Colour.RED: 1, Colour.BLUE: 2},
            by_word={"x": -1, "y": 0},
            by_name={"n": inner},
        )
    )
    return value | changes


SCHEMA: Any = schema_of(Outer, title="t", description="d")
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_what_a_dataclass_becomes_is_as_its_schema_says() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(outer())
    VALIDATOR.validate(outer(ratio=None, inner=None, by_name={}))
    assert list(outer()) == SCHEMA["required"] == list(SCHEMA["properties"])
    assert "class" in outer() and "class_name" not in outer() and "secret" not in outer()


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 1},
        {"kind": "c"},
        {"colour": "green"},
        {"class": None},
        {"ratio": "1"},
        {"word": "z"},
        {"change": 0.5},
        {"count": 0},
        {"inner": {"size": -1}},
        {"inner": {"size": None}},
        {"inner": {}},
        {"inner": {"size": 1, "more": 1}},
        {"all_inner": []},
        {"all_inner": None},
        {"by_colour": {"red": 1}},
        {"by_colour": {"red": 1, "blue": -1}},
        {"by_word": {"x": 1, "y": 1, "z": 1}},
        {"by_name": {"": {"size": 1}}},
        {"by_name": {"n": 1}},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_not_of_a_fields_type_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(outer(**changes))


def test_every_key_is_required() -> None:
    for key in outer():
        value = outer()
        del value[key]
        assert not VALIDATOR.is_valid(value)


def test_docstrings_are_the_descriptions() -> None:
    assert SCHEMA["$defs"]["Inner"]["description"] == "An inner object; see `Inner` and `size`."
    assert SCHEMA["$defs"]["Inner"]["properties"]["size"]["description"] == "Bytes of it."


def test_a_type_that_json_does_not_have_is_refused() -> None:
    @dataclass
    class Odd:
        what: complex

    with pytest.raises(TypeError, match="complex"):
        schema_of(Odd, title="t", description="d")


@pytest.mark.parametrize(
    "schema", [summary_schema(), fit_schema(), estimate_schema()], ids=["summary", "fit", "estimate"]
)
def test_the_schemas_are_schemas(schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
