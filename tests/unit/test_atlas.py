"""The atlas without its runs: its search, its summary, and that it goes on where it stopped."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ampmem.analysis.activations import ActivationGroup, ActivationPart

REPORTS = Path(__file__).resolve().parents[2] / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.is_dir(), reason="no checkout: the reports are missing")
if REPORTS.is_dir():
    sys.path.insert(0, str(REPORTS))
    import atlas_document
    import atlas_page
    import atlas_points
    import atlas_search
    import atlas_summary
    import atlas_tables
    import make_atlas
    from atlas_train import PRECISIONS, Setting

GIB = 1 << 30
ROOM = 80 * GIB
ABOUT: Mapping[str, str | int] = {"ampmem": "0", "torch": "2", "gpu": "a GPU", "memory": ROOM}
GROUP = ("BERT base", "adamw", False)
STATIC, EACH = {"fp32": 2.0, "amp": 2.5, "amp-nocache": 2.5, "bf16": 1.0}, {"fp32": 0.5, "amp": 0.25}
"""GiB of a made-up model: those that the batch does not change, and those of each sample."""


def made(setting: Any) -> dict[str, Any]:
    """The point of a made-up model; on an 80 GiB GPU that has nothing else in use."""
    static, each = STATIC[setting.precision], EACH.get(setting.precision, 0.25)
    size = int((static + each * setting.batch) * GIB)
    if size > ROOM:
        return asdict(setting) | {"fit": "does-not-fit"}
    rest = {"phase": "backward", "at_peak": {"activations": size}, "activations": size, "copies": 0, "parameters": 9}
    return asdict(setting) | {"fit": "fits", "peak": size, "at_most": size} | rest


def here(tasks: Iterator[Any], jobs: int) -> Iterator[Any]:
    """The points of all ``tasks``, made in this process."""
    for task in tasks:
        yield from task()


def whole(document: dict[str, Any], group: Any = GROUP) -> int:
    """Make every point of one group; how many that were."""
    return len(list(make_atlas.every_point(document, [group], 1, make=made, run=here)))


def test_the_search_ends_at_the_largest_that_fits_and_around_the_break_even() -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    curves = atlas_document.curves_of(document["points"], GROUP)
    assert {name: sorted(curve) for name, curve in curves.items()} == {
        "fp32": [1, 2, 4, 8, 16, 128],
        "amp": [1, 2, 4, 8, 16, 128, 256],
        "amp-nocache": [1, 128],
        "bf16": [1, 128],
    }
    assert all(size.fits for curve in curves.values() for size in curve.values())
    assert atlas_search.break_even(curves["fp32"], curves["amp"]) == (2, 4)
    assert atlas_search.break_even(curves["fp32"], curves["bf16"]) == (None, 1)


def test_other_optimizers_and_checkpointing_begin_where_adamw_ended() -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    whole(document, ("BERT base", "sgd", False))
    curves = atlas_document.curves_of(document["points"], ("BERT base", "sgd", False))
    assert {name: sorted(curve) for name, curve in curves.items() if curve} == {
        "fp32": [1, 2, 4, 8, 32, 128],
        "amp": [1, 2, 4, 8, 32, 128],
    }


def test_a_model_that_does_not_fit_at_all_is_asked_once() -> None:
    curves: dict[str, dict[int, Any]] = {name: {} for name in PRECISIONS}
    assert atlas_search.wanted(curves, ROOM, PRECISIONS, 16, fine=True) == [("fp32", 1)]
    none = {name: {1: atlas_search.Size(peak=0, fits=False)} for name in PRECISIONS}
    curves["fp32"] = none["fp32"]
    assert atlas_search.wanted(curves, ROOM, PRECISIONS, 16, fine=True) == [(name, 1) for name in PRECISIONS[1:]]
    assert atlas_search.wanted(none, ROOM, PRECISIONS, 16, fine=True) == []


def test_a_peak_that_does_not_grow_ends_at_the_largest_batch() -> None:
    curve = {1: atlas_search.Size(peak=GIB, fits=True), 16: atlas_search.Size(peak=GIB, fits=True)}
    assert atlas_search.next_end(curve, ROOM, 16) == atlas_search.LARGEST
    assert atlas_search.next_end(curve | {atlas_search.LARGEST: curve[1]}, ROOM, 16) is None


def test_after_a_guess_that_did_not_fit_the_middle_is_tried() -> None:
    def size(peak: int, *, fits: bool = True) -> Any:
        return atlas_search.Size(peak=peak * GIB, fits=fits)

    curve = {1: size(2), 16: size(17)}
    assert atlas_search.next_end(curve, ROOM, 16) == 64
    assert atlas_search.next_end(curve | {64: size(0, fits=False)}, ROOM, 16) == 32
    assert atlas_search.next_end({1: size(30)}, ROOM, 16) == 2
    assert atlas_search.next_end({1: size(30), 2: size(0, fits=False)}, ROOM, 16) is None


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, at_once = tmp_path / "atlas.json", atlas_document.new_document(ABOUT)
    count = whole(at_once)
    stopped = atlas_document.read_document(file, ABOUT)
    for number, _ in enumerate(make_atlas.every_point(stopped, [GROUP], 1, make=made, run=here), start=1):
        atlas_document.write_document(stopped, file)
        if number == 5:
            break
    later = atlas_document.read_document(file, ABOUT)
    assert len(later["points"]) == 5
    assert whole(later) == count - 5
    assert atlas_document.text_of(later) == atlas_document.text_of(at_once)
    assert whole(later) == 0


def test_no_run_begins_after_the_time_is_over() -> None:
    document = atlas_document.new_document(ABOUT)
    assert list(make_atlas.every_point(document, [GROUP], 1, end=0.0, make=made, run=here)) == []


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    atlas_document.write_document(document, tmp_path / "atlas.json")
    found = atlas_document.read_document(tmp_path / "atlas.json", ABOUT)
    assert atlas_document.text_of(found) == (tmp_path / "atlas.json").read_text(encoding="utf-8")
    point = found["points"][0]
    assert atlas_document.setting_of(point) == Setting(
        model="BERT base", optimizer="adamw", checkpointing=False, precision="fp32", batch=1
    )


def points_of(model: str, fp32: int, amp: int) -> list[dict[str, Any]]:
    """The points of a model at batch 1, with the given peaks."""
    setting = {"model": model, "optimizer": "adamw", "checkpointing": False, "batch": 1}
    return [setting | {"precision": name, "fit": "fits", "peak": peak} for name, peak in (("fp32", fp32), ("amp", amp))]


def test_the_table_counts_halves_little_and_costs() -> None:
    peaks = {"BERT base": 500, "GPT-2": 950, "ResNet-50": 1000, "DLRM": 1200}
    points = [point for model, amp in peaks.items() for point in points_of(model, 1000, amp)]
    heads, rows = atlas_summary.counts_of(atlas_summary.savings_of(points, "amp"))
    assert heads[1:] == (
        "halves it",
        "saves 10 to 50 %",
        "saves 0.1 to 10 %",
        "no change",
        "costs memory",
        "median saving",
    )
    assert [row[1:] for row in rows] == [("1", "0", "1", "1", "1", "2 %")] * 2
    assert atlas_summary.setting_in_words(points, ABOUT) == (
        "4 models in 4 settings, trained for two steps on a simulated a GPU."
    )
    assert "no point yet" in atlas_summary.setting_in_words([], ABOUT)
    assert atlas_summary.counts_of([])[1] == []


def test_the_words_say_what_checkpointing_changes() -> None:
    points = points_of("BERT base", 1000, 700) + points_of("GPT-2", 1000, 800)
    assert "checkpointing and" not in atlas_summary.setting_in_words(points, ABOUT)
    recomputed = [point | {"checkpointing": True} for point in points_of("BERT base", 1000, 900)]
    assert atlas_summary.setting_in_words(points + recomputed, ABOUT).endswith(
        " The median saving at the largest batch is 25 % without activation checkpointing and 10 % with it (1 setting)."
    )


def test_the_break_even_in_words() -> None:
    def said(fp32: int, amp: int) -> str:
        (saving,) = atlas_summary.savings_of(points_of("GPT-2", fp32, amp), "amp")
        return atlas_summary.break_even_of(saving)

    assert said(1000, 900) == "at every size"
    assert said(1000, 1000) == "at no size"


def test_what_stays_in_fp32_is_named_largest_first_without_what_is_small() -> None:
    point = {"activations": 1000, "in_fp32": {"norms": 204, "the loss": 100, "softmax": 99, "gelu": 90, "views": 9}}
    assert atlas_page.in_fp32_of(point) == "norms 20 %, the loss 10 %, softmax 10 %"
    assert atlas_page.in_fp32_of({"activations": 1000, "in_fp32": {"views": 9}}) == "nothing"
    assert atlas_page.in_fp32_of({"activations": 1000}) is None


def test_the_activations_of_a_run_that_are_fp32_are_counted() -> None:
    parts = [("aten::native_layer_norm", "float32", 64), ("aten::rms_norm", "float32", 32), ("aten::mm", "bfloat16", 8)]
    groups = [
        ActivationGroup(
            kind=op,
            dtype=dtype,
            tensors=1,
            bytes=size,
            parts=(ActivationPart(saved_for=op, made_by=None, module=None, tensors=1, bytes=size),),
        )
        for op, dtype, size in parts
    ]
    assert atlas_points.kept_in_fp32(groups) == {"norms": 96}


def test_the_page_is_whole_and_loads_nothing() -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    page = atlas_page.page_of(document)
    assert "[[" not in page.partition('<script type="application/json"')[0]
    assert "default-src &#39;none&#39;" in page
    assert 'src="' not in page and "<link" not in page
    assert len(page.encode()) < 3_000_000
    assert "from 4 on, not at 2" in page


def test_the_page_leaves_out_a_group_that_is_not_whole() -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    assert len(atlas_document.whole_groups(document)) == len(document["points"])
    document["points"] = [point for point in document["points"] if point["precision"] != "bf16"]
    assert atlas_document.whole_groups(document) == []


def test_what_compiling_changes_is_said_of_models_whose_runs_are_all_there(tmp_path: Path) -> None:
    document = atlas_document.new_document(ABOUT)
    whole(document)
    assert atlas_summary.compiled_in_words(document) == ""
    wanted = atlas_document.wanted_compiled(document, "BERT base")
    assert [(each.precision, each.batch) for each in wanted] == [("fp32", 1), ("amp", 1), ("fp32", 128), ("amp", 128)]
    peaks = {("fp32", 1): 2.5, ("amp", 1): 3.025, ("fp32", 128): 33.0, ("amp", 128): 17.25}
    document["compiled"] = [
        asdict(setting) | {"fit": "fits", "peak": int(peaks[setting.precision, setting.batch] * GIB)}
        for setting in wanted
    ]
    # As it is AMP takes 2.75 GiB at batch 1, and 34.5 GiB at 128, where FP32 takes 66.
    assert atlas_summary.compiled_in_words(document) == (
        " torch.compile, tried on 1 model with AdamW and without checkpointing, changes AMP's peak by +10 to +10 % "
        "(median +10 %) at batch size 1 and by -50 to -50 % (median -50 %) at the largest batch; there AMP saves 48 % "
        "of FP32's peak when both are compiled, 48 % when neither is (medians)."
    )
    document["compiled"].append(asdict(wanted[0]) | {"model": "GPT-2", "refused": "compiling failed: a reason"})
    assert atlas_tables.compiled_of(document) == [
        [
            "BERT base",
            "2.8 GiB",
            "3.0 GiB",
            "+10.0 %",
            "128",
            "34.5 GiB",
            "17.2 GiB",
            "-50.0 %",
            "47.7 %",
            "47.7 %",
            "",
        ],
        ["GPT-2", *[""] * 9, "compiling failed: a reason"],
    ]
    (line, *others) = atlas_page.data_of(document["points"], document)["lines"]
    assert (line["precision"], line["compiled"]) == ("amp", "+10.0 %, -50.0 %")
    assert {each["compiled"] for each in others} == {""}
    atlas_document.write_document(document, tmp_path / "atlas.json")
    found = atlas_document.read_document(tmp_path / "atlas.json", ABOUT)
    assert atlas_document.wanted_compiled(found, "BERT base") == []
    document["compiled"].pop(0)
    assert atlas_document.wanted_compiled(document, "BERT base") == wanted[:1]
    assert atlas_summary.compiled_in_words(document) == ""
