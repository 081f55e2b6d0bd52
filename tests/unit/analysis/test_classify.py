from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from support.build import RUN, Story
from support.documents import ROOT
from support.failures import ended

from ampmem.analysis.analyse import analyse
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.classify import RULES, view_of
from ampmem.events import OTHER_THREADS, Action, Fact, Phase, Recording
from ampmem.vocabulary import SourceKind

IT = 0x10
"""The address of the allocation that a test is about; it is always the first."""


def category_of(story: Story, allocation: int = 0) -> Category:
    return CATEGORIES[analyse(story.recording()).classes.category[allocation]]


def name_of(story: Story) -> str:
    recording = story.recording()
    return recording.texts[analyse(recording).classes.name[0]]


def born_in(phase: Phase, *, op: str = "", module: str = "") -> Story:
    story = Story()
    story.begin(0, phase)
    story.alloc(IT, 8, op=op, module=module)
    return story


ORDER = [
    Fact.MASTER_COPY,
    Fact.PARAMETER,
    Fact.GRADIENT,
    Fact.OPTIMIZER_STATE,
    Fact.PARAMETER_COPY,
    Fact.BUFFER,
    Fact.COMMUNICATION,
    Fact.CAST_COPY,
    Fact.INPUT,
    Fact.SAVED,
    Fact.COLLECTIVE,
]


@pytest.mark.parametrize(("strong", "weak"), list(pairwise(ORDER)))
def test_of_two_facts_the_earlier_rule_decides_and_names(strong: Fact, weak: Fact) -> None:
    story = born_in(Phase.BACKWARD)
    story.fact(weak, IT, "weak")
    story.fact(strong, IT, "strong")
    assert name_of(story) == "strong"


def test_the_rules_have_one_order() -> None:
    assert [str(rule.category) for rule in RULES] == [
        *("other", "untrained", "master_copies", "parameters", "gradients", "optimizer_state", "untrained"),
        *("parameters", "buffers", "buffers", "communication", "cast_copies", "inputs"),
        *("kept_predictions", "workspace", "activations", "communication", "other", "temporaries"),
    ]


def test_what_was_there_before_the_recording_is_no_temporary() -> None:
    story = Story()
    story.alloc(IT, 8, action=Action.BASELINE)
    story.begin(0, Phase.FORWARD)
    story.free(IT)
    assert category_of(story) == Category.OTHER


@pytest.mark.parametrize(
    ("op", "stack", "phases", "category"),
    [
        ("", "", True, Category.OTHER),
        ("aten::mm", "", True, Category.TEMPORARIES),
        ("", "train.py:3 main", True, Category.TEMPORARIES),
        ("aten::mm", "train.py:3 main", False, Category.OTHER),  # no phase of it all is known
    ],
)
def test_of_a_snapshot_what_dies_soon_is_temporary_where_its_birth_is_known(
    op: str, stack: str, phases: bool, category: Category
) -> None:
    story = Story()
    story.begin(0)
    story.scratch(IT, 8, op=op, stack=stack)
    if phases:
        story.enter(Phase.BACKWARD)
    story.end()
    recording = story.recording(run=replace(RUN, source=SourceKind.SNAPSHOT))
    assert CATEGORIES[analyse(recording).classes.category[0]] == category
    (seen,) = analyse(story.recording()).classes.category.tolist()
    assert CATEGORIES[seen] == Category.TEMPORARIES, "a recording has seen it"


def test_what_is_computed_again_has_the_name_of_that_and_a_result_of_an_op_has_none() -> None:
    story = born_in(Phase.BACKWARD)
    story.fact(Fact.OUTPUT, IT, "its name")
    assert name_of(story) == ""
    story.fact(Fact.RECOMPUTED, IT, "MmBackward0")
    assert name_of(story) == "MmBackward0"


def test_the_first_of_several_names_is_kept() -> None:
    story = born_in(Phase.SETUP)
    for name in ("embedding.weight", "head.weight"):
        story.fact(Fact.PARAMETER, IT, name)
    assert name_of(story) == "embedding.weight"


