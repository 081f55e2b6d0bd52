"""What becomes of a torch that lacks a private name: one clear line, or a lesser recording that says so."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.ready_python import ready_python

torch = pytest.importorskip("torch")

import ampmem  # noqa: E402
from ampmem.errors import UsageError  # noqa: E402
from ampmem.recorder.torch_private import cuda, general  # noqa: E402
from ampmem.recorder.torch_private import entries as torch_entries  # noqa: E402
from ampmem.recorder.torch_private.entries import ENTRIES, PrivateName, Use, probe  # noqa: E402
from ampmem.recording import read  # noqa: E402

TRAINING = """
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
SHARDED = """
import torch.distributed
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""
DAMAGED = """
import builtins, gc, json, os, sys
from types import FunctionType, ModuleType, SimpleNamespace
import torch
import torch._dynamo  # imports much by name, and optimizers import it
import torch.utils.checkpoint
import torch.distributed.fsdp  # what the damage is done to
from ampmem.cli.main import main
from ampmem.recorder.torch_private.entries import at

class Absent:
    def __get__(self, instance, owner=None):
        raise AttributeError("not in this torch")
    def __set__(self, instance, value):
        pass

def unmarked(optimizer):
    optimizer._zero_grad_profile_name = "zero_grad"
    type(optimizer).step = optimizer.profile_hook_step(type(optimizer).step)

def damage(owner, name):
    found = at(owner)
    if name == "__script_unsupported":  # on what this returns
        torch.amp.autocast_mode.autocast_decorator = lambda region, function: function
    elif name == "found_inf":  # which this does not tell
        torch.amp.GradScaler.step = lambda scaler, optimizer: optimizer.step()
    elif name == "hooked":  # what this marks
        torch.optim.Optimizer._patch_step_function = unmarked
    elif owner == "torch.autograd.graph.Node":  # C makes their classes
        torch.Tensor.grad_fn = SimpleNamespace()
    elif isinstance(found, ModuleType):
        if hasattr(found, name):  # torch's own code goes on finding it
            if not hasattr(builtins, name):  # as Python's own compile
                setattr(builtins, name, getattr(found, name))
            delattr(found, name)
    elif isinstance(found, type) and found is not getattr(torch._C, "_FunctionBase", None):
        setattr(found, name, Absent())
    else:  # whose attributes cannot be taken away
        parent, _, last = owner.rpartition(".")
        setattr(at(parent), last, SimpleNamespace())

gc.collect()
gc.freeze()  # or each child would copy all of torch to look for garbage in it
for number, (damages, device, precision, script) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()  # a process of its own for each
    if not child:
        for owner, name in damages:
            damage(owner, name)
        for module in [each for each in sys.modules if each.startswith(("ampmem.cli", "ampmem.recorder"))]:
            del sys.modules[module]  # to be imported by a torch that is damaged
        with open(f"{number}.txt", "w") as said:
            os.dup2(said.fileno(), 2)
        code = None
        try:
            sys.argv[1:] = ["profile", "--quiet", "--device", device, "--precision", precision]
            sys.argv += ["-o", f"{number}.ampmem", script]
            main()
        except SystemExit as error:
            code = error.code
        except BaseException:
            import traceback
            traceback.print_exc()
        with open(f"{number}.code", "w") as said:
            said.write(str(code))
        os._exit(0)
    os.waitpid(child, 0)
"""


def are_apart(one: PrivateName, other: PrivateName) -> bool:
    """Whether neither is missing because the other is: their owners differ, and neither is the other's owner."""
    return one.owner != other.owner and one.owner != other.title and other.owner != one.title


def groups() -> list[list[PrivateName]]:
    """Entries that can be missing together: of one use, all refused or none, and apart."""
    found: list[list[PrivateName]] = []
    for entry in ENTRIES:
        alike = (each for each in found if (each[0].use, not each[0].without) == (entry.use, not entry.without))
        group = next((each for each in alike if all(are_apart(entry, other) for other in each)), None)
        if group is None:
            found.append(group := [])
        group.append(entry)
    return found


GROUPS = groups()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``ampmem profile`` said and left without the entries of each group, by their numbers."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "train.py").write_text(TRAINING)
    (folder / "distributed.py").write_text(SHARDED + TRAINING)
    damages = [
        (
            [(entry.owner, entry.name) for entry in group],
            "cuda" if group[0].use is Use.CUDA else "cpu",
            "amp" if group[0].use is Use.PRECISION else "as-is",
            "distributed.py" if group[0].use is Use.SHARDED else "train.py",
        )
        for group in GROUPS
    ]
    command = [ready_python(), "-c", DAMAGED, json.dumps(damages)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def titles(entries: list[PrivateName]) -> list[str]:
    return [entry.title for entry in entries]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(len(GROUPS)), ids=[f"{group[0].use.name}-{group[0].title}" for group in GROUPS]
)
def test_without_them_there_is_one_line_or_a_lesser_recording(number: int, runs: Path) -> None:
    group = GROUPS[number]
    said, code = (runs / f"{number}.txt").read_text(), (runs / f"{number}.code").read_text()
    recording = runs / f"{number}.ampmem"
    assert "Traceback" not in said
    if not group[0].without:
        assert code == "2"
        line = r"ampmem: this torch \(([^)]+)\) lacks (.+); ampmem works with torch 2\.11 to 2\.15\n"
        found = re.fullmatch(line, said)
        assert found is not None and found[1] == torch.__version__, said
        assert set(titles(group)) <= set(found[2].split(", "))  # some take others with them
        assert not recording.exists()
    elif group[0].use is Use.CUDA and not torch.cuda.is_available():  # what is said of that is another test's
        assert (code, said.count("\n")) == ("2", 1)
        assert "cuda cannot be recorded: " in said
    else:
        assert code == "0", said
        assert f"recorded 1 step in {number}.ampmem" in said
        notes = {f"this torch ({torch.__version__}) lacks {each.title}: {each.without}" for each in group}
        assert notes <= set(read(recording).notes)


