"""Pickles read as data: the standard library's reader, restricted so that it calls nothing.

A pickle is a program for a small stack machine. Two of its instructions import a name and call it, which is how a file
runs code. DCP's `.metadata` and the entries of its `.distcp` files are pickles. This reader builds `dict`, `list`,
`tuple`, `str`, `bytes`, numbers, and *notes*: `Name` for an import and `Call` for a call, with the arguments that it
would have had. The reader of each format interprets the notes, in plain Python.

* Opcodes outside of `_OPCODES`, and names outside of the caller's allow-list, stop the reading.
* Instructions that call, build or hash are replaced here: nothing is imported, no attribute is set, no key is deep.
* Work and memory are bounded by the length of the data: none of the remaining opcodes allocates ahead of its input.

It extends the reader written in Python, because that one has a table of opcodes; the one in C accepts all of them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from ..errors import CheckpointError


class PickleRefused(CheckpointError):
    """A pickle that asks for more than its format needs, or that is damaged. None of it was run."""


class Name:
    """An import: `module.name`."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full

    def __repr__(self) -> str:
        return f"<{self.full}>"


class Call:
    """A call that was not made: of `name` with `args`, then given `state`. Equal only to itself, so it can be a key."""

    __slots__ = ("name", "args", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None

    def __repr__(self) -> str:
        return f"<{self.name}(...)>"  # without arguments: they may contain this note


class Reference:
    """A persistent id: a reference to something outside of the pickle."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


# The opcodes that pickles of DCP and torch.save use, and similar ones.
_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT "
    "BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GLOBAL STACK_GLOBAL BINPERSID"
).split()


class _Reader(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes | memoryview, allowed: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Name:
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise PickleRefused(
                f"it asks for {full[:200]!r}, which this format does not use. Nothing was run. "
                "If you trust its source, load it with the program that wrote it and save it again"
            )
        return Name(full)

    def persistent_load(self, pid: Any) -> Reference:
        return Reference(pid)

    def note_call(self) -> None:
        args, target = self.stack.pop(), self.stack.pop()
        if not isinstance(target, Name) or not isinstance(args, tuple):
            raise PickleRefused("it calls something other than a name of its format")
        # The two containers that are pickled as calls; a plain dict serves for both.
        container = target.full in ("collections.OrderedDict", "collections.defaultdict")
        self.append({} if container else Call(target.full, args))

    def note_call_with_keywords(self) -> None:
        if self.stack.pop() != {}:
            raise PickleRefused("a checkpoint does not use calls with keywords")
        self.note_call()

    def note_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, dict) and isinstance(state, dict):
            return  # attributes of an OrderedDict (`_metadata` of a state dict), which no tensor needs
        if not isinstance(target, Call):
            raise PickleRefused(f"it gives state to {show(target)}, expected a call")
        target.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, found: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise PickleRefused(f"it gives items to {show(target)}, expected a dict")
        for key, value in zip(found[::2], found[1::2], strict=True):
            if not _is_key(key):
                raise PickleRefused(f"{show(key)} cannot be a key")
            target[key] = value

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
        pickle.REDUCE[0]: note_call,
        pickle.NEWOBJ[0]: note_call,
        pickle.NEWOBJ_EX[0]: note_call_with_keywords,
        pickle.BUILD[0]: note_state,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


def _is_key(value: Any, depth: int = 0) -> bool:
    """Whether `value` may be a key. Python hashes tuples recursively in C, without a limit."""
    if isinstance(value, tuple):
        return depth < 3 and len(value) < 100 and all(_is_key(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | bytes | bool | int | float | Call | Name)


def show(value: Any) -> str:
    """A short text for a value of a pickle; containers by their type, since they may be endless.

    >>> show("a"), show([1]), show(Name("os.system"))
    ("'a'", 'a list', '<os.system>')
    """
    if isinstance(value, str | bytes | int | float | Name | Call | None):
        return repr(value[:80] if isinstance(value, str | bytes) else value)
    return f"a {type(value).__name__}"


def read_pickle(data: bytes | memoryview, allowed: Collection[str]) -> Any:
    """The value that the pickle in `data` builds, with notes instead of calls. `allowed`: full names that it may use,
    such as `"torch.float32"`. Raises `PickleRefused` for other names, for unknown opcodes, and for damage.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"a": [1, 2.5, (b"x", None)]}), allowed=())
    {'a': [1, 2.5, (b'x', None)]}
    """
    reader = _Reader(data, allowed)
    try:
        return reader.load()
    except PickleRefused:
        raise
    except Exception as error:  # of the stack machine: an empty stack, an unknown opcode, a short read
        raise PickleRefused(f"damaged, or not the pickle of a checkpoint: {type(error).__name__}: {error}") from None
