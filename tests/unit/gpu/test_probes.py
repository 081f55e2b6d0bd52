"""What the probes make of what they see; without a GPU, what they would see is made up."""

import json
from collections import Counter
from pathlib import Path

import probes
import pytest
import results
import torch
from children import Ended
from probing.events import Taken, clock_verdict, engine_thread, engine_verdict
from probing.scripts import illegal_verdict, names_verdict
from results import DIED, FAILED, LATE, PASSED, SKIPPED, Row

BASE = 1_700_000_000_000_000_000
NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def test_the_clock_is_behind_its_tags_by_less_than_a_microsecond() -> None:
    entries = [(str(BASE + 1000 * each), BASE // 1000 + each + each % 3) for each in range(100)]
    entries += [("", 5), ("the script's own", 6)]
    row = clock_verdict(entries)
    assert row.outcome == PASSED
    assert row.facts | {"entries": 102, "tagged": 100, "us min": 0.0, "us max": 2.0, "below -1 us": 0} == row.facts


def test_an_entry_before_its_tag_is_a_failure_and_so_are_no_tags() -> None:
    row = clock_verdict([(str(BASE), BASE // 1000), (json.dumps({"t": BASE}), BASE // 1000 - 2)])
    assert row.outcome == FAILED
    assert row.facts["below -1 us"] == 1
    assert clock_verdict([("", 1)]).outcome == FAILED


def taken(address: int, block: int, *names: str) -> Taken:
    return Taken(address=address, block=block, names=names)


def test_the_engines_blocks_are_those_that_were_recorded() -> None:
    seen = [taken(1, 512, "aten::addmm"), taken(2, 1024, NODE, "AddmmBackward0", "aten::mm"), taken(3, 512, NODE)]
    traced = [(1, 400), (2, 1000), (3, 8)]
    recorded = [("AddmmBackward0", 1024), ("AddmmBackward0", 512)]
    good = engine_verdict(seen, traced, recorded)
    assert good.outcome == PASSED
    assert good.facts["blocks_as_rounded"] == 3
    assert engine_verdict(seen, traced, [("aten::t", 1024), recorded[1]]).outcome == FAILED
    assert engine_verdict(seen, traced, [("aten::mm", 2048), recorded[1]]).outcome == FAILED
    assert engine_verdict(seen, traced, [("", 1024), recorded[1]]).facts["recorded_without_a_name"] == 1
    assert engine_verdict(seen, traced, recorded[:1]).outcome == FAILED
    assert engine_verdict(seen, [(1, 400), (3, 8), (2, 1000)], recorded).outcome == FAILED
    assert engine_verdict(seen[:1], traced[:1], []).outcome == FAILED  # nothing was asked


def ended(code: int | None, *lines: str) -> Ended:
    return Ended(code=code, seconds=1.0, lines=lines)


def test_an_error_of_the_device_is_the_scripts_own() -> None:
    plain = ended(1, "RuntimeError: CUDA error: an illegal memory access was encountered")
    own = ('  File "illegal.py", line 18', "torch.AcceleratorError: CUDA error: an illegal memory access")
    assert illegal_verdict(plain, ended(1, "by an illegal access", *own), 1).outcome == PASSED
    assert illegal_verdict(plain, ended(-6, *own), 1).outcome == FAILED
    assert illegal_verdict(plain, ended(1, "ampmem: it failed"), 1).outcome == FAILED
    assert illegal_verdict(plain, ended(1, *own), 0).outcome == FAILED


def test_names_of_what_is_computed_again() -> None:
    pairs = Counter({("aten::gelu", "blocks.0.act"): 3, ("AddmmBackward0", "blocks.0.linear"): 2, ("x", "else"): 9})
    assert names_verdict(pairs, 5, 0).outcome == PASSED
    assert names_verdict(pairs, 0, 0).outcome == FAILED
    assert names_verdict(pairs, 5, 8).outcome == FAILED
    wrong = names_verdict(pairs + Counter({("aten::gelu", "blocks.1.norm"): 1}), 5, 0)
    assert wrong.outcome == FAILED
    assert wrong.facts["foreign"] == {"aten::gelu in blocks.1.norm": 1}


def test_what_needs_a_gpu_is_skipped_elsewhere_and_an_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str, folder: Path) -> Row:
        raise RuntimeError("the fan\nis loud")

    monkeypatch.setitem(probes.PROBES, "broken", (("cpu",), broken))
    assert probes.ask("clock", "cpu").outcome == SKIPPED
    row = probes.ask("broken", "cpu")
    assert (row.outcome, row.detail) == (FAILED, "RuntimeError: the fan is loud")


def test_a_probe_that_dies_or_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "probes.py"
    script.write_text(
        "import os, sys, time\nprint('asking')\nsys.stdout.flush()\n"
        "os.abort() if sys.argv[-1] == 'clock' else time.sleep(600)\n"
    )
    monkeypatch.setattr(probes, "__file__", str(script))
    monkeypatch.setattr(probes, "EACH", 2)
    found = probes.ask_all(["clock", "reentrant"], "cuda", 60, tmp_path / "rows.jsonl")
    assert [(row.name, row.outcome) for row in found] == [("clock", DIED), ("reentrant", LATE)]
    assert found[0].detail == "exit code -6: asking"
    assert [row.name for row in results.read(tmp_path / "rows.jsonl")] == ["clock", "reentrant"]


@pytest.mark.slow
def test_the_names_of_a_reentrant_checkpoint_on_the_cpu() -> None:
    assert probes.ask("reentrant", "cpu").outcome == PASSED


def test_a_step_on_the_cpu_has_the_nodes_that_torch_profiler_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe of the engine's thread, but for the trace, which only a GPU has."""
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(memory, "_snapshot", lambda *_, **__: {"device_traces": [[]]})
    for name, answer in (("synchronize", None), ("empty_cache", None), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    facts = engine_thread("cpu", tmp_path).facts
    count = facts["in_backward"]
    assert count > 5
    assert (facts["recorded_in_backward"], facts["recorded_with_the_same_block"]) == (count, count)
    assert facts["recorded_with_a_foreign_name"] == 0
    assert facts["recorded_without_a_name"] == 2  # the sums of biases, which the engine makes around the node