def test_an_input_made_by_a_module_is_none() -> None:
    outside = born_in(Phase.FORWARD)
    outside.fact(Fact.INPUT, IT)
    assert category_of(outside) == Category.INPUTS
    inside = born_in(Phase.FORWARD, module="encoder")
    inside.fact(Fact.INPUT, IT)
    assert category_of(inside) == Category.OTHER


@pytest.mark.parametrize(
    ("phase", "given", "category"),
    [
        (Phase.BETWEEN, True, Category.INPUTS),  # the batch, which has the indices of a sparse gradient
        (Phase.BETWEEN, False, Category.GRADIENTS),
        (Phase.BACKWARD, True, Category.GRADIENTS),
        (Phase.BACKWARD, False, Category.GRADIENTS),
    ],
)
def test_a_batch_is_not_a_gradient(phase: Phase, given: bool, category: Category) -> None:
    story = born_in(phase)
    story.fact(Fact.GRADIENT, IT, "weight")
    if given:
        story.fact(Fact.INPUT, IT)
    assert category_of(story) == category


@pytest.mark.parametrize(
    ("phase", "category"),
    [
        (Phase.SETUP, Category.INPUTS),
        (Phase.BETWEEN, Category.INPUTS),
        (Phase.FORWARD, Category.ACTIVATIONS),
        (Phase.OPTIMIZER, Category.ACTIVATIONS),
    ],
)
def test_saved_tensors_from_outside_the_step_are_input(phase: Phase, category: Category) -> None:
    story = born_in(phase)
    story.fact(Fact.SAVED, IT)
    assert category_of(story) == category


def scratch(change: Callable[[Story], object] = lambda story: None, *, op: str = "aten::mm") -> Story:
    """An op's scratch in forward, alive when its step ends."""
    story = born_in(Phase.FORWARD, op=op, module="layer")
    change(story)
    story.end(Phase.BACKWARD)
    return story


@pytest.mark.parametrize("born", [0, 1, 2, 3])
def test_each_step_has_its_own_end(born: int) -> None:
    """Scratch of forward is workspace where it outlives the step that it was born in, and is given back later."""
    story = Story()
    for step in range(4):
        story.begin(step, Phase.FORWARD)
        if step == born:
            story.alloc(IT, 8, op="aten::mm")
            story.scratch(0x20, 8, op="aten::mm")
        if step == born + 1:
            story.free(IT)
        story.end()
    if born == step:
        story.free(IT)
    assert [category_of(story, allocation) for allocation in (0, 1)] == [Category.WORKSPACE, Category.TEMPORARIES]


def test_only_what_the_failing_step_had_in_use_is_temporary() -> None:
    """What backward of the step before left behind is something else, and so is what came after the failure."""
    story = Story()
    for step in range(2):
        story.begin(step, Phase.BACKWARD)
        story.alloc(0x100 + step, 8)
        if step:
            failed = story.alloc(0x200, 8)  # at the instant at which memory runs out
            story.alloc(0x300, 8)
        story.end()
    recording = ended(story, failed, (8, 8, 8))
    recording = replace(recording, steps=(replace(recording.steps[0], finished=True), recording.steps[-1]))
    found = [CATEGORIES[code] for code in analyse(recording).classes.category.tolist()]
    assert found == [Category.OTHER, Category.TEMPORARIES, Category.TEMPORARIES, Category.OTHER]


@pytest.mark.parametrize("fact", [Fact.OUTPUT, Fact.SAVED])
def test_what_an_op_shows_is_no_workspace(fact: Fact) -> None:
    assert category_of(scratch(lambda story: story.fact(fact, IT))) == Category.ACTIVATIONS


def test_workspace_needs_an_op_of_torch() -> None:
    # A checkpoint keeps the random state that it will need again: nothing returned it, but it is no scratch.
    assert category_of(scratch(op="CheckpointFunction")) == Category.ACTIVATIONS


def test_workspace_needs_an_op() -> None:
    assert category_of(scratch(op="")) == Category.ACTIVATIONS


def test_workspace_needs_forward() -> None:
    story = born_in(Phase.BACKWARD, op="aten::mm")
    story.end()
    assert category_of(story) == Category.OTHER


