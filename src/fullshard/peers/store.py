"""The ranks' records in the store of their process group (`Records`). Each record is a mailbox too (`Mail`).

A rank rewrites its record repeatedly, in exchange for the one that it wrote last (`compare_set`). So one request is a
sign of life, reports the rank's activity, and fetches mail from other ranks:

    the rank     post('{"n": 7, ...}')     finds its own record: written
    another one  tell([3], "mail")         overwrites it
    the rank     post('{"n": 8, ...}')     finds the mail, and writes after it has read it

Two ranks that tell a third one something at the same time overwrite each other. So a message that must not get lost is
in the sender's own record as well, where the leader (diagnosis.py) finds it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from .failures import Fault

_MAIL = '{"mail":'
# How many earlier faults are sent again with a new one.
_LATELY = 8


class Store(Protocol):
    """The part of a torch store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def has_extended_api(self) -> bool: ...
    def append(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class Records:
    """The records of all ranks, as used by `rank`. `store`: for the thread that runs the model; `beside`: another
    connection, so that a sign of life does not wait for a question."""

    def __init__(self, store: Store, beside: Store, rank: int) -> None:
        self.store, self._beside, self.rank = store, beside, rank
        # A process group may be made again over the same store, equally often on all ranks.
        self.prefix = f"fullshard/{store.add(f'fullshard/made/{rank}', 1)}"
        self._last = self._machine = ""
        # Held while the record is exchanged: two threads would overwrite each other's record.
        self._posting = threading.Lock()

    def key(self, rank: int) -> str:
        """The key of the record of `rank`."""
        return f"{self.prefix}/rank/{rank}"

    def join(self, machine: str) -> None:
        """Register this rank and its machine, once."""
        self.append(f"{self.prefix}/ranks", f"{self.rank} ")
        self._machine = f"{self.prefix}/machine/{machine}"
        self.store.add(self._machine, 1)
        self.store.add(f"{self.prefix}/machines", 1)

    def is_one_machine(self) -> bool:
        """Whether all ranks that have joined are on this machine, where their processes are visible."""
        return self.store.add(self._machine, 0) == self.store.add(f"{self.prefix}/machines", 0)

    def post(self, record: str) -> list[str]:
        """Write this rank's record; return the mail that it replaces."""
        mail: list[str] = []
        with self._posting:
            for _ in range(8):
                found = _text(self._beside.compare_set(self.key(self.rank), self._last, record))
                if found == record:
                    self._last = record
                    break
                self._last = found  # mail; or this rank's last record, if an exception prevented noting it
                if found.startswith(_MAIL):
                    mail += json.loads(found)["mail"]
        return mail

    def tell(self, ranks: Iterable[int], texts: Sequence[str], own: Mapping[int, Sequence[str]] | None = None) -> None:
        """Leave `texts` for `ranks`: one request. `own`: other texts for some of them."""
        told = [rank for rank in ranks if rank != self.rank]
        keys, mail, own = [self.key(rank) for rank in told], _mail(texts), own or {}
        mails = [_mail(own[rank]) if rank in own else mail for rank in told]
        if keys and self._beside.has_extended_api():
            self._beside.multi_set(keys, mails)
        elif keys:
            for key, one in zip(keys, mails, strict=True):
                self._beside.set(key, one)

    def joined(self) -> frozenset[int]:
        """The ranks that have a record."""
        return frozenset(map(int, self.read(f"{self.prefix}/ranks", self._beside).split()))

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """The records of `ranks`, all of which have joined. One request."""
        keys = [self.key(rank) for rank in ranks]
        if not self._beside.has_extended_api():
            return {rank: _text(self._beside.get(key)) for rank, key in zip(ranks, keys, strict=True)}
        found = self._beside.multi_get(keys) if keys else []
        return {rank: _text(value) for rank, value in zip(ranks, found, strict=True)}

    def claim(self, key: str, before: str = "") -> str:
        """Claim `key` if `before` holds it; return the holder."""
        return _text(self._beside.compare_set(key, before, str(self.rank)))

    def release(self, key: str) -> None:
        """Let others claim it."""
        self._beside.set(key, "")

    # ---- lists ---------------------------------------------------------------------------------------------

    def append(self, key: str, text: str) -> None:
        """Add `text` to what is at `key`."""
        if self.store.has_extended_api():
            self.store.append(key, text)
        else:  # a file
            self.store.set(f"{key}/{self.store.add(key, 1)}", text)

    def read(self, key: str, store: Store | None = None) -> str:
        """The concatenated texts appended at `key`, of which there is at least one."""
        store = store or self.store
        if store.has_extended_api():
            return _text(store.get(key))
        parts = [f"{key}/{number}" for number in range(1, store.add(key, 0) + 1)]
        return "".join(_text(store.get(part)) for part in parts if store.check([part]))


class Receiver(Protocol):
    """A scope, which receives its faults."""

    name: str
    epoch: int

    def note_fault(self, fault: Fault, now: float) -> None: ...


class Mail:
    """The faults that this rank and the others tell each other. `scopes`: those that this rank has made."""

    def __init__(self, records: Records, scopes: Mapping[Any, Receiver]) -> None:
        self._records, self._scopes = records, scopes
        # The last faults reported, of any scope: each message repeats them, because it overwrites earlier ones.
        self._lately: list[Fault] = []
        # Faults of scopes that this rank has not made yet.
        self._early: list[tuple[Fault, float]] = []

    def tell(self, ranks: Iterable[int], faults: Sequence[Fault]) -> None:
        """Leave `faults` for `ranks`, with earlier ones, because this overwrites mail that may be unread."""
        epochs = {scope.name: scope.epoch for scope in list(self._scopes.values())}
        lately = [one for one in self._lately if one not in faults and one.epoch >= epochs.get(one.scope, 0)]
        self._lately = said = [*lately, *faults][-_LATELY:]
        ends = {int(rank) for one in said for rank in one.meets}
        self._records.tell(
            ranks, [one.dumps() for one in said], {rank: [one.dumps(rank) for one in said] for rank in ends}
        )

    def ask(self, rank: int, looks: Sequence[Fault]) -> None:
        """Ask `rank` to look at processes of its machine, which are of no interest later."""
        self._records.tell([rank], [one.dumps() for one in (*self._lately, *looks)])

    def receive(self, fault: Fault, now: float) -> None:
        """A fault came: its scope learns of it, at once or as soon as it is made."""
        known = [scope for scope in list(self._scopes.values()) if scope.name == fault.scope]
        for scope in known:
            scope.note_fault(fault, now)
        if not known:
            self._early = [*self._early[-_LATELY:], (fault, now)]

    def catch_up(self, scope: Receiver) -> None:
        """`scope` was made: it learns of the faults that came before."""
        for fault, since in self._early:
            if fault.scope == scope.name:
                scope.note_fault(fault, since)


def _mail(texts: Sequence[str]) -> str:
    return f"{_MAIL}{json.dumps(list(texts))}}}"


def _text(found: bytes | str) -> str:
    return found if isinstance(found, str) else found.decode()


def dumps(record: Mapping[str, Any]) -> str:
    """A record as its text, on one line."""
    return json.dumps(record, separators=(",", ":"))


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """`ranks` as runs (first, count, step), so that ten thousand fit into a record.

    >>> runs([0, 4, 8, 9]), ranks_of(runs([0, 4, 8, 9]))
    ([[0, 3, 4], [9, 1, 1]], [0, 4, 8, 9])
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return [[ranks[0], len(ranks), step]]
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == 1 and rank > found[-1][0]:
            found[-1][1:] = [2, rank - found[-1][0]]
        elif found and rank == found[-1][0] + found[-1][1] * found[-1][2]:
            found[-1][1] += 1
        else:
            found.append([rank, 1, 1])
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> list[int]:
    """The reverse of `runs`."""
    return [first + step * i for first, count, step in found for i in range(count)]
