"""Whether all hosts see the directory of a save, before its first byte: one rank of each other host looks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ..comm import Messenger
from . import limits
from .agreement import Heard, Message, agree
from .errors import CheckpointError

# By process group and rank: whether that rank looks for its host.
_looks: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def check(messenger: Messenger, what: str, path: str, name: str, largest_of: Callable[[], int]) -> None:
    """All ranks together, before they write into the directory `name` in `path`, which the first rank made.
    `largest_of`: returns the bytes of the largest file of this rank; what it raises, all ranks raise.

    Raises `CheckpointError` that names the hosts which do not see it, or `CheckpointIOError` for a file that a rank may
    not write. Costs a small message of each rank, and one more at the first save of a process group.
    """
    looks = _is_looking(messenger, what)

    def look() -> Message:
        limit, largest = limits.process_limit(), largest_of()
        if limit is not None and limit < largest:
            room = limits.Room(None, None, None, None, limit)
            limits.refuse(path, limits.problems(path, limits.Need(0, 0, largest, ""), room))
        problem = limits.sees(path, name) if looks else None
        return {} if problem is None else {"host": limits.host(), "problem": problem}

    def decide(heard: Heard) -> Message:
        if found := [f"host {one['host']} {one['problem']}" for one in heard.messages if one]:
            raise CheckpointError(
                f"{path}: expected a directory that all hosts share, found that host {limits.host()} made {name} "
                f"there and {', '.join(found)}; nothing was written: the directory must be one that all ranks share"
            )
        return {}

    agree(messenger, what, look, decide)


def _is_looking(messenger: Messenger, what: str) -> bool:
    if messenger.world == 1:
        return False
    known = _looks.setdefault(messenger.group, {})
    if messenger.rank not in known:

        def first_of_hosts(heard: Heard) -> Message:
            return {"ranks": [ranks[0] for ranks, _ in heard.groups[1:]]}

        found = agree(messenger, what, lambda: {"view": limits.view()}, first_of_hosts)
        known[messenger.rank] = messenger.rank in found["ranks"]
    return known[messenger.rank]
