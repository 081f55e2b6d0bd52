"""A recording begins and ends on one thread; wherever else it is ended, nothing of it stays, and nothing crashes."""

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.commands import python
from support.guest import Ended, alone, beside
from torch import nn

import ampmem
from ampmem.errors import UsageError
from ampmem.patching import in_place
from ampmem.recorder.sources import extension
from ampmem.recorder.torch_private.general import profiler_enabled

pytestmark = pytest.mark.slow

PATIENCE_S = 60
LATER = "left on a different thread"


class Training:
    """A model in training."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.ones(2, 8)).sum().backward()
            self.optimizer.step()


def run(*targets: Callable[[], object]) -> None:
    """Each on a thread of its own, all at once, to the end."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def recorded(prof: ampmem.Profile) -> tuple[int, int]:
    summary = prof.summary()
    return len(summary.steps), summary.conservation.residual_bytes


def test_of_two_at_once_the_second_is_refused() -> None:
    for _ in range(5):
        gate, results = threading.Barrier(2), []

        def record(gate: threading.Barrier = gate, results: list[object] = results) -> None:  # type: ignore[type-arg]
            gate.wait(PATIENCE_S)
            try:
                with ampmem.profile() as prof:
                    gate.wait(PATIENCE_S)
                    Training().steps(2)
            except UsageError as refused:
                gate.wait(PATIENCE_S)
                results.append("active already" in str(refused))
            else:
                results.append(recorded(prof))

        run(record, record)
        assert sorted(results, key=str) == [(2, 0), True]


def test_left_on_another_thread_it_ends_when_its_own_next_trains() -> None:
    training, prof = Training(), ampmem.profile()
    prof.__enter__()
    training.steps(2)

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match=LATER):
            prof.__exit__(None, None, None)

    run(leave)
    training.steps(1)
    assert in_place() == []
    assert not profiler_enabled()
    assert recorded(prof) == (2, 0)
    assert any("another thread ended the recording" in note for note in prof.recording().notes)


def test_it_ends_with_its_thread() -> None:
    training, prof = Training(), ampmem.profile()

    def begin() -> None:
        prof.__enter__()
        training.steps(2)

    run(begin)
    assert in_place() == []
    prof.__exit__(None, None, None)
    assert recorded(prof) == (2, 0)


def test_left_here_it_ends_on_a_thread_that_goes_on_training() -> None:
    training, prof = Training(), ampmem.profile()
    begun, left, enabled = threading.Event(), threading.Event(), []

    def train() -> None:
        prof.__enter__()
        training.steps(2)
        begun.set()
        left.wait(PATIENCE_S)
        training.steps(2)
        enabled.append(profiler_enabled())

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait(PATIENCE_S)
    with pytest.warns(RuntimeWarning, match=LATER):
        prof.__exit__(None, None, None)
    left.set()
    thread.join(PATIENCE_S)
    assert enabled == [False]
    assert in_place() == []
    assert recorded(prof) == (2, 0)


def test_a_generator_that_is_closed_on_another_thread() -> None:
    training = Training()

    def steps() -> Iterator[ampmem.Profile]:
        with ampmem.profile() as prof:
            while True:
                training.steps(1)
                yield prof

    generator = steps()
    next(generator)
    prof = next(generator)

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match=LATER):
            generator.close()  # type: ignore[attr-defined]

    run(leave)
    training.steps(1)
    assert in_place() == []
    assert recorded(prof) == (2, 0)


def test_one_after_the_other_on_threads_of_their_own() -> None:
    results = []

    def record() -> None:
        with ampmem.profile() as prof:
            Training().steps(2)
        results.append(recorded(prof))

    run(record)
    run(record)
    record()
    assert results == [(2, 0)] * 3


