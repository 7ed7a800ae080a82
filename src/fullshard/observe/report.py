"""`report(model, optimizer)`: the units of a model, its unsharded tensors, and the bytes of this rank.

Expected bytes are computed from layouts and the rules (expected.py); measured bytes are counted from the memory that
tensors hold now. Nothing is communicated or changed; it works on the meta device, and before the first forward.
"""

from __future__ import annotations

import functools
import json
import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of
from ..engine import Root, Unit, unit_of
from ..engine.names import clean_name, names_elsewhere, parameter_names
from ..engine.root import formed
from ..engine.state_dict import standing_parameter as standing
from ..layout import Term
from ..param import PendingGrad, ShardedParam
from ..policy import Options, resolve_precision
from ..policy.arguments import expect, expect_module, is_optimizer
from ..see.timeline import human as human
from .expected import (
    Bytes,
    Held,
    Hosts,
    communicator_terms,
    expected_of,
    expected_peak,
    hosts_of,
    kept_nbytes,
)
from .recorder import recorded_in

if TYPE_CHECKING:
    from .expected import Bytes


# ---- table -----------------------------------------------------------------------------------------------------------
# A `Report` as text: a line per unit, with equal consecutive units merged; unsharded tensors; notes.

_HEADER = ("unit", "class", "params", "elements", "this rank", "dtypes", "parameters", "gradients", "optimizer", "full")
_LEFT = {0, 1, 5}
_SHOWN = 12


def render(report: Report) -> str:
    """The table. Byte columns: measured / expected."""
    rows: list[Sequence[str]] = [_HEADER]
    for _, same in groupby(report.units, key=_figures):
        group = list(same)
        name = _name(group[0]) if len(group) == 1 else f"{_name(group[0])} .. {_name(group[-1])}"
        rows.append((name, group[0].module_class + (f" x{len(group)}" if len(group) > 1 else ""), *_cells(group)))
    rows.append(("sum", "", *_cells(report.units)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(_aligned(row[i], widths[i], i) for i in range(len(_HEADER))).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *_below(report)])


def _below(report: Report) -> list[str]:
    placements = dict.fromkeys(placement for unit in report.units for placement in unit.placements)
    lines = [
        f"rank {report.rank}; bytes: measured now / expected between backward and zero_grad; dtypes: storage, compute, "
        f"reduce",
        *(f"sharded as {placement}" for placement in placements),
        f"expected peak: {human(report.peak_nbytes)} in {report.peak_moment}, without activations and optimizer; "
        f"kept for messages: {human(report.message_nbytes)}",
    ]
    if report.communicators:
        names = ", ".join(term.name.removeprefix("communicator ") for term in report.communicators)
        nbytes = human(sum(term.nbytes for term in report.communicators))
        lines.append(
            f"communicators beside the mesh's own: {names}; at most {nbytes} outside of the allocator, estimated from "
            f"NCCL's defaults, not measured"
        )
    if report.hosts is not None and report.hosts.number > 1:
        lines.append(words_of(report.hosts))
    if report.record is not None:
        lines.append(f"steps are recorded: fullshard see {report.record}")
    kept = sum(unit.kept_nbytes for unit in report.units)
    if kept:
        live = sum(unit.kept_nbytes_live for unit in report.units)
        lines.append(
            f"kept between forward and backward, of an integer reshard_after_forward: {human(kept)}; now {human(live)}"
        )
    resident = [_name(unit) for unit in report.units if unit.resident]
    stays = [_name(unit) for unit in report.units if unit.keeps_storage]
    if stays:
        lines.append(f"storage of full parameters kept (set_keep_unsharded_storage): {', '.join(stays)}")
    if resident:
        lines.append(f"kept full within set_memory_budget(resident): {', '.join(resident)}")
    for unit in report.units:
        lines += [f"tied: {' = '.join(names)}" for names in unit.tied]
    # Buffers of one shape are one line, as the tables of rotary embeddings of all blocks; a parameter has its name.
    alike: dict[tuple[object, ...], list[Unsharded]] = {}
    for item in report.unsharded:
        one = "" if item.kind == "buffer" else item.name
        alike.setdefault((item.kind, one, item.shape, item.dtype), []).append(item)
    for items in list(alike.values())[:_SHOWN]:
        first, last = items[0], items[-1]
        names = first.name if len(items) == 1 else f"{first.name} .. {last.name} x{len(items)}"
        trainable = ", trainable" if first.requires_grad else ""
        nbytes = human(sum(item.nbytes for item in items))
        lines.append(f"not sharded: {first.kind} {names} {first.shape} {first.dtype}, {nbytes}{trainable}")
    more = [item for items in list(alike.values())[_SHOWN:] for item in items]
    if more:
        lines.append(f"not sharded: {len(more)} more, {human(sum(item.nbytes for item in more))}")
    return lines + [f"note: {note}" for note in report.notes]


