"""With ``--run-to-end``: the first evaluation after the recorded steps has a recording of its own.

Until it begins, and once it is over, the script runs without hooks.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import ampmem
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ampmem import patching
from ampmem import profile as ampmem_profile
from ampmem.analysis.summary import Summary, summarize
from ampmem.recorder.evaluation import ThenEvaluation
from ampmem.recorder.options import Options
from ampmem.recorder.process import active
from ampmem.recorder.session import Session
from ampmem.recording import read
from ampmem.vocabulary import Device, Forced, Precision, StepOn

ROWS, WIDE = 4096, 1024
RESULT, WEIGHTS = ROWS * WIDE * 4, (WIDE + 1) * WIDE * 4
SCRIPT = f"""
import os, signal, sys, torch
from torch.nn.modules import module
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear({WIDE}, {WIDE}, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, {WIDE}, device=device)).sum().backward()
        optimizer.step()

def hooks():
    return len(module._global_forward_pre_hooks) + len(module._global_forward_hooks)

def evaluate():
    results = []
    model.eval()
    with torch.no_grad():
        for batch in range(int(sys.argv[1])):
            results.append(model(torch.ones({ROWS}, {WIDE}, device=device)))
            if batch == 2 and "fork" in sys.argv and os.fork() == 0:
                model(torch.ones(8, {WIDE}, device=device))
                os._exit(hooks())
            if batch == 2 and "interrupt" in sys.argv:
                os.kill(os.getpid(), signal.SIGINT)

train(5)
print("waits", hooks())
evaluate()
print("status", os.wait()[1] if "fork" in sys.argv else 0)
train(2)
print("trains on", hooks())
evaluate()
"""


def kept(summary: Summary) -> tuple[int, int, str]:
    """The bytes that the finding about kept predictions names, and those that its change saves; and its message."""
    (found,) = [each for each in summary.findings if each.code == "predictions-kept"]
    saved = found.off_peak if found.off_failure is None else found.off_failure
    assert saved is not None
    return found.bytes, saved, found.message


@pytest.mark.parametrize("gpu", [(), ("--gpu", "24GiB")], ids=["cpu", "simulated"])
def test_the_first_evaluation_after_the_steps_is_recorded(tmp_path: Path, gpu: tuple[str, ...]) -> None:
    """Its recording is what ``--phase evaluation`` records, and says what it keeps; the script is left alone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.evaluation.ampmem").write_text("precious")
    fork = () if gpu else ("fork",)  # CUDA cannot be used in a forked process
    done = ampmem(tmp_path, "profile", *gpu, "--run-to-end", "-o", "run.ampmem", "train.py", "5", *fork)
    assert (done.returncode, done.stdout) == (0, "waits 0\nstatus 0\ntrains on 0\n"), done.stderr
    said = " ".join(done.stderr.split())
    assert "recorded the first evaluation after these steps in run.evaluation.2.ampmem" in said
    assert "5 steps, one for each batch The peak" in said.replace("recorded steps", "") and "keep its number" in said
    assert (tmp_path / "run.evaluation.ampmem").read_text() == "precious"
    steps = read(tmp_path / "run.ampmem")
    assert "the first evaluation after the recorded steps is in run.evaluation.2.ampmem" in steps.notes
    assert (len(steps.steps), steps.run.step_on) == (3, "")
    recording = read(tmp_path / "run.evaluation.2.ampmem")
    summary = summarize(recording)
    assert (recording.run.step_on, [step.batch_size for step in recording.steps]) == ("evaluation", [ROWS] * 5)
    size, saved, message = kept(summary)
    assert (size, saved) == (4 * RESULT, 4 * RESULT)
    assert "the local variable `results` of evaluate (train.py:" in message
    peak = summary.peak.categories
    assert (peak["kept_predictions"], peak["gradients"], peak["parameters"]) == (4 * RESULT, WEIGHTS, WEIGHTS)
    assert summary.conservation.residual_bytes == 0
    if not gpu:
        ampmem(tmp_path, "profile", "--phase", "evaluation", "--steps", "9", "-o", "alone.ampmem", "train.py", "5")
        alone = summarize(read(tmp_path / "alone.ampmem"))
        assert alone.peak.categories == peak


def test_an_evaluation_in_which_memory_runs_out_is_written(tmp_path: Path) -> None:
    """Of 336 MiB the context takes 80: there is room for weights, gradients, workspaces, a batch, and 12 results."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ampmem(tmp_path, "profile", "--gpu", "336MiB", "--run-to-end", "-o", "run.ampmem", "train.py", "40")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "one for each batch, and the batch in which the device ran out of memory out of memory in forward" in said
    summary = summarize(read(tmp_path / "run.evaluation.ampmem"))
    oom = summary.out_of_memory
    assert oom is not None and oom.ended_the_run and not oom.later
    batches = sum(step.finished for step in read(tmp_path / "run.evaluation.ampmem").steps)
    size, saved, _ = kept(summary)
    assert (size, saved, oom.alive["kept_predictions"]) == (batches * RESULT,) * 3 and batches == 12
    later = summarize(read(tmp_path / "run.ampmem")).out_of_memory  # the recording of the steps says so, too
    assert later is not None and later.later and later.asked == oom.asked


def test_an_interrupted_evaluation_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ampmem(tmp_path, "profile", "--device", "cpu", "--quiet", "--run-to-end", "train.py", "9", "interrupt")
    assert done.returncode == -2 and "interrupted after 3 steps" in done.stderr
    assert len(read(tmp_path / "train.evaluation.ampmem").steps) == 2  # the third batch was not over


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[nn.Module, ThenEvaluation]]:
    """A model that was trained for the two recorded steps, and what waits for its evaluation."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = patching.in_place()
    both = session_of(tmp_path)
    both.start()
    for _ in range(3):
        train(model, optimizer)
    assert active() is None and not (_global_forward_pre_hooks or _global_forward_hooks)
    yield model, both
    both.close()
    assert (patching.in_place(), active()) == (before, None)
    assert not (_global_forward_pre_hooks or _global_forward_hooks)


