"""The watch of a process: of which process group it is, and how long that waits."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.peers import is_current, watch
from tests.harness.threads import run_ranks

# The package has a function of the module's name.
WATCH: Any = sys.modules["fullshard.peers.watch"]


class Another:
    """A process group that was there before, at the same place in memory."""


@pytest.mark.threads_only(reason="what is put in its place is of this process")
def test_a_watch_is_of_one_process_group_and_waits_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WATCH, "timeout_of", lambda group: 77.0)

    def ranks(rank: int) -> None:
        here = watch()
        assert here is not None and watch() is here and is_current(here)
        assert here.settings.limit_seconds == 77.0 and here.settings.silence_seconds == 77.0 / 3
        key, another = id(dist.group.WORLD), Another()
        before = WATCH._watches[key]
        WATCH._watches[key] = (weakref.ref(another), here)
        assert not is_current(here) and watch() is not here
        WATCH._watches[key] = before
        assert is_current(here) and not is_current(WATCH.Watch(*[here.records.store] * 2, rank, here.settings))
        dist.barrier()
        if rank == 0:
            # A forked child is no rank, and says nothing in its parent's name.
            WATCH._forked()
            assert watch() is None and not WATCH._latest

    run_ranks(2, ranks)