def words_of(hosts: Hosts) -> str:
    """Returns what each of several hosts sends, as a line."""
    sent = f"between {hosts.number} hosts: each sends {human(hosts.sent_nbytes)} in a step"
    chosen = "" if hosts.rates is None else f" (measured: {hosts.rates})"
    return f"{sent}, in {hosts.ways}{chosen}" if hosts.ways else sent


def _figures(unit: UnitReport) -> tuple[object, ...]:
    """The figures that merged units have in common."""
    return (unit.module_class, *_cells([unit]), unit.placements)


def _cells(units: Sequence[UnitReport]) -> tuple[str, ...]:
    trainable, params = sum(u.num_trainable for u in units), sum(u.num_params for u in units)
    dtypes = [f"{'/'.join(u.storage_dtypes)} {'/'.join(u.compute_dtypes)} {'/'.join(u.reduce_dtypes)}" for u in units]
    return (
        str(params) if trainable == params else f"{params} ({trainable} trainable)",
        f"{sum(u.numel for u in units):,}",
        f"{sum(u.local_numel for u in units):,}",
        dtypes[0] if len(set(dtypes)) == 1 else "",
        *_bytes([u.measured for u in units], [u.expected for u in units]),
        human(sum(u.full_nbytes_live for u in units)),
    )


def _bytes(measured: Sequence[Bytes], expected: Sequence[Bytes]) -> list[str]:
    cells = []
    for kind in ("parameters", "gradients", "optimizer"):
        sides = []
        for parts in (measured, expected):
            values = [getattr(part, kind) for part in parts]
            sides.append("?" if None in values else human(sum(values)))
        cells.append("-" if sides == ["?", "?"] else " / ".join(sides))
    return cells


def _name(unit: UnitReport) -> str:
    return unit.name or "root"


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in _LEFT else cell.rjust(width)


# ---- report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitReport:
    """One unit. `num_`: parameters, tied ones once; `_numel`: elements; names of dtypes and placements are torch's."""

    name: str  # dotted name of its module, with "+" between several; "" is the model itself
    module_class: str
    param_names: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]  # all names of each parameter that has several
    placements: tuple[str, ...]  # "(Shard(dim=0),) on dp=4" or "... on 4 ranks", each once
    storage_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    reduce_dtypes: tuple[str, ...]
    num_params: int
    num_trainable: int
    numel: int  # of the whole parameters
    local_numel: int  # of this rank's shards
    padded_local_numel: int  # of this rank's flat buffers, elements that are no parameter included
    # The bytes per element of the widest dtype among its parameters.
    storage_itemsize: int
    compute_itemsize: int
    reduce_itemsize: int
    world: int  # ranks that share the parameters: the most of any group
    expected: Bytes  # after a backward, before `zero_grad`, once the optimizer stepped
    measured: Bytes  # now
    full_nbytes_live: int  # full parameters that are allocated now
    keeps_storage: bool  # the bytes of full parameters stay between uses, by `set_keep_unsharded_storage`
    resident: bool  # kept full between forward and backward, by `set_memory_budget(resident=)`
    # The bytes that an integer `reshard_after_forward` keeps between forward and backward: expected, and allocated now.
    kept_nbytes: int
    kept_nbytes_live: int


