"""Access to full parameters outside of a forward: `full_params` and `unit_open`.

`full_params` shows plain, unsharded parameters for a while, to inspect, edit, save or evaluate the model. It is the
counterpart of FSDP1's `FSDP.summon_full_params`, which torch's FSDP2 lacks. Arguments and errors are FSDP1's, but
`writeback` defaults to False.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor

from ..agree.mesh_ledger import before_opening
from ..comm import settle_uploads
from ..engine import Unit, unit_of
from ..engine.full_params import NoSteps, Opening, OpenUnit, opened_of, refuse_in_step
from ..engine.hooks import hooks_of
from ..engine.unit import module_units
from ..policy.arguments import expect_flag, expect_module


@contextmanager
def full_params(
    model: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Show the sharded parameters of `model` inside the context as plain, full `nn.Parameter`s in the storage dtype.

        with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
            if rank == 0:
                torch.save(model.state_dict(), "model.pt")  # plain tensors, under the names of the plain model

    recurse: include the sharded modules below; False opens only `model`'s own unit.
    writeback: at exit, even if the block raises, each rank copies its own rows of the edited parameters into its
        shards, without communication; so every rank must make the same edits. False drops edits.
    rank0_only: only the first rank of a unit's mesh gets full parameters; the others keep the sharded ones. Not with
        `writeback`.
    offload_to_cpu: the full parameters are on the CPU, wherever the shards are.

    Collective, and only outside of a step: it all-gathers parameter by parameter. Memory until exit: the full
    parameters without padding (none on other ranks with `rank0_only`); while gathering, one more parameter on the
    shards' device. To hold one unit at a time: `for unit in units: with full_params(unit, recurse=False)`.

    The context owns the tensors: names, `requires_grad` and ties are those of the model, `.grad` is None, and a tensor
    that the caller still holds is not freed. `state_dict()` and `load_state_dict()` are those of the plain model.
    Forward is allowed under `torch.no_grad()`: it neither communicates nor casts. Forward with gradients, `unshard`,
    `reshard` and conversions raise; with `writeback`, optimizer steps on the shards raise too. Contexts nest if
    `rank0_only` and `offload_to_cpu` are equal: the inner one reuses the parameters that are already full.

    Does nothing to a model without sharded parameters. Raises `NotImplementedError` (writeback with rank0_only),
    `ValueError` (a part of a unit instead of the sharded module) and `RuntimeError` (inside a step, on the meta device,
    an inner context with other arguments, and at exit: a parameter of another shape, or shards written meanwhile).
    """
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    for name, flag in flags.items():
        expect_flag(name, flag)
    if writeback and rank0_only:
        raise NotImplementedError(
            "full_params: expected writeback or rank0_only, found both: the other ranks would have nothing to write "
            "back; edit on every rank, or load what rank 0 saved"
        )
    units = _units(model, recurse)
    opening = Opening(rank0_only, offload_to_cpu)
    refuse_in_step(units)
    for unit in units:
        known = opened_of(unit)
        if known is not None and known.opening != opening:
            raise RuntimeError(
                f"full_params: expected {known.opening} as in the enclosing context, found {opening}; "
                f"use the same arguments for nested contexts, or leave the outer one first"
            )
    keep = opening.keeps(units)
    before_opening(model, [unit for unit in units if unit.opened is None])
    with ExitStack() as stack:
        if writeback:
            stack.enter_context(NoSteps(units))
        for unit in units:
            known = opened_of(unit)
            if known is None:
                opened = OpenUnit(unit, opening, keep=keep)
                stack.callback(partial(opened.close, writeback=writeback))
            elif writeback:
                stack.callback(known.write_back)
        yield


def _units(model: object, recurse: bool) -> list[Unit]:
    """The units to open. Raises where a sharded parameter of `model` would stay sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, found {type(model).__name__}; pass the model itself")
    own = unit_of(model)
    if not recurse and own is not None:
        return [own]
    units = module_units(model) if recurse else []
    known = {id(slot.module) for unit in units for param in unit.params for slot in param.slots}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and id(module) not in known:
                dotted = f"{name}.{parameter_name}" if name else parameter_name
                raise ValueError(
                    f"model: expected a module that fully_shard was applied to, found {type(model).__name__}, whose "
                    f"parameter {dotted} belongs to a unit around it; pass the module that was sharded"
                    + ("" if recurse else ", or recurse=True")
                )
    return units


def write_shards(model: nn.Module, what: str) -> list[Unit]:
    """Make the shards of `model` ready to be written from outside: no unit computes with full parameters made of them,
    and no upload reads them. Returns the units.

    Raises `RuntimeError` if a unit is open, because leaving it would write its full parameters back; `what`: who asks.
    """
    units = module_units(model)
    for unit in units:
        if unit.opened is not None:
            raise RuntimeError(
                f"{what}: expected sharded parameters, found {unit.record.name} open; leave full_params first"
            )
        if unit.root is not None:
            unit.root.reshard(unit)
    settle_uploads()
    return units


@contextmanager
def unit_open(module: nn.Module) -> Iterator[None]:
    """Show the parameters of the sharded `module` inside the context as in its forward, full; they may be read
    directly.

        hidden = model(tokens)
        with fullshard.unit_open(model.head):
            loss = fused_cross_entropy(hidden, model.head.weight, labels)
        loss.backward()

    For functions that take a weight instead of calling a module: fused or chunked cross-entropy. One use of the unit,
    like one forward: its gradients are reduced with those of the unit's other uses, and weights that backward reads are
    gathered again. `full_params` and `unshard()` show weights without that.

    module: one to which `fully_shard` was applied; only parameters of its own unit are opened, in `param_dtype`. What
        the block computes with them is not cast: cast inputs yourself.
    Collective where the unit is not full: all ranks open it, after the model's first forward began, in the same order.
    The unit owns the full parameters: they are freed at exit as after a forward, so do not keep them. Allowed inside of
    a forward, under `torch.no_grad()` (no gradients) and in recomputation. An exception in the block ends the step as
    one in a forward does.

    Raises `ValueError` for a module that is no unit, and names units in it; `RuntimeError` where saved-tensor hooks are
    disabled.
    """
    expect_module("module", module)
    unit = unit_of(module)
    if unit is None:
        inside = [type(below.module).__name__ for below in module_units(module)]
        found = f"which has {len(inside)} in it ({', '.join(inside[:4])})" if inside else "with none in it"
        raise ValueError(
            f"module: expected one to which fully_shard was applied, found {type(module).__name__}, {found}; open the "
            f"module whose unit has the parameter: the nearest one above it that was sharded"
        )
    with hooks_of(unit).opened(module):
        yield
