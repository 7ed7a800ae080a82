"""Whether all hosts see the directory of a save, before its first byte: one rank of each other host looks for it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ..comm import Messenger
from . import limits
from .agreement import Message, agree
from .errors import CheckpointError

# By process group and rank: whether that rank looks for its host.
_looks: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def check(messenger: Messenger, what: str, path: str, name: str, largest: int) -> None:
    """All ranks together, before they write into the directory `name` in `path`, which the first rank made. `largest`:
    bytes of the largest file of this rank.

    Raises `CheckpointError` that names the hosts which do not see it, or `CheckpointIOError` for a file that a rank may
    not write. Costs a small message of each rank, and one more at the first save of a process group.
    """
    looks = _is_looking(messenger, what)

    def look() -> Message:
        limit = limits.process_limit()
        if limit is not None and limit < largest:
            room = limits.Room(None, None, None, None, limit)
            limits.refuse(path, limits.problems(path, limits.Need(0, 0, largest, ""), room))
        problem = limits.sees(path, name) if looks else None
        return {} if problem is None else {"host": limits.host(), "problem": problem}

    def decide(messages: list[Message]) -> Message:
        if found := [f"host {one['host']} {one['problem']}" for one in messages if one]:
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

        def first_of_hosts(messages: list[Message]) -> Message:
            hosts: dict[str, int] = {}
            for rank, message in enumerate(messages):
                hosts.setdefault(message["view"], rank)
            return {"ranks": sorted(set(hosts.values()) - {0})}

        found = agree(messenger, what, lambda: {"view": limits.view()}, first_of_hosts)
        known[messenger.rank] = messenger.rank in found["ranks"]
    return known[messenger.rank]
