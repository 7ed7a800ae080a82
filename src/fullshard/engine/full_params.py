"""Opens units for `full_params`: their full parameters are on the modules, for a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import current_backward, dtensor_like, local_of, version_of
from ..comm import whole_of
from ..param import ShardedParam, full_of, local_part
from ..schedule import Phase
from .asleep import refuse_asleep
from .optimizer_steps import note_lent, refuses_steps
from .unit import Unit, module_units

# ---- full params -----------------------------------------------------------------------------------------------------
# Units opened by `full_params`: their modules hold plain full parameters, outside of any step.
#
# For the rules an open unit stays sharded, and it reports no events. The full parameters have the *storage* dtype
# (users inspect, edit and save them) and own their memory, separate from the engine's buffers.


class Opening(NamedTuple):
    """The options of `full_params`."""

    rank0_only: bool
    offload_to_cpu: bool

    def keeps(self, units: Iterable[Unit]) -> bool:
        """Whether this rank gets full parameters: with `rank0_only`, only the first rank of each mesh of `units`."""
        meshes = {param.spec.mesh for unit in units for param in unit.params}
        return not self.rank0_only or not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


class OpenUnit:
    """The full parameters of one unit, on its modules until `close`. The constructor all-gathers: collective."""

    def __init__(self, unit: Unit, opening: Opening, *, keep: bool) -> None:
        """keep: this rank gets full parameters."""
        self.unit = unit
        self.opening = opening
        self._keep = keep
        # The full parameters of each group; empty if this rank keeps none.
        self._full: list[list[nn.Parameter]] = []
        if unit.root is not None:
            unit.root.reshard(unit)
        unit.repair()
        _refuse_meta(unit)
        # Inference tensors could not be edited or kept for training.
        with torch.inference_mode(False), torch.no_grad():
            for group in unit.groups:
                gathered = [self._gather(param) for param in group.params]
                self._full.append([parameter for parameter in gathered if parameter is not None])
        if keep:
            for group, parameters in zip(unit.groups, self._full, strict=True):
                group.lend(parameters)
        self._versions = self._shard_versions()
        unit.opened = self

    def _gather(self, param: ShardedParam) -> nn.Parameter | None:
        shard = _dtensor(param)
        # One parameter at a time, to bound the extra device memory.
        # Shards on the host (CPUOffloadPolicy) are copied to the device first.
        local = local_of(shard)
        full = whole_of(dtensor_like(shard, local.to(self.unit.device)), f"full_params of {self.unit.record.name}")
        if not self._keep:
            return None
        full = full.cpu() if self.opening.offload_to_cpu else full
        return full_of(param, _own_memory(full, local), dict(shard.__dict__))

    def check_forward(self) -> None:
        """Raise unless the unit's forward may run now: without gradients, as the plain model in the storage dtype."""
        name = self.unit.record.name
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: expected no forward with gradients inside full_params, found one: these full parameters are "
                f"not trained; run it under torch.no_grad(), or leave the context first"
            )
        parallel = [param.name for param in self.unit.params if isinstance(param.full, DTensor)]
        if parallel:
            raise RuntimeError(
                f"{name}: expected a forward with plain parameters, found {parallel[0]}, whose module computes with "
                f"DTensors (tensor or expert parallelism), not with full parameters; leave full_params first"
            )
        if not self.opening.rank0_only:
            return
        together = self.unit.root.units if self.unit.root is not None else module_units(self.unit.module)
        sharded = [other.record.name for other in together if other.opened is None]
        if sharded or not self._keep:
            raise RuntimeError(
                f"{name}: expected a forward only where all parameters are full, found full_params(rank0_only=True) "
                f"{f'without {sharded[0]}' if sharded else 'on another rank than the first'}; use "
                f"rank0_only=False, or open the whole model and run the forward on the first rank only"
            )

    def write_back(self) -> None:
        """Copy this rank's rows of the full parameters into the shards. No communication."""
        name = self.unit.record.name
        if self._shard_versions() != self._versions:
            raise RuntimeError(
                f"{name}: expected sharded parameters that nobody writes inside full_params(writeback=True), found "
                f"them changed, so nothing was written back; edit the full parameters, or leave the context first"
            )
        ours = [parameter for made in self._full for parameter in made]
        # Check all before writing any.
        standing = [_standing(param, full) for param, full in zip(self.unit.params, ours, strict=True)]
        with torch.inference_mode(False), torch.no_grad():
            for param, value in zip(self.unit.params, standing, strict=True):
                param.local.copy_(local_part(value.detach(), _dtensor(param)))
        self._versions = self._shard_versions()

    def close(self, *, writeback: bool) -> None:
        """Put the shards back on the modules; `writeback`: with the edits of the full parameters."""
        try:
            if writeback:
                self.write_back()
        finally:
            self.unit.opened = None
            for group in self.unit.groups:
                if self._keep:
                    group.take_back()
            if self._keep:
                # An optimizer may still hold some of them.
                note_lent(self.unit, self.unit.params, [parameter for made in self._full for parameter in made])

    def _shard_versions(self) -> list[tuple[int, ...]]:
        return [(version_of(param.sharded), version_of(param.local)) for param in self.unit.params]


