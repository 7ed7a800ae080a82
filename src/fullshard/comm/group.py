"""The ranks that shard or replicate a unit's parameters, and the collectives between them.

    gather_into            all-gather: every rank's piece, concatenated in rank order, on every rank
    gather_each            several all-gathers, as one group of messages if the backend can
    exchange               all-to-all: piece r of this rank's buffer to rank r; the pieces for this rank, in rank order
    reduce_scatter         the sum (or mean) over ranks of piece r of their buffers, on rank r
    reduce_scatter_each    several reduce-scatters, as one group of messages if the backend can
    all_reduce             the sum (or mean) over ranks of their buffers, on every rank

All are asynchronous and return a `Work`. `wait()` makes the result usable for later work on the current stream (on a
CPU it blocks). On a CUDA device the backend's stream waits for earlier compute, and the holder of the `Work` keeps the
buffers alive. So overlap needs no further streams: it suffices to issue a message before the compute that hides it
(ADR 0004).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ReduceScatterOptions

from .._torch import new_group
from ..layout import ONE_LEVEL, HostGroups, Levels, Ways, exchanges_gradients, groups_messages, sends_in_pairs
from ..peers import Scope, Wait, ask, scope_of
from .data_group import (
    CARRIED,
    GATHER,
    GATHERS_EACH,
    REDUCES_EACH,
    Line,
    Work,
    Works,
    can_cut,
    carried,
    open_data_group,
    with_op,
)
from .relay import Relayed, relay

# ---- group -----------------------------------------------------------------------------------------------------------


class ShardGroup(Line):
    """The ranks that shard or replicate parameters on `device`. `backend` is that of `device`: "gloo", "nccl" (by
    whatever name torch has for it), "fake", "threaded" ...; of a group that torch does not know, such as a data
    group's, the caller says it."""

    # The nodes of its ranks, in the order of which gradients are summed, and the ways of messages (`use_levels`).
    levels: Levels | None = None
    ways: Ways = ONE_LEVEL

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, backend: str | None = None) -> None:
        super().__init__(process_group)
        self.device = device
        self.world = process_group.size()
        self.rank = process_group.rank()
        self.backend = backend or backend_name(process_group, device)
        # Whether several all-gathers are one launch; and whether ranks may send point-to-point (below).
        self.one_launch = groups_messages(self.backend)
        self.sends_in_pairs = sends_in_pairs(self.backend, on_host=device.type == "cpu")

    def open(self, scope: Scope, purpose: str = "data") -> None:
        """Use a data group from now on. Collective over the group."""
        self.use(open_data_group(scope, self.origin, self.device, self.backend, purpose))
        if purpose == "data":
            # Separate, because ranks may be at different messages of the model when one of them sends a small one, and
            # a comparison before a message has one size whatever the message is.
            open_data_group(scope, self.origin, self.device, self.backend, "small")
            # On the CPU if the group has a backend for it: a comparison then waits for nothing on the device and needs
            # no store.
            host = torch.device("cpu")
            open_data_group(scope, self.origin, host, backend_name(self.origin, host), "check")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the default group."""
        return tuple(dist.get_process_group_ranks(self.origin))

    def use_levels(self, levels: Levels | None, ways: Ways) -> None:
        """Sum in the order of these nodes from now on, and send in these `ways` (`choice.located` decides)."""
        self.levels, self.ways = levels, ways
        # Bound here and not asked at each gather: most groups have no levels, and a step gathers often.
        if levels is None or ways.gather != "levels":
            vars(self).pop("gather_into", None)
        else:
            self.gather_into = self._gather_in_levels  # type: ignore[method-assign]

    def _gather_in_levels(self, out: Tensor, piece: Tensor) -> Work:
        return self.send(gather_in_levels, self.process_group, self.levels, [out], [piece])

    def gather_each(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
        """`gather_into` for each pair, as one group of messages if the backend can."""
        if self.levels is not None and self.ways.gather == "levels":
            return [self.send(gather_in_levels, self.process_group, self.levels, outs, pieces)]
        if self.sends_in_pairs and self.ways.gather == "pairs":
            return [self.send(gather_each, self.process_group, outs, pieces)]
        if len(outs) > 1 and self.one_launch:
            known = list(outs), list(pieces)
            if outs[0].dtype not in CARRIED:
                known = [carried(out) for out in outs], [carried(piece) for piece in pieces]
            return [self.send(GATHERS_EACH, *known, GATHER)]
        return [self.gather_into(out, piece) for out, piece in zip(outs, pieces, strict=True)]

    def exchange_each(
        self, arriving: Mapping[int, Sequence[Tensor]], leaving: Mapping[int, Sequence[Tensor]], tag: int
    ) -> Work:
        """Send as the function `exchange_each` does, if `sends_in_pairs`."""
        return self.send(exchange_each, self.process_group, arriving, leaving, tag)

    def reduce_scatter_each(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], op: dist.ReduceOp.RedOpType
    ) -> list[Work]:
        """`reduce_scatter` for each pair, as one group of messages if the backend can."""
        if len(outs) > 1 and self.one_launch:
            return [self.send(REDUCES_EACH, list(outs), list(pieces), with_op(ReduceScatterOptions(), op))]
        return [self.reduce_scatter(out, piece, op) for out, piece in zip(outs, pieces, strict=True)]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An output buffer of a message, owned by the caller."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def apart(self) -> ShardGroup:
        """The same ranks with a separate communicator. Collective over the group."""
        scope = scope_of(self.ranks)
        if scope is not None:
            # torch's wait for all ranks of a new group does not name missing ones: ask first.
            scope.resume()
            ask(scope, "set_separate_reduce_scatter_group", "")
        made = self.some(self.ranks, "fullshard_reduce")
        made.use_levels(self.levels, self.ways)
        return made

    def some(self, ranks: Sequence[int], purpose: str) -> ShardGroup:
        """A group of `ranks` of the default group, this one included, with its own communicator. Collective over
        `ranks`."""
        backend = other_backend(self.origin)
        made = group_beside(scope_of(self.ranks), ranks, self.origin, self.device, backend, purpose)
        return ShardGroup(made, self.device)


class Alone(ShardGroup):
    """A group of this rank only, for parameters that are not sharded."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.data_group = None
        self.device = device
        self.world, self.rank = 1, 0
        self.backend = backend
        self.one_launch = self.sends_in_pairs = False


