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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from .._torch import new_group
from ..layout import exchanges_gradients, groups_messages, sends_in_pairs
from ..peers import Scope, ask, scope_of
from .data_group import DataGroup, Work, can_cut, exchange_each, gather_each, open_data_group

# ---- group -----------------------------------------------------------------------------------------------------------

# Dtypes that every backend supports; others (float8 and int16 weights, complex numbers on NCCL) are sent as bytes.
_CARRIED = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)

# The methods of a process group that torch's own functions call, renamed in 2.13. A process group written in Python
# implements only one set of names.
if hasattr(dist.ProcessGroup, "all_gather_single"):
    _GATHERS, _GATHERS_EACH = "all_gather_single", "all_gather_single_coalesced"
    _REDUCES, _REDUCES_EACH = "reduce_scatter_single", "reduce_scatter_single_coalesced"
    _EXCHANGES = "all_to_all_single"
else:
    _GATHERS, _GATHERS_EACH = "_allgather_base", "allgather_into_tensor_coalesced"
    _REDUCES, _REDUCES_EACH = "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"
    _EXCHANGES = "alltoall_base"

# Asynchronous, and shared: backends only read them.
_GATHER = AllgatherOptions()
_GATHER.asyncOp = True
_EXCHANGE = AllToAllOptions()
_EXCHANGE.asyncOp = True

# Reduce ops for sums and means over ranks.
SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.AVG


class Line:
    """Ranks that exchange messages, and the collectives between them.

    `origin`: the mesh's process group, or one made for a purpose."""

    # The one way to send: runs the method `call` of the process group with `args`, or the function `call`.
    send: Callable[..., Work]

    def __init__(self, origin: dist.ProcessGroup, data_group: DataGroup | None = None) -> None:
        self.origin = origin
        self.use(data_group)

    def use(self, data_group: DataGroup | None) -> None:
        """Send over `data_group` from now on, whose connections can be cut; None: over `origin`."""
        self.data_group = data_group
        self.send = partial(_call, self.origin) if data_group is None else data_group.issue

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group in use: the data group's, if it has one."""
        return self.origin if self.data_group is None else self.data_group.group

    def gather_into(self, out: Tensor, piece: Tensor) -> Work:
        """All-gather `piece` (n,) into `out` (world * n,); contiguous, of one dtype. `piece` may be this rank's part of
        `out`."""
        if out.dtype not in _CARRIED:
            out, piece = _carried(out), _carried(piece)
        return self.send(_GATHERS, out, piece, _GATHER)

    def exchange(self, out: Tensor, pieces: Tensor, arriving: Sequence[int] = (), leaving: Sequence[int] = ()) -> Work:
        """`pieces` and `out` (world * n,): chunk r goes to rank r; chunk r of `out` comes from rank r. `arriving`,
        `leaving`: the elements of each chunk, where they are not as many for each rank; in dtypes that backends know.
        """
        if out.dtype not in _CARRIED:
            out, pieces = _carried(out), _carried(pieces)
        return self.send(_EXCHANGES, out, pieces, list(arriving), list(leaving), _EXCHANGE)

    def reduce_scatter(self, out: Tensor, pieces: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """Reduce chunk `rank` of all ranks' `pieces` (world * n,) into `out` (n,)."""
        options = with_op(ReduceScatterOptions(), op)
        return self.send(_REDUCES, out, pieces, options)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """Reduce `tensor` over all ranks, in place on every rank."""
        return self.send("allreduce", [tensor], with_op(AllreduceOptions(), op))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Broadcast `tensor` from the rank at `source` of the group."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.send("broadcast", [tensor], options)


def _call(origin: dist.ProcessGroup, call: str | Callable[..., Work], *args: Any) -> Work:
    work: Work = getattr(origin, call)(*args) if isinstance(call, str) else call(*args)
    return work


def with_op(options: Any, op: dist.ReduceOp.RedOpType) -> Any:
    """The `options` of a message that reduces by `op`."""
    options.reduceOp, options.asyncOp = dist.ReduceOp(op), True
    return options


class ShardGroup(Line):
    """The ranks that shard or replicate parameters on `device`. `backend` is that of `device`: "gloo", "nccl" (by
    whatever name torch has for it), "fake", "threaded" ...; of a group that torch does not know, such as a data
    group's, the caller says it."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, backend: str | None = None) -> None:
        super().__init__(process_group)
        self.device = device
        self.world = process_group.size()
        self.rank = process_group.rank()
        self.backend = backend or backend_name(process_group, device)
        # Whether several all-gathers are one launch; and whether ranks may send point-to-point (comm/data_group.py).
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

    def gather_each(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
        """`gather_into` for each pair, as one group of messages if the backend can."""
        if self.sends_in_pairs:
            return [self.send(gather_each, self.process_group, outs, pieces)]
        if len(outs) > 1 and self.one_launch:
            known = list(outs), list(pieces)
            if outs[0].dtype not in _CARRIED:
                known = [_carried(out) for out in outs], [_carried(piece) for piece in pieces]
            return [self.send(_GATHERS_EACH, *known, _GATHER)]
        return [self.gather_into(out, piece) for out, piece in zip(outs, pieces, strict=True)]

    def exchange_each(
        self, arriving: Mapping[int, Sequence[Tensor]], leaving: Mapping[int, Sequence[Tensor]], tag: int
    ) -> Work:
        """Point-to-point, if `sends_in_pairs`: see `data_group.exchange_each`."""
        return self.send(exchange_each, self.process_group, arriving, leaving, tag)

    def reduce_scatter_each(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], op: dist.ReduceOp.RedOpType
    ) -> list[Work]:
        """`reduce_scatter` for each pair, as one group of messages if the backend can."""
        if len(outs) > 1 and self.one_launch:
            return [self.send(_REDUCES_EACH, list(outs), list(pieces), with_op(ReduceScatterOptions(), op))]
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
        return self.some(self.ranks, "fullshard_reduce")

    def some(self, ranks: Sequence[int], purpose: str) -> ShardGroup:
        """A group of `ranks` of the default group, this one included, with its own communicator. Collective over
        `ranks`."""
        made = new_group(ranks, self.origin, self.device, other_backend(self.origin), purpose)
        return ShardGroup(made, self.device)


def _carried(tensor: Tensor) -> Tensor:
    """The contiguous `tensor`, which is only moved, in a dtype that backends support."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)


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

    @property
    def reducing(self) -> ShardGroup:
        """The group that reduces gradients."""
        return self.reduce or self.shard

    def under(self, strategy: str) -> Links:
        """As `strategy` uses them, if the ranks that share parameters are on one node: `Nodes.locate` knows."""
        exchanges = strategy == "all-to-all" or (strategy != "torch" and exchanges_gradients(self.shard.backend))
        return self._replace(exchanges=exchanges)

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


# Torch's names for NCCL: `ProcessGroupNCCL` or `ProcessGroupNCCL2`, by torch's version (docs/devices.md). Messages over
# each are the same, because the data groups are.
_NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of `process_group` for `device`: a group may have one per device ("cpu:gloo,cuda:nccl")."""
    config = str(dist.get_backend_config(process_group))
    names = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    name = names.get(device.type, config).replace(":", "_")
    return "nccl" if name in _NCCL_NAMES else name


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
    groups = [new_group(members.tolist(), like, device, backend) for members in (ranks[:, column], ranks[row])]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("block", "rank_in_block"))