@pytest.mark.parametrize(
    ("size", "op", "category"),
    [
        (8, "AddmmBackward0", Category.WORKSPACE),
        (8, "", Category.OTHER),
        (16, "AddmmBackward0", Category.OTHER),
    ],
)
def test_the_engines_thread_has_a_workspace_as_large_as_that_of_forward(size: int, op: str, category: Category) -> None:
    story = Story(begins=Phase.FORWARD)
    story.alloc(IT + 1024, 8, op="aten::addmm")
    story.enter(Phase.BACKWARD)
    story.alloc(IT, size, op=op)
    story.end()
    assert category_of(story, 1) == category


def test_workspace_needs_a_step_that_ended() -> None:
    assert category_of(born_in(Phase.FORWARD, op="aten::mm")) == Category.OTHER
    second = Story()
    for step in range(2):
        second.begin(step)
        if step == 0:
            second.end()
    second.enter(Phase.FORWARD)
    second.alloc(IT, 8, op="aten::mm")
    assert category_of(second) == Category.OTHER


def test_scratch_freed_before_its_step_ends_is_no_workspace() -> None:
    story = born_in(Phase.FORWARD, op="aten::mm")
    story.enter(Phase.BACKWARD)
    story.free(IT)
    story.end()
    assert category_of(story) == Category.ACTIVATIONS


def test_freed_before_backward_starts_is_no_activation() -> None:
    freed_before = born_in(Phase.FORWARD)
    freed_before.free(IT)
    freed_before.enter(Phase.BACKWARD)
    assert category_of(freed_before) == Category.TEMPORARIES


def test_freed_at_the_instant_at_which_backward_starts_is_still_an_activation() -> None:
    story = born_in(Phase.FORWARD)
    starts = story.enter(Phase.BACKWARD)
    story.now = starts - 10
    assert story.free(IT) == starts
    assert category_of(story) == Category.ACTIVATIONS


def test_only_a_backward_after_the_birth_counts() -> None:
    story = Story(begins=Phase.BACKWARD)
    story.enter(Phase.FORWARD)
    story.scratch(IT, 8)
    assert category_of(story) == Category.TEMPORARIES


@pytest.mark.parametrize(("steps_later", "category"), [(0, "temporaries"), (1, "temporaries"), (2, "other")])
def test_temporaries_die_soon(steps_later: int, category: str) -> None:
    story = born_in(Phase.OPTIMIZER)
    for step in range(1, steps_later + 1):
        story.begin(step)
    story.free(IT)
    assert category_of(story) == category


def in_phase(phase: Phase, *facts: Fact, op: str = "", after: Phase | None = None, ends: bool = False) -> Story:
    """An allocation of ``phase``, about which ``facts`` are; phase ``after`` follows, and the step may end."""
    story = born_in(phase, op=op)
    for fact in facts:
        story.fact(fact, IT, "its name")
    if after is not None:
        story.enter(after)
    if ends:
        story.end()
    return story


def elsewhere() -> Recording:
    """What another thread holds, alone."""
    story = Story()
    story.begin(0)
    story.alloc(OTHER_THREADS, 8)
    return story.recording()


def beside(fact: Fact, *, model: str = "its", trains: bool = True) -> Recording:
    """Memory of the parameter ``its.weight`` of ``model``, and a parameter ``trained.weight``, which has a gradient."""
    story = born_in(Phase.SETUP)
    story.fact(fact, IT, "its.weight")
    story.parameter(0x80, "trained.weight", 8)
    if trains:
        story.tensor(Fact.GRADIENT, 0x100, 32, "trained.weight")
    (trained,) = story.recording().parameters
    its = (replace(trained, name="its.weight", model=model),) if fact == Fact.PARAMETER else ()
    return replace(story.recording(), parameters=(replace(trained, model="trained"), *its))


def kept_by_a_module() -> Recording:
    """What is made in the first step, and still an attribute's after the second."""
    story = in_phase(Phase.FORWARD, after=Phase.BACKWARD, ends=True)
    story.begin(1)
    story.fact(Fact.ATTRIBUTE, IT, "mask")
    story.end()
    return story.recording()