def session_of(folder: Path, **options: object) -> ThenEvaluation:
    asked = Options(path=folder / "run.ampmem", script="train.py", device=Device.CPU, steps=2, **options)  # type: ignore[arg-type]
    session = Session(asked, on_done=lambda: both.begin())
    both = ThenEvaluation(session, pytest.fail, force=False)
    return both


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def recorded(both: ThenEvaluation) -> int:
    """The number of batches of the recorded evaluation; 0 if there is none."""
    both.close()
    evaluation = both.recorded()
    return 0 if evaluation is None else len(read(evaluation.options.path).steps)


class Frozen(nn.Module):
    """Runs a part of itself without gradients while it trains."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = self.part(x)
        return y


def test_what_is_no_evaluation_begins_none(waiting: tuple[nn.Module, ThenEvaluation], tmp_path: Path) -> None:
    """Parts that run without gradients while a model trains, other threads, and modes in which nothing runs."""
    model, both = waiting
    Frozen(model)(torch.ones(2, 8))
    model[1].eval()
    model(torch.ones(2, 8))
    with torch.inference_mode():
        torch.ones(2)
    with torch.no_grad():
        thread = threading.Thread(target=lambda: model(torch.ones(2, 8)))
        thread.start()
        thread.join()
    assert not _global_forward_pre_hooks and both.evaluation is None
    assert recorded(both) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["run.ampmem"]


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "set_grad_enabled", "eval"])
def test_an_evaluation_begins_by_its_mode(waiting: tuple[nn.Module, ThenEvaluation], how: str) -> None:
    """The first batch is recorded, too, and training ends it."""
    model, both = waiting
    if how == "eval":
        with torch.no_grad():  # nothing runs here, but the module stays in eval mode
            model.eval()
        outside = torch.enable_grad()
    else:
        outside = torch.set_grad_enabled(False) if how == "set_grad_enabled" else getattr(torch, how)()
    with outside:
        for _ in range(3):
            model(torch.ones(20, 8))
    torch.set_grad_enabled(True)
    assert both.evaluation is not None and both.evaluation.outcome.recorded == 2  # the last batch may have a loss
    model.train()(torch.ones(2, 8))
    assert active() is None
    with torch.no_grad():  # a second evaluation
        model(torch.ones(20, 8))
    assert recorded(both) == 3


@pytest.mark.parametrize(
    "options",
    [{"precision": Precision.AMP}, {"forced": Forced(foreach=False)}, {"step_on": StepOn.FORWARD}],
    ids=["precision", "forced", "inference"],
)
def test_with_changes_forced_nothing_more_is_recorded(tmp_path: Path, options: dict[str, object]) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = session_of(tmp_path, **options)
    before = patching.in_place()
    both.start()
    for _ in range(2):
        train(model, optimizer)
    assert patching.in_place() == before
    with torch.no_grad():
        model.eval()(torch.ones(2, 8))
    assert recorded(both) == 0 and both.evaluation is None


def test_the_loss_of_a_batch_belongs_to_it(tmp_path: Path) -> None:
    """Computed after the model with gradients on, it saves its log-probabilities, which a list of losses keeps."""
    rows, classes = 256, 512
    model = nn.Linear(64, classes)
    x, target = torch.randn(rows, 64), torch.randint(classes, (rows,))
    losses = []
    with ampmem_profile(output=tmp_path / "run.ampmem", steps=9, phase="evaluation", device="cpu"):
        model.eval()
        for _ in range(4):  # the first of a model that no optimizer has may be a teacher's
            losses.append(nn.functional.cross_entropy(model(x), target))
        model.train()(x).sum().backward()
    summary = summarize(read(tmp_path / "run.ampmem"))
    saved = rows * classes * 4 + 4  # the log-probabilities, and the sum of the classes' weights
    assert [step.peak.categories["activations"] for step in summary.steps] == [saved, 2 * saved, 3 * saved]
    (found,) = [each for each in summary.findings if each.code == "no-grad-missing"]
    assert found.bytes == 3 * saved


class Trainer:
    """Keeps what each batch returned, as Hugging Face's Trainer does where it computes metrics."""

    def evaluation_loop(self, model: nn.Module) -> list[torch.Tensor]:
        all_preds = []
        with torch.no_grad():
            for _ in range(4):
                all_preds.append(model(torch.ones(512, 64)))
        return all_preds


def test_what_a_trainer_keeps_is_moved_by_its_own_argument(tmp_path: Path) -> None:
    with ampmem_profile(output=tmp_path / "run.ampmem", steps=9, phase="evaluation", device="cpu"):
        Trainer().evaluation_loop(nn.Linear(64, 128))
    (found,) = [each for each in summarize(read(tmp_path / "run.ampmem")).findings if each.code == "predictions-kept"]
    assert found.change.startswith("TrainingArguments(eval_accumulation_steps=1), which moves the results of each ")