def test_a_step_belongs_to_the_recorded_thread() -> None:
    refusals = []
    with ampmem.profile() as prof:
        Training().steps(1)

        def end_step() -> None:
            try:
                prof.step()
            except UsageError as refused:
                refusals.append(str(refused))

        run(end_step)
    assert len(refusals) == 1
    assert "a thread that is not recorded" in refusals[0]


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"), ampmem.profile(output=tmp_path / "none" / "run.ampmem"):
        pass
    with pytest.raises(UsageError, match="model must be"), ampmem.profile("no model"):  # type: ignore[arg-type]
        pass
    with ampmem.profile() as prof:
        Training().steps(1)
    assert recorded(prof) == (1, 0)


NEVER_LEFT = """
import sys, threading, torch, ampmem
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
prof = ampmem.profile(output="run.ampmem")
waits = threading.Event()

def train():
    prof.__enter__()
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    trained.set()
    if sys.argv[1] == "daemon":
        waits.wait()

trained = threading.Event()
if sys.argv[1] == "main":
    train()
else:
    thread = threading.Thread(target=train, daemon=sys.argv[1] == "daemon")
    thread.start()
    trained.wait(60)
print("the end")
"""


@pytest.mark.parametrize("where", ["main", "thread", "daemon"])
def test_never_left_it_ends_with_the_program(tmp_path: Path, where: str) -> None:
    done = python(tmp_path, "-c", NEVER_LEFT, where)
    assert (done.returncode, done.stdout) == (0, "the end\n")
    assert len(ampmem.load(tmp_path / "run.ampmem").steps) == 2


# -- forward on threads of the script's -----------------------------------------------------------

ELSEWHERE = "ran on a thread that is not recorded"


def test_training_on_another_thread_is_no_missing_model() -> None:
    with (
        pytest.warns(RuntimeWarning, match="Linear ran forward on another thread.*in the thread that trains"),
        ampmem.profile(),
    ):
        run(lambda: Training().steps(2))


def test_of_two_models_on_two_threads_one_is_recorded_and_the_other_named() -> None:
    mine, other = Training(), Training()
    with ampmem.profile() as prof:
        mine.steps(1)
        run(lambda: other.steps(1))
        mine.steps(1)
    assert recorded(prof) == (2, 0)
    assert prof.summary().parameters.bytes == 4 * (8 * 8 + 8)
    assert [ELSEWHERE in note for note in prof.recording().remarks] == [True]


def test_replicas_that_run_on_threads_are_said_to_be_missing() -> None:
    """As torch.nn.DataParallel runs them; the recorded thread has a forward of its own, backward and the update."""
    training = Training()
    with ampmem.profile() as prof:
        for _ in range(2):
            outputs = [training.model(torch.ones(2, 8))]
            replica = functools.partial(lambda made: made.append(training.model(torch.ones(2, 8))), outputs)
            run(replica, replica)
            torch.stack([output.sum() for output in outputs]).sum().backward()
            training.optimizer.step()
    assert recorded(prof) == (2, 0)
    assert [ELSEWHERE in note for note in prof.recording().remarks] == [True]


ON_A_THREAD = """
import threading
import torch
import ampmem

def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile() as prof:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    print(len(prof.summary().steps))

for _ in range(2):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
train()
"""


def test_the_first_recording_of_a_process_on_another_thread_prints_nothing(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", ON_A_THREAD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n1\n1\n", "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Without ampmem, which is always the same."""
    return alone(tmp_path_factory.mktemp("alone") / "plain", "trains_on_threads")


# Each time the threads meet elsewhere. tests/benchmarks/destruction.py runs it 500 times, and with sanitizers.
@pytest.mark.parametrize("steps", ["2", "2", "1000", "1000"])
@pytest.mark.parametrize("by_extension", ["on", "off"])
def test_four_threads_train_as_without_ampmem(
    tmp_path: Path,
    compiled_extension: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_extension: str,
    steps: str,
    trained: Ended,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, by_extension)
    both = beside(tmp_path, "trains_on_threads", "--steps", steps, to_the_end=True, plain=trained)
    assert both.differences() == []
