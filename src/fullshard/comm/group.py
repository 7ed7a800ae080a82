"""The ranks that share or replicate a unit's parameters, and the messages they exchange.

    gather_into       every rank's piece, one behind the other in rank order, on every rank
    gather_each       several of these, as one group of messages where the backend can; likewise reduce_scatter_each
    exchange          piece r of my buffer to rank r; the pieces for me, in rank order
    reduce_scatter    the sum (or mean) over ranks of piece r of their buffers, on rank r
    all_reduce        the sum (or mean) over ranks of their buffers, on every rank

All are asynchronous: they return a `Work`, whose `wait()` makes the result usable for what is computed afterwards on
the current stream (on a CPU: blocks). On a CUDA device the backend's own stream waits for what was computed before the
call, and buffers are kept alive by whoever holds the `Work`; so overlap needs no streams of ours, only that a message
is issued before the compute that is to hide it (ADR 0004).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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

from ..guard import Scope, ask, scope_of
from ..layout import groups_messages, sends_in_pairs
from .data_group import DataGroup, can_cut, data_group, exchange_each, gather_each, open_data_group
from .data_group import Work as Work

# ---- group -----------------------------------------------------------------------------------------------------------

# Dtypes that every backend has collectives for; others (float8 and int16 weights, complex numbers on NCCL) travel as
# bytes.
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

# The methods of a process group that torch's own functions call, which 2.13 renamed: a group that is written in Python
# has no others.
if hasattr(dist.ProcessGroup, "all_gather_single"):
    _GATHERS, _GATHERS_EACH = "all_gather_single", "all_gather_single_coalesced"
    _REDUCES, _REDUCES_EACH = "reduce_scatter_single", "reduce_scatter_single_coalesced"
    _EXCHANGES = "all_to_all_single"
else:
    _GATHERS, _GATHERS_EACH = "_allgather_base", "allgather_into_tensor_coalesced"
    _REDUCES, _REDUCES_EACH = "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"
    _EXCHANGES = "alltoall_base"

# Asynchronous; backends read them only.
_GATHER = AllgatherOptions()
_GATHER.asyncOp = True
_EXCHANGE = AllToAllOptions()
_EXCHANGE.asyncOp = True

# Sums and means over ranks, as backends are asked for them.
SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.AVG


class ShardGroup:
    """A process group as the engine uses it. `backend` is that of `device`: "gloo", "nccl", "fake", "threaded" ..."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        # The mesh's, or made in its place for a purpose.
        self.origin = process_group
        self.data_group: DataGroup | None = None
        self.device = device
        self.world = process_group.size()
        self.rank = process_group.rank()
        self.backend = _backend_name(process_group, device)
        # Whether several gathers are one launch; and whether ranks may send to each other without a collective
        # (comm/data_group.py).
        self.one_launch = groups_messages(self.backend)
        self.sends_in_pairs = sends_in_pairs(self.backend) and device.type == "cpu"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What messages go over now: the line's, where one was opened."""
        return self.origin if self.data_group is None else self.data_group.group

    def open(self, scope: Scope, purpose: str = "data") -> None:
        """From now on messages go over connections that can be cut. All ranks of the group make this call."""
        self.data_group = open_data_group(scope, self.origin, self.device, self.backend, purpose)
        if purpose == "data":
            # Apart, because ranks may be at different messages of the model when one of them sends a small one; and
            # what is compared before a message has one size, whatever the message is.
            open_data_group(scope, self.origin, self.device, self.backend, "small")
            # On the host, where the group has a backend for it, whatever the device is: who compares does not wait for
            # what is under way there, and asks no store.
            host = torch.device("cpu")
            open_data_group(scope, self.origin, host, _backend_name(self.origin, host), "check")

    def _send(self, call: Callable[..., Any], *args: Any) -> Work:
        return call(*args) if self.data_group is None else self.data_group.issue(call, *args)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, by their rank in the default group."""
        return tuple(dist.get_process_group_ranks(self.origin))

    def gather_into(self, out: Tensor, piece: Tensor) -> Work:
        """`piece` (n,) of all ranks into `out` (world * n,); contiguous, of one dtype. It may be this rank's part
        of `out`."""
        if out.dtype not in _CARRIED:
            out, piece = _carried(out), _carried(piece)
        return self._send(getattr(self.process_group, _GATHERS), out, piece, _GATHER)

    def gather_each(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
        """`gather_into` for each pair, as one group of messages where the backend can."""
        if self.sends_in_pairs:
            return self._send_each(gather_each, outs, pieces)
        if len(outs) > 1 and self.one_launch:
            known = list(outs), list(pieces)
            if outs[0].dtype not in _CARRIED:
                known = [_carried(out) for out in outs], [_carried(piece) for piece in pieces]
            return [self._send(getattr(self.process_group, _GATHERS_EACH), *known, _GATHER)]
        return [self.gather_into(out, piece) for out, piece in zip(outs, pieces, strict=True)]

    def exchange_each(
        self, arriving: Mapping[int, Sequence[Tensor]], leaving: Mapping[int, Sequence[Tensor]], tag: int
    ) -> list[Work]:
        """From rank to rank, where `sends_in_pairs`: see `data_group.exchange_each`."""
        return self._send_each(exchange_each, arriving, leaving, tag)

    def _send_each(self, call: Callable[..., list[Work]], *args: Any) -> list[Work]:
        if self.data_group is None:
            return call(self.process_group, *args)
        return self.data_group.issue_each(call, self.process_group, *args)

    def exchange(self, out: Tensor, pieces: Tensor) -> Work:
        """`pieces` and `out` (world * n,): chunk r goes to rank r; chunk r of `out` comes from rank r."""
        return self._send(getattr(self.process_group, _EXCHANGES), _carried(out), _carried(pieces), [], [], _EXCHANGE)

    def reduce_scatter(self, out: Tensor, pieces: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """The sum over ranks of chunk `rank` of `pieces` (world * n,) into `out` (n,)."""
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.asyncOp = True
        return self._send(getattr(self.process_group, _REDUCES), out, pieces, options)

    def reduce_scatter_each(
        self, outs: Sequence[Tensor], pieces: Sequence[Tensor], op: dist.ReduceOp.RedOpType
    ) -> list[Work]:
        """`reduce_scatter` for each pair, as one group of messages where the backend can."""
        if len(outs) > 1 and self.one_launch:
            options = ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp(op)
            options.asyncOp = True
            return [self._send(getattr(self.process_group, _REDUCES_EACH), list(outs), list(pieces), options)]
        return [self.reduce_scatter(out, piece, op) for out, piece in zip(outs, pieces, strict=True)]

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """`tensor` of all ranks summed, in place on every rank."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.asyncOp = True
        return self._send(self.process_group.allreduce, [tensor], options)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer for what a message brings, to be kept by the caller."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def apart(self) -> ShardGroup:
        """The same ranks with a communicator of their own. Every rank of the group makes this call."""
        scope = scope_of(self.ranks)
        if scope is not None:
            # Where torch makes a group it waits for all of its ranks, and names nobody.
            scope.resume()
            ask(scope, "set_separate_reduce_scatter_group", "")
        return self.some(self.ranks, "fullshard_reduce")

    def some(self, ranks: Sequence[int], purpose: str) -> ShardGroup:
        """`ranks`, this one and others of the default group, with a communicator of their own. Each of them makes this
        call."""
        # Local: the ranks of other groups of a mesh do not take part.
        made = dist.new_group(
            list(ranks), backend=other_backend(self.origin), use_local_synchronization=True, group_desc=purpose
        )
        assert isinstance(made, dist.ProcessGroup)
        return ShardGroup(made, self.device)


