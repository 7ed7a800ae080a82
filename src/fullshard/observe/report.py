"""`report(model, optimizer)`: which units a model has, what was left unsharded, and the bytes of this rank.

Expected bytes are arithmetic on layouts (layout/memory.py), measured ones are counted from the memory that tensors
really hold now. Nothing is communicated or changed; it works on the meta device, and before the first forward.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch_compat import local_of
from ..layout import Term
from ..param import PendingGrad, ShardedParam
from ..policy import Options
from ..runtime import Unit, unit_of
from ..runtime.names import clean_name
from .expected import Bytes, Held, expected_of, expected_peak, kept_nbytes, standing
from .table import human, render


@dataclass(frozen=True)
class UnitReport:
    """One unit. `num_`: parameters, tied ones once; `_numel`: elements; names of dtypes and placements are torch's."""

    name: str  # dotted name of its module; "" is the model itself
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
    padding_numel: int  # of this rank's flat buffers: elements that are no parameter
    expected: Bytes  # after a backward, before `zero_grad`, once the optimizer stepped
    measured: Bytes  # now
    full_nbytes_live: int  # full parameters that are allocated now
    resident: bool  # kept full between forward and backward, by `set_resident_bytes`
    # What an integer `reshard_after_forward` keeps between forward and backward: expected, and allocated now.
    kept_nbytes: int
    kept_nbytes_live: int


@dataclass(frozen=True)
class Unsharded:
    """A tensor that every rank holds whole."""

    name: str
    kind: str  # "parameter" or "buffer"
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Report:
    """What `report` found. `str(...)` is a table, `to_json()` all of it."""

    rank: int
    units: tuple[UnitReport, ...]
    unsharded: tuple[Unsharded, ...]
    expected: Bytes  # sums over units
    measured: Bytes
    message_nbytes: int  # buffers of messages that are kept between steps
    # When parameters, gradients and messages are expected to take most: the moment, and the terms. Without activations
    # and optimizer.
    peak_moment: str
    peak_terms: tuple[Term, ...]
    # What is likely a mistake; empty when nothing was found.
    notes: tuple[str, ...]

    @property
    def peak_nbytes(self) -> int:
        return sum(term.nbytes for term in self.peak_terms)

    def to_json(self) -> str:
        """All fields as one JSON object."""
        terms = [term._asdict() for term in self.peak_terms]
        return json.dumps(asdict(self) | {"peak_terms": terms, "peak_nbytes": self.peak_nbytes})

    def __str__(self) -> str:
        return render(self)


def report(model: nn.Module, optimizer: Optimizer | None = None) -> Report:
    """What is sharded in `model`, and how many bytes of parameters, gradients and optimizer state this rank holds.

        print(fullshard.report(model, optimizer))

    optimizer: its state is expected (for torch's elementwise optimizers) and measured; without it that is None.

    The figures are this rank's, of this moment. Raises `ValueError` when nothing in `model` is sharded.
    """
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    units: dict[Unit, str] = {}
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            # Of several modules, as `fully_shard([a, b])` makes it, all names.
            units[unit] = f"{units[unit]}+{names[id(module)]}" if unit in units else names[id(module)]
    if not units:
        raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
    found = [(name, unit) for unit, name in units.items()]
    held = None if optimizer is None else Held(optimizer)
    rows = tuple(_unit_report(name, unit, names, held) for name, unit in found)
    unsharded = _unsharded(model, [unit for _, unit in found])
    first = found[0][1]
    options = first.root.options if first.root is not None else Options.from_environment()
    moment, terms = expected_peak(found, options)
    return Report(
        rank=first.groups[0].placing.mesh.get_rank() if first.groups else torch.distributed.get_rank(),
        units=rows,
        unsharded=unsharded,
        expected=_sum(row.expected for row in rows),
        measured=_sum(row.measured for row in rows),
        message_nbytes=sum(shared.pool.nbytes for shared in {u.root.shared for _, u in found if u.root is not None}),
        peak_moment=moment,
        peak_terms=terms,
        notes=_notes(model, found, rows, unsharded, held),
    )