@dataclass(frozen=True)
class Unsharded:
    """An unsharded tensor, which every rank holds whole."""

    name: str
    kind: str  # "parameter" or "buffer"
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Report:
    """The result of `report`. `str(...)` is a table, `to_json()` has all fields."""

    rank: int
    units: tuple[UnitReport, ...]
    unsharded: tuple[Unsharded, ...]
    expected: Bytes  # sums over units
    measured: Bytes
    message_nbytes: int  # buffers of messages that are kept between steps
    # The expected peak of parameters, gradients and messages: the moment, and the terms. Without activations and
    # optimizer.
    peak_moment: str
    peak_terms: tuple[Term, ...]
    # The communicators that fullshard opened on the device so far, beside the user's own: an estimate of their bytes,
    # not measured. They are outside of torch's allocator, and so not part of the peak.
    communicators: tuple[Term, ...]
    # The likely mistakes.
    notes: tuple[str, ...]
    # The hosts of all ranks, and what each sends; None unless the ranks know them: on gloo, once a root formed.
    hosts: Hosts | None = None
    # The folder in which a `Recorder` keeps the steps, for `fullshard see`; None: not recorded.
    record: str | None = None
    # The dtype that units without a reduce_dtype follow: "grad_dtype", or "param_dtype" (FULLSHARD_REDUCE_DTYPE).
    reduce_default: str = "grad_dtype"

    @property
    def peak_nbytes(self) -> int:
        return sum(term.nbytes for term in self.peak_terms)

    def to_json(self) -> str:
        """All fields as one JSON object."""
        terms = {name: [t._asdict() for t in getattr(self, name)] for name in ("peak_terms", "communicators")}
        hosts = None
        if self.hosts is not None:
            rates = None if self.hosts.rates is None else self.hosts.rates._asdict()
            hosts = self.hosts._asdict() | {"rates": rates}
        return json.dumps(asdict(self) | terms | {"peak_nbytes": self.peak_nbytes, "hosts": hosts})

    def __str__(self) -> str:
        return render(self)


def report(model: nn.Module, optimizer: Optimizer | None = None) -> Report:
    """Report the units of `model`, and this rank's bytes of parameters, gradients and optimizer state.

        print(fullshard.report(model, optimizer))

    optimizer: the optimizer whose state is estimated (for torch's elementwise optimizers) and measured; without one
        these bytes are None.

    What is measured is that of this rank, now. Raises `ValueError` if nothing in `model` is sharded.
    """
    expect_module("model", model)
    expect(
        "optimizer",
        optimizer is None or is_optimizer(optimizer),
        "an optimizer or None",
        optimizer,
        "pass the optimizer itself",
    )
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    units: dict[Unit, str] = {}
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            # A unit of several modules, as by `fully_shard([a, b])`, has all names.
            units[unit] = f"{units[unit]}+{names[id(module)]}" if unit in units else names[id(module)]
    if not units:
        raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
    found = [(name, unit) for unit, name in units.items()]
    dotted = parameter_names(model, list(units))
    held = None if optimizer is None else Held(optimizer)
    rows = tuple(_unit_report(name, unit, names, dotted, held) for name, unit in found)
    unsharded = _unsharded(model, [unit for _, unit in found])
    first = found[0][1]
    options = first.root.options if first.root is not None else Options.current()
    moment, terms, leaving = expected_peak(model, found, options)
    folders = [recorded_in(root) for root in {formed(unit): None for _, unit in found} if isinstance(root, Root)]
    pools = {root.shared for root in (formed(unit) for _, unit in found) if root is not None}
    return Report(
        rank=first.groups[0].placing.mesh.get_rank() if first.groups else torch.distributed.get_rank(),
        units=rows,
        unsharded=unsharded,
        expected=_sum(row.expected for row in rows),
        measured=_sum(row.measured for row in rows),
        message_nbytes=sum(shared.pool.nbytes for shared in pools),
        peak_moment=moment,
        peak_terms=terms,
        communicators=communicator_terms(found),
        hosts=hosts_of(found, leaving),
        notes=_notes(model, found, rows, unsharded, held),
        record=next((str(folder) for folder in folders if folder is not None), None),
        reduce_default=next((g.precision.wanted.follows for _, unit in found for g in unit.groups), "grad_dtype"),
    )


def inspect_units(model: nn.Module) -> tuple[UnitReport, ...]:
    """Deprecated: `report(model).units`; empty when nothing is sharded."""
    expect_module("model", model)
    warnings.warn(
        "inspect_units is deprecated and goes in the next version; use report(model).units",
        DeprecationWarning,
        stacklevel=2,
    )
    return report(model).units if any(unit_of(module) is not None for module in model.modules()) else ()


# The former result type of `inspect_units`; removed together with it.
UnitInfo = UnitReport


# ---- one unit --------------------------------------------------------------------------------------------------


