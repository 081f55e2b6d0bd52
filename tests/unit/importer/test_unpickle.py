"""The reader of pickles: plain data comes through, nothing else does, nothing runs and little is held."""

import io
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import dump

from ampmem.errors import RecordingError, UsageError
from ampmem.importer import unpickle
from ampmem.importer.unpickle import Refused, load_plain, loads

HEAD = b"\x80\x04"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-5, 5), inner, max_size=5)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=100)
@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_through(data: object, protocol: int) -> None:
    assert loads(pickle.dumps(data, protocol=protocol)) == data


def test_shared_and_recursive_data_comes_through() -> None:
    shared = ["a" * 300]
    many = [[shared, shared, index] for index in range(2000)]
    result = loads(pickle.dumps(many))
    assert result == many
    assert isinstance(result, list) and isinstance(result[0], list) and isinstance(result[1], list)
    assert result[0][0] is result[1][1]
    loop: list[object] = []
    loop.append(loop)
    again = loads(pickle.dumps(loop))
    assert isinstance(again, list) and again[0] is again


@pytest.mark.parametrize("fast", [False, True])
def test_the_python_pickler_comes_through_too(fast: bool) -> None:
    stream = io.BytesIO()
    pickler = pickle._Pickler(stream, protocol=2)  # type: ignore[attr-defined]
    pickler.fast = fast
    pickler.dump({"a": [1, -2, 3.5, None, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), 2**40]})
    assert loads(stream.getvalue()) == {"a": [1, -2, 3.5, None, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), 2**40]}


class Evil:
    """Runs a command when a normal unpickler reads it."""

    def __init__(self, sentinel: Path) -> None:
        self.command = f"touch {sentinel}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def _short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _global(protocol: int) -> Callable[[Path], bytes]:
    return lambda sentinel: pickle.dumps({"segments": [Evil(sentinel)], "device_traces": []}, protocol=protocol)


def _call(name: str, code: bytes) -> Callable[[Path], bytes]:
    return lambda sentinel: HEAD + _short("os") + _short(name) + b"\x93" + _short(f"touch {sentinel}") + code + b"."


def _fixed(data: bytes) -> Callable[[Path], bytes]:
    return lambda _: data


def _laughs() -> bytes:
    """Thirty lists, each of ten times the one before."""
    body = HEAD + b"(]\x94"
    for index in range(30):
        body += b"](" + (b"h" + bytes([index])) * 10 + b"e\x94"
    return body + b"t."


def _nested(depth: int) -> bytes:
    return HEAD + b"]" * depth + b"a" * (depth - 1) + b"."


def _colliding() -> bytes:
    """Integers that have one hash between them."""
    keys = b"".join(b"\x8a\x10" + (index * (2**61 - 1)).to_bytes(16, "little") + b"N" for index in range(1, 60_000))
    return HEAD + b"}(" + keys + b"u."


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    **{f"reduce in protocol {protocol}": _global(protocol) for protocol in range(6)},
    "reduce": _call("system", b"\x85R"),
    "newobj": _call("system", b"\x85\x81"),
    "newobj_ex": _call("system", b"\x85}\x92"),
    "build": _call("system", b"b"),
    "inst": lambda sentinel: HEAD + b"(" + _short(f"touch {sentinel}") + b"ios\nsystem\n.",
    "obj": lambda sentinel: HEAD + b"(" + b"cos\nsystem\n" + _short(f"touch {sentinel}") + b"o.",
    "global": _fixed(HEAD + b"cos\nsystem\n."),
    "extension 1": _fixed(HEAD + b"\x82\x01."),
    "extension 2": _fixed(HEAD + b"\x83\x01\x00."),
    "extension 4": _fixed(HEAD + b"\x84\x01\x00\x00\x00."),
    "persistent id": _fixed(HEAD + b"Pname\n."),
    "binary persistent id": _fixed(HEAD + _short("name") + b"Q."),
    "out-of-band buffer": _fixed(b"\x80\x05\x97."),
    "read-only buffer": _fixed(b"\x80\x05N\x98."),
    "text of 2**62 bytes": _fixed(HEAD + b"\x8d" + struct.pack("<Q", 2**62) + b"x."),
    "text of 4 GB": _fixed(HEAD + b"X" + struct.pack("<I", 2**32 - 1) + b"x."),
    "bytes of 2**40": _fixed(HEAD + b"\x8e" + struct.pack("<Q", 2**40) + b"."),
    "bytearray of 2**40": _fixed(b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"."),
    "integer of 2 GB": _fixed(HEAD + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"."),
    "integer of 255 bytes": _fixed(HEAD + b"\x8a\xff" + b"\x7f" * 255 + b"."),
    "integer as text": _fixed(HEAD + b"L" + b"9" * 100_000 + b"L\n."),
    "frame of 2**60 bytes": _fixed(HEAD + b"\x95" + struct.pack("<Q", 2**60) + b"N."),
    "memo far out": _fixed(HEAD + b"Nr" + struct.pack("<I", 2**32 - 1) + b"2."),
    "memo that is not there": _fixed(HEAD + b"j" + struct.pack("<I", 7) + b"."),
    "dicts without end": _fixed(HEAD + b"(" + b"}" * 2_000_000 + b"l."),
    "lists without end": _fixed(HEAD + b"]\x94" * 1_500_000 + b"."),
    "marks without end": _fixed(HEAD + b"(" * 1_000_000 + b"."),
    "numbered memos without end": lambda _: (
        HEAD + b"N" + b"".join(b"r" + struct.pack("<I", 9 + index) for index in range(800_000)) + b"00."
    ),
    "colliding keys": lambda _: _colliding(),
    "duplicate": _fixed(HEAD + b"]2."),
    "list as a key": _fixed(HEAD + b"}]Ns."),
    "nothing on the stack": _fixed(HEAD + b"."),
    "a mark as the value": _fixed(HEAD + b"(."),
    "a mark in a tuple": _fixed(HEAD + b"((\x86."),
    "items without a mark": _fixed(HEAD + b"]NNe."),
    "items for a number": _fixed(HEAD + b"K\x01(Ne."),
    "odd number of items": _fixed(HEAD + b"}(NNNu."),
    "invalid text": _fixed(HEAD + b"\x8c\x02\xff\xfe."),
    "protocol 9": _fixed(b"\x80\x09N."),
    "no header": _fixed(b"N."),
    "gzip": _fixed(b"\x1f\x8b\x08" + bytes(100)),
    "zip": _fixed(b"PK\x03\x04" + bytes(100)),
    "json": _fixed(b'{"segments": []}'),
    "nothing": _fixed(b""),
    "noise": _fixed(bytes(range(256)) * 10),
}