def _carried(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and only to be moved, in a dtype that backends know."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)


class Alone(ShardGroup):
    """This rank by itself, for parameters that are not cut: there is nobody to send anything to."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.data_group = None
        self.device = device
        self.world, self.rank = 1, 0
        self.backend = backend
        self.one_launch = self.sends_in_pairs = False


class Block(NamedTuple):
    """Neighbours among the ranks that share parameters (comm/group.py)."""

    # (number of blocks, ranks of a block): every rank of the group, or of the replicated groups, once.
    mesh: DeviceMesh
    # This rank's block: the last axis of the mesh.
    group: ShardGroup


class Links(NamedTuple):
    """The ranks with which the parameters of one group are exchanged."""

    # Those that share each parameter.
    shard: ShardGroup
    # Those that hold the same shards as this rank, where a mesh has an axis that replicates.
    replicate: ShardGroup | None = None
    # The few among them from which backward gathers, where reshard_after_forward is an integer.
    block: Block | None = None
    # The ranks of `shard` again, where reductions have a communicator of their own.
    reduce: ShardGroup | None = None
    # All ranks of the mesh, by their rank in the default group.
    everyone: tuple[int, ...] = ()
    # Whether those of `shard`, here or in another group of the mesh, are on several nodes; found out where it matters.
    on_several_nodes: bool = False

    @property
    def reducing(self) -> ShardGroup:
        """The group over which gradients are cut."""
        return self.reduce or self.shard

    def open(self, scope: Scope) -> None:
        """Open the data groups of all of its groups."""
        for group in (self.shard, self.replicate):
            if group is not None and group.world > 1:
                group.open(scope)
        if self.block is not None:
            self.block.group.open(scope, "block")
        if self.reduce is not None:
            self.reduce.open(scope, "reduce")

    @property
    def ranks(self) -> int:
        """How many ranks contribute to a gradient."""
        return self.shard.world * (self.replicate.world if self.replicate is not None else 1)


def mesh_links(mesh: DeviceMesh, device: torch.device, *, shards: bool = True) -> Links:
    """The links of parameters on `mesh`: its last axis shards, one before it replicates.

    With `shards` off nothing is cut, and its only axis replicates.
    """
    everyone = tuple(mesh.mesh.flatten().tolist())
    if not shards:
        replicate = ShardGroup(mesh.get_group(0), device)
        return Links(Alone(device, replicate.backend), replicate, everyone=everyone)
    shard = ShardGroup(mesh.get_group(mesh.ndim - 1), device)
    return Links(shard, ShardGroup(mesh.get_group(0), device) if mesh.ndim == 2 else None, everyone=everyone)


def attend(links: Links) -> None:
    """From now on the others can tell when this process ends, or gives no sign of life: also before its first step."""
    if can_cut(links.shard.backend):
        scope = scope_of(links.everyone)
        if scope is not None:
            scope.watch.begin()


def all_reduce_over(
    tensor: Tensor, process_group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, what: str = "a sum between steps"
) -> None:
    """In place over any process group, and finished on return.

    A tensor on a device for which the group has no backend (on the host, where the group is NCCL's) goes by way of the
    group's device: for scalars and the like.
    """
    elsewhere = message_device(str(dist.get_backend_config(process_group)), tensor.device)
    moved = tensor if elsewhere is None else tensor.to(elsewhere)
    # Over the data group in its place: with a peer that failed this raises, where the mesh's group would wait for it.
    group = small_group(process_group, moved.device, what)
    if group is None:
        dist.all_reduce(moved, op=op, group=process_group)
    else:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        _send_small(group, what, "allreduce", [moved], options)
    if elsewhere is not None:
        tensor.copy_(moved)


def gather_over(out: Tensor, piece: Tensor, group: DataGroup, what: str) -> None:
    """`ShardGroup.gather_into` over a group of `small_group`, finished on return."""
    _send_small(group, what, _GATHERS, _carried(out), _carried(piece), _GATHER)


def broadcast_from(tensor: Tensor, process_group: dist.ProcessGroup, source: int, what: str) -> None:
    """What the rank at `source` of the process group has in `tensor`, on all of them; finished on return."""
    group = small_group(process_group, tensor.device, what)
    if group is None:
        dist.broadcast(tensor, group=process_group, group_src=source)
        return
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    _send_small(group, what, "broadcast", [tensor], options)


def _send_small(group: DataGroup, what: str, call: str, *args: Any) -> None:
    scope = group.scope
    doing, scope.doing = scope.doing, scope.doing or what
    try:
        group.issue(getattr(group.group, call), *args).wait()
    except BaseException as error:
        scope.interrupted(error, what)
        raise
    finally:
        scope.doing = doing


def small_group(process_group: dist.ProcessGroup, device: torch.device, what: str) -> DataGroup | None:
    """The data group for small messages of `device` instead of `process_group`: its ranks make the first call
    together."""
    found = data_group(process_group)
    scope = scope_of(dist.get_process_group_ranks(process_group)) if found is None else found.scope
    if scope is None or not can_cut(_backend_name(process_group, device)):
        return None
    doing, scope.doing = scope.doing, scope.doing or what
    try:
        if not any(isinstance(group, DataGroup) and group.purpose == "data" for group in scope.groups.values()):
            # Nobody else brings its ranks together again, where no root has formed.
            scope.resume()
        if found is None or found.device.type == device.type:
            purpose = "small"
        else:
            purpose = f"small {device.type}"
        return open_data_group(scope, process_group, device, _backend_name(process_group, device), purpose)
    finally:
        scope.doing = doing


def message_device(backend_config: str, device: torch.device) -> str | None:
    """The type of the device that a tensor on `device` has to be moved to for a message; None: it may stay.

    >>> message_device("cuda:nccl", torch.device("cpu")), message_device("cpu:gloo,cuda:nccl", torch.device("cpu"))
    ('cuda', None)
    """
    types = [part.split(":", 1)[0] for part in backend_config.split(",") if ":" in part]
    return None if not types or device.type in types else types[0]


def other_backend(process_group: dist.ProcessGroup) -> str | None:
    """The backends of `process_group`, for another group of such; None where they are those of the default group."""
    assert dist.group.WORLD is not None
    config = str(dist.get_backend_config(process_group))
    return None if config == str(dist.get_backend_config(dist.group.WORLD)) else config


def _backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str:
    # A group may have one backend per device ("cpu:gloo,cuda:nccl"); the one of our device decides.
    config = str(dist.get_backend_config(process_group))
    names = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return names.get(device.type, config).replace(":", "_")


# ---- blocks ----------------------------------------------------------------------------------------------------------
# Blocks of k neighbours among the ranks that share parameters: for an integer `reshard_after_forward`.
#
# Eight ranks in blocks of two are the mesh ((0, 1), (2, 3), (4, 5), (6, 7)). The process groups of a mesh and degree
# are made once and serve every unit: FSDP2 makes them again for each module, and a group costs memory on the device.

# By the process group of the axis that shards, with which they go; then by ranks and degree.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def block_of(mesh: DeviceMesh, degree: int, device: torch.device) -> Block:
    """This rank's block of `degree` consecutive ranks along the last axis of `mesh`, a divisor of its size.

    A collective call at the first time: every rank of `mesh` makes two groups (its block, and the ranks of equal
    position in the other blocks).
    """
    shard = mesh.get_group(mesh.ndim - 1)
    ranks = mesh.mesh.reshape(-1, degree)
    key = (mesh.device_type, degree, tuple(ranks.flatten().tolist()))
    known = _made.setdefault(shard, {})
    blocks = known.get(key)
    if blocks is None:
        blocks = known[key] = _make(mesh.device_type, ranks, shard)
    return Block(blocks, ShardGroup(blocks.get_group(1), device))


def _make(device_type: str, ranks: torch.Tensor, like: dist.ProcessGroup) -> DeviceMesh:
    # Ranks that made no groups would be waited for.
    scope = scope_of(tuple(sorted(ranks.flatten().tolist())))
    degree = ranks.size(1)
    if scope is not None:
        scope.resume()
        ask(scope, f"fully_shard(..., reshard_after_forward={degree})", "")
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    # Only the members take part, so a mesh over some ranks (a pipeline stage) needs nothing of the others.
    groups = [
        dist.new_group(members.tolist(), backend=other_backend(like), use_local_synchronization=True)
        for members in (ranks[:, column], ranks[row])
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("block", "rank_in_block"))