# The full parameters that `full_params` put on the modules of a unit, if it did.
opened_of = cast("Callable[[Unit], OpenUnit | None]", attrgetter("opened"))


def refuse_in_step(units: Iterable[Unit]) -> None:
    """Raise `RuntimeError` inside a forward or backward."""
    if current_backward() != -1:
        raise RuntimeError(
            "full_params: expected to be outside of a step, found a backward running; call it afterwards"
        )
    for unit in units:
        for other in unit.root.units if unit.root is not None else (unit,):
            if other.record.phase is Phase.FORWARD:
                raise RuntimeError(
                    f"full_params: expected to be outside of a step, found the forward of {other.record.name} running; "
                    f"call it afterwards (model.unshard() gathers inside a step; after an interrupted one, "
                    f"model.reset_iter_state() forgets it)"
                )


def refuse_opened(unit: Unit, what: str) -> None:
    """Raise `RuntimeError` when `what` is called while `unit` is open, or asleep."""
    refuse_asleep(unit, what)
    if unit.opened is not None:
        raise RuntimeError(
            f"{what}: expected sharded parameters on {unit.record.name}, found that full_params put full ones there; "
            f"leave that context first"
        )


class NoSteps:
    """Context in which optimizers may not step the shards of `units`: the write-back would undo the step."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._shards = {id(param.sharded) for unit in units for param in unit.params}

    def __enter__(self) -> None:
        _no_steps.append(self)

    def __exit__(self, *_: object) -> None:
        _no_steps.remove(self)

    def holds(self, parameter: Tensor) -> bool:
        return id(parameter) in self._shards


_no_steps: list[NoSteps] = []


@refuses_steps(_no_steps)
def _refuse_undone(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for entered in tuple(_no_steps):  # another thread may leave its own
        if any(entered.holds(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): expected no step of sharded parameters inside "
                f"full_params(writeback=True), which would undo it at its end; step outside of the context"
            )


def _dtensor(param: ShardedParam) -> DTensor:
    assert isinstance(param.sharded, DTensor)
    return param.sharded


def _standing(param: ShardedParam, ours: nn.Parameter) -> Tensor:
    """The tensor to write back: `ours`, or the one that the user assigned instead."""
    others = {id(found): found for slot in param.slots if (found := slot.get()) is not ours}
    found = next(iter(others.values()), ours)
    if len(others) > 1 or found is None or isinstance(found, DTensor) or found.shape != param.sharded.shape:
        shapes = [None if other is None else tuple(other.shape) for other in others.values()]
        raise RuntimeError(
            f"{param.name}: expected one plain parameter of shape {tuple(param.sharded.shape)} to write back, found "
            f"{shapes or tuple(ours.shape)}; change values, not shapes, and keep tied parameters tied"
        )
    return found


def _own_memory(full: Tensor, local: Tensor) -> Tensor:
    """`full` in a storage of its own: saving it saves no other bytes, and writing it writes no shard."""
    storage = full.untyped_storage()
    alone = storage.nbytes() == full.numel() * full.element_size() and full.is_contiguous()
    if alone and storage.data_ptr() != local.untyped_storage().data_ptr():
        return full
    return full.clone(memory_format=torch.contiguous_format)


def _refuse_meta(unit: Unit) -> None:
    on_meta = [param.name for param in unit.params if param.local.is_meta]
    if on_meta:
        raise RuntimeError(
            f"{unit.record.name}: expected parameters with data, found {', '.join(on_meta[:8])} on the meta device; "
            f"call to_empty(device=...) and initialise or load them before full_params"
        )
