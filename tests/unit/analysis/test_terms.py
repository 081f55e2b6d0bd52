"""Each term of the static model by itself: the evidence, the bytes that it explains, and whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampmem.analysis.static_model.evidence import Cast, Copy, Evidence, Fates, NamedMemory, StateMemory
from ampmem.analysis.static_model.explain import (
    TermKind,
    TermSums,
    cast_terms,
    gradient_terms,
    master_terms,
    parameter_terms,
    state_terms,
)
from ampmem.analysis.static_model.recipes import OPTIMIZERS
from ampmem.analysis.timeline.categories import Category
from ampmem.events import ParameterRecord
from ampmem.names import INPUT, StateName

Told = list[tuple[TermKind, int, int, tuple[str, ...]]]
NO_FATES = Fates(gone=frozenset(), later=frozenset())
KEPT = (Category.PARAMETERS, Category.GRADIENTS, Category.MASTER_COPIES)


def parameter(name: str = "a", elements: int = 100, dtype: str = "float32", **changes: object) -> ParameterRecord:
    size = {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
    record = ParameterRecord(name=name, elements=elements, bytes=size * elements, dtype=dtype, trainable=True)
    return replace(record, **{"optimizer": 0, "kind": "Linear", "shape": (elements,), **changes})  # type: ignore[arg-type]


def evidence(*parameters: ParameterRecord, **changes: object) -> Evidence:
    """Of ``parameters`` nothing was seen but for the ``changes``."""
    nothing = Evidence(
        parameters=parameters,
        live={},
        memories=dict.fromkeys(KEPT, ()),
        copied=(),
        fates=dict.fromkeys(KEPT, NO_FATES),
        states=(),
        states_fate=NO_FATES,
        copies={},
        cast={},
        casts_seen=True,
        had_gradient=frozenset(),
        have_gradients=frozenset(),
        sparse=frozenset(),
        autocast=True,
        updated=True,
        skipped=False,
        rounding=0,
    )
    return replace(nothing, **changes)  # type: ignore[arg-type]


def in_memory(category: Category, *memories: tuple[int, Mapping[str, str]], **changes: object) -> dict[str, object]:
    """The ``memories`` of ``category``: bytes, and by name the type of the tensor there."""
    return {
        "memories": dict.fromkeys(KEPT, ()) | {category: [NamedMemory(bytes=b, names=n) for b, n in memories]}
    } | changes


def fate(category: Category, **of: set[str]) -> dict[str, object]:
    fates = replace(NO_FATES, **{when: frozenset(names) for when, names in of.items()})
    return {"fates": dict.fromkeys(KEPT, NO_FATES) | {category: fates}}


def of_a(kind: TermKind, size: int, tensors: int = 1) -> Told:
    """One term, of the parameter ``a``."""
    return [(kind, size, tensors, ("a",))]


def told(terms: TermSums) -> Told:
    return [(term.kind, term.bytes, term.tensors, term.names) for term in terms.listed()]


K = TermKind
P, G, M = KEPT
FLOAT, HALF = {"a": "float32"}, {"a": "bfloat16"}


# -- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "seen", "expected"),
    [
        ([parameter()], in_memory(P, (400, FLOAT)), []),
        ([parameter()], {}, None),
        ([parameter()], fate(P, gone={"a"}), of_a(K.PARAMETERS_GONE, -400)),
        ([parameter()], fate(P, later={"a"}), of_a(K.PARAMETERS_LATER, -400)),
        ([parameter()], fate(P, gone={"a"}, later={"a"}), of_a(K.PARAMETERS_GONE, -400)),
        ([parameter(dtype="bfloat16")], in_memory(P, (200, HALF)), of_a(K.PARAMETER_TYPE, -200)),
        ([parameter()], in_memory(P, (400, FLOAT), (400, FLOAT), (400, FLOAT)), of_a(K.PARAMETERS_MOVED, 800, 2)),
        ([parameter()], in_memory(P, (400, FLOAT), (400, FLOAT), kept={"a": "ema"}), of_a(K.PARAMETERS_KEPT, 400)),
        (
            [parameter(), parameter("b", 50)],
            in_memory(P, (700, {"a": "float32", "b": "float32"})),
            [(K.AROUND_PARAMETERS, 100, 1, ())],
        ),
        ([parameter(padding=60)], in_memory(P, (460, FLOAT)), of_a(K.PADDING, 60)),
        (
            [parameter(padding=60)],
            in_memory(P, (500, FLOAT)),
            [(K.PADDING, 60, 1, ("a",)), (K.AROUND_PARAMETERS, 40, 1, ())],
        ),
        (
            [parameter(padding=60)],
            in_memory(P, (450, FLOAT)),  # so much is not all of the padding
            [(K.AROUND_PARAMETERS, 50, 1, ())],
        ),
        ([parameter(), parameter("b", shares="a")], in_memory(P, (400, {"a": "float32", "b": "float32"})), []),
        (
            [parameter()],
            in_memory(P, (400, FLOAT), copied=[NamedMemory(bytes=300, names={"ema": ""})]),
            [(K.PARAMETER_COPIES, 300, 1, ("ema",))],
        ),
        ([parameter()], in_memory(P, (400, {"ghost": "float32"})), None),
    ],
)
def test_parameters(records: Sequence[ParameterRecord], seen: dict[str, object], expected: Told | None) -> None:
    terms = parameter_terms(evidence(*records, **seen), 4.0)
    assert (told(terms), terms.complete) == (expected or [], expected is not None)


def test_two_parts_of_one_tensor_are_one_parameter() -> None:
    """As of a tensor that wraps two: the second is ``further``."""
    one, two = (NamedMemory(bytes=200, names={"a": ""}, further=frozenset(more)) for more in ((), ("a",)))
    for second, expected in ((two, []), (one, of_a(K.PARAMETERS_MOVED, 200))):
        seen = evidence(parameter(), memories=dict.fromkeys(KEPT, ()) | {Category.PARAMETERS: (one, second)})
        assert told(parameter_terms(seen, 4.0)) == expected


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "seen", "expected"),
    [
        ([parameter()], in_memory(G, (400, FLOAT)), []),
        ([parameter(trainable=False)], {}, of_a(K.FROZEN, -400)),
        ([parameter()], fate(G, gone={"a"}), of_a(K.GRADIENTS_FREED, -400)),
        ([parameter()], {"have_gradients": {"a"}}, of_a(K.GRADIENTS_LATER, -400)),
        ([parameter()], {"have_gradients": {"a"}, "had_gradient": {"a"}}, None),
        ([parameter()], {"have_gradients": {"b"}}, of_a(K.NO_GRADIENTS, -400)),
        ([parameter()], {}, None),  # of none a gradient was seen: that this one's was not says nothing
        ([parameter()], {"functional": True}, of_a(K.FUNCTIONAL_GRADIENTS, -400)),
        ([parameter()], {"functional": True, "have_gradients": {"a"}}, of_a(K.GRADIENTS_LATER, -400)),
        ([parameter()], in_memory(G, (200, HALF)), of_a(K.GRADIENT_TYPE, -200)),
        (
            [parameter()],
            in_memory(G, (400, FLOAT), (200, HALF)),
            [(K.SEVERAL_GRADIENTS, 400, 1, ("a",)), (K.GRADIENT_TYPE, -200, 1, ("a",))],
        ),
        ([parameter()], in_memory(G, *[(400, FLOAT)] * 3), of_a(K.SEVERAL_GRADIENTS, 800, 2)),
        ([parameter()], in_memory(G, (120, FLOAT), sparse={"a"}), of_a(K.SPARSE_GRADIENTS, -280)),
        ([parameter()], in_memory(G, (400, FLOAT), (36, {INPUT: "float32"})), [(K.GRADIENTS_OF_INPUTS, 36, 1, ())]),
        (
            [parameter(), parameter("b", shares="a")],
            in_memory(G, (400, FLOAT), (400, {"b": "float32"})),
            [(K.TIED, 400, 1, ("b",))],
        ),
        (
            [parameter(), parameter("b", overlap=300)],
            in_memory(G, (400, FLOAT), (400, {"b": "float32"})),
            [(K.OVERLAPPING, 300, 1, ("b",))],
        ),
        (
            [parameter(padding=60)],
            in_memory(G, (230, HALF)),  # the padding has half the bytes, too
            [(K.GRADIENT_TYPE, -200, 1, ("a",)), (K.PADDING, 30, 1, ("a",))],
        ),
        # The model has two gradients: the parameter's, and that of its master copy.
        ([parameter(dtype="bfloat16")], in_memory(G, (200, HALF), (400, FLOAT)), []),
        ([parameter(dtype="bfloat16")], in_memory(G, (200, HALF)), of_a(K.ONE_GRADIENT_OF_TWO, -400)),
        ([parameter(dtype="bfloat16")], in_memory(G, (400, FLOAT), (400, FLOAT)), of_a(K.SEVERAL_GRADIENTS, 200)),
    ],
)
def test_gradients(records: Sequence[ParameterRecord], seen: dict[str, object], expected: Told | None) -> None:
    per_element = 6.0 if records[0].dtype == "bfloat16" else 4.0
    terms = gradient_terms(evidence(*records, **seen), per_element)
    assert (told(terms), terms.complete) == (expected or [], expected is not None)


# -- master copies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "seen", "expected"),
    [
        (parameter(dtype="bfloat16"), in_memory(M, (400, FLOAT)), []),
        (parameter(dtype="bfloat16", trainable=False), {}, of_a(K.FROZEN, -400)),
        (parameter(dtype="bfloat16"), {}, of_a(K.NO_MASTER, -400)),
        (parameter(dtype="bfloat16"), fate(M, gone={"a"}), of_a(K.MASTERS_GONE, -400)),
        (parameter(dtype="bfloat16"), fate(M, later={"a"}), of_a(K.MASTERS_LATER, -400)),
        (parameter(dtype="bfloat16"), in_memory(M, (800, {"a": "float64"})), of_a(K.MASTER_TYPE, 400)),
        (parameter(dtype="bfloat16"), in_memory(M, *[(400, FLOAT)] * 3), of_a(K.MORE_MASTERS, 800, 2)),
        (parameter(), in_memory(M, *[(400, FLOAT)] * 2), of_a(K.MORE_MASTERS, 800, 2)),
        (parameter(), {}, []),
        (parameter(dtype="bfloat16"), in_memory(M, (420, FLOAT)), [(K.AROUND_MASTERS, 20, 1, ())]),
    ],
)
def test_master_copies(record: ParameterRecord, seen: dict[str, object], expected: Told) -> None:
    per_element = 4.0 if record.dtype == "bfloat16" else 0.0
    terms = master_terms(evidence(record, **seen), per_element)
    assert (told(terms), terms.complete) == (expected, True)


# -- cast copies ------------------------------------------------------------------------------


def copies(
    *sizes: int, view: bool = False, earlier: bool = False, cached: bool = False, saved: bool = False
) -> list[Copy]:
    return [Copy(bytes=size, cached=cached, saved=saved, view=view, earlier=earlier) for size in sizes]


def copies_of_a(*sizes: int, **how: bool) -> dict[str, object]:
    """Copies of the parameter ``a``."""
    return {"copies": {"a": copies(*sizes, **how)}}


@pytest.mark.parametrize(
    ("record", "per_element", "seen", "expected"),
    [
        (parameter(), 2.0, copies_of_a(200), []),
        # Why there is none.
        (parameter(), 2.0, {"cast": {"a": Cast(saved=True, again=True)}}, K.COPIES_FREED_WITH_GRAPH),
        (parameter(), 2.0, {"cast": {"a": Cast(saved=False, again=True)}}, K.COPIES_CHECKPOINTED),
        (parameter(), 2.0, {"cast": {"a": Cast(saved=False, again=False)}}, K.COPIES_NOT_SAVED),
        (parameter(dtype="float64"), 2.0, {"compiled": True}, K.DOUBLES_NOT_CAST),
        (parameter(dtype="float64"), 2.0, {"autocast": False}, K.NOT_CAST),
        (parameter(kind="LayerNorm"), 2.0, {"compiled": True, "casts_seen": False}, K.COMPILED),
        (parameter(kind="LayerNorm"), 2.0, {}, K.NORMS_NOT_CAST),
        (parameter(kind="Embedding"), 2.0, {}, K.EMBEDDINGS_NOT_CAST),
        (parameter(kind="EmbeddingBag"), 2.0, {}, K.EMBEDDINGS_NOT_CAST),
        (parameter(kind="Linear"), 2.0, {}, K.NOT_CAST),
        (parameter(), 2.0, copies_of_a(333), K.NOT_CAST),  # no copy of 100 elements has so many bytes
        (parameter(), 2.0, {"casts_seen": False}, None),
        # Where the model has none: what is still there.
        (parameter(), 0.0, copies_of_a(200, saved=True), of_a(K.COPIES_IN_GRAPH, 200)),
        (parameter(), 0.0, copies_of_a(200, 100, cached=True, saved=True), of_a(K.COPIES_IN_CACHE, 300, 2)),
        (parameter(), 0.0, copies_of_a(200), of_a(K.COPIES_ELSEWHERE, 200)),
        (
            parameter(),
            0.0,
            {"autocast": False, "copies": {"a": copies(200, cached=True)}},
            of_a(K.CASTS_OF_THE_SCRIPT, 200),
        ),
        # Copies of another size, or more than one.
        (parameter(), 2.0, copies_of_a(400), of_a(K.COPY_TYPE, 200)),
        (parameter(), 2.0, copies_of_a(200, 200, 400), of_a(K.COPIES_MADE_AGAIN, 600, 2)),
        (parameter(), 2.0, copies_of_a(60, 30, view=True), of_a(K.COPIES_OF_VIEWS_ONLY, -110, 2)),
        (
            parameter(),
            2.0,
            {"copies": {"a": [*copies(200), *copies(60, 30, view=True)]}},
            of_a(K.COPIES_OF_VIEWS_TOO, 90, 2),
        ),
        (
            parameter(),
            2.0,
            {"copies": {"a": [*copies(200, 200, earlier=True), *copies(200)]}},
            of_a(K.COPIES_OF_EARLIER_STEPS, 400, 2),
        ),
        # Of those of earlier steps alone the last one serves this step.
        (parameter(), 2.0, copies_of_a(400, 200, earlier=True), of_a(K.COPIES_OF_EARLIER_STEPS, 400)),
        # A shard of 100 of 400 elements.
        (parameter(global_elements=400), 2.0, copies_of_a(200), []),
        (parameter(global_elements=400), 2.0, copies_of_a(800), of_a(K.COPIES_OF_WHOLES, 600)),
        (parameter(global_elements=400), 2.0, copies_of_a(3200), of_a(K.COPIES_OF_WHOLES, 3000)),
        (parameter(global_elements=400), 2.0, copies_of_a(3204), K.NOT_CAST),
        (parameter(global_elements=400), 2.0, copies_of_a(100), of_a(K.COPY_TYPE, -100)),
        # Of a parameter that is not among those that are trained.
        (
            parameter(),
            2.0,
            {"copies": {"a": copies(200), "ema": copies(70, 50)}, "untrained": {"ema"}},
            [(K.COPIES_OF_UNTRAINED, 120, 2, ("ema",))],
        ),
    ],
)
def test_cast_copies(
    record: ParameterRecord, per_element: float, seen: dict[str, object], expected: Told | TermKind | None
) -> None:
    terms = cast_terms(evidence(record, **seen), per_element)
    missing = of_a(expected, -200) if isinstance(expected, TermKind) else expected
    assert (told(terms), terms.complete) == (missing or [], expected is not None)


def test_where_it_was_not_seen_whose_copies_are_further_ones_are_not_explained() -> None:
    terms = cast_terms(evidence(parameter(), copies={"a": copies(200, 200)}, named=False), 2.0)
    assert (told(terms), terms.complete) == ([], False)


def test_a_copy_of_tied_weights_is_one_too_many() -> None:
    records = parameter(), parameter("b", shares="a")
    terms = cast_terms(evidence(*records, copies={"a": copies(200), "b": copies(200)}), 2.0)
    assert told(terms) == [(K.TIED, 200, 1, ("b",))]


# -- optimizer state --------------------------------------------------------------------------


def states(*sizes: tuple[int, str]) -> dict[str, object]:
    """States by their bytes, each with names like ``exp_avg of a``, between commas."""
    return {
        "states": [
            StateMemory(bytes=size, names=tuple(StateName.read(name) for name in names.split(", ")))
            for size, names in sizes
        ]
    }


ADAM = ((400, "exp_avg of a"), (400, "exp_avg_sq of a"))
NO_STATE = [
    (parameter(trainable=False), {}, K.FROZEN),
    (parameter(), {"states_fate": Fates(gone=frozenset({"exp_avg of a"}), later=frozenset())}, K.STATE_FREED),
    (parameter(optimizer=None), {}, K.NOT_OPTIMIZED),
    (parameter(), {"updated": False}, K.NO_UPDATE_YET),
    (parameter(), {"updated": False, "skipped": True}, K.UPDATES_SKIPPED),
    (parameter(), {"states_fate": Fates(gone=frozenset(), later=frozenset({"exp_avg of a"}))}, K.STATE_LATER),
    (parameter(), {"have_gradients": {"b"}}, K.NEVER_A_GRADIENT),
    (parameter(), {"have_gradients": {"a"}, "had_gradient": {"a"}}, K.NO_GRADIENT_AT_UPDATE),
    (parameter(), {"have_gradients": {"a"}, "had_gradient": {"a"}, "at_update": {"a"}}, None),
    (parameter(), {}, None),
]


@pytest.mark.parametrize(("record", "seen", "why"), NO_STATE)
def test_no_optimizer_state(record: ParameterRecord, seen: dict[str, object], why: TermKind | None) -> None:
    terms = state_terms(evidence(record, **seen), lambda _: OPTIMIZERS["adam"], lambda _: 8.0)
    assert (told(terms), terms.complete) == (of_a(why, -800) if why else [], why is not None)


def fates_of_keys(**of: str) -> dict[str, object]:
    return {"states_fate": replace(NO_FATES, **{when: frozenset({name}) for when, name in of.items()})}


@pytest.mark.parametrize(
    ("record", "model", "seen", "expected"),
    [
        (parameter(), "adam", states(*ADAM), []),
        (parameter(), "adam", states(*ADAM, (16, "step of a")), of_a(K.SCALARS, 16)),
        (parameter(), "adam", states(*ADAM, (17, "step of a")), of_a(K.UNKNOWN_STATE, 17)),
        (parameter(), "adam", states(*ADAM, (17, "table")), [(K.UNKNOWN_STATE, 17, 1, ())]),
        (parameter(), "adam", states(*ADAM, (400, "exp_avg of ghost")), []),  # nobody's
        (parameter(), "adam", states(ADAM[0]) | fates_of_keys(gone="exp_avg_sq of a"), of_a(K.STATES_GONE, -400)),
        (parameter(), "adam", states(ADAM[0]) | fates_of_keys(later="exp_avg_sq of a"), of_a(K.STATES_LATER, -400)),
        (parameter(), "adam", states(ADAM[0]), None),
        (parameter(), "adam", states((404, "exp_avg of a"), ADAM[1]), None),  # four bytes too many
        (parameter(), "adam", states((820, "exp_avg of a, exp_avg_sq of a")), [(K.AROUND_STATES, 20, 1, ())]),
        (
            parameter(dtype="bfloat16"),
            "adam",
            states((200, "exp_avg of a"), (200, "exp_avg_sq of a")),
            of_a(K.STATE_TYPE, -400),
        ),
        # The states are in the type of the master copy.
        (parameter(dtype="bfloat16"), "adam", in_memory(M, (400, FLOAT)) | states(*ADAM), []),
        (
            parameter(elements=100, shape=(4, 25)),
            "adafactor",
            states((16, "row_var of a"), (100, "col_var of a")),
            [(K.FACTORED_STATE, 4 * (4 + 25), 1, ("a",))],
        ),
        (
            parameter(elements=5000, shape=(5000,)),
            "adam-8bit",
            states(
                *((5000, "state1 of a"), (5000, "state2 of a")),
                *((80, "absmax1 of a"), (80, "absmax2 of a")),  # one scale for each 256 elements that are begun
            ),
            of_a(K.SCALES_OF_BLOCKS, 160),
        ),
        (
            parameter(elements=1000, shape=(1000,)),
            "adam-8bit",
            states((4000, "state1 of a"), (4000, "state2 of a")),  # too small for blocks
            of_a(K.SCALES_OF_BLOCKS, 6000),
        ),
    ],
)
def test_optimizer_state(record: ParameterRecord, model: str, seen: dict[str, object], expected: Told | None) -> None:
    per_element = {"adam": 8.0, "adafactor": 0.0, "adam-8bit": 2.0}[model]
    terms = state_terms(evidence(record, **seen), lambda _: OPTIMIZERS[model], lambda _: per_element)
    assert (told(terms), terms.complete) == (expected or [], expected is not None)


def test_the_state_of_tied_weights_is_one_too_many() -> None:
    records = parameter(), parameter("b", shares="a")
    each = [(400, f"{key} of {name}") for name in "ab" for key in ("exp_avg", "exp_avg_sq")]
    terms = state_terms(evidence(*records, **states(*each)), lambda _: OPTIMIZERS["adam"], lambda _: 8.0)
    assert told(terms) == [(K.TIED, 800, 1, ("b",))]


# -- sums of terms ----------------------------------------------------------------------------


def test_terms_name_the_three_parameters_with_the_most_bytes_and_come_by_size() -> None:
    terms = TermSums()
    for name, size in (("a", -100), ("b", 300), ("c", 200), ("d", 100), ("b", 50)):
        terms.add(K.FROZEN, size, name)
    terms.add(K.TIED, 1000, "e", tensors=3)
    terms.add(K.ROUNDING, -2000)
    terms.add(K.PADDING, 7, "a")
    terms.add(K.PADDING, -7, "b")
    assert told(terms) == [
        (K.ROUNDING, -2000, 1, ()),
        (K.TIED, 1000, 3, ("e",)),
        (K.FROZEN, 550, 5, ("b", "c", "a")),
    ]
    assert terms.complete
    terms.add(None, 0)
    assert terms.complete, "nothing is missing"
    terms.add(None, 1)
    assert not terms.complete


def test_the_sum_of_terms_is_complete_where_all_parts_are() -> None:
    one, two = TermSums(), TermSums()
    one.add(K.FROZEN, 10, "a", about="x")
    one.add(K.STATE_TYPE, 10, "a", about="float16")
    two.add(K.FROZEN, 20, "b", tensors=2)
    two.add(K.STATE_TYPE, 30, "b", about="float64")
    together = TermSums.sum([one, two])
    assert told(together) == [
        (K.FROZEN, 30, 3, ("b", "a")),
        (K.STATE_TYPE, 30, 1, ("b",)),
        (K.STATE_TYPE, 10, 1, ("a",)),
    ]
    assert [term.why for term in together.listed()[1:]] == [
        "state of float64 parameters",
        "state of float16 parameters",
    ]
    assert together.complete
    two.add(None, 1)
    assert not TermSums.sum([one, two]).complete
    assert not TermSums.sum([two, one]).complete


# -- every byte -------------------------------------------------------------------------------


@st.composite
def gradients(draw: st.DrawFn) -> tuple[list[ParameterRecord], list[tuple[int, dict[str, str]]]]:
    """Parameters, some frozen or tied, and their gradients, some of them in a buffer that is larger than they are."""
    records, memories = [], list[tuple[int, dict[str, str]]]()
    for number in range(draw(st.integers(1, 4))):
        name = "abcd"[number]
        tied = "a" if number and draw(st.booleans()) else None
        elements = records[0].elements if tied else draw(st.integers(1, 50))
        records.append(parameter(name, elements, trainable=draw(st.booleans()), shares=tied))
        for dtype in draw(st.lists(st.sampled_from(["float32", "bfloat16"]), max_size=2)):
            size = elements * {"float32": 4, "bfloat16": 2}[dtype] + draw(st.sampled_from([0, 0, 8]))
            memories.append((size, {name: dtype}))
    return records, memories


@given(gradients())
def test_model_and_terms_are_all_that_was_measured(
    made: tuple[list[ParameterRecord], list[tuple[int, dict[str, str]]]],
) -> None:
    records, memories = made
    seen = evidence(*records, **in_memory(G, *memories), have_gradients={"other"})
    terms = gradient_terms(seen, 4.0)
    model = sum(4 * record.elements for record in records if record.shares is None)
    assert terms.complete
    assert model + sum(term.bytes for term in terms.listed()) == sum(size for size, _ in memories)
