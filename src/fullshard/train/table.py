"""The unit table: how many bytes of parameters, gradients and optimizer a rank holds, expected and measured.

Expected is arithmetic on what `fullshard.inspect_units` says of each unit; measured is counted from the storages that
the model and the optimizer really hold. AdamW keeps two values per element, in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import UnitInfo
from .facts import in_units

_ADAMW_STATES = 2


class StateBytes(NamedTuple):
    """Bytes of training state, of one unit or of a whole model."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def expected_local(unit: UnitInfo) -> StateBytes:
    """What this rank holds of the unit between two steps, the padding of its flat buffer included.

    The optimizer sees each parameter's own rows, without padding.
    """
    padded_nbytes = unit.padded_local_numel * unit.storage_itemsize
    return StateBytes(padded_nbytes, padded_nbytes, _ADAMW_STATES * unit.local_numel * unit.storage_itemsize)


def expected_unsharded(unit: UnitInfo) -> StateBytes:
    """What one process would hold of the unit without sharding."""
    nbytes = unit.numel * unit.storage_itemsize
    return StateBytes(nbytes, nbytes, _ADAMW_STATES * nbytes)


def add(parts: Iterable[StateBytes]) -> StateBytes:
    columns = list(zip(*parts, strict=True)) or [(0,), (0,), (0,)]
    return StateBytes(*(sum(column) for column in columns))


def measured_local(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """What this rank holds now: each distinct storage behind parameters, gradients and optimizer state, counted once.

    Counted whole: a view of one element keeps its whole storage alive.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return StateBytes(_storage_nbytes(parameters), _storage_nbytes(gradients), _storage_nbytes(states))


def _storage_nbytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


_HEADER = (
    "unit",
    "module",
    "tensors",
    "elements",
    "unsharded",
    "parameters",
    "gradients",
    "AdamW",
    "padding",
)


def unit_table(units: Sequence[UnitInfo], rank: int) -> str:
    """One line per unit, equal neighbours together, and a line of sums."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for _, same in groupby(units, key=_figures):
        group = list(same)
        name = group[0].name or "root"
        if len(group) > 1:
            name = f"{name} .. {group[-1].name}"
        rows.append((name, group[0].module_class + (f" x{len(group)}" if len(group) > 1 else ""), *_cells(group)))
    rows.append(("sum", "", *_cells(units)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  ".join(_aligned(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    rule = "-" * len(lines[0])
    own = (
        "unsharded: parameters, gradients and AdamW in one process; the three columns after it are the share of "
        f"rank {rank}; padding: of all ranks together"
    )
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], own])


def _figures(unit: UnitInfo) -> tuple[Any, ...]:
    return (unit.module_class, unit.num_params, unit.numel, unit.local_numel, unit.padded_local_numel)


def _cells(units: Sequence[UnitInfo]) -> tuple[str, ...]:
    local = add(expected_local(u) for u in units)
    padding = sum((u.world * u.padded_local_numel - u.numel) * u.storage_itemsize for u in units)
    return (
        str(sum(u.num_params for u in units)),
        f"{sum(u.numel for u in units):,}",
        in_units(add(expected_unsharded(u) for u in units).total),
        *(in_units(nbytes) for nbytes in local),
        in_units(padding),
    )


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def memory_lines(expected: StateBytes, unsharded: StateBytes, measured: StateBytes) -> list[str]:
    """Three short lines that set side by side what was expected, what was counted, and what it were unsharded."""
    lines = []
    for name in StateBytes._fields:
        here, there = getattr(measured, name), getattr(unsharded, name)
        lines.append(
            f"{name:<10} {in_units(here):>10} measured, {in_units(getattr(expected, name)):>10} expected, "
            f"{in_units(there):>10} unsharded"
        )
    return lines