class Block(NamedTuple):
    """Adjacent shard ranks (see `block_of`)."""

    # (number of blocks, ranks of a block): every rank of the group, or of the replicated groups, once.
    mesh: DeviceMesh
    # This rank's block: the last axis of the mesh.
    group: ShardGroup


class Links(NamedTuple):
    """The process groups of one param group."""

    # The ranks over which each parameter is sharded.
    shard: ShardGroup
    # The replicas of this rank's shards, if the mesh has a replicate axis.
    replicate: ShardGroup | None = None
    # The shard ranks for the all-gather in backward, if reshard_after_forward is an integer.
    block: Block | None = None
    # The ranks of `shard`, if reductions have a separate communicator.
    reduce: ShardGroup | None = None
    # All ranks of the mesh, by their rank in the default group.
    everyone: tuple[int, ...] = ()
    # Whether gradients use an all-to-all and are summed on arrival, not reduced by the backend (`under`).
    exchanges: bool = False
    # The hosts of the mesh, if ranks asked for them.
    hosts: HostGroups | None = None

    @property
    def reducing(self) -> ShardGroup:
        """The group that reduces gradients."""
        return self.reduce or self.shard

    @property
    def in_levels(self) -> bool:
        """Whether gradients are summed in the order of nodes, in whichever way they come."""
        return self.reducing.levels is not None and not self.exchanges

    def under(self, strategy: str) -> Links:
        """These links as `strategy` uses them, if the ranks that share parameters are on one node, which
        `choice.located` knows."""
        exchanges = strategy == "all-to-all" or (strategy != "torch" and exchanges_gradients(self.shard.backend))
        return self._replace(exchanges=exchanges, hosts=None)

    def open(self, scope: Scope) -> None:
        """Open the data groups of all these groups."""
        for group in (self.shard, self.replicate):
            if group is not None and group.world > 1:
                group.open(scope)
        if self.block is not None:
            self.block.group.open(scope, "block")
        if self.reduce is not None:
            self.reduce.open(scope, "reduce")

    @property
    def ranks(self) -> int:
        """The number of ranks that contribute to a gradient."""
        return self.shard.world * (self.replicate.world if self.replicate is not None else 1)


