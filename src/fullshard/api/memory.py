"""The methods of `FSDPModule` that say how many bytes something may take. Each is a method of the class (`module.py`).

None of them is in torch. They change when messages go and what stays in memory, never a result.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from ..layout import Candidate, choose_resident
from ..runtime import Unit, unit_of
from ..runtime.names import clean_name


def set_prefetch_bytes(self: object, nbytes: int | None) -> None:
    """Gather ahead what fits into `nbytes`, in forward along the recorded order and in backward along its reverse.

    nbytes: of the full parameters that arrive, in the compute dtype and padded, and of their messages, of all gathers
        that are ahead of what computes. A unit that does not fit is gathered when it is needed, and nothing behind it
        goes before. 0: nothing is ahead. None: what the environment says (`FULLSHARD_PREFETCH_BYTES`, and without it
        `FULLSHARD_PREFETCH` units in forward and one in backward).

    For the root, on which all units below depend; from the next forward or backward on. Lists of
    `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` are obeyed as they are, whatever their
    bytes. Call it alike on every rank. Raises `ValueError` for what is no number of bytes, `RuntimeError` below a root.
    """
    if nbytes is not None:
        _check("nbytes", nbytes, "0 gathers each unit when it is needed, None is the default")
    unit = _root_unit(self, "set_prefetch_bytes")
    unit.prefetch_nbytes = nbytes
    if unit.root is not None:
        unit.root.limit_bytes()


def set_gradient_bytes(self: object, nbytes: int | None) -> None:
    """Let gradients that were not reduced yet, and their messages, take `nbytes` at most, as far as waiting can do it.

    nbytes: of the full gradients that a backward brought, and of both ends of the messages that are under way. When a
        gradient comes, and when messages are made, the oldest messages are waited for until there is room: one large
        gradient after the other where these travel by themselves (NCCL), else one unit after the other. The gradients
        of the unit that computes, and then their messages, are always there, so less than these take is not kept; 0
        waits for every message at once. What `set_requires_gradient_sync(False)` holds is not part of it.
        None: what the environment says (`FULLSHARD_GRADIENT_BYTES`); without it no limit where ranks send one message a
        unit, and otherwise 3/4 of what the largest unit needs by itself. `FULLSHARD_REDUCTIONS` holds beside it.

    For the root, on which all units below depend; from the next backward on. Less costs time: messages have fewer
    kernels behind which they can hide. On a mesh that replicates, what goes on to the replicas is not hurried.
    Raises `ValueError` for what is no number of bytes, `RuntimeError` below a root.
    """
    if nbytes is not None:
        _check("nbytes", nbytes, "0 waits for every message at once, None is the default")
    unit = _root_unit(self, "set_gradient_bytes")
    unit.gradient_nbytes = nbytes
    if unit.root is not None:
        unit.root.limit_bytes()


def set_resident_bytes(self: object, nbytes: int) -> tuple[str, ...]:
    """Keep units of this module full, as many as fit into `nbytes`, in the place of gathering them again.

    A unit that is kept stays full between its forward and its backward. One without trainable parameters stays also
    behind the backward, and through evaluations: it is gathered again only when it was written. Between steps the
    sharded parameters stand on the modules all the same.

    nbytes: of full parameters, in the compute dtype and padded, beside those of units that are never freed after
        forward (the root by default, `reshard_after_forward=False`). 0: none; what was kept is freed.
    Returns the names of the units that are kept, relative to this module. Frozen ones are taken first, then the last
    ones; `fullshard.report` shows them. It is decided now: call it again when other parameters are frozen. Call it
    alike on every rank, between steps.

    What counts as written: changes in place of a parameter or its local tensor, optimizer steps, loading. Not seen, as
    by torch: writes through `.data`, and torch's list operations called on parameters; call `reshard()` behind these.
    Units whose tensors define how they are gathered are never kept. Raises `ValueError` for what is no number of bytes.
    """
    _check("nbytes", nbytes, "0 keeps no unit")
    module = cast(nn.Module, self)
    outer = _unit(self)
    names: dict[Unit, str] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            name = clean_name(name)
            names[unit] = f"{names[unit]}+{name}" if unit in names else name
    units = [unit for unit in names if _is_freed(unit, outer)]
    candidates = [Candidate(names[unit], unit.full_nbytes or 0, _is_frozen(unit)) for unit in units]
    chosen = set(choose_resident(candidates, nbytes))
    for i, unit in enumerate(units):
        was, unit.record.resident = unit.record.resident, i in chosen
        if was and i not in chosen and unit.root is not None:
            unit.root.reshard(unit)
    return tuple(candidates[i].name for i in sorted(chosen))


def _is_freed(unit: Unit, outer: Unit) -> bool:
    """Whether the unit is freed after forward unless it is kept; of `outer` it may not be known yet."""
    if unit is outer and unit.reshard_after_forward is None and (unit.root is None or unit.root.units[0] is unit):
        return False
    return unit.record.reshard_after_forward


def _is_frozen(unit: Unit) -> bool:
    return not any(param.sharded.requires_grad for param in unit.params)


def _root_unit(module: object, method: str) -> Unit:
    """The unit of `module`, of which it is not known that it is below a root."""
    unit = _unit(module)
    root = unit.root
    if root is not None and not root.provisional and root.units[0] is not unit:
        raise RuntimeError(
            f"{method}: expected the root module, found {unit.record.name} below it; call it on the root"
        )
    return unit


def _unit(module: object) -> Unit:
    unit = unit_of(cast(nn.Module, module))
    if unit is None:
        raise RuntimeError(
            f"expected a module that fully_shard was applied to, found an unsharded {type(module).__name__}; "
            f"apply fully_shard to it"
        )
    return unit


def _check(field: str, value: object, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{field}: expected a whole number of bytes >= 0, found {value!r}; {remedy}")
