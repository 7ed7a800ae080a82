"""The watch of the current process group, and the report when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from .._torch import default_store, timeout_of
from .scope import Scope
from .wait import AnyWatch, Settings
from .watch import Watch

# How long the process that serves the store waits at its end until others have read why it ends.
_LAST_SECONDS = 6.0

_watches: dict[int, tuple[weakref.ref[dist.ProcessGroup], Watch | None]] = {}
# The latest watch: it reports the end of the process even after the process group was destroyed.
_latest: list[Watch] = []


def watch() -> Watch | None:
    """This process's watch; None without peers (no process group, a fake one, a single rank)."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    key = id(world)
    known = _watches.get(key)
    if known is not None and known[0]() is world:
        return known[1]
    silent = dist.get_backend(world) == "fake" or dist.get_world_size(world) == 1
    settings = Settings.read(1800.0 if silent else timeout_of(world))
    made = None if silent else Watch(default_store(), default_store(), dist.get_rank(world), settings)
    _watches[key] = (weakref.ref(world, lambda _: _watches.pop(key, None)), made)
    if made is not None:
        made.is_current = partial(is_current, weakref.ref(made))
        _latest[:] = [made]
    return made


def is_current(which: AnyWatch | weakref.ref[Watch]) -> bool:
    """Whether `which` belongs to the current process group. Thread-safe."""
    which_now = which() if isinstance(which, weakref.ref) else which
    world = dist.group.WORLD if dist.is_initialized() else None
    known = None if world is None else _watches.get(id(world))
    return known is not None and known[0]() is world and known[1] is which_now


def scope_of(ranks: Sequence[int], apart: str = "") -> Scope | None:
    """The scope of these ranks; None without a watch, or for a single rank."""
    here = watch()
    return None if here is None or len(ranks) < 2 else here.scope(ranks, apart)


def mode() -> str:
    """The guard mode (`Settings.mode`), also without peers."""
    here = watch()
    return here.settings.mode if here is not None else Settings.read(0.0).mode


def has_peers() -> bool:
    """Whether this process has peers."""
    return watch() is not None


def _forked() -> None:
    """A forked child is not a rank: it has no watch thread, and must not report in its parent's name. It becomes one in
    a process group that it makes itself."""
    _watches.clear()
    _latest.clear()
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None:
        _watches[id(world)] = (weakref.ref(world), None)


def _end() -> None:
    known = list(_latest)
    if not known and not _watches:
        with suppress(Exception):
            # Without a watch yet (an invalid setting may end the process), peers may wait for it at their first use.
            world = dist.group.WORLD if dist.is_initialized() else None
            if world is not None and dist.get_backend(world) != "fake" and world.size() > 1:
                known = [Watch(default_store(), default_store(), world.rank(), Settings())]
    error = getattr(sys, "last_value", None)
    text = f"its process ended with {type(error).__name__}: {error}" if error is not None else "its process ended"
    for one in known:
        one.stop()
        one.join(2)
        one.end(text)
        if one.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            one.wait_for_readers(_LAST_SECONDS)


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
