"""FSDP2 and tensor parallel under gloo: a rank's recording says what its own tensors add up to, and what is whole."""

from pathlib import Path

import pytest
from support import gloo
from support import sharded_runs as runs

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import Summary, summarize, summary_of
from ampmem.analysis.timeline.categories import Category
from ampmem.vocabulary import Communication

pytestmark = pytest.mark.slow
RANKS = (0, 1)
NAMES = (*runs.SHARDED, "tensor-parallel", "tensor-parallel-amp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of every run on two ranks."""
    made = tmp_path_factory.mktemp("sharded")
    gloo.on_ranks(runs.train_sharded, made)
    return made


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of the runs on a mesh of two by two."""
    made = tmp_path_factory.mktemp("both")
    gloo.on_ranks(runs.train_both, made, ranks=4)
    return made


def summary(folder: Path, name: str, rank: int) -> Summary:
    return summarize(ampmem.load(gloo.recording_of(folder, name, rank)))


def most(folder: Path, name: str, rank: int) -> dict[Communication, int]:
    """The most bytes that each part of the communication ever has."""
    analysis = analyse(ampmem.load(gloo.recording_of(folder, name, rank)))
    each = [analysis.communication.at(position) for position in range(len(analysis.recording.events) + 1)]
    return {part: max(parts[part] for parts in each) for part in Communication}


def assert_as_known(folder: Path, name: str, rank: int, *, ranks: int = 2) -> None:
    """The categories are the sums over local tensors at all marks, and the sum of all is the process's total."""
    recording = ampmem.load(gloo.recording_of(folder, name, rank))
    analysis = analyse(recording)
    found = summary_of(analysis)
    known = gloo.kept(folder, name, rank)
    assert len(found.steps) == len(known) == runs.STEPS
    for step, sums in zip(found.steps, known, strict=True):
        marks = step.marks
        assert marks.after_forward is not None
        assert marks.after_backward is not None
        assert marks.after_optimizer is not None
        said = {
            "after_forward": marks.after_forward,
            "after_backward": marks.after_backward,
            "after_optimizer": marks.after_optimizer,
        }
        assert {mark: {key: live[Category(key)] for key in sums[mark]} for mark, live in said.items()} == sums
        assert marks.after_optimizer[Category.COMMUNICATION] == marks.after_optimizer[Category.TEMPORARIES] == 0
        assert marks.after_optimizer[Category.OTHER] <= 4 * ranks  # which the mesh has
    assert found.conservation.residual_bytes == 0
    assert not [note for note in recording.notes if "could not inspect" in note]
    assert found.static_problem is None
    assert [row for row in found.static_model if not row.explained] == []


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_categories_of_a_rank_are_sums_over_its_local_tensors(folder: Path, name: str, rank: int) -> None:
    assert_as_known(folder, name, rank)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", ["fp32", "policy"])
def test_so_they_are_where_parameters_are_split_twice(on_four: Path, name: str, rank: int) -> None:
    assert_as_known(on_four, name, rank, ranks=4)


@pytest.mark.parametrize("name", ["fp32", "kept", "policy", "amp", "offload", "accumulated", "prefetched"])
def test_what_is_whole_at_most_is_as_computed_by_hand(folder: Path, name: str) -> None:
    model = runs.Model()
    layer, head = model.layers[0], model.head
    itemsize = 2 if name == "policy" else 4
    found = most(folder, name, 0)
    layers = runs.LAYERS if name == "kept" else 1
    whole = layers * runs.whole_bytes(layer, itemsize) + runs.whole_bytes(head, itemsize)
    assert found[Communication.UNSHARDED_PARAMETERS] == whole
    every = {
        "accumulated": runs.whole_bytes(model, padded=False),
        "policy": runs.whole_bytes(layer, 2, padded=False) + runs.whole_bytes(head, 2, padded=False),
    }
    gradients = every.get(name, runs.whole_bytes(layer, padded=False) + runs.whole_bytes(head, padded=False))
    assert found[Communication.UNSHARDED_GRADIENTS] == gradients


def test_of_a_policy_no_copy_is_autocasts(folder: Path) -> None:
    found = summary(folder, "policy", 0)
    assert found.casts.copies == 0
    assert found.precision.name == "as-is"
    assert any("MixedPrecisionPolicy" in note for note in ampmem.load(gloo.recording_of(folder, "policy", 0)).notes)


def test_autocast_copies_whole_parameters(folder: Path) -> None:
    found = summary(folder, "amp", 1)
    copied = {entry.name for entry in found.casts.by_parameter}
    assert {"layers.0.up.weight", "head.weight"} <= copied
    whys = {term.why for row in found.static_model for term in row.terms}
    assert "copies of whole parameters, of which this rank keeps a shard" in whys


@pytest.mark.parametrize("rank", RANKS)
def test_parameters_are_those_of_the_rank_with_the_global_numbers_beside(folder: Path, rank: int) -> None:
    model = runs.Model()
    numbers = [parameter.numel() for parameter in model.parameters()]
    found = summary(folder, "fp32", rank).parameters
    assert (found.global_count, found.global_bytes) == (sum(numbers), 4 * sum(numbers))
    shards = [-(-each.shape[0] // 2) * each[0].numel() for each in model.parameters()]
    assert found.count == (sum(shards) if rank == 0 else sum(numbers) - sum(shards))
    recording = ampmem.load(gloo.recording_of(folder, "fp32", rank))
    padding = {record.name: record.padding for record in recording.parameters if record.padding}
    one_row = {"head.weight": 4 * runs.WIDTH, "head.bias": 4}
    assert padding == (one_row if rank else {})
    rows = [row for row in summary(folder, "fp32", rank).static_model if row.component == "gradients"]
    whys = {term.why: term.bytes for row in rows for term in row.terms}
    assert whys.get("padding that makes the shards of all ranks equally long") == (
        sum(one_row.values()) if rank else None
    )


def test_what_tensor_parallel_keeps_is_an_activation_and_what_it_sends_is_not(folder: Path) -> None:
    found = most(folder, "tensor-parallel", 0)
    assert found[Communication.ALL_REDUCE] >= 4 * runs.BATCH * runs.WIDTH
    assert found[Communication.UNSHARDED_PARAMETERS] == 0
    marks = summary(folder, "tensor-parallel", 0).steps[-1].marks
    assert marks.after_forward is not None
    assert marks.after_forward[Category.ACTIVATIONS] > 0
    record = {each.name: each for each in ampmem.load(gloo.recording_of(folder, "tensor-parallel", 0)).parameters}
    assert record["layers.0.up.weight"].global_elements == 2 * record["layers.0.up.weight"].elements
    assert record["layers.0.norm.weight"].global_elements is None


@pytest.mark.parametrize("rank", RANKS)
def test_the_ranks_allocate_what_they_do_without_ampmem(folder: Path, rank: int) -> None:
    without, with_ampmem = gloo.kept(folder, "allocations", rank)
    assert without
    assert with_ampmem == without
