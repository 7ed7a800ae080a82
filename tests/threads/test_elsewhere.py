"""What torch records of its own collectives: on that it rests that a rank alone in one of them hears of. Who is
stuck: tests/pure/test_diagnosis.py; programs: tests/procs/test_elsewhere.py."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from fullshard._torch import Recorded, active_collectives, issued_by_group, known_groups


def test_what_torch_records(tmp_path: Any) -> None:
    """The numbers of collectives alone, in their order, by group; nothing of those that are over is active."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        (name,) = known_groups()
        before = issued_by_group()[name]
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.broadcast(torch.ones(1), 0)
        assert issued_by_group() == {name: before + 3}
        # The backend's own thread says so, a moment after the call has returned.
        end = time.monotonic() + 20
        while any(one.thread == threading.get_ident() for one in active_collectives()):
            assert time.monotonic() < end, active_collectives()
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()


def test_what_needs_all_ranks() -> None:
    """A rank that receives from a root, or sends to one, may end before the others have come."""
    needs = {call for call in CALLS if Recorded("0", 1, call, 4).needs_all}
    assert needs == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


CALLS = "all_reduce all_gather reduce_scatter all_to_all barrier broadcast scatter reduce gather send".split()


def test_a_group_that_does_not_count_proves_nothing(monkeypatch: Any) -> None:
    class Uncounted:
        def _get_backend(self, device: torch.device) -> Any:
            raise RuntimeError("no backend for the host")

    monkeypatch.setattr("fullshard._torch.groups.known_groups", lambda: {"0": Uncounted()})
    assert issued_by_group() == {}