# ---- one unit --------------------------------------------------------------------------------------------------


def _unit_report(name: str, unit: Unit, names: dict[int, str], optimizer: Held | None) -> UnitReport:
    spelt = [_names(param, names) for param in unit.params]
    precisions = [group.precision for group in unit.groups]
    shards = [standing(param) for param in unit.params]
    trainable = [shard for shard in shards if shard.requires_grad]
    local_numel = sum(local_of(shard).numel() for shard in shards)
    nothing = Bytes(0, 0, None if optimizer is None else 0)
    expected = [expected_of(unit, position, optimizer) for position in range(len(unit.groups))]
    held = [param.held for param in unit.params if param.held is not None]
    gradients = [local_of(s.grad) for s in shards if s.grad is not None and not isinstance(s.grad, PendingGrad)]
    return UnitReport(
        name=name,
        module_class="+".join(type(module).__name__.removeprefix("FSDP") for module in unit.modules),
        param_names=tuple(slots[0] for slots in spelt),
        tied=tuple(slots for slots in spelt if len(slots) > 1),
        placements=_once(f"{param.spec.placements} on {_mesh(param)}" for param in unit.params),
        storage_dtypes=_once(_dtype(precision.storage) for precision in precisions),
        compute_dtypes=_once(_dtype(precision.compute) for precision in precisions),
        reduce_dtypes=_once(_dtype(precision.reduce) for precision in precisions),
        num_params=len(shards),
        num_trainable=len(trainable),
        numel=sum(shard.numel() for shard in shards),
        local_numel=local_numel,
        padding_numel=sum(group.pack.padded_local_numel for group in unit.groups) - local_numel,
        expected=_sum([nothing, *expected]),
        measured=Bytes(
            _held_nbytes([*(group.flat for group in unit.groups), *(local_of(shard) for shard in shards)]),
            _held_nbytes([*gradients, *held]),
            None if optimizer is None else _held_nbytes(_state(optimizer.optimizer, shards)),
        ),
        full_nbytes_live=sum(group.memory.live_nbytes for group in unit.groups),
        resident=unit.record.resident,
        kept_nbytes=kept_nbytes(unit),
        kept_nbytes_live=unit.narrowing.live_nbytes,
    )


def _names(param: ShardedParam, names: dict[int, str]) -> tuple[str, ...]:
    """Of all its slots in the model; a module outside of it has none."""
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
    """Bytes of the memory behind tensors, each byte once, and whole storages: a view keeps all of its storage alive."""
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


# ---- what is not sharded, and what looks wrong -----------------------------------------------------------------


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
    pending = [name for name, param in params if param.held is not None]
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
    padded = [name or "root" for name, unit in found if _is_mostly_padding(unit)]
    if padded:
        notes.append(f"more padding than parameters: {_some(padded)}; dims are small for so many ranks")
    if optimizer is not None:
        known = {id(standing(param)) for _, param in params} | {id(parameter) for parameter in model.parameters()}
        missing = [n for n, param in params if (p := standing(param)).requires_grad and id(p) not in optimizer.options]
        strays = len(optimizer.options.keys() - known)
        if strays:
            notes.append(
                f"the optimizer holds {strays} tensors that are no parameters of this model: was it built before "
                f"fully_shard? Build it afterwards"
            )
        if missing:
            notes.append(f"trainable, but not in the optimizer: {_some(missing)}")
    return tuple(notes)


def _waits(unit: Unit) -> bool:
    """Whether its memory is kept for a backward that may never come (lifecycle/pins.py)."""
    return unit.record.pins > 0 and unit.releases


def _is_mostly_padding(unit: Unit) -> bool:
    """Over all ranks, and worth a word: padding is allocated, gathered and reduced as the rest is."""
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
