"""Chooses the strategy that reduces the gradients of a group: `reduce.py` has a table of them, and those that send.

Gradients use an all-to-all within a node, and between nodes with one rank each. With more ranks on each node gloo's
messages go in two levels or in one, whichever is faster by counted bytes and measured rates (`rates.py`); gradients are
summed in one order in either case (`levels.py`). Other backends route for their network (ADR 0005).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import (
    ONE_LEVEL,
    TWO_LEVELS,
    FlatLayout,
    HostGroups,
    ReduceLayout,
    ShardLayout,
    Ways,
    direct_gradients,
    on_hosts,
)
from ..peers import node, same_on_all, scope_of, tell
from ..policy import Controls, resolve_scale
from .gather import CustomBuffers, CustomGroup
from .group import Links
from .levels import LevelReduce
from .pool import BufferPool
from .rates import measured
from .reduce import (
    Dtypes,
    ExchangeReduce,
    NativeReduce,
    Outgoing,
    PairReduce,
    Parts,
    ReduceChannel,
    Reduction,
    Summation,
)


def direct_of(
    links: Links, strategy: str, layouts: Sequence[ShardLayout], gathered: Collection[int], itemsize: int
) -> tuple[int, ...]:
    """Positions of the parameters whose gradients are sent directly from autograd's memory. Arguments as for
    `direct_gradients`; `gathered`: positions of parameters that are all-gathered directly into place."""
    group = links.reducing
    if strategy == "torch" or group.world == 1:
        return ()
    if links.exchanges:
        return direct_gradients(layouts, itemsize, backend=group.backend, on_host=group.device.type == "cpu")
    if not group.one_launch:
        return ()
    # Evenly sharded ones only, so that the gradient itself is the message.
    return tuple(i for i, layout in enumerate(layouts) if i in gathered and layout.padded_full_numel == layout.numel)


class _Location(NamedTuple):
    """Where the ranks of a mesh are. several: a group that shares parameters is on several nodes; hosts: all of them,
    if it is one or messages go from rank to rank."""

    several: bool = False
    hosts: HostGroups | None = None


# Of the groups of one root, by the ranks of their mesh and their own.
Locations = dict[tuple[tuple[int, ...], ...], _Location]


def located(links: Links, strategy: str, known: Locations) -> Links:
    """`links` as `strategy` uses them, wherever their ranks are: on one node or several, and how messages go between
    them. All ranks make the same calls in the same order; once per group, which `known` remembers: a question to the
    store, another one on several nodes, and messages of `measured` where there are two ways.

    Raises `ValueError` on all ranks for "all-to-all" between nodes.
    """
    links, levels, ways = links.under(strategy), None, ONE_LEVEL
    if links.shard.world > 1 and links.exchanges:
        key = links.everyone, links.shard.ranks
        if key not in known:
            known[key] = _place_of(links)
        several, hosts = known[key]
        if several and strategy == "all-to-all":
            raise ValueError(
                'set_communication("all-to-all"): expected the ranks that share parameters on one node, found '
                'several; use "auto", which exchanges gradients within a node and lets the backend reduce them '
                "between nodes"
            )
        links = links._replace(exchanges=not several)
        if hosts is not None:
            if hosts.levels is not None:
                levels, ways = hosts.levels, _ways_of(links, hosts, strategy)
            links = links._replace(exchanges=hosts.exchanges, hosts=hosts._replace(ways=ways))
    for group in (links.shard, links.reduce):
        if group is not None:
            group.use_levels(levels, ways)
    return links


def _ways_of(links: Links, hosts: HostGroups, strategy: str) -> Ways:
    if strategy in _WAYS:
        return _WAYS[strategy]
    return hosts.fastest(measured(links, hosts))


_WAYS = {"one-level": ONE_LEVEL, "two-levels": TWO_LEVELS}


def _place_of(links: Links) -> _Location:
    """Equal in all groups of the mesh, because replicas must sum in one dtype."""
    shard, everyone = scope_of(links.shard.ranks), scope_of(links.everyone)
    if shard is None or everyone is None:
        return _Location()
    # A digest: all ranks get those of all.
    here = hashlib.blake2s(node().encode(), digest_size=6).hexdigest()
    if same_on_all(everyone, "the node of this rank", here):
        return _Location(hosts=HostGroups(links.shard.backend, exchanges=True))
    if links.shard.sends_in_pairs:
        nodes, size = tell(everyone, "the nodes of all ranks", here), links.shard.world
        # Process groups have their ranks in order.
        groups = [sorted(links.everyone[first : first + size]) for first in range(0, len(links.everyone), size)]
        rows = [[nodes[rank] for rank in group] for group in groups]
        return _Location(any(len(set(row)) > 1 for row in rows), on_hosts(rows, links.shard.backend))
    several = shard is everyone or not same_on_all(shard, "the node of this rank", here)
    if shard is not everyone:
        same = same_on_all(everyone, "whether ranks that share parameters are on several nodes", str(several))
        several = several or not same
    return _Location(several)


def reduce_channel(
    links: Links,
    pack: FlatLayout,
    direct: tuple[int, ...],
    dtypes: Dtypes,
    pool: BufferPool,
    *,
    strategy: str,
    controls: Controls,
) -> ReduceChannel:
    """The strategy for this group: see the table in the module docstring. Measured in benchmarks/ and ADR 0005.

    `direct`: positions of the parameters whose gradients may be sent separately. `links`: under `strategy`.
    """
    group = links.reducing
    as_torch = strategy == "torch"
    levels = group.levels if controls.reduce_scatter is None else None
    native = as_torch or (group.world > 1 and not links.exchanges and levels is None)
    replicate = links.replicate
    if replicate is not None and replicate.world == 1 and not as_torch:
        replicate = None
    if group.world == 1 and replicate is None and controls.hook is None:
        return LocalReduce(dtypes.gradient, controls.divide_factor)
    scale = resolve_scale(dtypes.reduce, links.ranks, controls.divide_factor, sum_only=controls.sum_only)
    sums = Summation(replicate, scale, dtypes, controls.hook, controls.hook_stream, native, native and scale.averages)
    if controls.reduce_scatter is not None:
        group = CustomGroup(group, controls.reduce_scatter) if group.world > 1 else group
        pool = CustomBuffers(controls.reduce_scatter)
    if levels is not None:
        return LevelReduce(group, ReduceLayout(pack, facts_numel=0), pool, sums)
    if native or group.world == 1:
        layout = ReduceLayout(pack, direct if group.world > 1 else (), facts_numel=0)
        return NativeReduce(group, layout, pool, sums, adds_messages=not as_torch)
    if direct and group.sends_in_pairs:
        return PairReduce(group, ReduceLayout(pack, direct), pool, sums)
    return ExchangeReduce(group, ReduceLayout(pack), pool, sums)


class LocalReduce(ReduceChannel):
    """One rank: its gradients are the result."""

    def __init__(self, gradient: torch.dtype, divide_factor: float | None) -> None:
        self._dtype = gradient
        self._factor = divide_factor

    def issue(self, gradients: Parts, message: Outgoing) -> Reduction:
        found = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in found}
        if not found or (self._factor is None and dtypes == {self._dtype}):
            # `contiguous`: an expanded zero for a missing gradient cannot be written.
            return Reduction(self, [None if gradient is None else gradient.contiguous() for gradient in gradients])
        factor = self._factor
        if factor is not None and len(dtypes) > 1:
            found, factor = [gradient / factor for gradient in found], None
        # One buffer, so that an operation is one kernel and not one for each gradient. Divided before the cast.
        dtype = self._dtype if factor is None else found[0].dtype
        flat = torch.empty(sum(map(Tensor.numel, found)), dtype=dtype, device=found[0].device)
        torch._foreach_copy_(_pieces(flat, found), found)
        if factor is not None:
            flat = flat.div_(factor).to(self._dtype)
        parts = iter(_pieces(flat, found))
        return Reduction(self, [None if gradient is None else next(parts) for gradient in gradients])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`, cut into contiguous tensors of the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
