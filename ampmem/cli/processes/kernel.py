"""Protects the user's files from a process by means of Linux: overlays in a mount namespace, and Landlock.

Sources: mount(2), user_namespaces(7), pivot_root(2), landlock(7), and ``Documentation/filesystems/overlayfs.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_AT_FDCWD, _MOUNT_ATTR_RDONLY = -100, 1

_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""System calls without a function in every libc; these have the same numbers on all architectures."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_NO_FILES = re.compile(
    "autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|hugetlbfs|mqueue|nsfs|proc|"
    "pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs"
)
"""File systems that contain no files of users."""
_LEFT = re.compile(r"/(proc|sys|dev|run)(/|$)")
"""Folders whose files do not outlive a reboot; processes communicate through them, which overlays would prevent."""
_STAGES = ("/srv", "/media", "/mnt", "/opt", "/boot", "/home")
"""Candidates for the mount point of the memory for writes, when root prepares the namespace; the first unused one.

A user mounts it at /sys, where nothing is written; root needs /sys itself, to bind it below the new root.
"""


_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _system(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Call the kernel; numbers are passed as 64 bits, as it expects them."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(_LIBC.syscall(ctypes.c_long(number), *given), f"system call {number}")


def _mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    result = _LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None)
    _check(result, f"mount {target}")


def _make_read_only(path: str) -> None:
    """Make the mount at ``path`` read-only, without the mounts below it."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0), 32)
    _system(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), 0, attributes, 32)


def end_with_parent(number: int) -> None:
    """Have the kernel send signal ``number`` to this process when its parent dies."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number)), "prctl")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A mounted file system, at ``path``; ``files`` says whether it has files that the script could change."""

    path: str
    files: bool