def kept_by_a_list() -> Recording:
    """The first result of three in an evaluation, all of which a list of the script keeps."""
    story, kept = Story(), []
    story.begin(0, Phase.BETWEEN)
    for batch in range(3):
        for place, address in enumerate(kept):
            story.fact(Fact.VARIABLE, address, f"preds[{place}]", "eval.py:3 evaluate", at=story.now)
        story.enter(Phase.EVALUATION)
        story.alloc(IT + batch, 8, op="aten::addmm")
        kept.append(IT + batch)
        story.enter(Phase.BETWEEN)
    story.end()
    return story.recording()


def freed(story: Story) -> Recording:
    """``story``, with the allocation freed."""
    story.free(IT)
    return story.recording()


DECIDED: list[tuple[str, list[Story | Recording]]] = [
    ("other", [elsewhere()]),
    ("untrained", [beside(Fact.PARAMETER)]),
    ("master_copies", [in_phase(Phase.SETUP, Fact.MASTER_COPY, Fact.PARAMETER)]),
    ("parameters", [beside(Fact.PARAMETER, model="trained"), beside(Fact.PARAMETER, trains=False)]),
    ("gradients", [in_phase(Phase.BACKWARD, Fact.GRADIENT)]),
    ("optimizer_state", [in_phase(Phase.FORWARD, Fact.OPTIMIZER_STATE, after=Phase.BACKWARD)]),
    ("untrained", [beside(Fact.PARAMETER_COPY)]),
    ("parameters", [beside(Fact.PARAMETER_COPY, trains=False)]),
    ("buffers", [in_phase(Phase.SETUP, Fact.BUFFER, Fact.SAVED)]),
    ("buffers", [kept_by_a_module()]),
    ("communication", [in_phase(Phase.FORWARD, Fact.COMMUNICATION, Fact.SAVED)]),
    ("cast_copies", [in_phase(Phase.FORWARD, Fact.CAST_COPY, Fact.SAVED)]),
    ("inputs", [in_phase(Phase.BETWEEN, Fact.INPUT), in_phase(Phase.DATA), in_phase(Phase.BETWEEN, Fact.SAVED)]),
    ("kept_predictions", [kept_by_a_list()]),
    (
        "workspace",
        [
            in_phase(Phase.BACKWARD, Fact.WORKSPACE),
            in_phase(Phase.FORWARD, op="aten::mm", after=Phase.BACKWARD, ends=True),
        ],
    ),
    (
        "activations",
        [
            in_phase(Phase.FORWARD, Fact.SAVED),
            in_phase(Phase.BACKWARD, Fact.RECOMPUTED),
            in_phase(Phase.FORWARD, after=Phase.BACKWARD),
        ],
    ),
    ("communication", [in_phase(Phase.BACKWARD, Fact.COLLECTIVE)]),
    ("other", [in_phase(Phase.BACKWARD, Fact.HELD)]),
    ("temporaries", [freed(in_phase(Phase.BACKWARD))]),
    ("other", [in_phase(Phase.BACKWARD)]),
]
"""Recordings whose first allocation each row of the documents' table decides, in its order; the last has no rule."""


@pytest.mark.parametrize("place", range(len(DECIDED)))
def test_each_row_of_the_documents_is_the_rule_that_decides(place: int) -> None:
    name, recordings = DECIDED[place]
    for told in recordings:
        analysis = analyse(told if isinstance(told, Recording) else told.recording())
        view = view_of(analysis.lifetimes, analysis.facts, analysis.recording, analysis.untrained)
        deciding = [number for number, rule in enumerate(RULES) if rule.applies(view)[0]]
        assert (deciding or [len(RULES)])[0] == place
        assert CATEGORIES[analysis.classes.category[0]] == name


