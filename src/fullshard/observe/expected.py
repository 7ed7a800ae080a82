"""The expected bytes of a model: at rest, from layouts, dtypes and optimizer; at its peak, from the planner's
simulation of a step (plan/moments.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import local_of
from ..comm import DataGroup, communicators, direct_of, known_rates
from ..engine import Unit
from ..engine.root import formed
from ..engine.state_dict import standing_parameter as standing
from ..layout import FlatLayout, GatherPlan, Rates, Term, UnitMemory, secondary_layout
from ..param.initial import table_nbytes
from ..plan.description import Parameter, UnitShape
from ..plan.moments import Place, largest
from ..plan.simulation import record_of
from ..plan.strategy import Group, Limits
from ..plan.strategy import Unit as PlannedUnit
from ..policy import Options
from ..schedule import UnitRecord


class Hosts(NamedTuple):
    """The hosts of a model's ranks. number: of hosts; sent_nbytes: by the busiest to others in a step of one forward
    and backward; ways: of the messages between them, "" if there is no choice; rates: by which it was made, if they
    were measured."""

    number: int
    sent_nbytes: int
    ways: str
    rates: Rates | None


def hosts_of(found: Sequence[tuple[str, Unit]], leaving: int) -> Hosts | None:
    """The hosts of all ranks of these units, which send `leaving`; None unless the ranks asked for them."""
    links = [one for _, unit in found for one in unit.links if len(one.everyone) > 1]
    if not links or any(one.hosts is None for one in links):
        return None
    hosts = {host for one in links if one.hosts is not None for row in one.hosts.rows for host in row}
    choice = [one for one in links if one.hosts is not None and one.hosts.levels is not None]
    ways = dict.fromkeys(str(one.hosts.ways) for one in choice if one.hosts is not None)
    rates = next((rates for one in choice if (rates := known_rates(one.shard)) is not None), None)
    return Hosts(max(len(hosts), 1), leaving, "; ".join(ways), rates)


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
    return secondary_layout(group.pack, group.plan.direct, block.group.world)


def _planned(unit: Unit, position: int, name: str) -> Group:
    """A param group as the planner knows one."""
    group, links = unit.groups[position], unit.links[position]
    precision, pack, plan = group.precision, group.pack, group.plan
    strategy = unit.channels.strategy
    if strategy == "torch" and len(plan.direct) + bool(plan.packed) > 1:
        plan = GatherPlan(direct=(), packed=pack.order)
    # In a window, or after micro-batches that left their gradients here.
    held = unit.gradients.window_open or not unit.record.plan.sync
    # Before the root forms, `links` does not say yet whether there are several nodes.
    exchanged, in_levels = links.exchanges, links.in_levels
    memory = UnitMemory(
        name,
        pack,
        plan,
        precision.storage.itemsize,
        precision.compute.itemsize,
        (precision.wire if exchanged and not held else precision.reduce).itemsize,
        exchanges=exchanged,
        replicas=_replicas(unit, position),
        sum_itemsize=(
            precision.sum if (exchanged or in_levels) and group.placing.world > 1 else precision.reduce
        ).itemsize,
        kept=_kept_layout(unit, position),
        held_itemsize=precision.reduce.itemsize if held else 0,
        offloaded=unit.host_link is not None,
        stays=unit.settings.keeps_storage,
        in_levels=in_levels,
    )
    parameters = tuple(
        Parameter(param.name, tuple(shard.shape), str(precision.storage), shard.requires_grad)
        for param, shard in ((param, standing(param)) for param in group.params)
    )
    trained = [i for i, parameter in enumerate(parameters) if parameter.trainable]
    sent = None
    if trained:
        segments = [pack.segments[i] for i in trained]
        layouts, names = [segment.layout for segment in segments], [segment.name for segment in segments]
        gathered = {place for place, i in enumerate(trained) if i in group.plan.direct}
        direct = direct_of(links, strategy, layouts, gathered, precision.wire.itemsize)
        sent_pack = FlatLayout.build(layouts, pack.align_numel, names=names, first=direct)
        sent = replace(memory, pack=sent_pack, direct_gradients=direct, kept=None)
    return Group(memory, sent, parameters, 0, tuple(segment.name for segment in pack.segments), links.hosts)


def _unit(unit: Unit, name: str) -> PlannedUnit:
    groups = tuple(_planned(unit, position, name or "root") for position in range(len(unit.groups)))
    parameters = tuple(parameter for group in groups for parameter in group.parameters)
    is_outer = unit.root.units[0] is unit if unit.root is not None else name == ""
    keeps = unit.settings.reshard_after_forward is False or (unit.settings.reshard_after_forward is None and is_outer)
    part = next((links.block.group.world for links in unit.links if links.block is not None), 0)
    return PlannedUnit(UnitShape(name, "", parameters), groups, keeps, part)


def _records(found: Sequence[tuple[str, Unit]], planned: Sequence[PlannedUnit]) -> list[UnitRecord]:
    """Returns what the rules read about the units: their settings and facts, and what the user asked of their
    gathers."""
    records = [record_of(unit, i) for i, unit in enumerate(planned)]
    made = {unit.record: record for (_, unit), record in zip(found, records, strict=True)}
    for (_, unit), record in zip(found, records, strict=True):
        plan = unit.record.plan
        record.plan.resident = plan.resident
        record.plan.reshard_after_backward = plan.reshard_after_backward
        record.plan.gathers_in_backward = plan.gathers_in_backward
        record.plan.forward_prefetch = tuple(made[r] for r in plan.forward_prefetch if r in made)
        record.plan.backward_prefetch = tuple(made[r] for r in plan.backward_prefetch if r in made)
    return records


def _places(model: nn.Module, found: Sequence[tuple[str, Unit]]) -> list[Place]:
    """Where units run: inside the forward of the innermost unit that has their module. What an outer unit has after
    the modules of those inside is used after them."""
    number = {module: i for i, module in enumerate(model.modules())}
    inside = []
    for _, unit in found:
        around = [place for place, (_, other) in enumerate(found) if _has(other, unit)]
        inside.append(max(around, key=lambda place: number[found[place][1].module], default=-1))
    places = []
    for place, (_, unit) in enumerate(found):
        first = min((number[found[i][1].module] for i, outer in enumerate(inside) if outer == place), default=None)
        every = [
            (standing(param).numel() * group.precision.compute.itemsize, param)
            for group in unit.groups
            for param in group.params
            if standing(param).requires_grad
        ]
        early = 0 if first is None else sum(n for n, p in every if any(number[s.module] > first for s in p.slots))
        places.append(Place(inside[place], early / max(1, sum(n for n, _ in every))))
    return places


def _has(outer: Unit, unit: Unit) -> bool:
    """Whether the module of `unit` is inside a module of `outer`."""
    return outer is not unit and any(unit.module in module.modules() for module in outer.modules)


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


def expected_peak(
    model: nn.Module, found: Sequence[tuple[str, Unit]], options: Options
) -> tuple[str, tuple[Term, ...], int]:
    """The moment of the peak of parameters, gradients and messages, and its terms; and bytes that a host sends to
    others in that step."""
    root = formed(found[0][1])
    order = [record.name for record in root.run.forward_plan] if root is not None else []
    # In the order of the last run, else in definition order.
    placed = sorted(found, key=lambda item: order.index(n) if (n := item[1].record.name) in order else -1)
    planned = [_unit(unit, name) for name, unit in placed]
    chosen = (found[0][1] if root is None else root.units[0]).settings
    default = options.send_buffers_on(found[0][1].device.type)
    buffers = [count for _, unit in found if (count := unit.settings.controls.send_buffers or default) is not None]
    limits = Limits(
        options.prefetch_depth,
        chosen.prefetch_nbytes,
        options.reductions_in_flight,
        min(buffers, default=None),
        chosen.gradient_nbytes,
    )
    places, records = _places(model, placed), _records(placed, planned)
    moment, counted, leaving = largest(planned, places, limits, records)
    words = _Words(moment, planned, places, records)
    terms = [words.term(kind, name, nbytes) for kind, name, nbytes in counted]
    device = found[0][1].device
    table = 0 if device.type == "cpu" else table_nbytes(device)
    return moment, (*terms, *([Term("table of the digests of initial values", table)] if table else [])), leaving


_NAMES = {
    "parameters": "shards",
    "gradients of shards": "reduced shards",
    "held gradients": "held gradients",
    "kept parts": "kept part",
    "staging": "staging",
    "gradients": "gradients",
    "messages": "reduction",
}


class _Words:
    """The terms of a moment, in the words of docs/memory.md."""

    def __init__(
        self, moment: str, planned: Sequence[PlannedUnit], places: Sequence[Place], records: Sequence[UnitRecord]
    ) -> None:
        self._positions = {unit.shape.title: position for position, unit in enumerate(planned)}
        self._stays = {unit.shape.title for unit in planned if unit.staying_nbytes}
        outer = {place.inside for place in places}
        self._lasts = {r.name for r in records if r.plan.resident and not r.plan.trainable}
        self._keeps = {
            r.name for r in records if r.plan.resident or not r.plan.reshard_after_forward or r.index in outer
        }
        phase, _, self._current = moment.partition(" ")
        self._is_forward = phase == "forward"

    def term(self, kind: str, name: str, nbytes: int) -> Term:
        if kind != "full parameters":
            return Term(f"{_NAMES[kind]} of {name}", nbytes)
        if name in self._stays:
            return Term(f"storage of full {name}", nbytes)
        if name == self._current:
            return Term(f"full {name}", nbytes)
        return Term(f"full {name} ({'next' if self._is_next(name) else 'kept'})", nbytes)

    def _is_next(self, name: str) -> bool:
        """Whether `name` is gathered ahead of its use."""
        later = self._positions[name] > self._positions.get(self._current, -1)
        return (later and name not in self._lasts) if self._is_forward else not later and name not in self._keeps