def _unit_report(
    name: str, unit: Unit, names: dict[int, str], dotted: dict[ShardedParam, str], optimizer: Held | None
) -> UnitReport:
    spelt = [_names(param, names) for param in unit.params]
    precisions = [group.precision for group in unit.groups]
    shards = [standing(param) for param in unit.params]
    trainable = [shard for shard in shards if shard.requires_grad]
    nothing = Bytes(0, 0, None if optimizer is None else 0)
    expected = [expected_of(unit, position, optimizer) for position in range(len(unit.groups))]
    held = [param.gradients.held for param in unit.params if param.gradients.held is not None]
    gradients = [local_of(s.grad) for s in shards if s.grad is not None and not isinstance(s.grad, PendingGrad)]
    return UnitReport(
        name=name,
        module_class="+".join(type(module).__name__.removeprefix("FSDP") for module in unit.modules),
        param_names=tuple(dotted[param] for param in unit.params),
        tied=tuple(slots for slots in spelt if len(slots) > 1),
        placements=_once(f"{param.spec.placements} on {_mesh(param)}" for param in unit.params),
        storage_dtypes=_once(_dtype(precision.storage) for precision in precisions),
        compute_dtypes=_once(_dtype(precision.compute) for precision in precisions),
        reduce_dtypes=_once(_dtype(precision.reduce) for precision in precisions),
        num_params=len(shards),
        num_trainable=len(trainable),
        numel=sum(shard.numel() for shard in shards),
        local_numel=sum(local_of(shard).numel() for shard in shards),
        padded_local_numel=sum(group.pack.padded_local_numel for group in unit.groups),
        storage_itemsize=max((precision.storage.itemsize for precision in precisions), default=0),
        compute_itemsize=max((precision.compute.itemsize for precision in precisions), default=0),
        reduce_itemsize=max((precision.reduce.itemsize for precision in precisions), default=0),
        world=max((group.placing.world for group in unit.groups), default=1),
        expected=_sum([nothing, *expected]),
        measured=Bytes(
            _held_nbytes([*(group.flat for group in unit.groups), *(local_of(shard) for shard in shards)]),
            _held_nbytes([*gradients, *held]),
            None if optimizer is None else _held_nbytes(_state(optimizer.optimizer, shards)),
        ),
        full_nbytes_live=sum(group.memory.live_nbytes for group in unit.groups),
        keeps_storage=unit.settings.keeps_storage,
        resident=unit.record.plan.resident,
        kept_nbytes=kept_nbytes(unit),
        kept_nbytes_live=0 if unit.channels.secondary is None else unit.channels.secondary.live_nbytes,
    )


def _names(param: ShardedParam, names: dict[int, str]) -> tuple[str, ...]:
    """The names of all slots of `param` inside the model."""
    modules = [(names.get(id(slot.module)), slot.name) for slot in param.slots]
    return tuple(f"{module}.{name}" if module else name for module, name in modules if module is not None)


def _mesh(param: ShardedParam) -> str:
    mesh = param.spec.mesh
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    if mesh.mesh_dim_names is None:
        return f"{' x '.join(map(str, sizes))} ranks"
    return " x ".join(f"{axis}={size}" for axis, size in zip(mesh.mesh_dim_names, sizes, strict=True))


def _state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    values = [value for p in parameters if p in optimizer.state for value in optimizer.state[p].values()]
    return [local_of(v) if isinstance(v, DTensor) else v for v in values if isinstance(v, Tensor)]