LIMIT = 400 << 20
GUARDED = f"""
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
from ampmem.errors import AmpmemError
from ampmem.importer.unpickle import load_plain
for path in sys.argv[1:]:
    try:
        load_plain(Path(path))
    except AmpmemError as error:
        print(str(error).replace(chr(10), "<newline>"))
    else:
        print("LOADED")
"""


def _guarded(*paths: Path) -> list[str]:
    """What the reader says of each file, in a process that may not hold much."""
    command = [sys.executable, "-c", GUARDED, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_no_attack_runs_anything_or_holds_much(tmp_path: Path) -> None:
    sentinel = tmp_path / "it-ran"
    paths = []
    for number, (name, attack) in enumerate(ATTACKS.items()):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(attack(sentinel))
        paths.append((name, path))
    said = _guarded(*(path for _, path in paths))
    assert len(said) == len(ATTACKS)
    for (name, path), line in zip(paths, said, strict=True):
        assert line.startswith(f"{path} is not a memory snapshot"), (name, line)
        assert "<newline>" not in line
    assert not sentinel.exists()


def test_the_first_attack_would_work(tmp_path: Path) -> None:
    sentinel = tmp_path / "it-ran"
    pickle.loads(ATTACKS["reduce in protocol 4"](sentinel))
    assert sentinel.exists()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_snapshot_whose_events_share_their_stacks_is_not_too_much(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpickle, "_FREE_BYTES", 0)
    frames = [[{"name": "main", "filename": "train.py", "line": line}] for line in range(9)]
    trace = [
        {"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 1 << 50, "frames": frames[index % 9]}
        for index in range(5000)
    ]
    assert loads(pickle.dumps([trace], protocol=protocol)) == [trace]


def test_what_is_odd_but_plain_is_read_in_little_memory(tmp_path: Path) -> None:
    laughs, deep = tmp_path / "laughs", tmp_path / "deep"
    laughs.write_bytes(_laughs())
    deep.write_bytes(_nested(400_000))
    assert _guarded(laughs, deep) == ["LOADED", "LOADED"]


def test_every_truncation_is_refused() -> None:
    whole = pickle.dumps({"a": [1, 2.5, "text", (1, 2), None, True, 2**40], "b": {"c": []}}, protocol=4)
    for end in range(len(whole)):
        with pytest.raises(Refused):
            loads(whole[:end])


@settings(max_examples=150)
@given(st.binary(max_size=60))
def test_noise_is_refused_or_plain(data: bytes) -> None:
    with suppress(Refused):
        loads(HEAD + data)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump(tmp_path / "large.pickle", list(range(1000)))
    monkeypatch.setattr(unpickle, "MAX_FILE_BYTES", 100)
    with pytest.raises(UsageError, match="larger than 100 B"):
        load_plain(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_plain(tmp_path / "gone")
    with pytest.raises(UsageError, match="is not a file"):
        load_plain(tmp_path)


def test_the_message_names_the_file_and_the_opcode(tmp_path: Path) -> None:
    path = tmp_path / "odd.pickle"
    path.write_bytes(HEAD + b"cos\nsystem\n.")
    with pytest.raises(RecordingError, match=r"odd\.pickle .*opcode 0x63 at byte 2"):
        load_plain(path)
