"""The expected bytes of a unit, from its layouts (layout/memory.py), dtypes and optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import local_of
from ..comm import DataGroup, communicators, direct_of
from ..engine import Unit
from ..engine.root import formed
from ..engine.state_dict import standing_parameter as standing
from ..layout import FlatLayout, Term, UnitMemory, peak, secondary_layout
from ..param.initial import table_nbytes
from ..policy import Options


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank, by kind. None: unknown."""

    parameters: int
    gradients: int
    optimizer: int | None

    def __add__(self, other: Bytes) -> Bytes:
        known = self.optimizer is not None and other.optimizer is not None
        optimizer = (self.optimizer or 0) + (other.optimizer or 0) if known else None
        return Bytes(self.parameters + other.parameters, self.gradients + other.gradients, optimizer)


class Held:
    """An optimizer, and the options of each parameter's group by the parameter's id."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.options: dict[int, dict[str, Any]] = {id(p): g for g in optimizer.param_groups for p in g["params"]}


def _replicas(unit: Unit, position: int) -> int:
    """The number of replicas of this rank's shards, this one included."""
    replicate = unit.links[position].replicate
    return 1 if replicate is None else replicate.world


def kept_nbytes(unit: Unit) -> int:
    """Expected bytes kept between forward and backward by an integer `reshard_after_forward`; otherwise 0."""
    packs = [_kept_layout(unit, position) for position in range(len(unit.groups))]
    pairs = zip(unit.groups, packs, strict=True)
    return sum(pack.padded_local_numel * group.precision.compute.itemsize for group, pack in pairs if pack is not None)


def _kept_layout(unit: Unit, position: int) -> FlatLayout | None:
    group, block = unit.groups[position], unit.links[position].block
    if not unit.record.plan.keeps_secondary or unit.record.plan.resident or block is None:
        return None
    return secondary_layout(group.pack, group.plan, block.group.world)


def _memory(unit: Unit, position: int, name: str) -> UnitMemory:
    group = unit.groups[position]
    precision = group.precision
    is_outer = unit.root.units[0] is unit if unit.root is not None else name == ""
    keeps = unit.settings.reshard_after_forward is False or (unit.settings.reshard_after_forward is None and is_outer)
    keeps = keeps or unit.record.plan.resident
    # In a window, or after micro-batches that left their gradients here.
    held = unit.gradients.window_open or not unit.record.plan.sync
    # Before the root forms, `links` does not say yet whether there are several nodes.
    links = unit.links[position]
    exchanged = links.exchanges
    sums_here = exchanged and group.placing.world > 1
    layouts = [segment.layout for segment in group.pack.segments]
    direct = direct_of(links, unit.channels.strategy, layouts, group.plan.direct, precision.wire.itemsize)
    return UnitMemory(
        name or "root",
        group.pack,
        group.plan,
        precision.storage.itemsize,
        precision.compute.itemsize,
        (precision.wire if exchanged and not held else precision.reduce).itemsize,
        reshard=not keeps,
        outer=is_outer,
        exchanges=exchanged,
        replicas=_replicas(unit, position),
        sum_itemsize=(precision.sum if sums_here else precision.reduce).itemsize,
        kept=_kept_layout(unit, position),
        direct_gradients=direct,
        frozen=not any(standing(param).requires_grad for param in group.params),
        held_itemsize=precision.reduce.itemsize if held else 0,
        offloaded=unit.host_link is not None,
        stays=unit.settings.keeps_storage,
    )


def expected_of(unit: Unit, position: int, optimizer: Held | None) -> Bytes:
    """Expected bytes of one param group after a backward, before `zero_grad`, once the optimizer stepped. Parameters
    include padding; state does not."""
    group = unit.groups[position]
    itemsize = group.precision.storage.itemsize
    trainable = [i for i, param in enumerate(group.params) if standing(param).requires_grad]
    segments = [group.pack.segments[i] for i in trainable]
    gradients = 0
    if segments:
        # Trainable parameters only: the others are in no reduction.
        pack = FlatLayout.build([s.layout for s in segments], group.pack.align_numel, names=[s.name for s in segments])
        gradient = group.precision.gradient.itemsize
        memory = UnitMemory("", pack, group.plan, gradient, gradient, gradient, replicas=_replicas(unit, position))
        gradients = memory.reduced_nbytes
    state: int | None = None
    if optimizer is not None:
        state = 0
        for i in trainable:
            shard = standing(group.params[i])
            of_one = _state_nbytes(optimizer, shard)
            state = None if state is None or of_one is None else state + of_one
    return Bytes(group.pack.padded_local_numel * itemsize, gradients, state)


