from dataclasses import replace

import pytest
from support.build import Story, small_run

from ampmem.analysis.soundness import measure
from ampmem.analysis.static_model.recipes import (
    COMPONENTS,
    OPTIMIZERS,
    PRECISIONS,
    PUBLISHED,
    FormulaMatch,
    Measured,
    adafactor_state,
    adam8bit_state,
    match,
    optimizer_model,
    recipe,
)
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import Fact, Phase


@pytest.mark.parametrize(
    ("precision", "parts", "static", "peak"),
    [
        ("fp32", (4, 0, 4, 0, 8), 16, 16),
        ("amp-textbook", (4, 2, 2, 0, 8), 16, 16),
        ("autocast", (4, 2, 4, 0, 8), 16, 18),
        ("half-master", (2, 0, 2, 4, 8), 16, 16),
        ("half-master-fp32-gradients", (2, 0, 4, 4, 8), 18, 18),
        ("half-master-fp32-accumulation", (2, 0, 6, 4, 8), 20, 20),
        ("pure-half", (2, 0, 2, 0, 4), 8, 8),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_recipes_with_adam(
    precision: str, parts: tuple[float, ...], static: float, peak: float, optimizer: str
) -> None:
    chosen = recipe(precision, optimizer)
    assert list(chosen.components) == list(COMPONENTS)
    assert tuple(chosen.components.values()) == parts
    assert (chosen.total, chosen.peak) == (static, peak)


@pytest.mark.parametrize(
    ("optimizer", "fp32", "half"),
    [
        ("sgd", 0, 0),
        ("sgd-momentum", 4, 2),
        ("adam", 8, 4),
        ("adamw", 8, 4),
        ("amsgrad", 12, 6),
        ("adagrad", 4, 2),
        ("rmsprop", 4, 2),
        ("rmsprop-momentum", 8, 4),
        ("rmsprop-centered", 8, 4),
        ("rmsprop-centered-momentum", 12, 6),
        ("adadelta", 8, 4),
        ("adamax", 8, 4),
        ("nadam", 8, 4),
        ("radam", 8, 4),
        ("asgd", 4, 2),
        ("rprop", 8, 4),
        ("adafactor", 0, 0),
        ("adam-8bit", 2, 2),
    ],
)
def test_optimizer_state_follows_the_optimized_tensor(optimizer: str, fp32: float, half: float) -> None:
    assert recipe("fp32", optimizer).components["optimizer_state"] == fp32
    assert recipe("half-master", optimizer).components["optimizer_state"] == fp32
    assert recipe("pure-half", optimizer).components["optimizer_state"] == half
    assert OPTIMIZERS[optimizer].bytes_per_element(4) == fp32


def test_every_entry_says_where_it_is_from() -> None:
    for entries in (PRECISIONS, OPTIMIZERS, PUBLISHED):
        for key, entry in entries.items():
            assert key == entry.key
            assert entry.source


@pytest.mark.parametrize(("precision", "optimizer"), [("fp64", "adam"), ("fp32", "lion")])
def test_an_unknown_recipe_names_the_choices(precision: str, optimizer: str) -> None:
    with pytest.raises(UsageError, match=r"there is no .*(fp64.*half-master|lion.*sgd-momentum)"):
        recipe(precision, optimizer)


@pytest.mark.parametrize(
    ("classes", "settings", "key"),
    [
        (["MyAdamW", "AdamW", "Adam", "Optimizer"], {"amsgrad": False}, "adamw"),
        (["AdamW", "Adam", "Optimizer"], {"amsgrad": True}, "amsgrad"),
        (["Adam", "Optimizer"], {}, "adam"),
        (["SGD", "Optimizer"], {"momentum": 0}, "sgd"),
        (["SGD", "Optimizer"], {"momentum": 0.9}, "sgd-momentum"),
        (["RMSprop"], {"momentum": 0, "centered": False}, "rmsprop"),
        (["RMSprop"], {"momentum": 0.9, "centered": False}, "rmsprop-momentum"),
        (["RMSprop"], {"momentum": 0, "centered": True}, "rmsprop-centered"),
        (["RMSprop"], {"momentum": 0.9, "centered": True}, "rmsprop-centered-momentum"),
        (["Adagrad"], {}, "adagrad"),
        (["Adadelta"], {}, "adadelta"),
        (["Adamax"], {}, "adamax"),
        (["NAdam"], {}, "nadam"),
        (["RAdam"], {}, "radam"),
        (["ASGD"], {}, "asgd"),
        (["Rprop"], {}, "rprop"),
        (["Adafactor"], {"d": 1.0}, "adafactor"),
        (["Adafactor"], {"beta1": 0.9}, None),
        (["PagedAdamW8bit", "Optimizer2State", "Optimizer8bit", "Optimizer"], {}, "adam-8bit"),
        (["Adam8bit"], {}, "adam-8bit"),
        (["Adam", "Optimizer2State", "Optimizer8bit", "Optimizer"], {}, None),
        (["LBFGS", "Optimizer"], {}, None),
        ([], {}, None),
    ],
)
def test_the_model_of_an_optimizer(classes: list[str], settings: dict[str, object], key: str | None) -> None:
    found = optimizer_model(classes, settings)
    assert (None if found is None else found.key) == key


@pytest.mark.parametrize(
    ("shape", "itemsize", "size"),
    [
        ((), 4, 4),
        ((7,), 4, 28),
        ((3, 5), 4, 32),
        ((3, 5), 2, 16),
        ((2, 3, 5, 7), 4, 2 * 3 * 12 * 4),
        ((0, 5), 4, 20),
    ],
)
def test_adafactor_keeps_rows_and_columns(shape: tuple[int, ...], itemsize: int, size: int) -> None:
    assert adafactor_state(shape, itemsize) == size


@pytest.mark.parametrize(
    ("elements", "size"),
    [(0, 0), (4095, 8 * 4095), (4096, 2 * 4096 + 8 * 16), (4097, 2 * 4097 + 8 * 17)],
)
def test_eight_bit_adam_keeps_scales_by_the_block(elements: int, size: int) -> None:
    assert adam8bit_state(elements) == size


def test_published_totals_are_the_sums_of_their_parts_but_one() -> None:
    apart = {key for key, formula in PUBLISHED.items() if sum(formula.components.values()) != formula.total}
    assert apart == {"accelerate-mixed"}
    assert PUBLISHED["accelerate-mixed"].total == max(PUBLISHED["accelerate-mixed"].components.values())
    assert {formula.total for formula in PUBLISHED.values()} == {8, 16, 18, 20}


def run_of(*sizes: int, count: int = 1000) -> Measured:
    static = dict(zip(COMPONENTS, sizes, strict=True))
    return Measured(parameters=count, step=0, mark="after_backward", static=static, after_forward=None)


def test_sixteen_can_be_right_for_the_wrong_reason() -> None:
    autocast = run_of(4000, 0, 4000, 0, 8000)
    assert match(recipe("autocast", "adamw"), autocast) == FormulaMatch(total=True, split=True)
    assert match(recipe("amp-textbook", "adamw"), autocast) == FormulaMatch(total=True, split=False)
    assert match(recipe("pure-half", "adamw"), autocast) == FormulaMatch(total=False, split=False)
    assert match(PUBLISHED["zero-paper"], autocast) == FormulaMatch(total=True, split=False)
    assert match(PUBLISHED["transformers-fp32"], autocast) == FormulaMatch(total=True, split=True)


@pytest.mark.parametrize(("extra", "total"), [(160, True), (164, False), (-158, True), (-160, False)])
def test_a_match_is_within_one_percent_of_what_was_measured(extra: int, total: bool) -> None:
    assert match(recipe("fp32", "adamw"), run_of(4000, 0, 4000, 0, 8000 + extra)).total is total


def test_a_difference_of_exactly_one_percent_matches() -> None:
    fp32 = recipe("fp32", "adamw")  # 16 bytes of each of 99 are 16 less than 1,600
    assert match(fp32, run_of(400, 0, 400, 0, 800, count=99)) == FormulaMatch(total=True, split=True)
    assert not match(fp32, run_of(400, 0, 400, 0, 801, count=99)).total


def test_static_memory_is_measured_after_backward_of_the_last_updated_step() -> None:
    story = small_run()
    story.begin(2, Phase.BACKWARD)
    story.end(skipped=True)
    measured = measure(summarize(story.recording()))
    assert (measured.step, measured.mark, measured.parameters) == (1, "after_backward", 150)
    assert tuple(measured.static.values()) == (600, 0, 400, 0, 800)
    assert measured.static_bytes == 1800
    assert measured.after_forward[Category.CAST_COPIES] == 200


def test_the_first_step_has_its_state_after_the_update_only() -> None:
    summary = summarize(small_run().recording())
    measured = measure(replace(summary, steps=summary.steps[:1]))
    assert (measured.step, measured.mark) == (0, "after_optimizer")
    assert tuple(measured.static.values()) == (600, 0, 400, 0, 800)


def test_a_run_without_an_update_has_nothing_to_compare() -> None:
    story = Story(weight=10, begins=Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x2000, 40, "weight")
    story.end(skipped=True)
    with pytest.raises(NothingRecorded, match="no step with a backward and an optimizer update"):
        measure(summarize(story.recording()))
