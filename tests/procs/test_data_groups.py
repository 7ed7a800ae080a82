"""Cutting a data group ends what this rank waits for, whatever its peers did to their ends before
(comm/data_group.py)."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import PeerFailed
from fullshard.comm import ShardGroup, alike
from fullshard.comm.data_group import DataGroup, open_data_group
from fullshard.peers import Scope, scope_of
from tests.harness.hang import patience
from tests.harness.models import seeded
from tests.harness.pool import pool
from tests.threads.programs import Model, batch, part, shard


def opened() -> tuple[Scope, DataGroup]:
    """A data group of all ranks, over which a message went."""
    scope = scope_of(range(dist.get_world_size()))
    origin = dist.group.WORLD
    assert scope is not None and origin is not None
    data = open_data_group(scope, origin, torch.device("cpu"), "gloo", "test")
    assert data is not None
    data.issue(data.group.allreduce, [torch.ones(1)]).wait()
    return scope, data


def cut_after(rank: int, first: int) -> float:
    """Rank `first` cuts its end; another one waits for the third, which keeps its end, and then cuts its own."""
    world = dist.get_world_size()
    scope, data = opened()
    store = scope.watch.records.store
    if rank == first:
        data.cut()
        store.set("first/cut", "1")
    waits, seconds = (first - 1) % world, 0.0
    if rank == waits:
        while not store.check(["first/cut"]):
            time.sleep(0.01)
        time.sleep(0.1)  # until it is noticed here
        (silent,) = {0, 1, 2} - {first, waits}
        pending = data.group.recv([torch.empty(1)], silent, 7)
        begun = time.monotonic()
        data.cut()
        with pytest.raises(RuntimeError):
            pending.wait()
        seconds = time.monotonic() - begun
        store.set("second/cut", "1")
    while not store.check(["second/cut"]):
        time.sleep(0.01)
    return seconds


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_cut_ends_waits_for_a_rank_that_did_not_cut(first: int) -> None:
    """A closed connection to one peer must not keep the others open."""
    assert max(pool(3).run(cut_after, first, timeout=20)) < patience(2)


def closed_by(rank: int) -> str:
    """Rank 1 cuts its end, and says why a moment later."""
    scope, data = opened()
    if rank == 1:
        data.cut()
        time.sleep(0.5)
        scope.publish("raised", "ValueError: a bad token")
        while not scope.watch.records.store.check(["named"]):
            time.sleep(0.01)
        return ""
    begun = time.monotonic()
    with pytest.raises(PeerFailed) as caught:
        data.issue(data.group.allreduce, [torch.ones(1)]).wait()
    assert (
        caught.value.rank == 1 and data.is_cut and scope.failures.must_meet and time.monotonic() - begun < patience(5)
    )
    scope.watch.records.store.set("named", "")
    return caught.value.text


def test_a_closed_connection_is_explained_by_the_one_who_closed_it() -> None:
    """What the backend says is no name."""
    assert pool(2).run(closed_by, timeout=20)[0] == "ValueError: a bad token"


def _trained(rank: int) -> int:
    model = shard(seeded(Model))
    model(part(batch(2, 0), rank)).pow(2).mean().backward()
    return len(os.listdir("/proc/self/task"))


def _threads(rank: int) -> int:
    time.sleep(1.0)
    return len(os.listdir("/proc/self/task"))


def test_a_destroyed_process_group_leaves_no_connections() -> None:
    """Each has threads, which compute for ever where a peer closed its end; what is left of a watch may be collected
    much later."""
    inside = pool(2).run(_trained)
    for _ in range(4):
        pool(2).run(_trained)
    # Each time three groups of three threads were made. Some of torch's own groups may still wait for the collector.
    # Each rank by itself: what ran before in its process left threads of its own.
    after = pool(2).run(_threads, group=False)
    assert all(now < before + 2 * 9 for now, before in zip(after, inside, strict=True)), (inside, after)


def _compared(rank: int) -> tuple[bool | None, bool | None, int]:
    """As where parameters are on a device, for which this group has no backend: what is compared is on the host."""
    scope, origin = scope_of(range(dist.get_world_size())), dist.group.WORLD
    assert scope is not None and origin is not None
    group = ShardGroup(origin, torch.device("cuda"))
    group.open(scope)
    asked = scope.asked
    return alike(scope, "the end of the block"), alike(scope, f"rank {rank}"), scope.asked - asked


def test_ranks_compare_on_the_host_whatever_their_device_is() -> None:
    """Where the process group has a backend for the host; no question goes through the store."""
    assert pool(2).run(_compared) == [(True, False, 0)] * 2


class _Own:
    """A caller's messages, over before they return: what they return has a `wait` without a time limit, or is None."""

    def __init__(self, says: bool) -> None:
        self.says, self.calls = says, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **more: Any
    ) -> Any:
        self.calls += 1
        # Their names from 2.13 on.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        if "op" in more:
            scatter(output_tensor, input_tensor, op=more["op"], group=group)
        else:
            gather(output_tensor, input_tensor, group=group)
        return self if self.says else None

    def wait(self) -> None:
        pass


