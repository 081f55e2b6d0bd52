"""tests/benchmarks/overhead.py: what it measures, its tables, and what it writes."""

import functools
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.ready_python import ready_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import overhead  # noqa: E402
import overhead_turns  # noqa: E402
from overhead import Run  # noqa: E402

PROFILER, STACKS = overhead.PROFILERS


def run(device: str = "cpu", program: str = "gpt", steps: int = 3, **more: Any) -> Run:
    turns = {
        "plain": [(0.03, 0.03), (0.06, 0.06), (0.03, 0.03)],
        PROFILER: [(0.06, 0.12), (0.06, 0.12), (0.06, 0.12)],
        "ampmem": [(0.09, 0.15), (0.12, 0.24), (0.06, 0.12)],
    } | more.pop("turns", {})
    return Run(device=device, program=program, steps=steps, torch="2.13.0", python="3.11.7", turns=turns, **more)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert overhead.table([run()], 0) == [
        "| program | steps | plain, ms a step | torch.profiler | ampmem | ampmem, lowest to highest "
        "| ampmem ÷ torch.profiler | ampmem ÷ torch.profiler, stacks |",
        "|---|---|---|---|---|---|---|---|",
        "| gpt | 3 | 10.0 | 2.00 | 2.00 | 2.00 to 3.00 | 1.50 | - |",
    ]
    assert overhead.table([run()], 1)[-1] == "| gpt | 3 | 10.0 | 4.00 | 4.00 | 4.00 to 5.00 | 1.25 | - |"


def test_a_precision_that_took_no_turns_of_a_run_has_a_dash_there() -> None:
    lines = overhead.table([run(turns={"MemTracker": [(0.3, 0.3), (0.6, 0.6), (0.3, 0.3)]}), run(steps=20)], 0)
    assert [line.split(" | ")[5] for line in lines if "---" not in line] == ["MemTracker", "10.00", "-"]


def files(folder: Path) -> tuple[Path, Path]:
    docs, readme = folder / "benchmarks.md", folder / "README.md"
    docs.write_text(f"before\n\n{overhead.BEGIN}\nold\n{overhead.END}\n\nafter\n", encoding="utf-8")
    readme.write_text("- One.\n- Recording costs CPU time: much,\n  very much.\n- Two.\n", encoding="utf-8")
    return docs, readme


def test_the_figures_are_written_into_both_files_and_nothing_else_changes(tmp_path: Path) -> None:
    docs, readme = files(tmp_path)
    runs = [run(), run(steps=20), run("emulated"), run("emulated", steps=20)]
    for _ in range(2):  # what was written is replaced
        overhead.write(runs, docs, readme)
        text = docs.read_text(encoding="utf-8")
        missing = [key for key in sorted(overhead.keys(["cpu", "emulated"])) if "/gpt/" not in key]
        left_out = " ".join(["Not measured:", ", ".join(missing)]) + "."
        written = f"{overhead.BEGIN}\n\n{overhead.markdown(runs)}\n{left_out}\n\n{overhead.END}"
        assert " ".join(text.split()) == " ".join(f"before {written} after".split())
        first, *bullet, last = readme.read_text(encoding="utf-8").splitlines()
        assert (first, last) == ("- One.", "- Two.")
        assert all(line.startswith("  ") and len(line) <= 120 for line in bullet[1:])
        assert " ".join(line.strip() for line in bullet) == (
            "- Recording costs CPU time: a step of a small model takes 2.0 to 2.0 times its plain time on the CPU and "
            "2.0 to 2.0 times its plain time where an emulated GPU waits for its host; a block of 3 steps, with start "
            "and end, 4.0 to 4.0 times and 4.0 to 4.0 times "
            "([docs/benchmarks.md](docs/benchmarks.md))."
        )
    tables = "\n".join(overhead.table(runs[2:], 1))
    assert f"**With start and end, on emulated CUDA:**\n\n{tables}\n" in text
    assert "torch 2.13.0 on the CPU; torch 2.13.0 on emulated CUDA; Python 3.11.7;" in text


def test_the_long_step_is_told_apart_from_the_small_models() -> None:
    long = {precision: [(0.3 * factor, 0.3 * factor)] * 3 for precision, factor in (("plain", 1.0), ("ampmem", 1.05))}
    assert overhead.in_short([run(), run(program=overhead.LONG, turns=long)]) == (
        "Recording costs CPU time: a step of a small model takes 2.0 to 2.0 times its plain time on the CPU; a step of "
        "300 ms 1.05 to 1.05 times; a block of 3 steps, with start and end, 4.0 to 4.0 times"
    )