def mesh_links(mesh: DeviceMesh, device: torch.device, *, shards: bool = True) -> Links:
    """The links of parameters on `mesh`: (shard) or (replicate, shard); (replicate) if `shards` is off."""
    everyone = tuple(mesh.mesh.flatten().tolist())
    if not shards:
        replicate = ShardGroup(mesh.get_group(0), device)
        return Links(Alone(device, replicate.backend), replicate, everyone=everyone)
    shard = ShardGroup(mesh.get_group(mesh.ndim - 1), device)
    return Links(shard, ShardGroup(mesh.get_group(0), device) if mesh.ndim == 2 else None, everyone=everyone)


def attend(links: Links) -> None:
    """Start this process's signs of life, so that peers detect its end even before its first step."""
    if can_cut(links.shard.backend):
        scope = scope_of(links.everyone)
        if scope is not None:
            scope.watch.begin()


def message_device(backend_config: str, device: torch.device) -> str | None:
    """The device type to which a tensor on `device` must be moved for a message; None: it may stay.

    >>> message_device("cuda:nccl", torch.device("cpu")), message_device("cpu:gloo,cuda:nccl", torch.device("cpu"))
    ('cuda', None)
    """
    types = [part.split(":", 1)[0] for part in backend_config.split(",") if ":" in part]
    return None if not types or device.type in types else types[0]


def other_backend(process_group: dist.ProcessGroup) -> str | None:
    """The backends of `process_group`, to make another such group; None if they are those of the default group."""
    assert dist.group.WORLD is not None
    config = str(dist.get_backend_config(process_group))
    return None if config == str(dist.get_backend_config(dist.group.WORLD)) else config


def group_beside(
    scope: Scope | None,
    ranks: Sequence[int],
    like: dist.ProcessGroup,
    device: torch.device,
    backend: str | None,
    purpose: str | None = None,
) -> dist.ProcessGroup:
    """`new_group`, within the limits of `scope`: torch asks its own store, and waits for a silent one without end.
    A group whose connections cannot be cut is made without them."""
    make = partial(new_group, ranks, like, device, backend, purpose)
    if scope is None or not can_cut(backend_name(like, device)):
        return make()
    doing = scope.told or "a new process group"
    wait = Wait("connect", scope, doing, name=f"{purpose} {'.'.join(map(str, ranks))}", ranks=ranks)
    with scope.reporting(doing):
        return scope.made_within(wait, make, dist.DistNetworkError)


# Torch's names for NCCL: `ProcessGroupNCCL` or `ProcessGroupNCCL2`, by torch's version (docs/devices.md). Messages over
# each are the same, because the data groups are.
_NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of `process_group` for `device`: a group may have one per device ("cpu:gloo,cuda:nccl")."""
    config = str(dist.get_backend_config(process_group))
    names = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    name = names.get(device.type, config).replace(":", "_")
    return "nccl" if name in _NCCL_NAMES else name


# ---- pairs -----------------------------------------------------------------------------------------------------------
# Point-to-point messages from the source memory directly into the destination memory.
#
# For backends whose collectives make another copy and need one contiguous buffer (gloo). There a collective is queued
# to a thread pool; a send or receive is an immediate system call, and bytes of any dtype move in the background. It
# pays from a certain size: `layout.gather`.
#
# Ranks issue the same messages in the same order, as with collectives; messages of equal tag between two ranks match in
# that order. Private tags keep them apart from a user's own `send` and `recv` on the same group.

PARAMETERS_TAG = 0x66736864
GRADIENTS_TAG = PARAMETERS_TAG + 1
PASSED_ON_TAG = 0x66736870
# Of gradients in one level, which would overtake the second stage of earlier ones under the same tag.
ONE_LEVEL_TAG = PASSED_ON_TAG + 1
RATES_TAG = PASSED_ON_TAG + 2


def gather_each(group: dist.ProcessGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Works:
    """All-gather each `pieces[i]` (n,) into `outs[i]` (world * n,); all contiguous, of one dtype. A piece may be this
    rank's part of its `outs[i]`."""
    rank, world = group.rank(), group.size()
    chunks = [out.view(world, -1) for out in outs]
    arriving = {peer: [chunk[peer] for chunk in chunks] for peer in range(world) if peer != rank}
    works = exchange_each(group, arriving, dict.fromkeys(arriving, pieces), PARAMETERS_TAG)
    # Overlaps with the messages.
    own = [chunk[rank] for chunk in chunks]
    if own[0].data_ptr() != pieces[0].data_ptr():
        torch._foreach_copy_(own, list(pieces))
    return works


