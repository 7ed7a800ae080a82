"""A reader of pickles that calls nothing.

A pickle is a program for a small stack machine; two of its instructions import a name and call it, and that is how a
file runs code. DCP's `.metadata` and the entries of its `.distcp` files are pickles, so they have to be read by whoever
wants what is in them. This machine builds `dict`, `list`, `tuple`, `str`, `bytes`, numbers, and *notes*: `Name` for an
import and `Made` for a call, with the arguments that it would have had. What a note stands for is decided by the reader
of one format, in plain Python.

* A name that the caller does not allow ends the reading, before anything after it is looked at.
* No attribute is looked up, no object of a class outside of this file is made, so there is nothing for a pickle to run.
* Work and memory are bounded by the length of the data: there are no sizes that allocate ahead of what is there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any

from ..errors import CheckpointError


class PickleRefused(CheckpointError):
    """A pickle that asks for more than its format has use for, or that is damaged. Nothing of it was run."""


class Name:
    """An import: `module.name`."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full

    def __repr__(self) -> str:
        return f"<{self.full}>"


class Made:
    """A call that was not made: of `name` with `args`, then given `state`. Equal to itself alone, so it can be a "
    "key."""

    __slots__ = ("name", "args", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None

    def __repr__(self) -> str:
        return f"<{self.name}(...)>"  # not the arguments: they may hold this very note


class Stored:
    """A persistent id: what the pickle refers to outside of itself."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


_MARK = object()


class _Machine:
    """The stack of one reading. Methods named after opcodes are in `_OPCODES`."""

    def __init__(self, data: bytes | memoryview, allowed: Collection[str]) -> None:
        self.data, self.at, self.end = memoryview(data), 0, len(data)
        self.allowed = allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self.data
        while True:
            if self.at >= self.end:
                raise PickleRefused(f"the pickle ends at byte {self.at} without its end mark: the file was cut short")
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.pop()
            do = _OPCODES.get(code)
            if do is None:
                raise PickleRefused(f"opcode {bytes([code])!r} at byte {self.at - 1} has no use in a checkpoint")
            do(self)

    def take(self, count: int) -> memoryview:
        if count < 0 or self.at + count > self.end:
            raise PickleRefused(f"byte {self.at}: {count} more bytes are announced, {self.end - self.at} are left")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, code: str) -> int:
        found: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return found

    def line(self) -> str:
        stop = self.at
        while stop < self.end and self.data[stop] != 0x0A:
            stop += 1
        text = str(self.take(stop - self.at), "utf-8", "replace")
        self.take(1)
        return text

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleRefused(f"byte {self.at}: the pickle takes a value that it has not made")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is _MARK:
                found = self.stack[start + 1 :]
                del self.stack[start:]
                return found
        raise PickleRefused(f"byte {self.at}: there is no mark to go back to")

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise PickleRefused(f"byte {self.at}: expected a {kind.__name__} to add to")
        return self.stack[-1]

    def add_items(self, found: list[Any]) -> None:
        target = self.top(dict)
        if len(found) % 2:
            raise PickleRefused(f"byte {self.at}: a key without its value")
        for key, value in zip(found[::2], found[1::2], strict=True):
            if not _is_key(key):
                raise PickleRefused(f"byte {self.at}: {show(key)} cannot be a key")
            target[key] = value

    def name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise PickleRefused(
                f"it asks for {full[:200]!r}, which this format has no use for. Nothing was run. "
                "If you trust where the file comes from, load it with the program that wrote it and save it anew"
            )
        self.stack.append(Name(full))

    def call(self) -> None:
        args, target = self.pop(), self.pop()
        if not isinstance(target, Name) or not isinstance(args, tuple):
            raise PickleRefused(f"byte {self.at}: it calls something that is no name of its format")
        # The two containers that are pickled as calls; a plain dict serves for both.
        if target.full in ("collections.OrderedDict", "collections.defaultdict"):
            self.stack.append({})
        else:
            self.stack.append(Made(target.full, args))


def _is_key(value: Any, depth: int = 0) -> bool:
    """Whether `value` may be a key. Python hashes a tuple to its depth, by recursion in C that nothing stops."""
    if isinstance(value, tuple):
        return depth < 3 and len(value) < 100 and all(_is_key(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | bytes | bool | int | float | Made | Name)


def _binary(count: str) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(bytes(m.take(m.number(count))))


def _text(count: str) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        try:
            m.stack.append(str(m.take(m.number(count)), "utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise PickleRefused(f"byte {m.at}: a text that is not UTF-8") from None

    return read


def _value(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _tuple(count: int) -> Callable[[_Machine], None]:
    def build(m: _Machine) -> None:
        m.stack.append(tuple([m.pop() for _ in range(count)][::-1]))

    return build


def _skip(count: int) -> Callable[[_Machine], None]:
    def skip(m: _Machine) -> None:
        m.take(count)

    return skip


def _drop(m: _Machine) -> None:
    m.pop()


def _drop_to_mark(m: _Machine) -> None:
    m.pop_to_mark()


def _memoize(m: _Machine, key: int) -> None:
    if not m.stack:
        raise PickleRefused(f"byte {m.at}: nothing to remember")
    m.memo[key] = m.stack[-1]


def _recall(m: _Machine, key: int) -> None:
    if key not in m.memo:
        raise PickleRefused(f"byte {m.at}: it recalls {key}, which was not remembered")
    m.stack.append(m.memo[key])


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleRefused(f"byte {m.at}: a name that is no text")
    m.name(module, name)


def _global(m: _Machine) -> None:
    module = m.line()
    m.name(module, m.line())


def _new_with_keywords(m: _Machine) -> None:
    if m.pop() != {}:
        raise PickleRefused(f"byte {m.at}: a call with keywords has no use in a checkpoint")
    m.call()


def _build(m: _Machine) -> None:
    state = m.pop()
    if m.stack and isinstance(m.stack[-1], dict) and isinstance(state, dict):
        return  # attributes of an OrderedDict (`_metadata` of a state dict), which no tensor needs
    m.top(Made).state = state


def _append(m: _Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: _Machine) -> None:
    found = m.pop_to_mark()
    m.top(list).extend(found)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.add_items([key, value])


def _long(count: str) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        length = m.number(count)
        if length > 32:
            raise PickleRefused(f"byte {m.at}: an integer of {length} bytes")
        m.stack.append(int.from_bytes(m.take(length), "little", signed=True))

    return read


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord(b"\x80"): _skip(1),  # PROTO
    ord(b"\x95"): _skip(8),  # FRAME: a hint for buffering
    ord(b"("): _value(_MARK),
    ord(b"0"): _drop,
    ord(b"1"): _drop_to_mark,
    ord(b"N"): _value(None),
    ord(b"\x88"): _value(True),
    ord(b"\x89"): _value(False),
    ord(b"J"): lambda m: m.stack.append(m.number("<i")),
    ord(b"K"): lambda m: m.stack.append(m.number("<B")),
    ord(b"M"): lambda m: m.stack.append(m.number("<H")),
    ord(b"\x8a"): _long("<B"),
    ord(b"\x8b"): _long("<i"),
    ord(b"G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord(b"X"): _text("<I"),
    ord(b"\x8c"): _text("<B"),
    ord(b"\x8d"): _text("<Q"),
    ord(b"B"): _binary("<I"),
    ord(b"C"): _binary("<B"),
    ord(b"\x8e"): _binary("<Q"),
    ord(b"]"): lambda m: m.stack.append([]),
    ord(b"}"): lambda m: m.stack.append({}),
    ord(b")"): _value(()),
    ord(b"l"): lambda m: m.stack.append(m.pop_to_mark()),
    ord(b"t"): lambda m: m.stack.append(tuple(m.pop_to_mark())),
    ord(b"\x85"): _tuple(1),
    ord(b"\x86"): _tuple(2),
    ord(b"\x87"): _tuple(3),
    ord(b"a"): _append,
    ord(b"e"): _appends,
    ord(b"s"): _set_item,
    ord(b"u"): lambda m: m.add_items(m.pop_to_mark()),
    ord(b"q"): lambda m: _memoize(m, m.number("<B")),
    ord(b"r"): lambda m: _memoize(m, m.number("<I")),
    ord(b"\x94"): lambda m: _memoize(m, len(m.memo)),
    ord(b"h"): lambda m: _recall(m, m.number("<B")),
    ord(b"j"): lambda m: _recall(m, m.number("<I")),
    ord(b"c"): _global,
    ord(b"\x93"): _stack_global,
    ord(b"R"): _Machine.call,
    ord(b"\x81"): _Machine.call,
    ord(b"\x92"): _new_with_keywords,
    ord(b"b"): _build,
    ord(b"Q"): lambda m: m.stack.append(Stored(m.pop())),
}


def show(value: Any) -> str:
    """A short text for what was found in a pickle; containers by their type, since they may be endless.

    >>> show("a"), show([1]), show(Name("os.system"))
    ("'a'", 'a list', '<os.system>')
    """
    if isinstance(value, str | bytes | int | float | Name | Made | None):
        return repr(value[:80] if isinstance(value, str | bytes) else value)
    return f"a {type(value).__name__}"


def read_pickle(data: bytes | memoryview, allowed: Collection[str]) -> Any:
    """What the pickle in `data` builds, with notes in the place of calls. `allowed`: full names that it may mention,
    such as `"torch.float32"`. Raises `PickleRefused` for other names, for opcodes without use here, and for damage.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"a": [1, 2.5, (b"x", None)]}), allowed=())
    {'a': [1, 2.5, (b'x', None)]}
    """
    return _Machine(data, allowed).run()
