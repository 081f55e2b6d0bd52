"""What ``show`` prints, at four widths, as files: the tests compare with them, and this makes them anew.

::

    PYTHONPATH=tests python -m support.golden_texts
    git diff tests/unit/reporters/text/golden

Read the difference line by line before it is committed.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ampmem.analysis.comparison import Entry, compare, entry_of
from ampmem.analysis.ranks.merge import merge_all
from ampmem.analysis.summary import summarize
from ampmem.events import Fact, Phase, Recording
from ampmem.reporters.base import EVERYTHING, NOTHING
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.ranks import render_jobs
from ampmem.reporters.text.table import render
from support.build import AMP, FP32, RUN, Story, precision_run
from support.jobs import jobs

FOLDER = Path(__file__).parents[1] / "unit" / "reporters" / "text" / "golden"
WIDTHS = (60, 80, 100, 160)
DETAILS = {"": NOTHING, "-all": EVERYTHING}

_LAYER = "encoder.layers.{}.self_attention.in_projection"
_STACK = "/home/someone/projects/speech/train.py:9 main\n/home/someone/projects/speech/layers.py:{} forward"


def encoder(layers: int = 12) -> Recording:
    """A step under autocast of a model whose names are long."""
    story = Story()
    names = [_LAYER.format(number) for number in range(layers)]
    for number, name in enumerate(names):
        story.parameter(0x1000 + number, f"{name}.weight", 50_000 + number)
    for step in range(2):
        story.begin(step, Phase.DATA)
        story.alloc(0x2000, 6400)
        story.enter(Phase.FORWARD)
        for number, name in enumerate(names):
            stack = _STACK.format(20 + number)
            story.tensor(
                Fact.CAST_COPY,
                0x3000 + number,
                2 * (50_000 + number),
                f"{name}.weight",
                module=name,
                op="aten::_to_copy",
                stack=stack,
            )
            story.tensor(
                Fact.SAVED,
                0x4000 + number,
                300_000,
                "ScaledDotProductFlashAttentionBackward0",
                module=name,
                op="aten::_scaled_dot_product_attention",
                stack=stack,
                dtype="bfloat16",
            )
        story.enter(Phase.BACKWARD)
        for number, name in enumerate(names):
            story.tensor(Fact.GRADIENT, 0x5000 + number, 4 * (50_000 + number), f"{name}.weight")
            story.free(0x4000 + number, 0x3000 + number)
        story.enter(Phase.OPTIMIZER)
        if step == 0:
            for number, name in enumerate(names):
                story.tensor(Fact.OPTIMIZER_STATE, 0x6000 + number, 4 * (50_000 + number), f"exp_avg of {name}.weight")
                story.tensor(
                    Fact.OPTIMIZER_STATE, 0x8000 + number, 4 * (50_000 + number), f"exp_avg_sq of {name}.weight"
                )
        story.scratch(0x7000, 4 * 50_000 * layers, op="aten::_foreach_sqrt")
        story.end(loss=2.5 - step)
        story.enter(Phase.BETWEEN)
        story.free(*(0x5000 + number for number in range(layers)), 0x2000)
    run = replace(RUN, device_name="Intel(R) Xeon(R) Platinum 8480C", script="-m speech.train")
    return story.recording(run=run, notes=["the loss of the first step was not seen"])


def three() -> list[Entry]:
    """FP32, autocast, and a run without its cache that was killed."""
    plain = (30_000_000, 1_000_000, 2_000_000)
    fp32 = precision_run(FP32, plain=plain)
    amp = precision_run(AMP, activations=500, copies=200, losses=(2.0, 1.01))
    killed = Entry(label="amp-nocache", summary=None, failure="killed by SIGKILL")
    return [entry_of(fp32), entry_of(amp), killed]


def texts() -> Iterator[tuple[str, str]]:
    """The name of each file, and what is in it."""
    recording = encoder()
    summary, comparison = summarize(recording), compare(three())
    for width in WIDTHS:
        layout = Layout(width=width)
        for name, details in DETAILS.items():
            title = " ".join((recording.run.script, *recording.run.arguments))
            one = render(summary, recording.notes, title=title, file="train.ampmem", details=details, layout=layout)
            files = ["train.fp32.ampmem", "train.amp.ampmem"]
            several = render_comparison(comparison, files=files, details=details, layout=layout)
            yield f"show{name}.{width}.txt", f"{one}\n"
            yield f"compare{name}.{width}.txt", f"{several}\n"
    for name, runs in jobs().items():
        merged, files = merge_all(runs), [str(run.path) for run in runs]
        for width in WIDTHS:
            yield f"{name}.{width}.txt", f"{render_jobs(merged, files=files, layout=Layout(width=width))}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in texts():
        (FOLDER / file).write_text(text, encoding="utf-8")
