"""Rows of padding in torch's embeddings that `reset_parameters` did not zero.

`nn.Embedding` draws its weight and then writes `weight[padding_idx] = 0`. On a sharded weight, a DTensor, that indexing
makes a copy, so the zeros are lost, and the row stays random. What a load brought may have any row.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import sum_over
from ..param import Owner, ShardedParam, local_part
from .names import parameter_names
from .unit import Unit

# Of parameters that lost their value to `to_empty`, or never had one, and that no load gave one since.
_EMPTIED: weakref.WeakSet[Owner] = weakref.WeakSet()


def note_row_loaded(owner: Owner | None) -> None:
    """A load gave the parameter of `owner` its value."""
    if owner is not None:
        _EMPTIED.discard(owner)


def note_rows_emptied(params: Iterable[ShardedParam]) -> None:
    """`params` have memory without values."""
    for param in params:
        if param.owner is not None:
            _EMPTIED.add(param.owner)


class _Row(NamedTuple):
    name: str
    place: int
    param: ShardedParam
    mesh: DeviceMesh


def refuse_padding_rows(units: Sequence[Unit], top: nn.Module) -> None:
    """Raise `RuntimeError` on all ranks if a row of padding in a unit that was emptied is not zero, and no load wrote
    it. Collective, if there is such a table."""
    rows = list(_rows(units, top))
    wrong: list[_Row] = []
    for mesh in dict.fromkeys(row.mesh for row in rows):
        here = [row for row in rows if row.mesh == mesh]
        counts = sum_over(mesh, torch.tensor([[_is_wrong(row), _has_values(row)] for row in here]).int())
        # A load on any rank is a load: ranks may take part of a checkpoint each.
        wrong += [row for row, (bad, kept) in zip(here, counts.tolist(), strict=True) if bad and not kept]
    if wrong:
        found = "; ".join(f"{row.name}: row {row.place} (padding_idx)" for row in wrong[:8])
        raise RuntimeError(
            f"expected rows of padding to be zero after to_empty and reset_parameters, found other values in {found}: "
            f"the embedding zeroes its row by indexing, which on a sharded weight writes a copy. Call "
            f"fullshard.materialize(model) instead, load a checkpoint, or call fullshard.mark_initialized(model) if "
            f"the row is meant"
        )


def _rows(units: Sequence[Unit], top: nn.Module) -> Iterator[_Row]:
    of_tensor: dict[int, ShardedParam] = {}
    for param in (param for unit in units if unit.unproven for param in unit.params):
        of_tensor |= {id(param.full): param, id(param.sharded): param}
    names = parameter_names(top, units)
    for module in top.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            found = of_tensor.get(id(module.weight))
            if found is not None and found.sharded.is_floating_point():
                yield _Row(names[found], module.padding_idx, found, found.spec.mesh)


def _has_values(row: _Row) -> bool:
    """Whether its parameter kept its values, or a load gave it some: any row may be meant."""
    return row.param.owner is not None and row.param.owner not in _EMPTIED


def _is_wrong(row: _Row) -> bool:
    """Whether an element of the row that this rank has is not zero."""
    rows, columns = row.param.sharded.shape
    local = row.param.local
    mask = torch.zeros(rows, 1, dtype=torch.bool, device=local.device)
    mask[row.place] = True
    with torch.no_grad():
        mine = local_part(mask.expand(rows, columns), cast(DTensor, row.param.sharded))
        return bool(local[mine].count_nonzero().item())