def _held_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each byte once. Whole storages, because a view keeps all of its storage alive."""
    spans = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not tensor.is_meta:
            spans.append((str(tensor.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total, device, end = 0, "", 0
    for where, start, stop in sorted(spans):
        if where != device:
            device, end = where, 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


# ---- unsharded tensors and notes -------------------------------------------------------------------------------


def _unsharded(model: nn.Module, units: Sequence[Unit]) -> tuple[Unsharded, ...]:
    ours = {(id(slot.module), slot.name) for unit in units for param in unit.params for slot in param.slots}
    left: dict[int, Unsharded] = {}
    for prefix, module in model.named_modules():
        for kind, tensors in (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        ):
            for name, tensor in tensors:
                if (id(module), name) in ours or id(tensor) in left:
                    continue
                dotted = clean_name(f"{prefix}.{name}" if prefix else name)
                local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
                left[id(tensor)] = Unsharded(
                    dotted, kind, tuple(tensor.shape), _dtype(tensor.dtype), local.nbytes, tensor.requires_grad
                )
    return tuple(left.values())


def _notes(
    model: nn.Module,
    found: Sequence[tuple[str, Unit]],
    rows: Sequence[UnitReport],
    unsharded: Sequence[Unsharded],
    optimizer: Held | None,
) -> tuple[str, ...]:
    notes = []
    params = [
        (name, p)
        for (_, unit), row in zip(found, rows, strict=True)
        for name, p in zip(row.param_names, unit.params, strict=True)
    ]
    on_meta = [name for name, param in params if local_of(standing(param)).is_meta]
    if on_meta:
        notes.append(
            f"on the meta device: {_some(on_meta)}; call to_empty and initialise or load before the first step"
        )
    plain = [item.name for item in unsharded if item.kind == "parameter" and item.requires_grad]
    if plain:
        notes.append(f"trainable and in no unit: {_some(plain)}; their gradients are not averaged over the ranks")
    pending = [name for name, param in params if param.gradients.held is not None]
    if pending:
        notes.append(f"gradients accumulated and not reduced yet: {_some(pending)}, held whole on every rank")
    pinned = [
        (name or "root", row.full_nbytes_live) for (name, unit), row in zip(found, rows, strict=True) if _waits(unit)
    ]
    if pinned:
        notes.append(
            f"full for the backward of a graph that a backward (create_graph) or torch.func recorded: "
            f"{_some([name for name, _ in pinned])}, {human(sum(nbytes for _, nbytes in pinned))}; a backward that "
            f"brings gradients, changed shards, or reshard() of each of them ends that"
        )
    former = [name or "root" for name, unit in found if _reduces_as_before(unit)]
    if former:
        notes.append(
            f"FULLSHARD_REDUCE_DTYPE=param_dtype: {_some(former)} reduces gradients in the dtype of compute, as torch "
            f"up to 2.14; from 2.15 on it is that of the parameters"
        )
    padded = [name or "root" for name, unit in found if _is_mostly_padding(unit)]
    if padded:
        notes.append(f"more padding than parameters: {_some(padded)}; dims are small for so many ranks")
    if optimizer is not None:
        known = {id(standing(param)) for _, param in params} | {id(parameter) for parameter in model.parameters()}
        missing = [n for n, param in params if (p := standing(param)).requires_grad and id(p) not in optimizer.options]
        held = {id(p): p for group in optimizer.optimizer.param_groups for p in group["params"]}
        strays = [parameter for key, parameter in held.items() if key not in known]
        if strays:
            notes.append(
                f"the optimizer holds {len(strays)} tensors that are no parameters of this model: "
                f"{_some(list(names_elsewhere(strays).values()))}; was it built before fully_shard? Build it "
                f"afterwards, or call rebind_optimizer(optimizer, model). If they are another module's, nothing "
                f"averages their gradients: give it to fully_shard too"
            )
        if missing:
            notes.append(f"trainable, but not in the optimizer: {_some(missing)}")
    return tuple(notes)


def _reduces_as_before(unit: Unit) -> bool:
    """Whether the former meaning of `reduce_dtype=None` gives other dtypes than the newest."""
    each = [group.precision for group in unit.groups]
    newest = [resolve_precision(one.wanted._replace(follows="grad_dtype"), one.storage) for one in each]
    return any(one.reduce is not new.reduce for one, new in zip(each, newest, strict=True))


def _waits(unit: Unit) -> bool:
    """Whether its memory is kept for a backward that may never come (schedule/rules.py)."""
    return unit.record.pins.count > 0 and unit.releases


def _is_mostly_padding(unit: Unit) -> bool:
    """Whether padding exceeds the parameters, over all ranks: it is allocated, all-gathered and reduced as well."""
    padded_nbytes = sum(g.placing.world * g.pack.padded_local_numel * g.precision.storage.itemsize for g in unit.groups)
    nbytes = sum(g.pack.numel * g.precision.storage.itemsize for g in unit.groups)
    return padded_nbytes > 2 * nbytes and padded_nbytes > 1 << 16


def _some(names: Sequence[str], shown: int = 6) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _once(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return functools.reduce(operator.add, parts)
