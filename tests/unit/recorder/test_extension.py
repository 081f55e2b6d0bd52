"""The compiled extension: how it is made and found, and that it sees what the profiler sees."""

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint

import ampmem
from ampmem.cli.main import group
from ampmem.errors import AmpmemError
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.extension import CompiledExtension, Observed
from ampmem.recorder.torch_private.general import profiler_enabled

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.fixture
def cache(compiled_extension: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, with an extension in it that recordings use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    return compiled_extension


@pytest.fixture
def seeing(cache: Path) -> Iterator[CompiledExtension]:
    """The extension, which records this thread."""
    found = extension.find()
    found.start()
    yield found
    found.abandon()
    found.take()


def backward() -> None:
    weight = torch.ones(50, 20, requires_grad=True)
    hidden = checkpoint(torch.tanh, weight @ torch.ones(20, 30), use_reentrant=False)
    hidden.square().sum().backward()


def of_profiler() -> list[tuple[int, str]]:
    """(bytes, node) of each allocation and free on the CPU, by torch.profiler's own tree."""
    found: list[tuple[int, str]] = []

    def visit(nodes: list[Any], node: str) -> None:
        for each in nodes:
            if hasattr(each.extra_fields, "alloc_size"):
                found.append((each.extra_fields.alloc_size, node))
            else:
                ran = each.name.endswith(("Backward0", "AccumulateGrad")) and "evaluate_function" not in each.name
                visit(each.children, each.name if ran else node)

    with profile(profile_memory=True) as prof:
        backward()
    visit(prof.kineto_results.experimental_event_tree(), "")
    return found


def rows(seen: Observed) -> list[tuple[int, str]]:
    return [(size, seen.names[name]) for size, name in zip(seen.bytes.tolist(), seen.name.tolist(), strict=True)]


def test_it_sees_the_blocks_and_nodes_that_the_profiler_sees(seeing: CompiledExtension) -> None:
    backward()  # what torch keeps for good is allocated now
    seeing.take()
    backward()
    seen = seeing.take()
    seeing.abandon()
    assert rows(seen) == of_profiler()
    assert {"TanhBackward0", "MmBackward0"} <= {node for _, node in rows(seen)}


def test_a_node_has_its_number_and_its_time_and_is_around_its_blocks(seeing: CompiledExtension) -> None:
    weight = torch.ones(50, 20, requires_grad=True)
    result = weight.exp()
    number = torch._C._autograd._get_sequence_nr() - 1
    result.sum().backward()
    seen = seeing.take()
    (span,) = [each for each in seen.spans.tolist() if seen.names[each[2]] == "ExpBackward0"]
    start, end, _, own, thread = span
    assert own == number
    inside = np.flatnonzero((seen.time_ns >= start) & (seen.time_ns <= end) & (seen.bytes > 0))
    assert seen.bytes[inside].tolist() == [50 * 20 * 4]
    assert seen.own[inside].tolist() == seen.number[inside].tolist() == [number]
    assert seen.thread[inside].tolist() == [thread]


def test_what_was_taken_is_gone_and_other_threads_are_not_seen(seeing: CompiledExtension) -> None:
    kept = torch.ones(1000)
    assert rows(seeing.take()) == [(4000, "")]
    other = threading.Thread(target=lambda: torch.ones(500))
    other.start()
    other.join()
    assert rows(seeing.take()) == []
    del kept
    assert rows(seeing.take()) == [(-4000, "")]


def test_what_comes_between_the_count_and_the_take_is_taken_later(
    seeing: CompiledExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, empty = [torch.ones(1000)], np.empty

    def interrupted(*arguments: Any) -> Any:  # by the engine's threads, or the garbage collector
        kept.append(torch.ones(77))
        return empty(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(extension.np, "empty", interrupted)
        assert rows(seeing.take()) == [(4000, "")]
    assert rows(seeing.take()) == [(308, ""), (308, "")]
    room = np.empty((0, 9), np.int64)
    taken = (ctypes.c_int64 * 2)()
    kept.append(torch.ones(9))
    seeing.library.ampmem_take(room.ctypes.data, 0, room.ctypes.data, 0, taken)
    assert list(taken) == [0, 0]
    assert rows(seeing.take()) == [(36, "")]


def test_it_leaves_no_profiler_behind(cache: Path) -> None:
    found = extension.find()
    found.start()
    assert profiler_enabled()
    found.abandon()
    assert not profiler_enabled()
    torch.ones(1000)
    assert rows(found.take()) == []


def test_a_recording_uses_it_and_ends_when_the_script_starts_a_profiler(cache: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile(model, optimizer, device="cpu") as recorded:
        for step in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with profile(profile_memory=True) as prof:
                    torch.ones(77)
    assert len(recorded.recording().steps) == 2
    assert any(event.cpu_memory_usage == 77 * 4 for event in prof.function_events)


def test_a_forked_child_records_nothing_of_its_parent(cache: Path) -> None:
    found = extension.find()
    assert found is not None
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile(model, optimizer, device="cpu"):
        model(torch.ones(4, 8)).sum().backward()
        child = os.fork()
        if child == 0:
            os._exit(int(profiler_enabled()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()


def test_without_one_and_where_it_is_turned_off_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(extension.VARIABLE, "on")
    assert extension.find() is None
    if COMPILER is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("compiled_extension")))
        assert extension.find() is not None
        monkeypatch.setenv(extension.VARIABLE, "off")
        assert extension.find() is None


# -- what is loaded, and what is not -------------------------------------------------------------


def compile_c(library: Path, source: str) -> None:
    """Make ``library`` of a program in C, and its seal."""
    assert COMPILER is not None
    command = [COMPILER, "-x", "c", "-shared", "-fPIC", "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    seal(library)


def seal(library: Path) -> None:
    """Seal ``library`` as it is, so that only what else is wrong with it counts."""
    content = library.read_bytes()
    text = f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"
    library.with_suffix(".sha256").write_text(text, encoding="ascii")


def truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def change(library: Path) -> None:
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


FUNCTIONS = ("start", "stop", "count", "take", "name")
BLIND = "\n".join(f"long ampmem_{name}(void) {{ return 0; }}" for name in FUNCTIONS)
"""An extension that sees nothing."""
UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty file": (lambda library: library.write_bytes(b""), "was changed since it was compiled"),
    "a truncated file": (truncate, "was changed since it was compiled"),
    "a changed file": (change, "was changed since it was compiled"),
    "a folder": (lambda library: (library.unlink(), library.mkdir()), "was changed since it was compiled"),
    "no seal": (lambda library: library.with_suffix(".sha256").unlink(), "No such file or directory"),
    "no library": (lambda library: (library.write_bytes(b"no library"), seal(library)), "cannot be loaded"),
    "no function": (lambda library: compile_c(library, ""), "undefined symbol: ampmem_name"),
    "another torch": (
        lambda library: compile_c(library, "int gone(void); int ampmem_name(void) { return gone(); }"),
        "undefined symbol: gone",
    ),
    "one that sees nothing": (lambda library: compile_c(library, BLIND), "does not see what torch"),
    "a file for the group": (lambda library: library.chmod(0o620), "other users can write"),
    "a seal for others": (lambda library: library.with_suffix(".sha256").chmod(0o602), "other users can write"),
    "a folder for others": (lambda library: library.parent.chmod(0o777), "other users can write"),
    "a link": (link, "is a symbolic link"),
    "a link to the seal": (lambda library: link(library.with_suffix(".sha256")), "is a symbolic link"),
    "a link to the folder": (lambda library: link(library.parent), "is a symbolic link"),
}


@pytest.fixture
def copied(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library, where a recording looks for it."""
    made = extension.path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = extension.path()
    copy.parent.mkdir(parents=True)
    copy.parent.chmod(0o700)
    for path in (made, made.with_suffix(".sha256")):
        shutil.copy(path, copy.parent)
    return copy


def train() -> ampmem.Summary:
    """A recording of two steps."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile(model, optimizer, device="cpu") as recorded:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorded.summary()


@pytest.mark.parametrize("state", UNSAFE)
def test_a_library_that_is_not_safe_or_not_right_is_left_out_with_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    spoil, why = UNSAFE[state]
    spoil(copied)
    capsys.readouterr()
    summary = train()
    assert (len(summary.steps), summary.conservation.residual_bytes) == (2, 0)
    assert summary.parameters.bytes == 4 * (8 * 8 + 8)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ampmem: the C++ extension is not used, and torch.profiler is: ")
    assert why in line
    assert line.endswith(". To compile it anew: ampmem extension")
    assert extension.find() is None
    assert capsys.readouterr().err == ""  # it was said


def test_a_library_of_another_user_is_left_out(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert extension.find() is None
    assert f"{copied.parent} belongs to another user" in capsys.readouterr().err


def test_a_right_library_is_used_without_a_word(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert extension.find() is not None
    assert train().conservation.residual_bytes == 0
    assert capsys.readouterr().err == ""


def test_a_relative_cache_folder_is_not_looked_into(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert extension.folder() == tmp_path / "home" / ".cache" / "ampmem" / "extension"
    assert extension.find() is None


def test_what_is_compiled_belongs_to_this_user_alone(cache: Path) -> None:
    library = extension.path()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (library.parent, library, library.with_suffix(".sha256"))]
    assert modes == [0o700, 0o600, 0o600]


@pytest.mark.parametrize("state", ["a file in its place", "a link in its place", "a full disk"])
def test_a_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = extension.folder()
    folder.parent.mkdir()
    if state == "a file in its place":
        folder.touch()
    elif state == "a link in its place":
        folder.symlink_to(tmp_path, target_is_directory=True)
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(extension, "_compiled", full)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(group, ["extension"])
    assert isinstance(result.exception, AmpmemError)
    assert result.exception.exit_code == 1
    assert str(folder) in str(result.exception)
    assert sorted({*tmp_path.rglob("*")} - {folder}) == sorted({*before} - {folder})
    assert not folder.is_dir() or folder.is_symlink() or list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/nowhere/c++", "the C++ compiler /nowhere/c++ does not start: No such file or directory"),
        ("false", "the C++ compiler false could not compile the extension: "),
    ],
)
def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(AmpmemError, match="C\\+\\+ compiler") as error:
        extension.build()
    assert str(error.value) == said
    assert list(extension.folder().iterdir()) == []


@pytest.mark.parametrize(
    ("broken", "loads", "linked"),
    [
        ("", [True], ["extension", "ops", "tensors", "trace", "workspaces"]),
        ("trace", [True], ["extension", "ops", "tensors", "workspaces"]),  # CUDA's headers are of another version, say
        ("ops", [True], ["extension", "tensors", "trace", "workspaces"]),
        ("workspaces", [True], ["extension", "ops", "tensors", "trace"]),  # a torch that keeps them elsewhere
        ("", [False, True], ["extension"]),  # torch does not export all that the parts need
    ],
)
def test_a_part_that_does_not_compile_or_load_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, loads: list[bool], linked: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(extension, "cuda_headers", lambda: tmp_path)
    links: list[list[str]] = []

    def ran(command: list[str]) -> str | None:
        if broken and f"{broken}.cpp" in " ".join(command):
            return "an error"
        if "-shared" in command:
            links.append(command)
        Path(command[command.index("-o") + 1]).touch()
        return None

    answers = iter(loads)

    def load(_: Path) -> None:
        if not next(answers):
            raise AmpmemError("it does not see what torch allocates")

    monkeypatch.setattr(extension, "_ran", ran)
    monkeypatch.setattr(extension, "_loaded", load)
    assert extension.build() == extension.path()
    assert sorted(Path(each).stem for each in links[-1] if each.endswith(".o")) == linked
    assert ("-lc10_cuda" in links[-1]) == ("trace" in linked)
    assert ("-ltorch_cuda" in links[-1]) == ("workspaces" in linked)
    assert sorted(extension.folder().iterdir()) == [extension.path().with_suffix(".sha256"), extension.path()]


def test_the_parts_that_were_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"ampmem_ops_start": 1, "ampmem_tensors_clear": 1, "ampmem_trace_start": 1, "ampmem_workspaces": 1}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**parts))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert extension.left_out(Path("made.so")) == []
    parts.clear()
    monkeypatch.setattr(extension, "cuda_headers", lambda: None)
    ops, tensors, trace = extension.left_out(Path("made.so"))
    assert ops.startswith("the part for the ops of forward does not work with this torch")
    assert tensors.startswith("the part that reads many tensors at once does not work with this torch")
    assert trace.startswith("CUDA's headers were not found (set CUDA_HOME)")
    monkeypatch.setattr(extension, "cuda_headers", Path)
    _, _, trace, workspaces = extension.left_out(Path("made.so"))
    assert trace.startswith("the part for CUDA does not work with this torch")
    assert workspaces.startswith("the part for the workspaces of cuBLAS does not work with this torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert extension.left_out(Path("made.so")) == [ops, tensors]


def test_without_a_compiler_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(group, ["extension"])
    assert isinstance(result.exception, AmpmemError)
    assert str(result.exception) == "there is no C++ compiler (c++, g++, clang++): install one, or name it in CXX"


def test_the_command_prints_the_path_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "made.so"
    monkeypatch.setattr(extension, "build", lambda: made)
    monkeypatch.setattr(extension, "left_out", lambda library: [f"{library.name} has no part for CUDA"])
    result = CliRunner().invoke(group, ["extension"])
    assert result.stdout == f"{made}\n"
    assert result.stderr.splitlines()[1:] == ["ampmem: made.so has no part for CUDA"]
    extension.folder().mkdir(parents=True)
    for name in ("2.13.0-0.so", "2.13.0-0.sha256"):
        (extension.folder() / name).touch()
    assert CliRunner().invoke(group, ["extension", "--remove"]).exit_code == 0
    assert list(extension.folder().iterdir()) == []


def status(*arguments: str) -> list[str]:
    result = CliRunner().invoke(group, ["extension", "--status", *arguments])
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_the_status_says_what_is_not_compiled_and_what_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "my-compiler -O0")
    monkeypatch.delenv(extension.VARIABLE, raising=False)
    not_there = f"not compiled for torch {torch.__version__}; ampmem extension compiles it with my-compiler"
    assert status() == [not_there] and extension.is_missing()
    extension.folder().mkdir(parents=True)
    (extension.folder() / "2.5.1-0123.so").touch()
    monkeypatch.setenv(extension.VARIABLE, "off")
    off = "AMPMEM_EXTENSION=off: recordings do not use it"
    assert (
        status() == [not_there, "compiled for another torch or by another ampmem: torch 2.5.1", off]
        and not extension.is_missing()
    )


def test_the_status_names_what_the_compiled_parts_replace(cache: Path) -> None:
    first, *parts = status()
    assert first.startswith(f"compiled for torch {torch.__version__}: {extension.path()}, ")
    assert (
        "memory events: in place of torch.profiler" in parts and "ops of forward: in place of a dispatch mode" in parts
    )
    assert not extension.is_missing()
    extension.path().chmod(0o622)
    unsafe, *_ = status()
    extension.path().chmod(0o600)
    assert unsafe == f"compiled for torch {torch.__version__}, but not used: other users can write {extension.path()}"