def _mounts() -> list[_Mount]:
    """The mounts that paths reach, each after the one that it is mounted on."""
    found: dict[str, _Mount] = {}
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        kind, _, options = rest.split(" ", 2)
        writable = "ro" not in fields.split(" ")[5].split(",") and "ro" not in options.split(",")
        real = not _NO_FILES.fullmatch(kind) and not (kind == "tmpfs" and _LEFT.match(path))
        found.pop(path, None)  # a later mount covers an earlier one
        found[path] = _Mount(path=path, files=writable and real)
    return [found[path] for path in sorted(found) if os.path.lexists(path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlaid:
    """The result of :func:`overlay_everything`: the folder ``place`` has ``out0``, ``out1`` …, and the written files.

    ``written`` maps each covered folder to the folder with the files written below it.
    """

    place: Path
    written: Mapping[str, Path]


def overlay_everything(folders: Sequence[Path], limit: int, *, as_root: bool) -> Overlaid:
    """Move this process into a namespace in which each write goes to memory, at most ``limit`` bytes of it.

    The real ``folders`` remain reachable, as ``out0``, ``out1`` … in :attr:`Overlaid.place`. Everything is gone with
    the last process of the namespace. Raises ``OSError`` if the kernel forbids it. Without ``as_root`` a user namespace
    gives the right to mount: this thread has to be the process's only one, and the process cannot be used any more
    after an error, since it may have lost its user.
    """
    directory, mounts = str(Path.cwd()), _mounts()
    _enter_namespace(as_root=as_root)
    stage = _stage([*(mount.path for mount in mounts), *map(str, folders), directory]) if as_root else "/sys"
    _mount("ampmem", stage, "tmpfs", 0, f"size={limit},mode=700")
    for i, folder in enumerate(folders):
        Path(f"{stage}/out{i}").mkdir()
        _mount(str(folder), f"{stage}/out{i}", None, _MS_BIND)
    layers = _Layers(stage, f"{stage}/root" if as_root else "")
    with _sockets() as sockets:
        layers.cover_all(mounts, directory)
        for path, opened in sockets.items():
            with suppress(OSError):  # its folder cannot be reached any more
                _mount(f"/proc/self/fd/{opened}", f"{layers.base}{path}", None, _MS_BIND)
    place = _place(layers.base)
    for name in [f"out{i}" for i in range(len(folders))] + ["files"]:
        Path(f"{layers.base}{place}/{name}").mkdir()
        _mount(f"{stage}/{name}", f"{layers.base}{place}/{name}", None, _MS_BIND)
    if as_root:
        _enter_root(layers.base)
    else:
        _check(_LIBC.umount2(os.fsencode(stage), _MNT_DETACH), f"umount {stage}")
        _drop_capabilities()
    os.chdir(directory)
    written = {folder: Path(place, "files", name) for folder, name in layers.upper.items()}
    return Overlaid(place=Path(place), written=written)


def _enter_namespace(*, as_root: bool) -> None:
    """Enter a mount namespace; without root, in a user namespace with the same user and group."""
    user, group = os.getuid(), os.getgid()
    _check(_LIBC.unshare(_CLONE_NEWNS | (0 if as_root else _CLONE_NEWUSER)), "unshare")
    if not as_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


@contextmanager
def _sockets() -> Iterator[dict[str, int]]:
    """A descriptor of each socket that a server listens at: below an overlay a server would not be found (unix(7))."""
    lines = Path("/proc/net/unix").read_text("utf-8", "surrogateescape").splitlines()
    paths = {path for path in (line.split(None, 7)[-1] for line in lines) if path.startswith("/")}
    with ExitStack() as opened:
        found = {}
        for path in paths:
            with suppress(OSError):  # it is gone, or out of this user's reach
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # and not another file of this name by now
                    found[path] = descriptor
        yield found


def _stage(needed: Sequence[str]) -> str:
    """A folder of :data:`_STAGES` without a ``needed`` path at or below it; empty if there is none.

    Mounting at an empty path fails, so such a machine gets the next best protection.
    """
    free = (each for each in _STAGES if not any(_is_below(f"{path}/", each) for path in needed))
    return next((each for each in free if Path(each).is_dir()), "")


def _is_below(path: str, folder: str) -> bool:
    """Whether ``path`` is inside of ``folder``."""
    return path != folder and path.startswith(f"{folder.rstrip('/')}/")


def _place(base: str) -> str:
    """A new folder for ampmem in the namespace, in the first folder for temporary files that is covered."""
    for parent in ("/tmp", "/var/tmp", str(Path.home())):
        path = f"{parent}/.ampmem-{os.getpid()}"
        with suppress(OSError):
            Path(base + path).mkdir(mode=0o700)
            return path
    raise OSError(errno.EROFS, "no folder for temporary files could be covered")


def _enter_root(root: str) -> None:
    """Make ``root`` the root of this process, and drop the former one."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    os.chdir(root)
    _system(number, b".", b".")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount the former root")


def _drop_capabilities() -> None:
    """Give up the capabilities of a new user namespace, with which the script could write its read-only files."""
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0), 8)
    _check(_LIBC.capset(header, ctypes.create_string_buffer(24)), "capset")


class _Layers:
    """Overlays whose upper folders are in ``stage``, mounted below ``base``, which is empty for the root itself."""

    def __init__(self, stage: str, base: str) -> None:
        self.base = base
        self.upper: dict[str, str] = {}
        self._stage = stage
        self._names = map(str, count())
        for name in ("files", "work", *(["root"] if base else [])):
            Path(stage, name).mkdir()

    def cover_all(self, mounts: Sequence[_Mount], directory: str) -> None:
        """Cover every mount with files, and the working ``directory``; below another base, bind the others."""
        points = [mount.path for mount in mounts]
        for mount in mounts:
            if not os.access(mount.path, os.F_OK):
                continue  # nor can the script reach it, such as another user's FUSE
            if mount.files and Path(mount.path).is_dir():
                self._cover(mount.path, points)
            elif self.base:
                self._bind(mount.path, read_only=mount.files)
            elif mount.files:
                self._close(mount.path)
        if _LEFT.match(directory) and directory not in self.upper:
            self._cover(directory, points)

    def _cover(self, folder: str, points: Sequence[str]) -> None:
        """Put an overlay over ``folder``; where the kernel refuses, over each folder inside, and close the rest.

        A user cannot use a folder with other mounts below it as a lower layer. The root itself cannot be covered in
        place: processes would not see the cover.
        """
        parted = not self.base and any(_is_below(point, folder) for point in points)
        if not parted:
            try:
                self._overlay(folder)
            except OSError:
                self._close(folder)
            return
        self._close(folder)
        with suppress(PermissionError):  # what cannot be listed stays closed
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False) and entry.path not in points:
                    self._cover(entry.path, points)

    def _overlay(self, folder: str) -> None:
        name = next(self._names)
        upper, work = f"{self._stage}/files/{name}", f"{self._stage}/work/{name}"
        status = Path(folder).stat()
        for path in (upper, work):
            Path(path).mkdir()
        Path(upper).chmod(stat.S_IMODE(status.st_mode))
        if self.base:
            os.chown(upper, status.st_uid, status.st_gid)
        # Users get no redirect_dir: renaming a folder of the lower layer fails for them, as between file systems.
        how = "redirect_dir=on" if self.base else "userxattr"
        lower = re.sub(r"([\\,:])", r"\\\1", folder)
        target = f"{self.base}{folder}"
        _mount("overlay", target, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work},{how}")
        self.upper[folder] = name

    def _close(self, path: str) -> None:
        """Make ``path`` read-only, without the mounts below it."""
        if self.base:
            self._bind(path, read_only=True)
            return
        if path != "/":
            _mount(path, path, None, _MS_BIND | _MS_REC)
        _make_read_only(path)

    def _bind(self, path: str, *, read_only: bool) -> None:
        target = f"{self.base}{path}"
        try:
            _mount(path, target, None, _MS_BIND)
        except OSError:  # another mount covers it
            return
        if read_only:
            _make_read_only(target)


_WRITES = 0b1_1111_1111_0010
"""Landlock's rights that change files: writing, removing, making of each kind, and from later versions below."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14


def landlock(folders: Sequence[Path]) -> None:
    """Forbid this thread, and the threads and processes that it starts, to change files outside of ``folders``.

    Raises ``OSError`` if the kernel has no Landlock. Modes, owners and times of files can still be changed.
    """
    version = _system(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    handled = _WRITES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = _system(_LANDLOCK_CREATE_RULESET, struct.pack("Q", handled), 8, 0)
    try:
        for folder in (*folders, Path("/dev"), Path("/proc")):
            opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                _system(_LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", handled, opened), 0)
            finally:
                os.close(opened)
        _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))), "prctl")
        _system(_LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
