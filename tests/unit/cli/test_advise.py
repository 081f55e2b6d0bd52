"""What ``ampmem advise`` keeps of runs, says of those that are left, and passes on to runs on the CPU."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ampmem.allocator.gpus import gpu_to_simulate
from ampmem.analysis.advised import EndedRun
from ampmem.analysis.blocks import Blocks
from ampmem.analysis.changes import Loop, Script, Trial
from ampmem.analysis.fit import Memory
from ampmem.cli.processes.children import say_context
from ampmem.errors import UsageError
from ampmem.vocabulary import NOTHING_FORCED, Forced

advise: Any = import_module("ampmem.cli.advise")

OF = {"ampmem advise": "1", "GPU": "h100"}
MEMORY = Memory(allocated=1, reserved=2, used=3, highest=4, surely=False, outside_at_most=5, allowed=6)
RUNS = (
    EndedRun(
        forced=NOTHING_FORCED,
        trial=Trial(memory=MEMORY, flops=9, recomputed_flops=3),
        script=Script(
            blocks=Blocks(names=("h.0", "h.1"), saved_bytes=(2, 3), flops=(4, 5)),
            optimizers=("Adam",),
            updated=2,
            batch=8,
        ),
    ),
    EndedRun(forced=Forced(checkpoint=("h.0",), foreach=False, batch_size=4), trial=Trial(memory=None)),
    EndedRun(forced=Forced(bfloat16=True), trial=Trial(memory=None, failure="torch does not")),
)


def test_runs_that_are_kept_are_read_as_they_were(tmp_path: Path) -> None:
    kept = advise._Kept(tmp_path / "runs", OF)
    for ended in RUNS:
        assert kept.run_of(ended.forced) is None
        kept.keep(ended)
    again = advise._Kept(tmp_path / "runs", OF)
    assert [again.run_of(ended.forced) for ended in RUNS] == list(RUNS)
    assert again.run_of(Forced(fused=True)) is None
    assert len((tmp_path / "runs").read_text().splitlines()) == 1 + len(RUNS)


def test_a_run_that_was_killed_is_made_again(tmp_path: Path) -> None:
    kept = advise._Kept(tmp_path / "runs", OF)
    kept.keep(EndedRun(forced=Forced(fused=True), trial=Trial(memory=None, failure="killed by SIGKILL")))
    assert advise._Kept(tmp_path / "runs", OF).run_of(Forced(fused=True)) is None


def test_a_line_of_which_a_part_was_written_is_no_run_and_hprecisions_none(tmp_path: Path) -> None:
    advise._Kept(tmp_path / "runs", OF).keep(RUNS[0])
    with (tmp_path / "runs").open("a") as file:
        file.write('{"forced": {"check')
    advise._Kept(tmp_path / "runs", OF).keep(RUNS[1])
    again = advise._Kept(tmp_path / "runs", OF)
    assert [again.run_of(ended.forced) for ended in RUNS] == [*RUNS[:2], None]


def test_without_a_file_nothing_is_kept() -> None:
    kept = advise._Kept(None, OF)
    kept.keep(RUNS[0])
    assert kept.run_of(NOTHING_FORCED) is None


@pytest.mark.parametrize("text", ["\x00\n", "[]\n", "{}\n", '{"other": 1}\n', "[" * 100_000, "9" * 5000])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs").write_text(text)
    with pytest.raises(UsageError, match="ampmem advise did not write this file"):
        advise._Kept(tmp_path / "runs", OF)
    assert (tmp_path / "runs").read_text() == text


def test_what_is_left_is_said_by_what_the_runs_before_have_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, left = [100.0], [4]
    monkeypatch.setattr(advise.time, "monotonic", lambda: now[0])
    progress = advise._Progress(lambda: left[0])
    progress.ended("a", "kept", made=False)
    now[0] = 110.0
    progress.ended("b", "done")
    now[0], left[0] = 160.0, 5
    progress.ended("c", "done")
    left[0] = 0
    progress.ended("d", "done")
    assert capsys.readouterr().err.splitlines() == [
        "run 1: a: kept",
        "run 2: b: done; at most 4 left, about 40 s",
        "run 3: c: done; at most 5 left, about 2 min",
        "run 4: d: done",
    ]


def test_arguments_that_name_a_gpu_name_the_cpu() -> None:
    given = ("cuda", "--device=cuda:1", "--device", "cuda:0", "cuda.yaml", "cudax", "--cuda", "a=b=cuda")
    assert advise._on_cpu(given) == ("cpu", "--device=cpu", "--device", "cpu", *given[4:7], "a=b=cpu")


@pytest.mark.parametrize(
    ("gpu", "limit", "said"),
    [
        (
            "1GiB",
            1 << 30,
            "up to 896.0 MiB are assumed for the CUDA context, and the limit is 1.0 GiB, so hardly any run surely fits",
        ),
        ("2GiB", 2 << 30, ""),
        ("h100", 80 << 30, ""),
        ("h100", 600 << 20, "the limit is 600.0 MiB, so hardly any run surely fits\n"),
    ],
)
def test_a_budget_that_the_context_nearly_fills_is_said(
    gpu: str, limit: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_context(gpu_to_simulate(gpu), limit)
    text = capsys.readouterr().err
    assert said in text and bool(text) == bool(said)


@pytest.mark.parametrize(
    ("script", "loop"),
    [
        ("import torch", Loop.OWN),
        ("def main():\n    from transformers import GPT2LMHeadModel", Loop.OF_TRANSFORMERS),
        ("import transformers\ntransformers.Trainer(args=transformers.TrainingArguments())", Loop.TRAINER),
        ("import lightning.pytorch as L, transformers", Loop.LIGHTNING),
    ],
)
def test_the_training_loop_is_known_by_the_names_in_the_script(script: str, loop: Loop) -> None:
    assert advise.loop_of(compile(script, "train.py", "exec")) is loop