def _state_nbytes(optimizer: Held, shard: Tensor) -> int | None:
    """Bytes of state of one parameter under torch's elementwise optimizers; None for others."""
    options = optimizer.options.get(id(shard))
    if options is None:
        return 0
    kind = type(optimizer.optimizer)
    # (tensors of the parameter's size, scalars of 4 bytes)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        tensors, scalars = 2 + bool(options["amsgrad"]), 1
    elif kind is torch.optim.SGD:
        tensors, scalars = int(options["momentum"] != 0), 0
    elif kind is torch.optim.RMSprop:
        tensors, scalars = 1 + (options["momentum"] > 0) + bool(options["centered"]), 1
    elif kind is torch.optim.Adagrad:
        tensors, scalars = 1, 1
    elif kind in (torch.optim.Adadelta, torch.optim.Adamax, torch.optim.RAdam):
        tensors, scalars = 2, 1
    else:
        return None
    return tensors * local_of(shard).numel() * shard.element_size() + 4 * scalars


# NCCL's documented defaults: bytes of the buffer of a channel, and the most channels of a communicator.
_CHANNEL_NBYTES, _CHANNELS = 4 << 20, 32


def communicator_terms(found: Sequence[tuple[str, Unit]]) -> tuple[Term, ...]:
    """The communicators that fullshard opened on the device, beside the user's own, each with an estimate of its bytes.

    The estimate is NCCL_BUFFSIZE for each of NCCL_MAX_NCHANNELS channels, from the environment or else NCCL's defaults.
    It is not measured, and what a communicator takes is outside of torch's allocator. 0 for other backends.
    """
    nbytes = int(os.environ.get("NCCL_BUFFSIZE") or _CHANNEL_NBYTES)
    nbytes *= int(os.environ.get("NCCL_MAX_NCHANNELS") or _CHANNELS)
    groups: dict[str, DataGroup] = {}
    for _, unit in found:
        for links in unit.links:
            block = None if links.block is None else links.block.group
            for group in (links.shard, links.replicate, links.reduce, block):
                if group is not None and group.world > 1:
                    groups |= {one.name: one for one in communicators(group.origin)}
    return tuple(
        Term(f'communicator "{one.purpose}" of {len(one.ranks)} ranks', nbytes if one.backend == "nccl" else 0)
        for one in groups.values()
    )


def expected_peak(found: Sequence[tuple[str, Unit]], options: Options) -> tuple[str, tuple[Term, ...]]:
    """The moment of the peak of parameters, gradients and messages, and its terms."""
    root = formed(found[0][1])
    order = [record.name for record in root.run.forward_plan] if root is not None else []
    # In the order of the last run, else in definition order.
    placed = sorted(found, key=lambda item: order.index(n) if (n := item[1].record.name) in order else -1)
    memories = [_memory(unit, i, name) for name, unit in placed for i in range(len(unit.groups))]
    if not memories:
        return "never", ()
    chosen = (found[0][1] if root is None else root.units[0]).settings
    default = options.send_buffers_on(found[0][1].device.type)
    buffers = [count for _, unit in found if (count := unit.settings.controls.send_buffers or default) is not None]
    moment, terms = peak(
        memories,
        prefetch_depth=options.prefetch_depth,
        reductions_in_flight=options.reductions_in_flight,
        send_buffers=min(buffers, default=None),
        prefetch_nbytes=chosen.prefetch_nbytes,
        gradient_nbytes=chosen.gradient_nbytes,
    )
    device = found[0][1].device
    table = 0 if device.type == "cpu" else table_nbytes(device)
    return moment, (*terms, *([Term("table of the digests of initial values", table)] if table else []))
