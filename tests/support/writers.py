"""A script that trains on a GPU and changes every file beside it, each in another way; what it wrote it reads back.

    python writers.py make       fills the folders, as a former training would have
    python writers.py [WAY...]   trains a step, then changes files in these ways, or in all

Prints a line of JSON: for each way whether it read back what it wrote, or its error.
"""

import ctypes
import io
import json
import mmap
import multiprocessing
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import nn

WAYS: dict[str, Callable[[nn.Module], object]] = {}
ROOT = Path.cwd()


def way(function):
    WAYS[function.__name__] = function
    return function


def state(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def array(model):
    return state(model)["weight"].numpy()


def loads(path, model, **how):
    model.load_state_dict(torch.load(path, **how))
    return True


@way
def saved(model):
    torch.save(model.state_dict(), "last.pt")
    return loads("last.pt", model)


@way
def saved_from_cpu(model):
    torch.save(state(model), "last.pt")
    return loads("last.pt", model)


@way
def saved_whole(model):
    torch.save(model, "last.pt")
    return isinstance(torch.load("last.pt", weights_only=False), nn.Module)


@way
def saved_in_the_old_format(model):
    torch.save(state(model), "last.pt", _use_new_zipfile_serialization=False)
    return loads("last.pt", model)


@way
def saved_to_an_open_file(model):
    with open("last.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    return loads("last.pt", model)


@way
def saved_in_memory(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    Path("last.pt").write_bytes(buffer.getvalue())
    return loads("last.pt", model)


@way
def jit(model):
    torch.jit.save(torch.jit.script(nn.Linear(4, 4)), "last.pt")
    return torch.jit.load("last.pt") is not None


@way
def safe(model):
    safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    return loads_safe(model)


@way
def safe_from_cpu(model):
    safetensors.torch.save_file(state(model), "model.safetensors")
    return loads_safe(model)


def loads_safe(model):
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    return True


@way
def numpy_save(model):
    np.save("data.npy", array(model))
    return np.load("data.npy").shape == (64, 64)


@way
def numpy_savez(model):
    np.savez("data.npz", weight=array(model))
    return np.load("data.npz")["weight"].shape == (64, 64)


@way
def numpy_text(model):
    np.savetxt("data.txt", array(model))
    return np.loadtxt("data.txt").shape == (64, 64)


@way
def tofile(model):
    array(model).tofile("data.bin")
    return np.fromfile("data.bin", np.float32).size == 64 * 64


@way
def memmap(model):
    written = np.memmap("data.bin", np.float32, "r+", shape=(64, 64))
    written[:] = array(model)
    written.flush()
    return bool((np.fromfile("data.bin", np.float32) == written.ravel()).all())


@way
def pickled(model):
    with open("data.bin", "wb") as file:
        pickle.dump(state(model), file)
    with open("data.bin", "rb") as file:
        return set(pickle.load(file)) == {"weight", "bias"}


@way
def as_json(model):
    with open("data.txt", "w") as file:
        json.dump(state(model)["bias"].tolist(), file)
    return len(json.loads(Path("data.txt").read_text())) == 64


@way
def appended(model):
    with open("data.txt", "a") as file:
        file.write("more")
    return Path("data.txt").read_text() == "real datamore"


@way
def raw(model):
    descriptor = os.open("data.bin", os.O_WRONLY)
    os.pwrite(descriptor, b"made up", 0)
    os.close(descriptor)
    return Path("data.bin").read_bytes()[:7] == b"made up"


@way
def mapped(model):
    with open("data.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:7] = b"made up"
    return Path("data.bin").read_bytes()[:7] == b"made up"


@way
def truncated(model):
    os.truncate("data.bin", 3)
    return os.path.getsize("data.bin") == 3


@way
def in_c(model):
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(b"data.bin", b"w")
    if not file:
        raise OSError("fopen")
    libc.fwrite(b"made up", 1, 7, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return Path("data.bin").read_bytes() == b"made up"


@way
def in_a_shell(model):
    subprocess.run(
        "echo made up > data.txt && rm data.bin && mv old new && ln -sf data.txt link", shell=True, check=True
    )
    return Path("link").read_text() == "made up\n" and Path("new", "model.pt").exists()


@way
def in_another_python(model):
    code = "import pathlib; pathlib.Path('data.txt').write_text('made up')"
    subprocess.run([os.path.realpath("/proc/self/exe"), "-c", code], check=True)
    return Path("data.txt").read_text() == "made up"


@way
def in_a_fork(model):
    child = multiprocessing.get_context("fork").Process(target=Path("data.txt").write_text, args=("made up",))
    child.start()
    child.join()
    if child.exitcode:
        raise OSError("the child failed")
    return Path("data.txt").read_text() == "made up"


@way
def rotated(model):
    os.makedirs("new")
    torch.save(model.state_dict(), "new/model.pt")
    shutil.rmtree("old")
    return loads("new/model.pt", model)


@way
def replaced(model):
    os.replace("last.pt", "previous.pt")
    torch.save(model.state_dict(), "last.pt")
    return loads("previous.pt", model, map_location="cuda") and loads("last.pt", model)


@way
def renamed_folder(model):
    os.rename("old", "older")
    return loads("older/model.pt", model, map_location="cuda")


@way
def removed(model):
    os.remove("data.txt")
    Path("data.bin").unlink()
    return not Path("data.txt").exists()


@way
def linked(model):
    os.link("data.txt", "second")
    Path("second").write_text("made up")
    os.symlink("data.txt", "third")
    return Path("third").exists()


@way
def through_a_link(model):
    Path("link").write_text("made up")
    return Path("data.txt").read_text() == "made up"


@way
def modes(model):
    os.chmod("data.txt", 0o600)
    os.utime("data.txt", (1, 1))
    return os.stat("data.txt").st_mtime == 1


@way
def database(model):
    with sqlite3.connect("rows.db") as connection:
        connection.execute("INSERT INTO t VALUES (2)")
    return len(sqlite3.connect("rows.db").execute("SELECT * FROM t").fetchall()) == 2


@way
def archives(model):
    with zipfile.ZipFile("data.zip", "w") as file:
        file.writestr("a", "made up")
    with tarfile.open("data.tar", "w") as tar:
        tar.add("data.zip")
    return zipfile.ZipFile("data.zip").read("a") == b"made up"


@way
def from_another_folder(model):
    os.chdir("old")
    Path("../data.txt").write_text("made up")
    return Path("../data.txt").read_text() == "made up"


@way
def temporary(model):
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("made up")
        file.flush()
        return Path(file.name).read_text() == "made up"


def make():
    model = nn.Linear(64, 64)
    for name in WAYS:
        folder = ROOT / name
        (folder / "old").mkdir(parents=True)
        os.chdir(folder)
        for path in ("last.pt", "previous.pt", "old/model.pt"):
            torch.save(model.state_dict(), path)
        safetensors.torch.save_file(model.state_dict(), "model.safetensors")
        np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32).tofile("data.bin")
        for path in ("data.txt", "data.npy", "data.npz", "data.zip", "data.tar"):
            Path(path).write_text("real data")
        os.symlink("data.txt", "link")
        with sqlite3.connect("rows.db") as connection:
            connection.execute("CREATE TABLE t (x)")
            connection.execute("INSERT INTO t VALUES (1)")


def train(ways):
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    found = {}
    for name in ways or WAYS:
        os.chdir(ROOT / name)
        try:
            found[name] = bool(WAYS[name](model))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    make() if sys.argv[1:] == ["make"] else train(sys.argv[1:])