def _custom(rank: int, says: bool) -> tuple[float, int]:
    model, plain = shard(seeded(Model)), shard(seeded(Model))
    gather, scatter = _Own(says), _Own(says)
    plain.set_force_sum_reduction_for_comms(True)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    for trained in (model, plain):
        trained(part(batch(2, 0), rank)).pow(2).mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a.grad - b.grad).to_local().abs().max()) for a, b in pairs), gather.calls * scatter.calls


@pytest.mark.parametrize("says", [True, False], ids=["a wait without a limit", "nothing"])
def test_custom_messages_may_return_anything_that_waits(says: bool) -> None:
    """Red before: on gloo the wait for it was cut into slices, and it was a TypeError."""
    found = pool(2).run(_custom, says)
    assert [difference for difference, _ in found] == [0.0, 0.0] and all(calls for _, calls in found)


# ---- what a backend keeps --------------------------------------------------------------------------------------------


def _used_later(rank: int, lazy: bool) -> list[float]:
    """Two data groups are connected. Nothing of Python is left of it when their store is used and a message sent."""
    if lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    scope, origin = scope_of(range(dist.get_world_size())), dist.group.WORLD
    assert scope is not None and origin is not None
    made = [open_data_group(scope, origin, torch.device("cpu"), "gloo", purpose) for purpose in ("one", "other")]
    found = []
    for data in made:
        assert data is not None
        data.connect()
    gc.collect()
    for data in made:
        assert data is not None
        store: Any = data.group.get_group_store()
        store.set(f"later {rank}", "1")
        assert store.get(f"later {1 - rank}") == b"1"
        value = torch.ones(1)
        data.issue("allreduce", [value]).wait()
        found.append(value.item())
    return found


@pytest.mark.parametrize("lazy", [False, True], ids=["connected at once", "connected by the first message"])
def test_the_store_of_a_connected_group_can_be_used_later(lazy: bool) -> None:
    """Red before: it called an object of Python's that was gone. NCCL does so at its first message, and its watchdog
    whenever it finds an error; gloo where it connects lazily."""
    assert pool(2).run(_used_later, lazy, timeout=30) == [[2.0, 2.0]] * 2


def _cut_for_a_device(rank: int) -> tuple[bool, float]:
    """A group of gloo's for a device, whose tensors gloo copies to the host: messages of the host stand for them."""
    device = torch.device("cuda", 0)
    scope, origin = scope_of(range(dist.get_world_size())), dist.group.WORLD
    assert scope is not None and origin is not None
    data = open_data_group(scope, origin, device, "gloo", "test")
    assert data is not None and not data.on_streams
    data.connect()
    backend: Any = data.group._get_backend(device)
    pending = backend.recv([torch.empty(1)], 1 - rank, 7)
    # Both wait now: a rank that asks after the cut gets its error from `recv` itself.
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        data.cut()
    with pytest.raises(RuntimeError):
        pending.wait()
    return data.is_cut, time.monotonic() - begun


def test_a_cut_closes_a_group_of_gloo_for_a_device() -> None:
    """Red before: it called `abort`, which gloo has not."""
    (cut, mine), (_, theirs) = pool(2).run(_cut_for_a_device, timeout=20)
    assert cut and max(mine, theirs) < 10


def _gone_while_connecting(rank: int) -> str:
    """Rank 1 is here, and never comes into gloo's own rendezvous."""
    scope, origin = scope_of(range(dist.get_world_size())), dist.group.WORLD
    assert scope is not None and origin is not None
    data = open_data_group(scope, origin, torch.device("cpu"), "gloo", "test")
    assert data is not None
    store: Any = scope.watch.records.store
    if rank == 1:
        scope.watch.begin()
        store.add(f"{scope.watch.records.prefix}/{scope.name}/{scope.renewed}/{data.name}/here", 1)
        time.sleep(0.3)
        scope.publish("raised", "ValueError: never")
        while not store.check(["named"]):
            time.sleep(0.01)
        return ""
    with pytest.raises(PeerFailed) as caught:
        data.connect()
    store.set("named", "")
    return caught.value.text


def test_the_wait_for_a_connection_ends_with_the_peer() -> None:
    assert pool(2).run(_gone_while_connecting, timeout=20)[0] == "ValueError: never"
