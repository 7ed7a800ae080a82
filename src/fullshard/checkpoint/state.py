"""The state of a model and its optimizers under the names of the plain model, as nested dicts of tensors.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=...)

Tensors share memory with model and optimizer, so that a load writes into them. An optimizer's state is
`{"state": {name of the parameter: {...}}, "param_groups": [{"params": [names], "lr": ...}]}`, the same for every world.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .errors import CheckpointMismatch
from .tree import OpenState

# What wrappers put into names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

Optimizers = Optimizer | Iterable[Optimizer]


def get_state_dict(model: nn.Module, optimizers: Optimizers = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of `model` and of `optimizers` (one or several). Sends nothing, changes nothing, needs no step before.

    Names are those of the plain model: without those of DistributedDataParallel, torch.compile and activation
    checkpointing. `load` fills the state of an optimizer as the checkpoint has it, also that of one which has not
    stepped yet; `set_state_dict` then brings it into the optimizer.
    """
    names = parameter_names(model)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in all_of(optimizers):
        taken = optimizer.state_dict()
        numbered = names_in_order(optimizer, names)
        for number, entries in taken["state"].items():
            state[numbered[number]] = dict(entries)
        for group in taken["param_groups"]:
            groups.append({**group, "params": [numbered[number] for number in group["params"]]})
    owned = [p for optimizer in all_of(optimizers) for group in optimizer.param_groups for p in group["params"]]
    like: dict[str, Tensor] = {names[parameter]: parameter for parameter in owned}
    return _model_state(model), {"state": OpenState(state, like), "param_groups": groups}


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    model_state_dict: dict[str, Any] | None = None,
    optim_state_dict: dict[str, Any] | None = None,
) -> None:
    """Bring state, as `get_state_dict` gave it and `load` filled it, into `model` and `optimizers`.

    Every parameter and buffer of the model has to be there, every parameter of an optimizer in one of the stored
    groups; else `CheckpointMismatch` lists what is not, and nothing is changed. State that an optimizer has and
    `optim_state_dict` has not, goes. Dtypes stay as they were stored.
    """
    loads = [] if optim_state_dict is None else _optimizer_loads(model, optimizers, optim_state_dict)
    if model_state_dict is not None:
        raw = {_clean(name): name for name in model.state_dict()}
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        raw = {name.removeprefix(prefix): spelt for name, spelt in raw.items()}
        problems = [f"missing: {name}" for name in sorted(raw.keys() - model_state_dict.keys())]
        problems += [f"unexpected: {name}" for name in sorted(model_state_dict.keys() - raw.keys())]
        if problems:
            raise CheckpointMismatch("set_state_dict: expected the state of this model, found", problems)
        model.load_state_dict({raw[name]: value for name, value in model_state_dict.items()})
    for optimizer, state in loads:
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of each parameter in the plain model; the first one of tied weights."""
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    return {parameter: _clean(name).removeprefix(prefix) for name, parameter in model.named_parameters()}


def _model_state(model: nn.Module) -> dict[str, Any]:
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    return {_clean(name).removeprefix(prefix): value for name, value in model.state_dict().items()}


def _clean(name: str) -> str:
    return _WRAPPERS.sub("", name)


def all_of(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def names_in_order(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> list[str]:
    """Names in the order in which the optimizer numbers its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(parameter not in names for parameter in parameters)
    if strangers:
        raise ValueError(
            f"expected an optimizer of the parameters of this model, found {strangers} of {len(parameters)} that it "
            f"does not have; build the optimizer after fully_shard"
        )
    return [names[parameter] for parameter in parameters]


def _optimizer_loads(
    model: nn.Module, optimizers: Optimizers, stored: dict[str, Any]
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """What each optimizer's own `load_state_dict` takes; parameters by number again."""
    names = parameter_names(model)
    group_of = {name: group for group in stored["param_groups"] for name in group["params"]}
    loads, problems = [], []
    for optimizer in all_of(optimizers):
        numbered = names_in_order(optimizer, names)
        number_of = {name: number for number, name in enumerate(numbered)}
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            own = [names[parameter] for parameter in group["params"]]
            problems += [f"missing: {name}, in no stored group of parameters" for name in own if name not in group_of]
            found = [group_of[name] for name in own if name in group_of]
            settings = [{key: value for key, value in one.items() if key != "params"} for one in found]
            if any(one != settings[0] for one in settings[1:]):
                problems.append(f"group {index}: its parameters were stored in groups of different settings")
            # An empty group has nothing to be recognised by, and keeps its settings.
            chosen = settings[0] if settings else {key: value for key, value in group.items() if key != "params"}
            groups.append({**chosen, "params": [number_of[name] for name in own]})
        state = {number_of[name]: entries for name, entries in stored["state"].items() if name in number_of}
        loads.append((optimizer, {"state": state, "param_groups": groups}))
    known = {names[p] for optimizer in all_of(optimizers) for group in optimizer.param_groups for p in group["params"]}
    problems += [f"unexpected: state of {name}" for name in sorted(stored["state"].keys() - known)]
    if problems:
        raise CheckpointMismatch("set_state_dict: expected the state of these optimizers, found", problems)
    return loads


def _keep_dtypes(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Undo that torch's `load_state_dict` casts state to the dtype of its parameter, where that is another one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entries in state["state"].items():
        held = optimizer.state[parameters[number]]
        for name, value in entries.items():
            now = held.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype is not value.dtype:
                with torch.no_grad():
                    held[name] = value.detach().to(now.device)