def test_this_torch_lacks_nothing_that_a_recording_on_the_cpu_takes() -> None:
    assert probe(Use.ALWAYS, Use.PRECISION) == []


def test_every_entry_says_what_it_is_for() -> None:
    assert len(set(titles(ENTRIES))) == len(ENTRIES) > 50
    for entry in ENTRIES:
        assert entry.why, entry.title


def entry(name: str, *, without: str = "", use: Use = Use.ALWAYS) -> PrivateName:
    return PrivateName(owner="torch", name=name, why="a test", without=without, use=use)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts other entries in place of the real ones."""

    def put(*others: PrivateName) -> None:
        monkeypatch.setattr(torch_entries, "ENTRIES", list(others))
        torch_entries._missing.cache_clear()

    yield put
    torch_entries._missing.cache_clear()


def test_all_that_is_missing_is_said_at_once_and_only_where_it_is_needed(
    entries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries(
        entry("gone"),
        entry("Tensor"),
        entry("also", without="less is known"),
        entry("cuda_gone", use=Use.CUDA),
        entry("cuda_less", without="no marks", use=Use.CUDA),
    )
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    with pytest.raises(UsageError) as refused:
        probe(Use.ALWAYS, Use.CUDA)
    text = "this torch (2.15.0) lacks torch.gone, torch.cuda_gone; ampmem works with torch 2.11 to 2.15"
    assert str(refused.value) == text
    with pytest.raises(UsageError, match=r"lacks torch\.gone;"):
        probe(Use.ALWAYS)
    assert probe(Use.PRECISION) == []


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.10.1", False),
        ("2.11.0+cu130", True),
        ("2.15.3", True),
        ("2.16.0a0+git1234567", False),
        ("3.0.0", False),
        ("unknown", False),
    ],
)
def test_a_torch_that_was_not_tested_is_used_with_a_note(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile(device="cpu") as profiled:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    note = f"ampmem is not tested with torch {version}, only with torch 2.11 to 2.15"
    assert (note in profiled.recording().notes) is not tested


def test_profile_in_python_is_refused_in_the_same_words(entries: Any) -> None:
    entries(entry("gone"))
    with pytest.raises(UsageError, match=r"lacks torch\.gone; ampmem works with torch 2\.11 to 2\.15"):
        ampmem.profile(device="cpu").__enter__()


def test_a_stand_in_refuses_rather_than_to_do_nothing(entries: Any) -> None:
    entries(gone := entry("gone"))
    stand_in = torch_entries.needed(gone.owner, gone.name, gone.why)
    with pytest.raises(UsageError, match=r"lacks torch\.gone"):
        stand_in("any", arguments=True)


def test_what_is_patched_but_missing_is_a_place_that_nobody_calls(entries: Any) -> None:
    entries()
    owner, name = torch_entries.patched("torch", "gone", "a test", without="less")
    assert vars(owner)[name] is None
    assert not hasattr(torch, "gone")


def test_cuda_without_its_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in [each for each in ENTRIES if each.owner == "torch._C" and each.use is Use.CUDA]:
        monkeypatch.delattr(torch._C, item.name, raising=False)
    assert not cuda.history_is_on()
    assert cuda.metadata_setter() is None
    cuda.observe_out_of_memory(lambda *_: None)


def test_foreach_is_concluded_from_where_the_parameters_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert general._by_device(parameters, False, use_fused=False) == (False, False)
    expected = general.fused_or_foreach(parameters, False, use_fused=False)
    assert general._by_device(parameters, False, use_fused=False) == tuple(expected)


def test_no_loss_is_read_where_a_tensor_of_functorch_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.ones(())
    assert general.below_functorch(loss) is loss
    monkeypatch.setattr(general, "_is_batched", None)
    assert general.below_functorch(loss) is None


WITHOUT_SIMULATOR = """
import sys

for name in [each for each in sys.modules if each.partition(".")[0] == "ampmem"]:
    del sys.modules[name]  # which a ready Python has imported

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("ampmem.simulator"):
            raise AssertionError(f"a recording has imported {name}")

sys.meta_path.insert(0, Refused())
"""
ON_THE_CPU = """
from ampmem.cli.main import main
sys.argv[1:] = ["profile", "--device", "cpu", "--precision", "amp", "train.py"]
main()
"""
ON_A_GPU = """
from pathlib import Path
from time import time_ns
import torch
from support.cuda_model import ModelCuda
from ampmem.recorder import session
from ampmem.recorder.device import Placement
from ampmem.recorder.options import Options
from ampmem.recorder.sources.cuda.source import CudaSource

gpu = ModelCuda(time_ns)
session.choose_source = lambda options, baseline: CudaSource(api=gpu)
Placement.missing = lambda placement: None  # no tensor is on a modelled GPU
running = session.Session(Options(path=Path("gpu.ampmem"), script="train.py"))
running.start()
kept = gpu.malloc(1000)
exec(open("train.py").read())
running.close()
running.check()
"""


@pytest.mark.slow
@pytest.mark.parametrize("recording", [ON_THE_CPU, ON_A_GPU])
def test_a_recording_never_reaches_the_simulated_device(recording: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    path = f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    command = [ready_python(), "-c", WITHOUT_SIMULATOR + path + recording]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.ampmem"))) == 1