def gather_in_levels(
    group: dist.ProcessGroup, levels: Levels, outs: Sequence[Tensor], pieces: Sequence[Tensor]
) -> Relayed:
    """`gather_each` in two levels: counterparts exchange their pieces, and each rank passes on to its neighbours what
    it got, piece by piece."""
    rank = group.rank()
    chunks = [out.view(group.size(), -1) for out in outs if out.numel()]
    pieces = [piece for piece in pieces if piece.numel()]
    counterparts, neighbours = levels.counterparts(rank), levels.neighbours(rank)
    # All receives first, see `exchange_each`.
    first = [
        (group.recv([chunk[peer]], peer, PARAMETERS_TAG), chunk[peer]) for chunk in chunks for peer in counterparts
    ]
    works: list[Any] = []
    for peer in neighbours:
        works += [group.recv([chunk[peer]], peer, PARAMETERS_TAG) for chunk in chunks]
        passed_on = levels.counterparts(peer)
        works += [group.recv([chunk[other]], peer, PASSED_ON_TAG) for chunk in chunks for other in passed_on]
    works += [group.send([piece], peer, PARAMETERS_TAG) for piece in pieces for peer in (*counterparts, *neighbours)]
    own = [chunk[rank] for chunk in chunks]
    if own and own[0].data_ptr() != pieces[0].data_ptr():
        torch._foreach_copy_(own, list(pieces))

    def pass_on() -> Iterator[Any]:
        try:
            while first:
                work, arrived = first.pop(0)
                work.wait()
                for peer in neighbours:
                    yield group.send([arrived], peer, PASSED_ON_TAG)
        finally:
            for work, _ in first:
                # A message failed: the memory of the others must be free.
                with suppress(RuntimeError):
                    work.wait()

    return relay(group, PASSED_ON_TAG, Relayed(works, pass_on))


def exchange_each(
    group: dist.ProcessGroup,
    arriving: Mapping[int, Sequence[Tensor]],
    leaving: Mapping[int, Sequence[Tensor]],
    tag: int,
) -> Works:
    """Send `leaving[r][i]` of this rank into `arriving[this rank][i]` of rank r. Tensors are contiguous, and must not
    change before the works complete; empty ones are not sent."""
    rank, world = group.rank(), group.size()
    works: list[Any] = []
    # All receives first: bytes that arrive before their receive is posted wait in the sender's socket.
    for peer, tensors in arriving.items():
        works += [group.recv([tensor], peer, tag) for tensor in tensors if tensor.numel()]
    # Rank r begins with r + 1, so that not all ranks send to rank 0 first.
    for step in range(1, world):
        peer = (rank + step) % world
        works += [group.send([tensor], peer, tag) for tensor in leaving[peer] if tensor.numel()]
    return Works(works)


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Blocks of k adjacent shard ranks, for an integer `reshard_after_forward`.
#
# Eight ranks in blocks of two are the mesh ((0, 1), (2, 3), (4, 5), (6, 7)). All units share the process groups of a
# mesh and degree: FSDP2 makes them for each module, and a group costs memory on the device.

# By the process group of the shard axis, whose lifetime they share; then by ranks and degree.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def block_of(mesh: DeviceMesh, degree: int, device: torch.device) -> Block:
    """This rank's block of `degree` consecutive ranks along the last axis of `mesh`, a divisor of its size.

    The first call is collective: every rank of `mesh` makes two groups (its block, and the ranks of equal position in
    the other blocks).
    """
    shard = mesh.get_group(mesh.ndim - 1)
    ranks = mesh.mesh.reshape(-1, degree)
    key = (mesh.device_type, degree, tuple(ranks.flatten().tolist()))
    known = _made.setdefault(shard, {})
    blocks = known.get(key)
    if blocks is None:
        blocks = known[key] = _make(mesh.device_type, device, ranks, shard)
    return Block(blocks, ShardGroup(blocks.get_group(1), device))


def _make(device_type: str, device: torch.device, ranks: torch.Tensor, like: dist.ProcessGroup) -> DeviceMesh:
    # Making groups waits for all ranks: ask first, so that missing ranks are named.
    scope = scope_of(tuple(sorted(ranks.flatten().tolist())))
    degree = ranks.size(1)
    if scope is not None:
        scope.resume()
        ask(scope, f"fully_shard(..., reshard_after_forward={degree})", "")
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    # Only members take part, so a mesh over some ranks (a pipeline stage) does not involve the others.
    backend = other_backend(like)
    parts = ranks[:, column], ranks[row]
    groups = [group_beside(scope, members.tolist(), like, device, backend) for members in parts]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("block", "rank_in_block"))
