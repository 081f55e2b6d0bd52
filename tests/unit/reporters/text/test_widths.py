"""Every text at every width of a terminal: no line is wider than that, and no number is cut or missing."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
from support.build import AMP, FP32, RUN, Story, precision_run, predicted, small_run
from support.changed_code import Code, changed
from support.checked import MIB, result, run
from support.failures import in_backward, in_forward
from support.golden_texts import encoder, three
from support.jobs import JOBS, jobs

from ampmem.analysis import largest
from ampmem.analysis.comparison import compare, entry_of
from ampmem.analysis.estimate import prediction_of
from ampmem.analysis.fit import FitResult, Memory, Vary, fit_result
from ampmem.analysis.ranks.merge import Jobs, merge_all
from ampmem.analysis.soundness import measure
from ampmem.analysis.static_model.recipes import PRECISIONS, recipe
from ampmem.analysis.summary import Summary, summarize
from ampmem.events import Fact, Phase, Recording, TermsRecord
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.text import memory
from ampmem.reporters.text.check import render_check, render_checks
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.difference import render_difference
from ampmem.reporters.text.fit import render_fit_result
from ampmem.reporters.text.layout import NARROWEST, WIDEST, Layout, number, table, table_lines, words
from ampmem.reporters.text.model import render_recipe, render_recipes
from ampmem.reporters.text.plain_text import columns, shorten, wrapped
from ampmem.reporters.text.ranks import render_jobs, render_matrix, render_places
from ampmem.reporters.text.table import render

UNLIMITED = Layout(width=2000)
WIDTHS = sorted({*range(NARROWEST, WIDEST, 7), 60, 79, 80, 99, 100, WIDEST})
NUMBER = re.compile(r"\d(?:[\d.,]*\d)?(?: (?:B|[KMGTP]iB|%)(?!\w))?")
GIB = 2**30
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Rendered = Callable[[Layout], str]


def transformer(layers: int = 12) -> Recording:
    """A step under autocast: equal layers, each made by the same line, and a head that is not like them."""
    story = Story()
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in range(layers)]
    story.parameter(0x999, "transformer.wte.weight", 406_382_592)
    for at, name in enumerate(names):
        story.parameter(0x1000 + at, f"{name}.weight", 2_359_296)
    story.begin(0, Phase.FORWARD)
    for at, name in enumerate(names):
        stack = (
            "/home/someone/2024-06-01/nano-gpt-124M/train.py:9 main\n/home/someone/nano-gpt-124M/model.py:42 forward"
        )
        story.tensor(
            Fact.CAST_COPY, 0x2000 + at, 4_718_592, f"{name}.weight", module=name, op="aten::_to_copy", stack=stack
        )
        story.tensor(
            Fact.SAVED,
            0x3000 + at,
            12_345_678,
            "ScaledDotProductFlashAttentionBackward0",
            module=name,
            op="aten::_scaled_dot_product_attention",
            stack=stack,
            dtype="bfloat16",
        )
    story.enter(Phase.BACKWARD)
    for at, name in enumerate(names):
        story.tensor(Fact.GRADIENT, 0x5000 + at, 9_437_184, f"{name}.weight")
        story.free(0x2000 + at, 0x3000 + at)
    story.end(Phase.OPTIMIZER, loss=10.8249, scale=65536.0)
    run = replace(RUN, device_name="NVIDIA H100 80GB HBM3 on node-0042.cluster-17", script="-m nano_gpt_124M.train")
    return story.recording(run=run, notes=["the loss of the first 1,024 micro-batches was not seen, nor 3 others"])


def simulated() -> Summary:
    """A run on a simulated GPU, of which some terms are not known."""
    allocated = TermsRecord(
        tensors=3000 * MIB,
        workspaces={"cuBLAS": 64 * MIB},
        scratch={"aten.sum.dim_IntList": 30 * MIB},
        rounding=6 * MIB,
        cached=100 * MIB,
    )
    record = predicted(
        0,
        total=4 * GIB,
        outside=512 * MIB,
        outside_at_most=700 * MIB,
        allocated=allocated,
        reserved=replace(allocated, scratch={}, cached=330 * MIB),
        highest_allocated=3300 * MIB,
        highest_reserved=3600 * MIB,
        bounds={"cuDNN's workspaces in convolutions": 200 * MIB},
        unmodelled=("what sort allocates",),
    )
    return replace(summarize(small_run().recording()), prediction=prediction_of(record))


def fitted() -> FitResult:
    def memory(size: int, most: int) -> Memory:
        return Memory(allocated=size - 30 * MIB, reserved=size, used=size + 512 * MIB, highest=most + 700 * MIB)

    fp32 = {value: memory(1000 * MIB + value * 37 * MIB, 1024 * MIB + value * 37 * MIB) for value in (1, 2, 48, 128)}
    points: dict[str, dict[int, Memory | None]] = {"fp32": {**fp32, 256: None}, "amp": {**fp32, 1024: None}}
    return fit_result(
        points,
        script="train.py --preset medium-1024",
        vary=Vary(name="--batch-size", separator="=", low=1, high=1024),
        gpu="RTX 4090",
        total=6 * GIB,
        steps=2,
        notes=("warning: 3 of 12 runs were killed", "attention takes 1.5 GiB more where the 2 kernels differ"),
    )


def of_run(recording: Recording) -> Rendered:
    return of_summary(summarize(recording), recording.notes)


def of_summary(summary: Summary, notes: tuple[str, ...] = ()) -> Rendered:
    def rendered(layout: Layout) -> str:
        return render(summary, notes, title="train.py", details=EVERYTHING, all_steps=True, layout=layout)

    return rendered


def of_jobs(merged: Jobs) -> Rendered:
    """Without ranks x categories, where columns are merged: that table has a test of its own."""

    def rendered(layout: Layout) -> str:
        text = render_jobs(merged, details=EVERYTHING, layout=layout)
        for job in merged.jobs:
            text = text.replace(render_matrix(job, layout, every=True), "")
        return text

    return rendered


CHECKED = ("rank 3", "rank 17", "rank 4", "rank 5", "rank 6")
NAMES = (
    *("show small", "show encoder", "show transformer", "show simulated"),
    *("out of memory in forward", "out of memory in backward"),
    *("compare", "compare others", "diff", "checks", "fit", "model"),
    *(f"check {label}" for label in CHECKED),
    *(f"model {key}" for key in PRECISIONS),
    *JOBS,
)
"""The names of :func:`cases`, for the collection, which works nothing out."""


@cache
def cases() -> Mapping[str, Rendered]:
    """Every renderer of texts, over summaries that have something to say in each section."""
    difference = changed(
        Code(sizes=(1000, 1000, 2**20), kept=300), Code(sizes=(5000, 7000, 2**21), line=40, kept=512, op="aten::add")
    )
    comparison = compare(three())
    alike = compare(
        [entry_of(precision_run(FP32, plain=(10**12,))), entry_of(precision_run(AMP, script="train_v2.py"))]
    )
    checks = [
        result(run(saved=3 * MIB), run(), activations="5MiB", label="rank 3"),
        result(run(saved=3 * MIB), run(), summary=True, label="rank 17"),
        result(run(saved=3 * MIB), peak="2MiB", label="rank 4"),
        result(run(kept=MIB), run(), peak="100MiB", label="rank 5"),
        result(run(), run(), label="rank 6"),
    ]
    recipes = [recipe(key, "adamw") for key in PRECISIONS]
    measured = measure(summarize(encoder()))
    found: dict[str, Rendered] = {
        "show small": of_run(small_run().recording()),
        "show encoder": of_run(encoder()),
        "show transformer": of_run(transformer()),
        "show simulated": of_summary(simulated()),
        "out of memory in forward": of_run(in_forward()),
        "out of memory in backward": of_run(in_backward()),
        "compare": lambda layout: render_comparison(comparison, details=EVERYTHING, layout=layout),
        "compare others": lambda layout: render_comparison(alike, details=EVERYTHING, layout=layout),
        "diff": lambda layout: render_difference(difference, layout),
        "checks": lambda layout: render_checks(checks, layout),
        "fit": lambda layout: render_fit_result(fitted(), layout),
        "model": lambda layout: render_recipes(recipes, 600_066, measured, layout),
    }
    found |= {f"check {one.label}": lambda layout, one=one: render_check(one, layout) for one in checks}  # type: ignore[misc]
    found |= {
        f"model {one.precision.key}": lambda layout, one=one: render_recipe(one, 7_000_000_000, None, layout)  # type: ignore[misc]
        for one in recipes
    }
    return found | {name: of_jobs(merge_all(runs)) for name, runs in jobs().items()}


def test_every_case_is_tried() -> None:
    assert tuple(cases()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_too_wide_and_no_number_is_cut_or_missing(name: str) -> None:
    rendered = cases()[name]
    numbers = Counter(NUMBER.findall(rendered(UNLIMITED)))
    assert numbers
    for width in WIDTHS:
        text = rendered(Layout(width=width))
        wide = [line for line in text.splitlines() if columns(line) > width and len(line.split()) > 1]
        assert wide == [], width
        missing = numbers - Counter(NUMBER.findall(text))
        assert not missing, (width, missing)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_by_category_have_every_peak_at_every_width(name: str) -> None:
    for job in merge_all(jobs()[name]).jobs:
        for width in WIDTHS:
            text = render_matrix(job, Layout(width=width))
            assert max(map(columns, text.splitlines())) <= width
            unit = UNITS[" ".join(text.split()).split(", in ")[1].split()[0]]
            peaks = {f"{rank.peak.bytes / unit:,.1f}" for rank in job.compared if rank.peak is not None}
            assert peaks <= {cell.removeprefix("*") for cell in text.split()}, width


def test_a_name_that_is_cut_keeps_its_figures() -> None:
    name = "transformer.h.11.attn.c_proj.weight"
    assert shorten(name, 31) == "transformer.h.11.…c_proj.weight"
    assert shorten(name, 20) == "tra…r.h.11.att…ight"
    assert shorten("encoder.layers.*.self_attention.weight (12)", 30) == "encoder.layers.*.….weight (12)"
    assert shorten("406,382,592 parameters in 1.5 GiB", 30) == "406,382,592 pa…ters in 1.5 GiB"
    assert shorten("/data/run-20240601/model.py:42 forward", 30) == "/data/run-20240601…:42 forward"
    for width in range(7, len(name)):
        assert "11." in shorten(name, width)
        assert len(shorten(name, width)) <= width
    # Figures alone may be too wide.
    assert shorten("0, 2, 4, 6, 8, 10, 12", 9) == "0, 2…, 12"


def test_a_long_word_is_broken_beside_a_figure() -> None:
    assert wrapped("at /data/run-20240601/model.py", 16) == ["at /data/run-", "  20240601/model", "  .py"]
    assert wrapped("123456789", 4) == ["1234", "  56", "  78", "  9"]


def test_of_a_text_without_an_end_the_middle_is_left_out() -> None:
    for text in ("B" * 1_000_000, "1." * 500_000, "\x1b[2J" * 200_000):
        lines = wrapped(f"first {text} last", 100)
        assert len(lines) < 110 and "…" in "".join(lines) and "".join(lines).isprintable()
        assert lines[0].startswith("first") and lines[-1].endswith("last")
        assert columns(shorten(text, 40)) <= 40


def test_columns_without_room_follow_below() -> None:
    shown = [words("name", least=4), number("used"), number("B/\nparam", rank=1, of="used")]
    rows = [["total", "12.0 MiB", "4.00"], ["part", "1.0 MiB", ""]]
    assert table(shown, rows, Layout(width=20)).splitlines() == [
        "name       used",
        "-----  --------",
        "total  12.0 MiB",
        "part    1.0 MiB",
        "",
        "          used",
        "name   B/param",
        "-----  -------",
        "total     4.00",
    ]
    head, body = table_lines(shown, rows, Layout(width=18))
    assert head == ["name       used", "-----  --------"]
    assert body == [["total  12.0 MiB", "    used B/param", "    4.00"], ["part    1.0 MiB"]]


def test_a_list_of_ranks_is_broken_into_lines() -> None:
    text = table([words("rank", least=8, wraps=True), number("peak")], [["0, 2, 4, 6, 8", "1.0 GiB"]], Layout(width=18))
    assert text.splitlines() == ["rank         peak", "--------  -------", "0, 2, 4,  1.0 GiB", "6, 8"]


def test_equal_layers_are_one_row_with_their_number() -> None:
    text = of_run(transformer())(Layout(width=160))
    for table_of, row in (
        ("modules", "transformer.h.*.attn.c_proj (12)   108.0 MiB    141.3 MiB  54.0 MiB  108.0 MiB"),
        ("by parameter", "transformer.h.*.attn.c_proj.weight (12)      12      0         0         0     0  54.0 MiB"),
        ("largest", "11.8 MiB  141.3 MiB  activations  bfloat16 output of attention (12)"),
        ("largest", " 1.5 GiB    1.5 GiB  parameters   transformer.wte.weight"),
    ):
        assert row in text, table_of
    assert "transformer.h.10" not in text
    # Of the largest allocations a summary has 50 and all like the last, so each number is that of all layers.
    assert "bfloat16 output of attention (60)" in of_run(transformer(60))(Layout(width=160))


def test_of_more_equal_layers_than_a_summary_lists_there_may_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (largest, memory):
        monkeypatch.setattr(place, "MOST", 55)
    assert "bfloat16 output of attention (54 or more)" in of_run(transformer(60))(Layout(width=160))


def test_layers_of_other_sizes_keep_their_rows() -> None:
    story = Story()
    for at, count in enumerate((1000, 9000, 1000, 1000)):
        story.parameter(0x1000 + at, f"net.{at}.weight", count)
    story.begin(0, Phase.FORWARD)
    story.alloc(0x2000, 100)
    story.fact(Fact.SAVED, 0x2000, "aten::mm", "net.0")
    story.end(Phase.BACKWARD)
    text = of_run(story.recording())(Layout(width=100))
    rows = [line.split() for line in text.splitlines() if line.startswith("net.")]
    assert [row[:3] for row in rows] == [["net.*", "(3)", "11.7"], ["net.1", "35.2", "KiB"]]


def test_ranks_whose_peaks_are_in_equal_layers_are_one_row() -> None:
    (job,) = merge_all(jobs()["ranks-pipeline"]).jobs
    moved = []
    for rank in job.ranks:
        assert rank.peak is not None
        module = "head" if rank.rank == 7 else f"layers.{rank.rank // 2}.mlp"
        peak = replace(rank.peak, module=module)
        moved.append(replace(rank, peak=peak, parameters=job.ranks[0].parameters))
    lines = render_places(replace(job, ranks=tuple(moved)), Layout(width=100)).splitlines()
    assert [line.split()[:5] for line in lines[4:]] == [
        ["0-6", "backward", "layers.*.mlp", "(4)", "mm"],
        ["7", "backward", "head", "mm", "51,200"],
    ]


def test_rows_of_one_name_have_what_is_left_below_them() -> None:
    shown = [words("saved for"), words("made by", rank=1), number("bytes")]
    rows = [["addmm", "gelu", "128.0 KiB"], ["addmm", ".to()", "64.0 KiB"]]
    assert table(shown, rows, Layout(width=22)).splitlines() == [
        "saved for      bytes",
        "---------  ---------",
        "addmm      128.0 KiB",
        "    made by gelu",
        "addmm       64.0 KiB",
        "    made by .to()",
    ]
