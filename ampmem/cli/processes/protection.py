"""Keeps the script's writes from the user's files, in a run that is made to predict, to search or to compare.

Three ways, the first that works: overlays in a namespace of the process's own, where each writer, native ones included,
writes to memory; Landlock, by which the kernel refuses writes; and refusal by Python's own functions only. What ampmem
itself writes reaches the real folders in each of them, through :meth:`Protected.real`.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from ampmem.cli.processes import kernel
from ampmem.output import copy_with_holes, remove_empty
from ampmem.patching import patch
from ampmem.units import counted, format_bytes

_INHERITED = "AMPMEM_PROTECTED"
"""The variable by which a launcher passes its protection to the processes that it starts."""


class Way(StrEnum):
    """The way in which the user's files are protected."""

    NOT = "not"
    OVERLAY = "overlay"
    """Writes go to memory, and are gone with the run."""
    LANDLOCK = "landlock"
    """The kernel refuses writes outside of one folder."""
    PYTHON = "python"
    """Python's own functions refuse them."""


_LIMITS = {
    Way.LANDLOCK: "this machine allows no overlays (namespaces are off), so the script cannot write files outside of "
    "{scratch}: it gets PermissionError",
    Way.PYTHON: "this machine allows neither overlays nor Landlock, so files are protected from Python's own functions "
    "only: compiled code (C, C++, Rust) and programs that the script starts can still change them",
}
"""By way, the limits of the protection that a user must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """The protection of the user's files from this process, and the folders in which ampmem itself writes.

    ``folders`` are pairs of a real folder and the path by which ampmem reaches it. ``scratch`` is the folder in which
    the script can write with the weaker ways; ``written`` are pairs of a covered folder and the folder with what the
    script wrote below it.
    """

    way: Way = Way.NOT
    folders: tuple[tuple[str, str], ...] = ()
    scratch: str = ""
    written: tuple[tuple[str, str], ...] = ()
    limit: int = 0

    @property
    def active(self) -> bool:
        """Whether the script's writes are kept from the user's files."""
        return self.way is not Way.NOT

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel protects the files, and so from native code and other programs too."""
        return self.way in (Way.OVERLAY, Way.LANDLOCK)

    @property
    def limits(self) -> str:
        """The limits of the protection, for the user; empty for overlays, which the script does not notice."""
        return _LIMITS.get(self.way, "").format(scratch=self.scratch)

    def real(self, path: Path) -> Path:
        """The path by which ampmem reaches ``path`` in one of the :attr:`folders`; others are returned unchanged."""
        if not self.active:
            return path
        absolute = path.absolute()
        reached = dict(self.folders)
        if str(absolute) in reached:
            return Path(reached[str(absolute)])
        folder = reached.get(str(absolute.parent))
        return path if folder is None else Path(folder, absolute.name)

    def named(self, path: Path) -> Path:
        """The user's name of a file that ampmem reaches at ``path``."""
        return next((Path(name, path.name) for name, folder in self.folders if folder == str(path.parent)), path)

    def worded(self, text: str) -> str:
        """``text`` with the user's names of files that ampmem reaches by other paths."""
        for name, folder in self.folders:
            text = text.replace(folder, name)
        return text

    def pass_on(self) -> None:
        """Have the processes that this one starts know their protection, which they inherit."""
        if self.active:
            os.environ[_INHERITED] = json.dumps(asdict(self))

    def files(self) -> Iterator[tuple[Path, Path]]:
        """Each file that the script has written and not removed: the user's name, and where it is."""
        for folder, upper in self.written:
            for parent, folders, names in os.walk(upper):
                folders[:] = [name for name in folders if not name.startswith(_OWN)]
                for path in (Path(parent, name) for name in names):
                    if path.is_file() and not path.is_symlink():
                        yield Path(folder, path.relative_to(upper)), path

    def full(self) -> bool:
        """Whether the script has used up the memory for files."""
        space = os.statvfs(self.written[0][1])
        return space.f_bavail * space.f_frsize < self.limit // 256

    def why(self, failure: BaseException | None) -> str:
        """The message that the protection caused the script's ``failure``, and what to do; empty if it did not."""
        short = isinstance(failure, OSError) and (failure.errno == errno.ENOSPC or "free space" in str(failure))
        if self.way is Way.OVERLAY and (short or self.full()):  # libraries report a full disk by errors of their own
            return (
                f"files that the script writes take at most {format_bytes(self.limit)} of memory here: raise "
                "--files-limit, or let the script write them (--files write)"
            )
        if self.active and _is_refusal(failure):
            foreign = isinstance(failure, OSError) and failure.errno == errno.EOVERFLOW  # an id without a mapping
            there = "in folders and files of another owner or group" if foreign else "there"
            where = f"outside of {self.scratch}" if self.scratch else there
            return (
                f"to protect your files, the script cannot write {where} in this run: give it another folder, or let "
                "it write its files (--files write)"
            )
        return ""

    def keep(self, folder: Path) -> int:
        """Copy the files that the script has written to ``folder``, below their full names; returns their number.

        With the weaker ways the files are in the scratch folder already.
        """
        written = list(self.files())
        for name, path in written:
            there = folder / name.relative_to("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            copy_with_holes(path, there)
        return len(written)

    def unkept(self) -> str:
        """The sentence about files that the script has written and that are gone with the run; empty without any."""
        sizes = [path.stat().st_size for _, path in self.files()]
        if not sizes:
            return ""
        be = "is" if len(sizes) == 1 else "are"
        return (
            f"the script wrote {counted(len(sizes), 'file')} ({format_bytes(sum(sizes))}), which {be} gone now: your "
            "own files are as "
            "before (--keep-files DIR keeps what is written)"
        )


UNPROTECTED = Protected()

_OWN = ".ampmem-"
"""The beginning of the names of ampmem's own folders."""
_REFUSED = (errno.EACCES, errno.EROFS, errno.EOVERFLOW, errno.EXDEV, errno.EPERM)


def inherited() -> Protected:
    """The protection of the launcher that started this process; none if there was no such launcher."""
    text = os.environ.pop(_INHERITED, "")
    if not text:
        return UNPROTECTED
    given = json.loads(text)
    pairs = {name: tuple(map(tuple, given[name])) for name in ("folders", "written")}
    found = Protected(**(given | pairs | {"way": Way(given["way"])}))
    if found.scratch:
        _refuse_in_python(found)
    return found


def protect(
    folders: Sequence[Path],
    limit: int,
    claimed: Sequence[Path] = (),
    scratch: Path | None = None,
    own: Sequence[Path] = (),
) -> Protected:
    """Protect the user's files from this process and those that it starts; ampmem still reaches ``folders``.

    The script can write at most ``limit`` bytes. ``own`` are folders of ampmem's that are not protected, as ampmem's
    code writes there while the script runs. If only a child process can be protected, the run continues in a forked
    child, and this process ends with the child's exit code; ``claimed`` are empty files, removed if the child has
    recorded nothing. With Landlock or Python's functions the script can write in ``scratch``, by default a new folder.
    """
    if os.getuid() == 0 and sys.platform == "linux":
        with suppress(OSError):  # without privileges for it nothing has happened
            return _overlaid([*folders, *own], limit, as_root=True)
    ways: list[Callable[[], Protected]] = [
        functools.partial(_overlaid, [*folders, *own], limit, as_root=False),
        functools.partial(_landlocked, folders, scratch, own),
        functools.partial(_in_python, folders, scratch, own),
    ]
    for enter in ways if sys.platform == "linux" else ways[-1:]:
        found = _in_child(enter, functools.partial(_publish, folders, claimed))
        if found is not None:
            return found
    raise AssertionError("unreachable")


def way_here(folder: Path) -> Protected:
    """The protection that a run in ``folder`` would get on this machine: a child tries it and ends at once."""
    told, tell = os.pipe()
    with _forking():
        child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.close(told)
            found = protect([folder], 1 << 20)
            os.write(tell, json.dumps([found.way, found.scratch]).encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        way, scratch = json.loads(answer.read() or '["python", ""]')
    os.waitpid(child, 0)
    return Protected(way=Way(way), scratch=scratch)


def _overlaid(folders: Sequence[Path], limit: int, *, as_root: bool) -> Protected:
    found = kernel.overlay_everything(folders, limit, as_root=as_root)
    if not as_root:
        _rename_folders()
    return Protected(
        way=Way.OVERLAY,
        folders=tuple((str(folder), str(found.place / f"out{i}")) for i, folder in enumerate(folders)),
        written=tuple((folder, str(upper)) for folder, upper in found.written.items()),
        limit=limit,
    )


def _rename_folders() -> None:
    """Make ``os.rename`` copy folders: without root, overlayfs refuses to rename a folder of the lower layer."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def rename(source: Any, target: Any, **descriptors: Any) -> None:
            try:
                original(source, target, **descriptors)
            except OSError as error:
                if error.errno != errno.EXDEV or descriptors or not Path(source).is_dir():
                    raise
                with suppress(FileNotFoundError):
                    Path(target).rmdir()  # as rename does, which replaces an empty folder only
                shutil.copytree(source, target, symlinks=True)
                shutil.rmtree(source)

        return rename

    for place in ((os, "rename"), (os, "replace")):
        patch(*place, wrap)


def _landlocked(folders: Sequence[Path], scratch: Path | None, own: Sequence[Path]) -> Protected:
    found = _beside(Way.LANDLOCK, folders, scratch, own)
    try:
        kernel.landlock([Path(found.scratch), *(Path(reached) for _, reached in found.folders)])
    except OSError:
        _clear(folders, os.getpid())
        raise
    _refuse_in_python(found)  # modes, owners and times of files, too, which the kernel does not look at
    return found


def _in_python(folders: Sequence[Path], scratch: Path | None, own: Sequence[Path]) -> Protected:
    found = _beside(Way.PYTHON, folders, scratch, own)
    _refuse_in_python(found)
    return found


def _beside(way: Way, folders: Sequence[Path], scratch: Path | None, shared: Sequence[Path]) -> Protected:
    """The protection without overlays: ampmem writes into a new folder in each of ``folders``, the script into another.

    The parent process moves ampmem's files to their places when this process has ended. ``shared`` folders are written
    directly.
    """
    made = _scratch_of(os.getpid())
    own = [_own_folder(folder, os.getpid()) for folder in folders]
    for folder in (*own, *([made] if scratch is None else [])):
        folder.mkdir(mode=0o700)
    written = str(scratch or made)
    reached = zip((*folders, *shared), (*own, *shared), strict=True)
    pairs = tuple((str(folder), str(path)) for folder, path in reached)
    return Protected(way=way, folders=pairs, scratch=written)


def _own_folder(folder: Path, process: int) -> Path:
    return folder / f"{_OWN}{process}"


def _scratch_of(process: int) -> Path:
    """The folder for the script's files, for a ``process`` that was not given another."""
    return Path(tempfile.gettempdir(), f"{_OWN}{process}-files")


def _clear(folders: Sequence[Path], process: int) -> None:
    """Remove the folders that :func:`_beside` made for ``process``."""
    for own in (*(_own_folder(folder, process) for folder in folders), _scratch_of(process)):
        shutil.rmtree(own, ignore_errors=True)


def _publish(folders: Sequence[Path], claimed: Sequence[Path], process: int) -> None:
    """Move the files that ampmem has written in the child ``process`` to ``folders``, and clean up."""
    for folder in folders:
        own = _own_folder(folder, process)
        for path in sorted(own.iterdir()) if own.is_dir() else ():
            path.replace(folder / path.name)
    _clear(folders, process)
    remove_empty(claimed)


def _is_refusal(failure: BaseException | None) -> bool:
    """Whether ``failure`` is the error of a refused write, or a library's own error with the text of one."""
    if isinstance(failure, OSError):
        return failure.errno in _REFUSED
    return failure is not None and any(os.strerror(code) in str(failure) for code in _REFUSED)


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_BY_KERNEL = 0x80
"""The code of a signal from the terminal, which the child gets as well (``SI_KERNEL``)."""


def _forking() -> warnings.catch_warnings[None]:
    """A block without Python's warning about forking a process with several threads: numpy's threads hold no locks."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


def _in_child(enter: Callable[[], Protected], publish: Callable[[int], None]) -> Protected | None:
    """Fork, and call ``enter`` in the child, where this function returns; the parent waits and ends as the child does.

    In the parent it returns only if the child could not be protected: ``None``.
    """
    told, tell = os.pipe()
    watched = {*_FORWARDED, signal.SIGCHLD}
    former = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    reaped = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, the child's status would be lost

    def put_back() -> None:
        signal.signal(signal.SIGCHLD, reaped)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)

    with _forking():
        child = os.fork()
    if child == 0:
        os.close(told)
        try:
            found = enter()
        except OSError:
            os._exit(1)
        if sys.platform == "linux":
            kernel.end_with_parent(signal.SIGKILL)
        os.write(tell, b"\0")
        os.close(tell)
        put_back()
        return found
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        entered = answer.read()
    if not entered:
        os.waitpid(child, 0)
        put_back()
        return None
    status = _wait(child, watched)
    publish(child)
    _end_like(status)


def _wait(child: int, watched: set[signal.Signals]) -> int:
    """Wait for ``child``; returns its exit status. Signals that only this process gets are passed on to the child."""
    while True:
        got = signal.sigwaitinfo(watched)
        if got.si_signo == signal.SIGCHLD:
            number, status = os.waitpid(child, os.WNOHANG)
            if number:
                return status
        elif got.si_code != _BY_KERNEL:
            os.kill(child, got.si_signo)


def _end_like(status: int) -> NoReturn:
    """End this process as a child with this ``status`` has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped core already
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


_CHANGES = {
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.mkdir": (0, 2),
    "os.rename": (0, 2),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.truncate": (0, None),
    "os.chmod": (0, 2),
    "os.chown": (0, 3),
    "os.utime": (0, 3),
}
"""Python's audit events that change a file: the places of the path and of its folder's descriptor."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse_in_python(found: Protected) -> None:
    """Make Python's own functions refuse to change files outside of ``found.folders`` and its ``scratch`` folder."""
    os.environ["TMPDIR"] = tempfile.tempdir = found.scratch
    folders = (found.scratch, *(reached for _, reached in found.folders), "/dev", "/proc")
    allowed = [f"{os.path.realpath(folder)}/" for folder in folders]

    def refuse(path: Any, descriptor: Any = None) -> None:
        if isinstance(path, int):
            return  # an open file
        name = os.fsdecode(path)
        if isinstance(descriptor, int) and descriptor >= 0 and not name.startswith("/"):
            name = f"/proc/self/fd/{descriptor}/{name}"
        full = Path(os.path.realpath(name))
        special = full.exists() and not full.is_file() and not full.is_dir()
        if special or any(f"{full}/".startswith(folder) for folder in allowed):
            return
        raise PermissionError(errno.EACCES, "ampmem protects this file: --files write lets the script write", name)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[2], int) and given[2] & _WRITING:
            refuse(given[0])
        elif event in _CHANGES:
            place, descriptor = _CHANGES[event]
            refuse(given[place], None if descriptor is None else given[descriptor])
            if event == "os.rename":
                refuse(given[1], given[3])

    sys.addaudithook(hook)


def new_folder(folder: Path) -> Path:
    """The first of the folders ``folder/1``, ``folder/2`` … that does not exist; it is made now."""
    for number in count(1):
        made = folder / str(number)
        with suppress(FileExistsError):
            made.mkdir(parents=True)
            return made
    raise AssertionError("unreachable")
