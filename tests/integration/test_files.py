"""No run that predicts, compares or searches changes a file of the user, through whatever writer, however it ends."""

import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import writers
from support.commands import ampmem, python

from ampmem.recording import read

SUPPORT = Path(__file__).parents[1] / "support"
WRITERS = str(SUPPORT / "writers.py")
WEAKER = str(SUPPORT / "weaker.py")
KEPT = ("overlay", "user")
"""The kinds of protection under which the script can write, and read what it wrote."""
KINDS = (*KEPT, "landlock", "python")
BY_COMPILED_CODE = {"jit", "in_c", "in_a_shell", "in_another_python", "database"}
"""The ways that Python's own functions cannot refuse."""


def tree(folder: Path) -> dict[str, object]:
    """Everything about the files below ``folder`` but when they were read; ampmem's own are left out."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix != ".ampmem":
            changed = None if path == folder or path.parent == folder else status.st_mtime_ns
            found[str(path.relative_to(folder))] = (status.st_mode, status.st_uid, status.st_nlink, changed, content)
    return found


def run(kind: str, folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """``ampmem`` with ``arguments`` on a machine with this kind of protection."""
    if kind == "overlay":
        return ampmem(folder, *arguments, fresh=fresh)
    return python(folder, WEAKER, kind, *arguments, fresh=fresh)


@functools.cache
def changed(kind: str) -> tuple[dict[str, object], dict[str, object], dict[str, object], str]:
    """All of the writers in one simulated run: the files before and after, what each said, and standard error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert python(folder, WRITERS, "make").returncode == 0
        before = tree(folder)
        done = run(kind, folder, "profile", "--gpu", "h100", "--quiet", "-o", "w.ampmem", WRITERS)
        assert done.returncode == 0, done.stderr
        assert len(read(folder / "w.ampmem").steps) == 1
        assert [path.name for path in folder.iterdir() if path.name.startswith(".ampmem")] == []
        return before, tree(folder), json.loads(done.stdout), done.stderr


def part(found: dict[str, object], writer: str) -> dict[str, object]:
    return {path: what for path, what in found.items() if Path(path).parts[0] == writer}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", writers.WAYS)
def test_files_are_as_before(writer: str, kind: str) -> None:
    before, after, said, _ = changed(kind)
    if kind == "python" and writer in BY_COMPILED_CODE:
        assert part(after, writer) != part(before, writer)  # as the first line says
        return
    assert part(after, writer) == part(before, writer)
    if kind in KEPT:
        assert said[writer] is True
    elif writer not in ("temporary", "modes", "in_another_python"):
        assert said[writer] is not True


def test_the_script_can_write_temporary_files_in_each_kind() -> None:
    assert {kind: changed(kind)[2]["temporary"] for kind in KINDS} == dict.fromkeys(KINDS, True)


def test_what_is_not_protected_is_said_first() -> None:
    first = {kind: changed(kind)[3].splitlines()[1] for kind in KINDS}
    assert first["overlay"] == first["user"] == "ampmem: recording to w.ampmem"
    assert first["landlock"].startswith("ampmem: this machine allows no overlays (namespaces are off), so the script")
    assert first["landlock"].endswith("it gets PermissionError")
    assert first["python"] == (
        "ampmem: this machine allows neither overlays nor Landlock, so files are protected from Python's own functions "
        "only: compiled code (C, C++, Rust) and programs that the script starts can still change them"
    )


def test_what_the_script_wrote_is_said_to_be_gone() -> None:
    assert "ampmem: the script wrote 3" in changed("overlay")[3]
    assert "which are gone now: your own files are as before" in changed("overlay")[3]