def test_nothing_is_written_where_a_file_has_no_place_for_it(tmp_path: Path) -> None:
    docs, readme = files(tmp_path)
    readme.write_text("- One.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README.md has 0 places for the figures, not 1"):
        overhead.write([run()], docs, readme)
    assert "old" in docs.read_text(encoding="utf-8")


def test_the_projects_own_files_have_a_place_for_the_figures(tmp_path: Path) -> None:
    docs, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
    for copy, path in ((docs, ROOT / "docs/benchmarks.md"), (readme, ROOT / "README.md")):
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    overhead.write([run()], docs, readme)
    assert "| gpt | 3 | 10.0 |" in docs.read_text(encoding="utf-8")


def test_each_precision_takes_turns_and_a_turn_has_its_start_and_end() -> None:
    short, long = overhead_turns.measure("cpu", "mlp", [1, 6], 2)
    precisions = ["plain", PROFILER, STACKS, "MemTracker", "ampmem"]
    assert (list(short["turns"]), list(long["turns"])) == (
        precisions,
        [precision for precision in precisions if precision != "MemTracker"],
    )
    for each in (short, long):
        measured = Run(**json.loads(json.dumps(each)))
        assert measured.key == f"cpu/mlp/{each['steps']}"
        for taken in measured.turns.values():
            assert len(taken) == 2
            assert all(0 < loop <= whole for loop, whole in taken)


def test_ampmems_precision_records_every_step_of_the_block() -> None:
    training = overhead_turns.Training("mlp", "cpu")
    profile = overhead_turns.PRECISIONS["ampmem"](training)
    with profile:
        training.run(2)
    assert len(profile.recording().steps) == 2


def test_every_program_is_there_for_both_commands_and_trains() -> None:
    assert tuple(overhead_turns.PROGRAMS) == (*overhead.PROGRAMS, overhead.LONG)
    for program in overhead.PROGRAMS:
        training = overhead_turns.Training(program, "cpu")
        assert len(training.optimizer.state) == len(list(training.model.parameters()))


def test_a_part_has_its_own_time_without_that_of_the_parts_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def take(ns: int, inside: Callable[[], None] | None = None) -> None:
        nonlocal now
        now += ns
        if inside is not None:
            inside()

    monkeypatch.setattr(overhead_turns, "process_time_ns", lambda: now)
    clock = overhead_turns.Clock()
    inner = clock.timed("inner", partial(take, 4))
    clock.timed("outer", partial(take, 10, inner))()
    inner()
    assert (clock.taken["outer"], clock.taken["inner"]) == (10, 8)
    assert (clock.calls["outer"], clock.calls["inner"]) == (1, 2)


def test_runs_that_the_file_has_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def started(wanted: list[str], *more: str) -> list[str]:
        asked.append(wanted)
        return [json.dumps(overhead.asdict(run(steps=int(key.rpartition("/")[2])))) for key in wanted]

    monkeypatch.setattr(overhead, "started", started)
    file = tmp_path / "turns.jsonl"
    for steps in ([3], [3, 20]):
        wanted = [f"cpu/gpt/{each}" for each in steps]
        assert [each.key for each in overhead.measured(wanted, 3, file)] == wanted
    assert asked == [["cpu/gpt/3"], ["cpu/gpt/20"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "tpu"], "no run has that in its name; there are cpu/mlp/3, "),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--only", "cpu", "--write"], "--write needs mlp/3 on the CPU and on the emulated runtime, at least"),
        (["--gpu", "--write"], "--write needs mlp/3 on the CPU and on the emulated runtime, at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        overhead.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_the_tables(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compiled_extension: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setattr(sys, "executable", ready_python())
    overhead.main(["--only", "cpu/mlp/3", "--rounds", "1"])
    said = capfd.readouterr()
    assert "**In the loop, on the CPU:**\n\n| program | steps |" in said.out
    assert said.out.count("\n| mlp | 3 | ") == 2
    assert said.err.startswith("cpu/mlp/3: ")


@pytest.mark.parametrize("name", [name for names in overhead_turns.PARTS.values() for name in names.split()])
def test_each_part_names_a_function_of_ampmem(name: str) -> None:
    module, _, path = f"ampmem.{name}".partition(":")
    assert callable(functools.reduce(getattr, path.split("."), import_module(module)))
