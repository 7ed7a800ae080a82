"""`rebind_optimizer`: an optimizer that was built before `fully_shard` continues with the sharded parameters.

The optimizer's own lists and dicts are changed in place, so learning-rate schedules, scalers and wrappers that hold it
keep working. Its state is cut as the parameters were: each rank keeps its rows, and no message is sent.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, local_of
from ..engine import Unit
from ..engine.names import dotted_name, first_few, parameter_names
from ..engine.state_dict import replaced_place, standing_parameter
from ..engine.unit import module_units
from ..param import ShardedParam
from ..policy.arguments import expect_module

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def rebind_optimizer(optimizer: O, model: nn.Module) -> O:
    """Give an optimizer that was built before `fully_shard` the sharded parameters; returns the same optimizer.

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fullshard.rebind_optimizer(optimizer, model)

    Groups, their order and options stay, and so does state: tensors of the parameter's shape (momenta) become DTensors
    with its placements, of which this rank keeps its rows on the device of its shards; a `step`, scalars and values
    stay. dtypes stay. Each rank must hold the same whole state, as after training on one process or under DDP. No
    messages. Parameters of other modules stay as they are; call it again for each sharded model of the optimizer. A
    second call does nothing.

    optimizer: holds the parameters that `model` had when it was sharded (or the sharded ones already).
    model: sharded by `fully_shard` or `replicate`, or with modules that are.
    Raises `TypeError` for an object that is no optimizer. Raises `ValueError`, and changes nothing, if `model` has no
    sharded parameters; if the optimizer has none of its parameters; if it has tensors that are on no module and the
    model has trainable ones of that shape that it has not (something else than `fully_shard` replaced them, such as
    `parallelize_module`); if it would have a parameter twice; and for state that cannot be cut: of another shape
    (factors of Adafactor), of a tensor subclass, or tensors in containers.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the one that was "
            f"built before fully_shard"
        )
    units = module_units(expect_module("model", model))
    if not units:
        raise ValueError(
            f"model: expected a module that fully_shard was applied to, found a {type(model).__name__} without sharded "
            f"modules; call fully_shard first"
        )
    successors = _successors(optimizer, model, units)
    state, moved = optimizer.state, {}
    for key, entries in state.items():
        # Some optimizers have entries under names.
        found = successors.get(id(key)) if isinstance(key, Tensor) else None
        if found is not None:
            how = next(g for g in optimizer.param_groups if any(p is key for p in g["params"]))
            entries = {name: found.state(optimizer, key, name, value, how) for name, value in entries.items()}
        moved[key if found is None else found.parameter] = entries
    for group in optimizer.param_groups:
        group["params"][:] = [successors[id(p)].parameter if id(p) in successors else p for p in group["params"]]
    state.clear()
    state.update(moved)
    return optimizer


class _Successor:
    """A parameter that replaced another. `param`: None for one that is not sharded."""

    def __init__(self, unit: Unit, name: str, param: ShardedParam | None, parameter: nn.Parameter) -> None:
        self.unit, self.name, self.param, self.parameter = unit, name, param, parameter

    def state(self, optimizer: Optimizer, old: Tensor, key: str, value: Any, group: dict[str, Any]) -> Any:
        """The entry `key` of the state of `old`, for `parameter`."""
        param = self.param
        if isinstance(value, Tensor):
            if value.ndim == 0 or key == "step":
                on_device = group.get("capturable") or group.get("fused")
                return value.to(self.parameter.device) if on_device else value
            whole = _whole(value, old)
            if param is None and whole is not None:
                return value.to(self.parameter.device)
            if param is not None and whole is not None and whole.shape == param.layout.shape:
                return self._cut(param, whole)
            if isinstance(value, DTensor) and isinstance(old, DTensor) and value.placements == old.placements:
                return value  # sharded already, as the parameter that was assigned anew
        elif not _holds_tensor(value):
            return value
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else " with tensors"
        raise ValueError(
            f"{type(optimizer).__name__}: expected state that is one value per element or a scalar, found {key!r} of "
            f"{dotted_name(self.unit, self.name)}, a {type(value).__name__}{shape}, where the parameter has "
            f"{tuple(old.shape)}; it cannot be cut: build a new optimizer after fully_shard, or drop the state "
            f"(optimizer.state.clear()) and call this again"
        )

    def _cut(self, param: ShardedParam, whole: Tensor) -> DTensor:
        group = next(group for group in self.unit.groups if param in group.params)
        rank, layout = group.placing.rank, param.layout
        rows = whole.detach().narrow(layout.dim, layout.start(rank), layout.rows(rank))
        # A copy: a view would keep the whole tensor alive.
        local = torch.empty(rows.shape, dtype=rows.dtype, device=self.parameter.device).copy_(rows)
        return dtensor_like(self.parameter, local)


def _whole(value: Tensor, old: Tensor) -> Tensor | None:
    """`value` as the data-parallel ranks cut it, if it has one element for each of `old`; else None."""
    if value.shape != old.shape:
        return None
    if isinstance(old, DTensor) and isinstance(value, DTensor) and value.placements == old.placements:
        return local_of(value)
    return value if type(value) in (Tensor, nn.Parameter) and not isinstance(old, DTensor) else None


def _successors(optimizer: Optimizer, model: nn.Module, units: list[Unit]) -> dict[int, _Successor]:
    """The replacement of each replaced parameter of the optimizer, by its id; checks that all are accounted for."""
    names = parameter_names(model, units)
    own = {id(standing_parameter(param)): name for param, name in names.items()}
    own |= {id(parameter): name for name, parameter in model.named_parameters() if id(parameter) not in own}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[int, _Successor] = {}
    strangers: list[Tensor] = []
    for parameter in given:
        place = None if id(parameter) in own else replaced_place(parameter)
        if place is not None and place[0] in units:
            unit, name = place
            param = next((param for param in unit.params if param.name == name), None)
            new = standing_parameter(param) if param is not None else unit.module.get_parameter(name)
            found[id(parameter)] = _Successor(unit, name, param, new)
        elif id(parameter) not in own and place is None:
            strangers.append(parameter)
    after = [found[id(p)].parameter if id(p) in found else p for p in given]
    held = {id(parameter) for parameter in after}
    if len(held) < len(after):
        twice = [own[id(p)] for p in _twice(after) if id(p) in own]
        raise ValueError(
            f"{type(optimizer).__name__}: expected each parameter once, found {first_few(twice)} both as it was before "
            f"fully_shard and sharded; take one of the two out of the optimizer"
        )
    left = [param for param in names if param.sharded.requires_grad and id(standing_parameter(param)) not in held]
    shapes = {tuple(parameter.shape) for parameter in strangers}
    lost = [names[param] for param in left if tuple(param.sharded.shape) in shapes]
    if lost or not held & own.keys():
        what = f"tensors instead of {first_few(lost)}" if lost else f"{len(given)} tensors and none of them"
        raise ValueError(
            f"{type(optimizer).__name__}: expected the parameters that this {type(model).__name__} had when "
            f"fully_shard replaced them, found {what} that are not known: the optimizer is of another model, or "
            f"something else replaced its parameters (parallelize_module, to_empty, deepcopy); build the optimizer "
            f"after fully_shard" + (", or call requires_grad_(False) on what it is not to train" if lost else "")
        )
    return found


def _twice(parameters: list[Tensor]) -> list[Tensor]:
    seen: set[int] = set()
    return [p for p in parameters if id(p) in seen or seen.add(id(p))]  # type: ignore[func-returns-value]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return isinstance(value, Tensor)
    return any(map(_holds_tensor, value))