TRAIN = """
import os, sys, torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
model.load_state_dict(torch.load("last.pt", map_location=device))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(8, 64, device=device)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if os.environ.get("RANK", "0") != "0": continue
    if os.path.exists("last.pt"): os.replace("last.pt", "previous.pt")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, "last.pt")
    for name in sorted(os.listdir("old"))[:-1]: os.remove(f"old/{name}")
    os.system(f"echo {step} >> log.txt")
    if os.environ.get("DIES") == str(step): os.kill(os.getpid(), 9)
    if os.environ.get("FAILS") == str(step): raise ValueError("on purpose")
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with a script, its checkpoints of days, and its log."""
    folder = tmp_path / "work"
    (folder / "old").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    for name in ("last.pt", "previous.pt", "old/1.pt", "old/2.pt"):
        torch.save(model.state_dict(), folder / name)
    (folder / "log.txt").write_text("days\n")
    return folder


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = tree(folder)
    yield
    assert tree(folder) == before


SIMULATED = ("--gpu", "1GiB")
COMMANDS = {
    "profile": ("profile", *SIMULATED, "train.py"),
    "a rank": ("profile", "--device", "sim", "--world-size", "2", "--rank", "1", "train.py"),
    "watch": ("watch", "--device", "sim", "train.py"),
    "fit": ("fit", *SIMULATED, "--points", "0", "--precision", "fp32", "train.py", "--vary", "1:2"),
    "advise": ("advise", *SIMULATED, "--allow", "foreach,fused", "train.py"),
    "advise on the CPU": ("advise", "--device", "cpu", "--allow", "foreach", "train.py"),
    "compare": ("compare", "--precision", "fp32,amp", *SIMULATED, "-o", "run", "train.py"),
    "compare on the CPU": ("compare", "--precision", "fp32,amp", "-o", "run", "train.py"),
    "check": ("check", "--budget", "peak=1GiB", "train.py"),
    "check two processes": ("check", "--budget", "peak=1GiB", "--nproc-per-node", "2", "train.py"),
    "profile that protects": ("profile", "--device", "cpu", "--files", "protect", "train.py"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "overlay") for name in COMMANDS),
        # Ranks are started in either kind in the same way, by three bare interpreters.
        *(pytest.param(name, "user", marks=pytest.mark.slow) for name in COMMANDS if "two" not in name),
    ],
)
def test_no_command_that_predicts_or_compares_changes_a_file(
    trained: Path, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "two" in name:  # for the first optimizer each bare interpreter imports half of torch
        without = TRAIN.replace("optimizer.step(); optimizer.zero_grad()", "model.zero_grad()")
        (trained / "train.py").write_text(without.replace("optimizer = ", "# "))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with unchanged(trained), unchanged(temporary):
        # A launcher starts its processes itself: no server, which would be outside of the namespace, may do it.
        done = run(kind, trained, *COMMANDS[name], fresh="two" in name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_runs_on_a_real_device_say_so_first(trained: Path) -> None:
    said = "ampmem: the runs leave your files as they are: what the script writes is gone after each run"
    for name in ("compare on the CPU", "check"):
        assert ampmem(trained, *COMMANDS[name], fresh=False).stderr.startswith(said)
    assert "files" not in ampmem(trained, *COMMANDS["compare"]).stderr.splitlines()[0]


def test_a_real_run_is_the_users_and_writes(trained: Path) -> None:
    done = ampmem(trained, "profile", "--device", "cpu", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr
    assert (trained / "log.txt").read_text() == "days\n0\n1\n"
    done = ampmem(trained, "check", "--budget", "peak=1GiB", "--files", "write", "train.py")
    assert done.returncode == 0, done.stderr
    assert (trained / "log.txt").read_text() == "days\n0\n1\n0\n1\n"


@pytest.mark.parametrize("kind", ["overlay", "user", "landlock"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_killed_run_changes_nothing(trained: Path, kind: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", str(step))
    if kind == "landlock":  # it may not write, but die it can
        (trained / "train.py").write_text(
            TRAIN.replace("    if os.path.exists", "    try:\n     if os.path.exists")
            .replace("    torch.save", "     torch.save")
            .replace("    for name", "    except Exception: pass\n    for name")
            .replace('os.remove(f"old/{name}")', "pass")
        )
    with unchanged(trained):
        done = run(kind, trained, "profile", "--quiet", *SIMULATED, "--steps", "9", "train.py")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(read(trained / "train.ampmem").steps) == step + 1
    assert sorted(path.name for path in trained.iterdir() if "ampmem" in path.name) == ["train.ampmem"]


@pytest.mark.parametrize("kind", ["overlay", "user"])
def test_a_killed_parent_ends_the_run(trained: Path, kind: str) -> None:
    slow = TRAIN.replace(
        '    if os.environ.get("DIES")', '    print(step, flush=True); sys.stdin.read(1)\n    if os.environ.get("DIES")'
    )
    (trained / "train.py").write_text(slow)
    start = ["-m", "ampmem"] if kind == "overlay" else [WEAKER, kind]
    with unchanged(trained):
        running = subprocess.Popen(
            [sys.executable, *start, "profile", *SIMULATED, "--steps", "9", "train.py"],
            cwd=trained,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert running.stdout is not None
        assert running.stdout.readline() == b"0\n"
        running.kill()
        assert running.stdout.read() == b""  # until the last process that has it open has ended
        running.communicate()


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_fails_keeps_its_exit_code_and_its_files(
    trained: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "0")
    with unchanged(trained):
        done = run(kind, trained, "profile", "--quiet", *SIMULATED, "train.py")
    assert done.returncode == 1
    if kind in KEPT:
        assert "ValueError: on purpose" in done.stderr
    else:
        assert "to protect your files, the script cannot write outside of" in done.stderr or kind == "python"


def test_an_interrupt_reaches_the_script_in_a_child(trained: Path) -> None:
    waits = TRAIN.replace("    loss =", "    print('ready', flush=True); sys.stdin.read(1)\n    loss =")
    (trained / "train.py").write_text(waits)
    with unchanged(trained):
        running = subprocess.Popen(
            [sys.executable, WEAKER, "user", "profile", *SIMULATED, "train.py"],
            cwd=trained,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
    assert running.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors


def test_what_the_script_wrote_can_be_kept(trained: Path) -> None:
    with unchanged(trained):
        done = ampmem(trained, "profile", "--quiet", *SIMULATED, "--keep-files", "../kept", "train.py")
    kept = Path(f"{trained}/../kept{trained}").resolve()
    assert "ampmem: kept 3 files that the script wrote in ../kept" in done.stderr.splitlines()
    assert sorted(path.name for path in kept.iterdir()) == ["last.pt", "log.txt", "previous.pt"]
    assert (kept / "log.txt").read_text() == "days\n0\n1\n"
    assert set(torch.load(kept / "last.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("train.py/kept", "--keep-files train.py/kept: the folder cannot be made: Not a directory"),
        ("kept", "could not keep all files that the script wrote in kept: Not a directory"),
    ],
)
def test_what_cannot_be_kept_is_said(trained: Path, folder: str, said: str) -> None:
    (trained / "kept").mkdir()
    (trained / "kept" / trained.parts[1]).touch()  # where the copies' folder would be
    done = ampmem(trained, "profile", "--gpu", "h100", "--quiet", "--keep-files", folder, "train.py")
    assert f"ampmem: {said}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_each_of_several_runs_keeps_its_files(trained: Path) -> None:
    command, *options = COMMANDS["compare on the CPU"]
    done = ampmem(trained, command, "--no-times", "--keep-files", "kept", *options)
    assert done.returncode == 0, done.stderr
    logs = [trained / "kept" / number / str(trained)[1:] / "log.txt" for number in "12"]
    assert [log.read_text() for log in logs] == ["days\n0\n1\n", "days\n0\n1\n"]


LARGE = """
import torch
from torch import nn
model = nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, "a.pt")
    found = torch.load("a.pt")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["rng"])
"""


def test_tensors_without_values_take_no_space(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LARGE)
    done = ampmem(
        tmp_path, "profile", "--quiet", "--gpu", "h100", "--files-limit", "1MiB", "--keep-files", "kept", "train.py"
    )
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "kept" / str(tmp_path)[1:] / "a.pt"
    assert kept.stat().st_size > 3 * 4 * (4096 * 4096 + 4096)
    assert kept.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("line", ["numpy.ones(2 << 20).tofile('a.bin')", "torch.save(torch.rand(4 << 20), 'a.pt')"])
def test_more_than_the_limit_says_which_option_helps(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(
        f"{LARGE.replace('for step', 'import numpy')}".split("import numpy")[0] + f"import numpy\n{line}\n"
    )
    done = ampmem(tmp_path, "profile", "--quiet", "--gpu", "h100", "--files-limit", "8MiB", "train.py")
    assert done.returncode == 1
    assert (
        "ampmem: files that the script writes take at most 8.0 MiB of memory here: raise --files-limit, or let the "
        "script write them (--files write)"
    ) in done.stderr.splitlines()


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100, n_positions=16))
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
arguments = TrainingArguments(
    "out", max_steps=4, save_steps=1, eval_strategy="steps", eval_steps=1, save_total_limit=1,
    load_best_model_at_end=True, per_device_train_batch_size=4, report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
model.save_pretrained("final")
GPT2LMHeadModel.from_pretrained("final")
"""


@pytest.mark.slow
def test_a_trainer_that_rotates_checkpoints_and_loads_the_best_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    former = tmp_path / "out" / "checkpoint-1"
    former.mkdir(parents=True)
    state = {"best_global_step": 1, "epoch": 1, "global_step": 1, "log_history": []}
    (former / "trainer_state.json").write_text(json.dumps(state))
    (former / "model.safetensors").write_text("real data")
    with unchanged(tmp_path):
        done = ampmem(tmp_path, "profile", "--quiet", "--gpu", "h100", "--steps", "9", "train.py")
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "train.ampmem").steps) == 4


SHARDED = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import fully_shard
torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = fully_shard(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "at": {"step": step + 1}}
    checkpoint.save(state, checkpoint_id="sharded")
    state["at"] = {"step": 0}
    checkpoint.load(state, checkpoint_id="sharded")
    assert state["at"] == {"step": step + 1}, state["at"]
"""


def test_a_sharded_checkpoint_can_be_loaded_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED)
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_text("real data")
    with unchanged(tmp_path):
        done = ampmem(tmp_path, "profile", "--quiet", "--gpu", "h100", "--world-size", "8", "train.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KEPT)
def test_a_server_that_runs_already_is_reached(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text("import socket; socket.socket(socket.AF_UNIX).connect('at'); print('reached')")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "at"))
        server.listen()
        done = run(kind, tmp_path, "profile", "--gpu", "h100", "--quiet", "train.py")
    assert done.stdout == "reached\n", done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can write into /")
@pytest.mark.parametrize("folder", ["/", "/dev/shm", "/run"])
def test_from_any_working_directory(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    name = f"ampmem-test-{os.getpid()}"
    script.write_text(f"{LARGE}\nimport pathlib; pathlib.Path('{name}').write_text('made up')\n")
    done = ampmem(Path(folder), "profile", "--quiet", "--gpu", "h100", "-o", str(tmp_path / "t.ampmem"), str(script))
    assert done.returncode == 0, done.stderr
    assert not Path(folder, name).exists()
    assert not Path(folder, "a.pt").exists()


BLOCK = """
import io, pickle, sys, ampmem, numpy, torch, safetensors.torch
from torch import nn
with ampmem.profile(device="sim") as prof:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        real = torch.ones(3); torch.save(real, "real.pt"); pickle.dumps(real); numpy.save("real.npy", real.numpy())
        cpu = model.weight.detach().cpu()
        array = cpu.numpy()
    WRITE
"""
EACH = """
    for line in LINES:
        try:
            exec(compile(line, "line", "exec"))
        except ampmem.simulator.where.NotSimulated as error:
            print(error)
"""
REFUSED = {
    "torch.save(model.state_dict(), 'last.pt')": "torch.save",
    "torch.save({'model': cpu}, 'last.pt')": "torch.save",
    "torch.save(cpu.double() * 2, 'last.pt')": "torch.save",
    "torch.save(model, io.BytesIO())": "torch.save",
    "safetensors.torch.save_file({'a': cpu}, 'last.pt')": "safetensors",
    "safetensors.torch.save_file(model.state_dict(), 'last.pt')": "safetensors",
    "numpy.save('last.pt', array)": "numpy.save",
    "numpy.savez('last.pt', a=array)": "numpy.savez",
    "numpy.savetxt('last.pt', array[:3])": "numpy.savetxt",
    "array.tofile('last.pt')": "numpy.ndarray.tofile",
    "(array * 2).tofile('last.pt')": "numpy.ndarray.tofile",
    "numpy.memmap('last.pt', 'f4', 'r+', shape=(64, 64))[:] = array": "numpy.memmap",
    "pickle.dump({'a': [cpu]}, open('other', 'wb'))": "pickle",
    "pickle.dump(vars(type('Any', (), {'a': cpu}))['a'], open('other', 'wb'))": "pickle",
    "pickle.Pickler(open('other', 'wb')).dump(model)": "pickle",
}


def test_in_a_block_made_up_numbers_are_not_saved(tmp_path: Path) -> None:
    first, *_ = REFUSED
    script = BLOCK.replace("    WRITE", f"{EACH.replace('LINES', repr(list(REFUSED)))}    {first}")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "last.pt").write_bytes(b"trained" * 4096)
    done = python(tmp_path, "train.py")
    refused = (
        "{} would write made-up numbers, because a simulated device has no data; leave it out here, or run the script "
        "with ampmem profile --device sim on Linux, which then keeps your files as they are"
    ).format
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == list(map(refused, REFUSED.values()))
    number = len(script.rstrip().splitlines())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ampmem.simulator.where.NotSimulated: train.py:{number}: {refused(REFUSED[first])}"
    )
    assert (tmp_path / "last.pt").read_bytes() == b"trained" * 4096
    assert (tmp_path / "real.pt").exists()
    assert (tmp_path / "real.npy").exists()


def test_safetensors_before_0_8_has_another_function(tmp_path: Path) -> None:
    """A simulation begins beside it, and made-up numbers are not saved by it either."""
    older = "module = safetensors.torch; module._tobytes = lambda tensor, name: b''; del module._to_ndarray\n"
    script = BLOCK.replace("from torch import nn\n", f"from torch import nn\n{older}")
    script = script.replace("WRITE", "module._tobytes(real, 'a'); print('real'); module._tobytes(cpu, 'a')")
    (tmp_path / "train.py").write_text(script)
    done = python(tmp_path, "train.py")
    assert done.stdout == "real\n"
    assert "safetensors would write made-up numbers" in done.stderr


def test_after_a_block_everything_is_written_as_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        BLOCK.replace("WRITE", "pass") + "saved = torch.ones(3)\ntorch.save(saved, 'last.pt')\n"
        "numpy.ones(3).tofile('a.bin')\npickle.dump(saved, open('b.bin', 'wb'))\n"
    )
    done = python(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "last.pt").tolist() == [1.0, 1.0, 1.0]


def test_options_that_do_not_go_together_are_refused(trained: Path) -> None:
    done = ampmem(trained, "profile", "--device", "cpu", "--keep-files", "kept", "train.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "ampmem: --keep-files is for --files protect: without it the script writes its files in their places",
    )
    done = ampmem(trained, "profile", *SIMULATED, "--files-limit", "much", "train.py")
    assert done.returncode == 2
    assert "--files-limit" in done.stderr