@pytest.mark.skipif(not (ROOT / "reports").is_dir(), reason="no checkout: pages are missing")
def test_the_documents_say_what_decides_every_category() -> None:
    text = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    table = text.partition("\n## What decides a category\n")[2].partition("\n|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    names = [name.strip("`") for name, _ in rows]
    assert names == [name for name, _ in DECIDED] == [*(rule.category for rule in RULES), Category.OTHER]
    assert set(names) == set(CATEGORIES)
    for rule, (_, decides) in zip(RULES, rows, strict=False):
        said = {fact for fact in Fact if f"`{fact.name.lower()}`" in decides}
        assert said.issuperset(set(rule.names) - {Fact.SCRATCH}), rule


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BETWEEN])
@pytest.mark.parametrize("use", [Fact.INPUT, Fact.SAVED])
@pytest.mark.parametrize("stack", ["train.py:9", ""])
def test_the_next_batch_may_be_made_before_backward(phase: Phase, use: Fact, stack: str) -> None:
    """The last step's next batch is used in no step: the line that made it has made a batch before."""
    story = Story()
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        if step:
            story.fact(use, 0x100, "NllLossBackward0" * (use == Fact.SAVED))
        story.enter(phase)
        story.alloc(0x100 + step, 8, op="aten::randn", stack=stack)
        story.alloc(0x200 + step, 16, op="aten::mul", stack=stack)  # a result of another op, such as a scaled loss
        story.enter(Phase.BACKWARD)
        story.end(Phase.OPTIMIZER)
    found = analyse(story.recording()).classes.category.tolist()
    assert [CATEGORIES[code] for code in found[::2]] == [Category.INPUTS] * 2
    assert Category.INPUTS not in [CATEGORIES[code] for code in found[1::2]]


@pytest.mark.parametrize(("op", "size"), [("aten::randn", 8), ("aten::argmax", 8), ("aten::randn", 16)])
def test_after_a_single_step_the_next_batch_is_as_large_as_the_one_before(op: str, size: int) -> None:
    """Predictions may be as large as the labels, and a cast as large as a weight."""
    story = Story()
    story.parameter(0x90, "weight", 16)
    story.alloc(0x100, 8)
    story.begin(0, Phase.FORWARD)
    story.fact(Fact.SAVED, 0x90, "MmBackward0")
    story.fact(Fact.INPUT, 0x100)
    story.alloc(0x200, size, op=op, stack="train.py:9")
    story.enter(Phase.BACKWARD)
    story.end(Phase.OPTIMIZER)
    assert (category_of(story, 2) == Category.INPUTS) is (op == "aten::randn" and size == 8)


def test_what_its_own_step_saves_is_not_the_next_batch() -> None:
    story = Story()
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.SAVED, 0x100 + step, 8, "TanhBackward0", op="aten::tanh", stack="train.py:9")
        if step:
            story.fact(Fact.SAVED, 0x100, "MulBackward0")  # a state that is carried on
        story.end(Phase.BACKWARD)
    assert category_of(story, 0) == category_of(story, 1) == Category.ACTIVATIONS


def test_the_newest_result_has_the_category_of_those_before_it() -> None:
    """A reference model's logits are held until the next step assigns them again; the last are never freed."""
    story = Story()
    story.begin(-1)
    for step in range(4):
        if step:
            story.begin(step)
        story.enter(Phase.EVALUATION)
        story.alloc(0x100 + step, 8, op="aten::addmm", module="reference", stack="train.py:9")
        story.fact(Fact.OUTPUT, 0x100 + step)
        if step:
            story.free(0xFF + step)
        else:
            story.begin(0)
        story.enter(Phase.FORWARD)
        story.end(Phase.BACKWARD)
    story.alloc(0x900, 8, op="aten::add", module="reference", stack="train.py:9")  # what no step before had
    story.fact(Fact.OUTPUT, 0x900)
    story.fact(Fact.HELD, 0x103, "ref")
    categories = [CATEGORIES[code] for code in analyse(story.recording()).classes.category]
    assert categories == [Category.TEMPORARIES] * 4 + [Category.OTHER]


def test_what_each_step_keeps_is_not_short_lived() -> None:
    story = Story()
    for step in range(3):
        story.begin(step, Phase.EVALUATION)
        story.alloc(0x100 + step, 8, op="aten::addmm", module="model", stack="train.py:9")
        story.fact(Fact.OUTPUT, 0x100 + step)
        story.enter(Phase.FORWARD)
        story.end(Phase.BACKWARD)
    assert {category_of(story, place) for place in range(3)} == {Category.OTHER}
