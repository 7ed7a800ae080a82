"""The reader of pickles that calls nothing: what it builds, what it refuses, and that no file runs code."""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.formats.pickle_tree import Call, PickleRefused, read_pickle

PLAIN = [
    {"a": [1, -1, 255, 256, 65536, 1 << 40, -(1 << 70)], "b": (1.5, float("inf")), "c": (None, True, False)},
    {"text": "ünïcode \ud800", "bytes": b"\x00\xff", "long": "x" * 300, "long bytes": b"x" * 300},
    {(1, "tuple"): {}, 3: [[], [()], [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]]},
    collections.OrderedDict(a=1, b=collections.OrderedDict()),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    allowed = {"collections.OrderedDict", "_codecs.encode"}
    found = read_pickle(pickle.dumps(value, protocol), allowed)
    if protocol == 2 and "bytes" in value:
        # Protocol 2 has no bytes: they are a call, which is noted.
        assert isinstance(found["bytes"], Call) and found["bytes"].name == "_codecs.encode"
        found = {**found, "bytes": value["bytes"], "long bytes": value["long bytes"]}
    assert found == value


def test_what_is_shared_stays_shared() -> None:
    inner: list[int] = [1]
    found = read_pickle(pickle.dumps([inner, inner]), ())
    found[0].append(2)
    assert found == [[1, 2], [1, 2]]


class _Runs:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path, how: str) -> None:
        self.marker, self.how = str(marker), how

    def __reduce__(self) -> tuple[Any, ...]:
        match self.how:
            case "os.system":
                return os.system, (f"touch {self.marker}",)
            case "eval":
                return eval, (f"__import__('pathlib').Path({self.marker!r}).touch()",)
            case "exec":
                return exec, (f"import pathlib; pathlib.Path({self.marker!r}).touch()",)
            case "getattr":
                return getattr, (os, "system")
            case "state":
                return _Holder, (), {"run": _Runs(Path(self.marker), "os.system")}
        raise AssertionError(self.how)


class _Holder:
    pass


HOW = ("os.system", "eval", "exec", "state")


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("how", HOW)
def test_hostile_pickles_are_refused_and_run_nothing(how: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps({"tensors": [_Runs(marker, how)]}, protocol)
    with pytest.raises(PickleRefused):
        read_pickle(data, {"collections.OrderedDict"})
    assert not marker.exists()
    # The payload is a live one: the same bytes run code when they are unpickled.
    if how != "state":
        pickle.loads(data)
        assert marker.exists()


def test_even_allowed_names_are_not_called(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    found = read_pickle(pickle.dumps(_Runs(marker, "os.system")), {"posix.system"})
    assert isinstance(found, Call) and found.name == "posix.system" and not marker.exists()
    # Nor is state given to anything but a note: no attribute of a class, a module or a function can be set.
    data = b"cposix\nsystem\n}X\x01\x00\x00\x00aK\x01sb."
    with pytest.raises(PickleRefused, match="expected a call"):
        read_pickle(data, {"posix.system"})


@pytest.mark.parametrize(
    "code",
    [b"P1\n.", b"(i__main__\nX\n.", b"(o.", b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"\x97.", b"."],
)
def test_opcodes_without_use_are_refused(code: bytes) -> None:
    with pytest.raises(PickleRefused):
        read_pickle(code, ())


def test_announced_lengths_allocate_nothing() -> None:
    for code in (
        b"X\xff\xff\xff\xff",
        b"\x8d" + b"\xff" * 8,
        b"B\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8e" + b"\xff" * 8,
    ):
        with pytest.raises(PickleRefused):
            read_pickle(code + b"abc.", ())
    # A memo of four thousand million entries is one entry.
    assert read_pickle(b"K\x01r\xff\xff\xff\xff.", ()) == 1


def test_nesting_without_end_is_an_error_and_no_crash() -> None:
    """Python hashes a tuple, and shows one, by recursion."""
    deep = b")" + b"\x85" * 150_000
    assert isinstance(read_pickle(deep + b".", ()), tuple)
    with pytest.raises(PickleRefused, match="cannot be a key"):
        read_pickle(b"}" + deep + b"K\x01s.", ())
    # Each tuple is twice the one before: 2**100 items in 500 bytes.
    wide = b")" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(100))
    with pytest.raises(PickleRefused, match="cannot be a key"):
        read_pickle(b"}" + wide + b"K\x01s.", ())


def test_damage_is_refused_and_never_anything_else() -> None:
    """Cut short at each byte, and with bytes changed at random: a value, or the one error."""
    data = pickletools.optimize(pickle.dumps(PLAIN[:3], 4))
    for stop in range(len(data)):
        with pytest.raises(PickleRefused):
            read_pickle(data[:stop], ())
    draw = random.Random(0)
    refused = 0
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            read_pickle(bytes(broken), ())
        except PickleRefused:
            refused += 1
    assert refused > 1000


def test_what_is_endless_is_shown_short() -> None:
    from fullshard.checkpoint.formats.pickle_tree import show

    endless: list[Any] = []
    endless.append(endless)
    assert show(endless) == "a list" and show("x" * 1000) == repr("x" * 80)
    pickler = pickle.Pickler(io.BytesIO(), 4)
    pickler.dump(endless)
    assert repr(Call("a.b", (endless,))) == "<a.b(...)>"
