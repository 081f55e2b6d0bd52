"""The pytest plugin, in runs of pytest inside this one; a device is simulated for all that need not be on the CPU."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from support.ready_python import ready_python
from torch import nn

import ampmem
from ampmem.integrations.pytest import judging, plugin  # noqa: F401 - an inner run forgets what it imports

pytestmark = pytest.mark.slow

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "ampmem.integrations.pytest.plugin"
INSTALLED = any(entry.name == "ampmem" for entry in entry_points(group="pytest11"))
"""Whether this environment was made since the plugin is there; otherwise it has to be named."""

MODEL = """
import unittest
import pytest, torch
from torch import nn

WIDTH = 256

def train(steps=3, kept=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.ones(32, WIDTH, device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kept is not None:
            kept.append(loss)
    return model
"""
PARAMETERS = 2 * (256 * 256 + 256) * 4
"""Bytes of the model's parameters."""


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """What an inner run imports is forgotten after it, and torch does not bear to be imported twice."""
    for device in ("cpu", "cuda"):
        with ampmem.profile(device="sim" if device == "cuda" else "cpu") as prof:
            model = nn.Linear(4, 4).to(device)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.ones(2, 4, device=device)).sum().backward()
                optimizer.step()
        prof.summary().to_json()


class Ran:
    """What a run of pytest came to."""

    def __init__(self, code: int, lines: Sequence[str]) -> None:
        self.code = code
        self.lines = list(lines)
        self.text = "\n".join(lines)

    def outcomes(self) -> dict[str, str]:
        """The outcome of each test, by its name."""
        found = {}
        for line in self.lines:
            name, space, word = line.partition(" ")
            if space and "::" in name and word.split() and word.split()[0].isupper():
                found[name.partition("::")[2]] = word.split()[0]
        return found


def run(pytester: pytest.Pytester, source: str, *args: str, width: int = 160) -> Ran:
    pytester.makepyfile(test_it=MODEL + source)
    named = ("-p", "no:memray", *(() if INSTALLED else ("-p", PLUGIN)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        done = pytester.runpytest_inprocess(
            *named, "-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers", "-v", *args
        )
    return Ran(int(done.ret), done.outlines + done.errlines)


def test_a_limit_holds_to_the_byte(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        f"""
SIM = dict(device="sim", gpu="h100")

@pytest.mark.ampmem(parameters={PARAMETERS}, **SIM)
def test_as_many(): train()

@pytest.mark.ampmem(parameters={PARAMETERS - 1}, **SIM)
def test_one_less(): train()

@pytest.mark.ampmem(optimizer_state={2 * PARAMETERS}, **SIM)
@pytest.mark.ampmem(gradients={PARAMETERS}, **SIM)
@pytest.mark.ampmem(peak="80 MiB", **SIM)
def test_several(): train()

@pytest.mark.ampmem(optimizer_state={2 * PARAMETERS}, **SIM)
@pytest.mark.ampmem(gradients={PARAMETERS - 1}, **SIM)
@pytest.mark.ampmem(peak="60 MiB", **SIM)
def test_several_broken(): train()

@pytest.mark.ampmem(parameters={PARAMETERS - 1}, device="cpu")
def test_on_the_cpu(): train()
""",
    )
    assert done.outcomes() == {
        "test_as_many": "PASSED",
        "test_one_less": "FAILED",
        "test_several": "PASSED",
        "test_several_broken": "FAILED",
        "test_on_the_cpu": "FAILED",
    }
    assert "memory: broken: parameters 514.000 KiB, 1 B over its budget of 513.999 KiB" in done.text
    assert PARAMETERS == 514 * 1024
    assert "over its budget of 60.0 MiB, and 1 more limit" in done.text
    assert "test_it.py:12 train" in done.text
    assert "passed" in done.lines[-1]


def test_subtests_are_judged_with_their_test_and_not_one_by_one(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        f"""
class TestUnit(unittest.TestCase):
    @pytest.mark.ampmem(parameters={PARAMETERS - 1}, gpu="h100")
    def test_second_is_larger(self):
        global WIDTH
        for WIDTH in (64, 256):
            with self.subTest(width=WIDTH):
                train()

    @pytest.mark.ampmem(growth="1 MiB", steps=6, device="sim", gpu="h100")
    def test_steps_of_both(self):
        for number in range(2):
            with self.subTest(number=number):
                train()
""",
    )
    found = done.outcomes()
    assert (found["TestUnit::test_second_is_larger"], found["TestUnit::test_steps_of_both"]) == ("FAILED", "PASSED")
    assert "memory: broken: parameters 514.000 KiB, 1 B over its budget of 513.999 KiB" in done.text


def test_the_tests_own_end_comes_first(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
pytestmark = pytest.mark.ampmem(peak="1 KiB", device="sim")

def test_fails():
    train()
    assert "mine" == "yours"

def test_skips():
    train()
    pytest.skip("not now")

@pytest.mark.xfail(reason="it takes too much")
def test_expected(): train()

@pytest.mark.xfail(strict=True)
@pytest.mark.ampmem(peak="1 GiB")
def test_not_expected_to_pass(): train()

@pytest.mark.xfail(raises=ZeroDivisionError)
def test_expected_otherwise(): train()

class TestCase(unittest.TestCase):
    def test_unit_fails(self):
        train()
        self.assertEqual(1, 2)
    def test_unit_skips(self): self.skipTest("no")
    def test_unit_breaks(self): train()
    @unittest.expectedFailure
    def test_unit_expected(self):
        train()
        self.assertEqual(1, 2)
    @pytest.mark.ampmem(peak="1 GiB")
    def test_unit_holds(self): train()
""",
    )
    assert done.outcomes() == {
        "test_fails": "FAILED",
        "test_skips": "SKIPPED",
        "test_expected": "XFAIL",
        "test_not_expected_to_pass": "FAILED",
        "test_expected_otherwise": "FAILED",
        "TestCase::test_unit_fails": "FAILED",
        "TestCase::test_unit_skips": "SKIPPED",
        "TestCase::test_unit_breaks": "FAILED",
        "TestCase::test_unit_expected": "XFAIL",
        "TestCase::test_unit_holds": "PASSED",
    }
    assert done.text.count("over its budget of 1.0 KiB") == 4  # the two that break it, and their summary lines
    assert "[XPASS(strict)]" in done.text


def test_nothing_recorded_is_a_failure_even_where_warnings_are_errors(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
pytestmark = pytest.mark.filterwarnings("error")

@pytest.mark.ampmem(peak="1 GiB", device="cpu")
def test_no_model(): pass

@pytest.mark.ampmem(peak="1 GiB", device="sim")
def test_elsewhere():
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters()).step()

@pytest.mark.ampmem(peak="1 GiB", device="cpu")
def test_inference():
    with torch.no_grad(): nn.Linear(4, 4)(torch.ones(2, 4))

@pytest.mark.ampmem(peak="1 GiB", device="cpu", step_on="forward")
def test_inference_asked_for():
    with torch.no_grad(): nn.Linear(4, 4)(torch.ones(2, 4))

@pytest.mark.ampmem(budgets={"modules.encoder.activations": "1 GiB"}, device="sim")
def test_no_such_module(): train()

@pytest.mark.ampmem(peak="1 GiB", device="cuda")
def test_no_gpu(): train()
""",
    )
    assert done.outcomes() == {
        "test_no_model": "FAILED",
        "test_elsewhere": "FAILED",
        "test_inference": "PASSED",
        "test_inference_asked_for": "PASSED",
        "test_no_such_module": "FAILED",
        "test_no_gpu": "PASSED" if torch.cuda.is_available() else "FAILED",
    }
    for message in (
        "memory: no model was seen",
        "memory: the model is on cpu: none of its 2 parameters was on the simulated GPU",
        "memory: not judged: modules.encoder.activations: no module 'encoder' was seen",
    ):
        assert message in done.text
    assert "During handling" not in done.text
    if not torch.cuda.is_available():
        assert done.text.count("cuda cannot be recorded: ") == 2  # at the test, and in pytest's list of what failed


def test_growth_is_of_what_stays_from_step_to_step(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.ampmem(growth="0 B", steps=4, device="sim")
def test_none(): train(4)

@pytest.mark.ampmem(growth="0 B", steps=4, device="sim")
def test_losses_are_kept(): train(4, kept=[])

@pytest.mark.ampmem(growth="4 B", steps=4, device="sim")
def test_losses_may_be_kept(): train(4, kept=[])

@pytest.mark.ampmem(growth="1 GiB", steps=10, device="sim")
def test_too_few(): train(3)
""",
    )
    assert done.outcomes() == {
        "test_none": "PASSED",
        "test_losses_are_kept": "FAILED",
        "test_losses_may_be_kept": "PASSED",
        "test_too_few": "FAILED",
    }
    assert "memory: broken: growth 4 B in each step, 4 B over its budget of 0 B" in done.text
    assert "growth: what grew from the end of step 0 to the end of step 3: 12 B more" in done.text
    assert "memory: growth needs 10 steps, and 3 steps finished; train longer, or give steps=3" in done.text


def test_the_fixture_records_blocks_and_is_the_module(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        f"""
def test_summary(ampmem):
    with ampmem.profile(device="sim", gpu="h100") as prof: train()
    assert prof.summary().peak.categories["parameters"] == {PARAMETERS}
    assert isinstance(prof.summary(), ampmem.Summary)
    assert ampmem.load(prof.path).steps
    assert ampmem.__version__

def test_call(ampmem):
    with ampmem(device="cpu") as prof: train()
    assert prof.summary().source == "cpu"

@pytest.mark.ampmem(parameters={PARAMETERS - 1}, gpu="h100")
def test_each_block(ampmem):
    train(1)  # which no limit is about
    with ampmem.profile() as first: train()
    with ampmem.profile(device="cpu") as second: train()
    assert (first.summary().source, second.summary().source) == ("simulated", "cpu")

@pytest.mark.ampmem(peak="1 GiB", device="sim")
def test_no_block(ampmem): train()

@pytest.fixture
def recorded(ampmem):
    with ampmem.profile(): train()

@pytest.mark.ampmem(peak="1 KiB", device="sim")
def test_of_a_fixture(recorded): pass

def test_nested_is_the_tests_own(ampmem):
    with pytest.raises(Exception, match="cannot be nested"), ampmem.profile(device="cpu"):
        with ampmem.profile(device="sim"): pass
""",
        "--ampmem",
        "-W",
        "ignore::RuntimeWarning",
    )
    assert done.outcomes() == {
        "test_summary": "PASSED",
        "test_call": "PASSED",
        "test_each_block": "FAILED",
        "test_no_block": "FAILED",
        "test_of_a_fixture": "FAILED",
        "test_nested_is_the_tests_own": "PASSED",
    }
    assert "memory of block 1: broken: parameters 514.000 KiB, 1 B over" in done.text
    assert "memory of block 2: broken: parameters 514.000 KiB, 1 B over" in done.text
    assert "memory: no block was recorded: in a test with the fixture ampmem the limit" in done.text
    table = done.text.partition(" memory ")[2]
    assert "test_it.py::test_each_block (block 2)" in table
    assert "optimizer_state" in table


def test_a_block_that_is_left_open_is_closed_and_an_error_of_its_test(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
HELD = []

def block(ampmem):
    with ampmem.profile(device="sim", gpu="h100"):
        train(1)
        yield

def test_left_open(ampmem):
    HELD.append(block(ampmem))
    next(HELD[0])

@pytest.mark.ampmem(peak="1 GiB", device="sim")
def test_after():
    HELD.clear()  # which leaves the block once more
    train(1)

def test_failure_is_its_own(ampmem):
    held = block(ampmem)
    next(held)
    assert False

def test_no_device_is_left(): assert not torch.cuda.is_available()

@pytest.fixture
def recorded(ampmem):
    with ampmem.profile(device="sim", gpu="h100") as prof: yield prof
    assert prof.summary().peak.bytes

@pytest.mark.ampmem(peak="1 GiB")
def test_a_fixture_may_end_it(recorded): train(1)
""",
    )
    ends = [line.rpartition("::")[2].split()[:2] for line in done.lines if line.startswith("test_it.py::")]
    assert ends == [
        ["test_left_open", "PASSED"],
        ["test_left_open", "ERROR"],
        ["test_after", "PASSED"],
        ["test_failure_is_its_own", "FAILED"],
        ["test_no_device_is_left", "PASSED"],
        ["test_a_fixture_may_end_it", "PASSED"],
    ]
    assert "a block of the fixture ampmem was still open after its test: something holds it" in done.text


def test_nearer_marks_hold_and_may_not_ask_for_another_recording(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
pytestmark = pytest.mark.ampmem(peak="1 KiB", device="sim", gpu="h100")

@pytest.mark.ampmem(peak="1 GiB")
class TestNearer:
    @pytest.mark.parametrize("many", [1, 2])
    def test_holds(self, many): train(many)
    @pytest.mark.ampmem(peak="1 MiB")
    def test_breaks(self): train()
""",
    )
    assert done.outcomes() == {
        "TestNearer::test_holds[1]": "PASSED",
        "TestNearer::test_holds[2]": "PASSED",
        "TestNearer::test_breaks": "FAILED",
    }
    other = '\n@pytest.mark.ampmem(peak="1 GiB", device="cpu")\n@pytest.mark.ampmem(growth="0 B", device="sim")\n'
    done = run(pytester, other + "def test_both(): pass\n")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert (
        "ERROR: test_it.py::test_both: ampmem: device='cpu', but another mark has device='sim'; a test is "
        "recorded only once"
    ) in done.text


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('ampmem("1 GiB")', "ampmem: give '1 GiB' a name, such as peak='1 GiB'"),
        ('ampmem(peek="1 GiB")', "ampmem: unknown limit 'peek'; did you mean 'peak'?; limits of modules are given"),
        ('ampmem(peak="1 GiB", devise="cpu")', "ampmem: unknown limit 'devise'; did you mean 'device'?"),
        ('ampmem(peak="2 GBX")', "ampmem: peak: '2 GBX' is not a size"),
        ("ampmem(peak=-1)", "ampmem: peak: -1 is not a size"),
        ("ampmem(peak=None)", "ampmem: peak: None is not a size"),
        ('ampmem(budgets={"activation": 1})', "unknown budget 'activation'; did you mean 'activations'?"),
        ('ampmem(budgets=["peak"])', "ampmem: budgets must be a mapping from keys to limits"),
        ('ampmem(peak="1 GiB", device="sims")', "ampmem: unknown device 'sims'"),
        ('ampmem(peak="1 GiB", gpu="h100", device="cpu")', "ampmem: gpu= simulates a GPU, and device='cpu'"),
        ('ampmem(peak="1 GiB", assume="unique=1")', "ampmem: assume= is for a simulated GPU only: give"),
        ('ampmem(peak="1 GiB", device="sim", gpu="h1")', "ampmem: unknown GPU 'h1'"),
        ('ampmem(peak="1 GiB", device="sim", assume="x=1")', "ampmem: assume=x=1: --assume does not know 'x'"),
        ('ampmem(peak="1 GiB", step_on="x")', "ampmem: step_on=x: give backward"),
        ('ampmem(growth="0 B", steps=1)', "ampmem: steps=1: growth needs at least 2 steps"),
        ('ampmem(peak="1 GiB", steps=3)', "ampmem: steps= is the number of steps over which growth is measured"),
    ],
)
def test_a_mark_that_cannot_be_meant_is_a_usage_error(pytester: pytest.Pytester, mark: str, message: str) -> None:
    source = f"\n@pytest.mark.{mark}\ndef test_wrong(): pass\ndef test_other(): pass\n"
    done = run(pytester, source)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in done.lines if line.startswith("ERROR: ")]
    assert len(errors) == 1
    assert errors[0].startswith("ERROR: test_it.py::test_wrong: ")
    assert message in errors[0]
    assert run(pytester, source, "-k", "other").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ampmem-allow", "1%"], "--ampmem-allow needs --ampmem-baseline DIR"),
        (["--ampmem-update"], "--ampmem-update needs --ampmem-baseline DIR, where it writes"),
        (["--ampmem-baseline", "none"], "--ampmem-baseline none: no such directory"),
        (["--ampmem-baseline", ".", "--ampmem-allow", "much"], "--ampmem-allow: 'much' is neither a share"),
    ],
)
def test_options_that_cannot_be_meant_are_a_usage_error(
    pytester: pytest.Pytester, options: list[str], message: str
) -> None:
    done = run(pytester, "\ndef test_other(): pass\n", *options)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert message in done.text


WITHOUT_A_LIMIT = """
pytestmark = pytest.mark.ampmem(device="sim", gpu="h100")

def test_trains(): train()

@pytest.mark.ampmem(parameters=1)
def test_limited(): train()

def test_does_not_train(): pass
"""


def test_a_mark_may_say_how_to_record_and_limit_nothing(pytester: pytest.Pytester) -> None:
    done = run(pytester, WITHOUT_A_LIMIT, "--ampmem", "-W", "error::pytest.PytestDeprecationWarning")
    assert done.outcomes() == {"test_trains": "PASSED", "test_limited": "FAILED", "test_does_not_train": "PASSED"}
    rows = [line.split()[:2] for line in done.text.partition(" memory ")[2].splitlines() if "test_it.py::" in line]
    assert ["test_it.py::test_trains", "peak"] in rows


def test_one_mark_limits_several_and_any_budget(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        f"""
SIM = dict(device="sim", gpu="h100")
MODULE = {{"modules.(model).parameters": {PARAMETERS - 1}}}

@pytest.mark.ampmem(peak="80 MiB", parameters={PARAMETERS}, growth=0, steps=3, budgets={{"device": "2 GiB"}}, **SIM)
def test_kept(): train()

@pytest.mark.ampmem(peak="60 MiB", parameters={PARAMETERS}, budgets={{**MODULE, "device": 1}}, **SIM)
def test_broken(): train()
""",
    )
    assert done.outcomes() == {"test_kept": "PASSED", "test_broken": "FAILED"}
    assert "over its budget of 60.0 MiB, and 2 more limits" in done.text
    said = {line.split()[0]: "BROKEN" in line for line in done.lines if "  budget  " in line}
    assert said == {"peak": True, "parameters": False, "modules.(model).parameters": True, "device": True}


def test_beside_memray_each_plugin_has_its_own_mark(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytest_memray")
    monkeypatch.setattr(sys, "executable", ready_python())
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    source = f"""
@pytest.mark.limit_memory("30 MB")
def test_memray_kept(): bytearray(1024 * 1024)

@pytest.mark.limit_memory("30 MB")
def test_memray_broken(): bytearray(40 * 1024 * 1024)

@pytest.mark.ampmem(parameters={PARAMETERS}, device="sim", gpu="h100")
def test_ampmem_kept(): train()

@pytest.mark.ampmem(parameters={PARAMETERS - 1}, device="sim", gpu="h100")
def test_ampmem_broken(): train()

@pytest.mark.limit_memory("1 GB")
@pytest.mark.ampmem(parameters={PARAMETERS}, device="sim", gpu="h100")
def test_both_kept(): train()

@pytest.mark.limit_memory("1 GB")
@pytest.mark.ampmem(parameters={PARAMETERS - 1}, device="sim", gpu="h100")
def test_ampmem_of_both_broken(): train()

@pytest.mark.limit_memory("30 MB")
@pytest.mark.ampmem(parameters={PARAMETERS}, device="sim", gpu="h100")
def test_memray_of_both_broken():
    train()
    bytearray(40 * 1024 * 1024)
"""
    pytester.makepyfile(test_it=MODEL + source)
    named = () if INSTALLED else ("-p", PLUGIN)
    options = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--strict-markers",
        "-W",
        "error::pytest.PytestDeprecationWarning",
        "-v",
    )
    ran = pytester.runpytest_subprocess(*named, *options, timeout=240)
    done = Ran(int(ran.ret), ran.outlines)
    assert done.outcomes() == {
        "test_memray_kept": "PASSED",
        "test_memray_broken": "MEMORY",
        "test_ampmem_kept": "PASSED",
        "test_ampmem_broken": "FAILED",
        "test_both_kept": "PASSED",
        "test_ampmem_of_both_broken": "FAILED",
        "test_memray_of_both_broken": "MEMORY",
    }
    for said in (
        "Test was limited to 30.0MiB but allocated",
        "memory: broken: parameters 514.000 KiB, 1 B over its budget of 513.999 KiB",
    ):
        assert len([line for line in done.lines if line.startswith(said)]) == 2


def test_what_failed_by_itself_is_listed_with_what_it_took_and_leaves_its_baseline(pytester: pytest.Pytester) -> None:
    source = """
import os
pytestmark = pytest.mark.ampmem(parameters="1 GiB", device="sim", gpu="h100")

def test_fails():
    train()
    assert "broken" not in os.environ

def test_fails_at_once():
    assert "broken" not in os.environ
    train()

def test_fails_with_a_block(ampmem):
    for _ in range(2):
        with ampmem.profile(): train()
    assert "broken" not in os.environ

def test_skips():
    train()
    if "broken" in os.environ: pytest.skip("not now")
"""
    compare = ("--ampmem", "--ampmem-baseline", "memory")
    assert run(pytester, source, *compare, "--ampmem-update").code == 0
    files = {path: path.read_bytes() for path in Path("memory").rglob("*.json")}
    assert len(files) == 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("broken", "1")
        for update in ((), ("--ampmem-update",)):
            done = run(pytester, source, *compare, *update)
            rows = {
                line[: line.index("  ")]: line.split()
                for line in done.text.partition(" memory ")[2].splitlines()
                if line.startswith("test_it.py::")
            }
            name = "test_it.py::test_fails"
            assert sorted(rows) == [
                f"{name} (failed by itself)",
                f"{name}_at_once (failed by itself)",
                f"{name}_with_a_block (block 2, failed by itself)",
                f"{name}_with_a_block (failed by itself)",
            ]
            assert rows[f"{name} (failed by itself)"][4:7] == rows[f"{name}_with_a_block (failed by itself)"][4:7]
            assert "MiB" in rows[f"{name} (failed by itself)"]
            assert "MiB" not in rows[f"{name}_at_once (failed by itself)"]
            assert f"memory: {'0 written, 0 as they were' if update else '0 compared'}" in done.lines
    assert {path: path.read_bytes() for path in Path("memory").rglob("*.json")} == files


BASELINE = """
@pytest.mark.ampmem(peak="100 MiB", device="sim", gpu="h100")
@pytest.mark.parametrize("steps", [2, 3], ids=["two/2", "three"])
def test_marked(steps): train(steps)

def test_recorded(ampmem):
    with ampmem.profile(device="sim"): train()

def test_plain(): pass
"""


def test_a_baseline_is_written_compared_and_left_alone(pytester: pytest.Pytester) -> None:
    compare = ("--ampmem-baseline", "memory", "--ampmem")
    done = run(pytester, BASELINE, *compare, "--ampmem-update")
    assert done.code == 0
    assert "memory: 3 written, 0 as they were" in done.lines
    files = {path: path.read_bytes() for path in sorted(Path("memory").rglob("*.json"))}
    assert [path.parent.as_posix() for path in files] == ["memory/test_it"] * 3
    assert Path("memory/test_it/test_recorded.json") in files
    assert all(str(pytester.path).encode() not in content for content in files.values())

    assert "memory: 0 written, 3 as they were" in run(pytester, BASELINE, *compare, "--ampmem-update").lines
    assert {path: path.read_bytes() for path in files} == files

    done = run(pytester, BASELINE, *compare)
    assert done.code == 0
    assert "memory: 3 compared" in done.lines
    assert {path: path.read_bytes() for path in files} == files


def test_what_has_grown_since_the_baseline_fails(pytester: pytest.Pytester) -> None:
    compare = ("--ampmem-baseline", "memory", "--ampmem")
    recorded = BASELINE.partition("def test_recorded")
    assert run(pytester, "def test_recorded" + recorded[2], *compare, "--ampmem-update").code == 0
    grown = BASELINE.replace("    with ampmem", "    global WIDTH\n    WIDTH = 512\n    with ampmem")
    done = run(pytester, grown, *compare)
    assert done.outcomes() == {
        "test_marked[two/2]": "FAILED",
        "test_marked[three]": "FAILED",
        "test_recorded": "FAILED",
        "test_plain": "PASSED",
    }
    assert "memory: baseline not found: memory/test_it/test_marked-three-" in done.text
    after = 2 * (512 * 512 + 512) * 4
    assert "memory: broken: peak" in done.text
    assert "of memory/test_it/test_recorded.json, and" in done.text
    assert "parameters  baseline" in done.text.replace("parameters       ", "parameters  ")
    assert f"+{(after - PARAMETERS) / 2**20:.1f} MiB" in done.text
    assert "since the" in done.text.partition(" memory ")[2]
    allowed = run(pytester, grown, *compare, "--ampmem-allow", "1GiB", "-k", "recorded")
    assert allowed.outcomes() == {"test_recorded": "PASSED"}
    shrunk = BASELINE.replace("    with ampmem", "    global WIDTH\n    WIDTH = 128\n    with ampmem")
    assert run(pytester, shrunk, *compare, "-k", "recorded").outcomes() == {"test_recorded": "PASSED"}


def test_a_baseline_that_cannot_be_written_fails_its_test_in_one_line(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("memory").mkdir()
    pytester.path.joinpath("memory", "test_it").touch()
    done = run(pytester, BASELINE, "--ampmem-baseline", "memory", "--ampmem-update", "-k", "recorded")
    assert done.outcomes() == {"test_recorded": "FAILED"}
    (line,) = [line for line in done.lines if line.startswith("memory: cannot write memory/test_it/test_recorded.json")]
    assert "File exists" in line
    assert "Traceback" not in done.text and "plugin.py" not in done.text


def test_other_items_and_runs_without_memory_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    mark = 'import pytest\npytestmark = pytest.mark.ampmem(peak="1 KiB")\n'
    pytester.makepyfile(documented=f'{mark}def f():\n    """\n    >>> 1\n    1\n    """\n')
    done = run(pytester, "\ndef test_plain(): pass\n", "--doctest-modules", "--ampmem")
    assert done.code == 0
    assert "no test was recorded: mark one with" in done.text
    assert " memory " not in run(pytester, "\ndef test_plain(): pass\n").text


def test_the_example_in_the_documents_is_true(pytester: pytest.Pytester) -> None:
    page = ROOT / "docs" / "pytest.md"
    if not page.is_file():
        pytest.skip("no checkout: the documents are missing")
    python, printed = (
        part.partition("```")[0]
        for part in page.read_text(encoding="utf-8").replace("```python", "```console").split("```console\n")[1:3]
    )
    pytester.makepyfile(test_memory=python)
    named = () if INSTALLED else ("-p", PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        done = pytester.runpytest_inprocess(*named, "-p", "no:cacheprovider", "--ampmem", "--strict-markers")
    done.assert_outcomes(passed=2, failed=1)
    said = [line.strip() for line in done.outlines]
    for line in printed.splitlines()[1:]:
        if line.strip() not in {"", "…"}:
            assert line.strip() in said, line


def test_the_plugin_is_found_and_costs_no_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"ampmem": PLUGIN}
    code = f"import pytest, sys; before = set(sys.modules); import {PLUGIN}; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    new = [name for name in done.stdout.strip("[]\n").replace("'", "").split(", ") if name]
    assert PLUGIN in new
    assert [name for name in new if not name.startswith("ampmem")] == []
    assert not {"ampmem.api", "ampmem.analysis", "ampmem.recorder"} & set(new)


@pytest.mark.slow
def test_under_xdist_the_controller_reports_what_workers_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", ready_python())
    pytester.makepyfile(test_it=MODEL + BASELINE + '\n@pytest.mark.ampmem(peak="x")\ndef test_wrong(): pass\n')
    named = [] if INSTALLED else ["-p", PLUGIN]
    options = ["-n", "2", "--dist", "loadfile", "--ampmem", "--ampmem-baseline", "memory", "--ampmem-update"]
    done = pytester.runpytest_subprocess(*named, "-p", "no:cacheprovider", *options, timeout=240)
    text = done.stdout.str()
    assert "3 passed" in text or "4 passed" in text
    assert "1 error" in text
    assert "test_it.py::test_wrong: ampmem: peak: 'x' is not a size" in text
    assert "memory: 3 written, 0 as they were" in text
    assert "test_it.py::test_recorded" in text.partition(" memory ")[2]
    assert len(list(Path("memory").rglob("*.json"))) == 3
