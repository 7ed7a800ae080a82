"""Optimizers and wrappers of others that cannot take sharded parameters: an error before theirs.

It names the parameter and what works. Theirs names none, and comes in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch.dtensor import REFUSES_CHANGED_PLACEMENTS
from .._torch.modules import left_out_of_ddp
from ..param import Owner
from .names import clean_name, first_few, names_elsewhere
from .optimizer_steps import refuses_steps
from .root import module_units

# On an optimizer that steps on shards (api/optimizer.py).
ON_SHARDS = "_fullshard_mirrors"
# On one that steps whole matrices on their owners (extras/owners.py), which steps the rest on shards.
ON_OWNERS = "_fullshard_owners"


@refuses_steps((None,), lasts=True)
def _refuse_foreign(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if ON_SHARDS in optimizer.__dict__:
        return False
    room = type(optimizer).__module__.partition(".")[0]
    found = False
    for group in optimizer.param_groups:
        ours = {id(p): owner for p in group["params"] if (owner := Owner.of(p)) is not None}
        if ours and room == "bitsandbytes":
            _refuse_bitsandbytes(optimizer, [owner.name for owner in ours.values()])
        if ours and room == "torch" and isinstance(optimizer, _MUON) and REFUSES_CHANGED_PLACEMENTS:
            _refuse_few_rows(optimizer, group["params"])
        how = next((name for name in ("foreach", "fused") if group.get(name) is True), None)
        if how is None or not ours or len(ours) == len(group["params"]) or room != "torch":
            continue
        found = True
        trained = [p for p in group["params"] if p.grad is not None]
        for plain in (p for p in trained if id(p) not in ours):
            beside = next((p for p in trained if id(p) in ours and _alike(p, plain)), None)
            if beside is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: expected parameters of one kind for {how}=True, found "
                    f"{ours[id(beside)].name}, which is sharded, beside {names_elsewhere([plain])[id(plain)]}, which "
                    f"is not; call fullshard.step_on_shards(optimizer), or build it with {how}=False"
                )
    return not found


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether one of the lists that torch made has both."""
    return a.dtype is b.dtype and a.device == b.device


def _refuse_bitsandbytes(optimizer: Optimizer, names: list[str]) -> None:
    name = type(optimizer).__name__
    cure = "call fullshard.step_on_shards(optimizer, elementwise=True): each rank steps its own rows"
    if "LAMB" in name or "LARS" in name:
        cure = "take one whose update of an element depends on no other element, such as its AdamW"
    raise RuntimeError(
        f"{name}.step: expected plain parameters, as its kernels do, found {first_few(names)}, which fully_shard "
        f"sharded; {cure}"
    )


_MUON: tuple[type[Optimizer], ...] = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))


def _refuse_few_rows(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Where ranks have no rows of a matrix, the update comes out whole, and torch does not add it to shards."""
    for p in params:
        owner = Owner.of(p) if p.grad is not None else None
        if owner is None or not isinstance(p, DTensor):
            continue
        for axis, placement in enumerate(p.placements):
            ranks = p.device_mesh.size(axis)
            if not isinstance(placement, Shard) or p.shape[placement.dim] >= ranks:
                continue
            cure = "call fullshard.step_on_owners(optimizer), or give it to AdamW"
            if p.shape[1 - placement.dim] >= ranks:
                cure += f", or shard dim {1 - placement.dim} of such a matrix (shard_placement_fn of fully_shard)"
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected matrices with a row for each rank, found {owner.name} of "
                f"shape {tuple(p.shape)}, sharded over {ranks} ranks along dim {placement.dim}: torch makes its update "
                f"whole, and cannot add it to a shard; {cure}"
            )


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def _refuse_around(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    left = left_out_of_ddp(child)
    names = [one for one in _sharded_names(child) if one not in left]
    if names:
        raise NotImplementedError(  # torch's type, for a module that is a unit itself
            f"DistributedDataParallel: expected a module whose gradients nobody else averages, found "
            f"{type(child).__name__}, of which fully_shard sharded {first_few(names)} and averages the gradients; "
            f"call fully_shard on the whole model instead, with a mesh of two axes for copies of shards, or "
            f"fullshard.replicate for what is to be whole on every rank"
        )


def _sharded_names(model: nn.Module) -> Iterator[str]:
    ours = {id(param.sharded) for unit in module_units(model) for param in unit.params}
    return (clean_name(name) for name, parameter in model.named_parameters() if id(parameter) in ours)


register_module_module_registration_hook(_refuse_around)
