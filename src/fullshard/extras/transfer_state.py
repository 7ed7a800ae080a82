"""The state of an optimizer in a transfer: what it holds for each parameter, under the names of the parameters.

A tensor of a parameter's shape goes where the parameter goes: renamed, fused, split or packed with it, and placed like
it in the target. One without dims (a count of steps) is on every rank that has the parameter; of fused parameters the
first one's counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, settled
from ..engine.names import clean_name
from ..layout import Box, Held, Link, Names, Parts, Portion, rename
from ..param import dtype_named, local_data

# Between the name of a parameter and that of its state.
_MARK = "\0"


def key_of(name: str, entry: str) -> str:
    """The name of a state tensor in a plan."""
    return f"{name}{_MARK}{entry}"


def shown(text: str) -> str:
    """`text` with names of state tensors for people: state["exp_avg"] of weight."""
    return text.replace(_MARK, " of the optimizer's state, ")


def optimizers_of(side: Any) -> list[Optimizer]:
    """The optimizers of one side of a transfer: of `(model, optimizer)` or `(model, [optimizer, ...])`."""
    if not isinstance(side, tuple):
        return []
    found = side[1]
    return [found] if isinstance(found, Optimizer) else list(found)


def parameters_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters of `optimizers` by their names in `model`. Raises `ValueError` for one that is not in it."""
    names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), clean_name(name))
    found = {}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    "transfer: expected optimizers of the model's parameters, found another parameter; build the "
                    "optimizer after fully_shard, or call fullshard.rebind_optimizer(optimizer, model)"
                )
            found[names[id(parameter)]] = parameter
    return found


class Described(NamedTuple):
    """The state that one rank has. `tensors`: state by `key_of`; `values`: state that is no tensor; `groups`: names and
    settings of each group; `names`: of the parameters of its optimizers, in any role."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    groups: list[tuple[list[str], dict[str, Any]]]
    names: list[str]

    def text(self) -> str:
        """Everything but the tensors, of which the names."""
        return json.dumps([self.values, self.groups, self.names, sorted(self.tensors)])


def described(side: Any) -> Described:
    """The optimizers of one side on this rank."""
    optimizers = optimizers_of(side)
    if not optimizers:
        return Described({}, {}, [], [])
    parameters = parameters_of(side[0], optimizers)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    tensors, values, groups = dict[str, Tensor](), dict[str, Any](), list[tuple[list[str], dict[str, Any]]]()
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for entry, value in entries.items():
                key = key_of(name_of[id(parameter)], entry)
                if isinstance(value, Tensor):
                    tensors[key] = settled(value)
                else:
                    values[key] = value
        for group in optimizer.param_groups:
            settings = {
                name: value.item() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            groups.append(([name_of[id(parameter)] for parameter in group["params"]], settings))
    return Described(tensors, values, groups, list(parameters))


class State(NamedTuple):
    """The state that goes from the optimizers of the source into those of the target, the same on all ranks.

    `values`, `settings`: by the target's name of a parameter; the first what is no tensor, by entry."""

    links: list[Link]
    targets: dict[str, Held]
    values: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    problems: list[str]


def planned(
    names: Names,
    sources: Mapping[str, Held],
    targets: Mapping[str, Held],
    state: Mapping[str, Held],
    sides: tuple[list[Any], list[tuple[Any, list[int]]]],
) -> State:
    """`sources`, `targets`: the parameters; `state`: the source's tensors; `sides`: the texts of the source, and those
    of the target with the ranks that have them."""
    there, here = sides
    made = State([], {}, {}, {}, [])
    holders: dict[str, list[int]] = {}
    for (_, _, known, _), ranks in here:
        for name in known:
            holders.setdefault(name, []).extend(ranks)
    if not holders or not any(known for _, _, known, _ in there):
        if holders or any(known for _, _, known, _ in there):
            made.problems.append("an optimizer on one side alone; pass (model, optimizer) for both, or for none")
        return made
    entries: dict[str, dict[str, Held]] = {}
    for key, held in state.items():
        name, _, entry = key.partition(_MARK)
        entries.setdefault(entry, {})[name] = held
    shapes = {name: targets[name].shape for name in holders if name in targets}
    plain_values = {key: value for values, *_ in there for key, value in values.items()}
    group_of = {name: settings for _, groups, *_ in there for known, settings in groups for name in known}
    everything = rename(names, {name: sources[name].shape for name in group_of if name in sources}, shapes)
    first = {
        target: next(link.source for link in everything.links if link.target == target) for target in everything.shapes
    }
    lacking = sorted(holders.keys() - first.keys())
    made.problems.extend(f"{name}: in the target's optimizer, not in the source's" for name in lacking)
    made.problems.extend(
        f"{name}: in the source's optimizer, not in the target's" for name in sorted(first.keys() - holders.keys())
    )
    made.settings.update({target: group_of[source] for target, source in first.items()})
    for key, value in plain_values.items():
        name, _, entry = key.partition(_MARK)
        for target in (target for target, source in first.items() if source == name):
            made.values.setdefault(target, {})[entry] = value
    for entry, of_names in entries.items():
        _link_entry(made, entry, of_names, sources, targets, holders, first, everything.links)
    return made


def _link_entry(
    made: State,
    entry: str,
    held: Mapping[str, Held],
    sources: Mapping[str, Held],
    targets: Mapping[str, Held],
    holders: Mapping[str, list[int]],
    first: Mapping[str, str],
    links: list[Link],
) -> None:
    """One entry of the state of all parameters that have it."""
    for link in links:
        if link.source not in held or link.target not in holders:
            continue
        there, key = held[link.source], key_of(link.target, entry)
        if there.shape == sources[link.source].shape and there.shape:
            made.links.append(link._replace(source=key_of(link.source, entry), target=key))
            made.targets.setdefault(key, Held(targets[link.target].shape, there.dtype, targets[link.target].parts, key))
        elif not there.shape:
            if first[link.target] == link.source and key not in made.targets:
                made.links.append(Link(key_of(link.source, entry), key, (), (), ()))
                parts = Parts([Portion(Box((), ()), tuple(sorted(set(holders[link.target]))))])
                made.targets[key] = Held((), there.dtype, parts, key)
        else:
            shape = sources[link.source].shape
            made.problems.append(
                f"{link.source}: state {entry!r} of shape {there.shape}, not of the parameter's {shape}"
            )


class Filled:
    """The target's optimizers on this rank while their state arrives: new tensors where there are none that fit."""

    def __init__(self, side: Any, state: State) -> None:
        self._state, self._optimizers = state, optimizers_of(side)
        self._known = parameters_of(side[0], self._optimizers) if self._optimizers else {}
        # The tensors of this rank, to be written, by `key_of`.
        self.tensors: dict[str, Tensor] = {}
        for key, held in state.targets.items():
            name, _, entry = key.partition(_MARK)
            parameter = self._known.get(name)
            if parameter is not None:
                self.tensors[key] = self._tensor(parameter, held, self._owner(parameter).state[parameter].get(entry))

    def _owner(self, parameter: nn.Parameter) -> Optimizer:
        return next(
            optimizer
            for optimizer in self._optimizers
            if any(parameter is one for group in optimizer.param_groups for one in group["params"])
        )

    def _tensor(self, parameter: nn.Parameter, held: Held, known: Any) -> Tensor:
        dtype = dtype_named(held.dtype)
        if isinstance(known, Tensor) and known.shape == torch.Size(held.shape) and known.dtype is dtype:
            return known
        if not held.shape:
            return torch.zeros((), dtype=dtype)
        local = torch.zeros_like(local_data(parameter), dtype=dtype)
        return dtensor_like(parameter, local) if isinstance(parameter, DTensor) else local

    def commit(self) -> None:
        """Everything has arrived: the optimizers have it."""
        for key, tensor in self.tensors.items():
            name, _, entry = key.partition(_MARK)
            parameter = self._known[name]
            self._owner(parameter).state[parameter][entry] = tensor
        for name, entries in self._state.values.items():
            if name in self._known:
                self._owner(self._known[name]).state[self._known[name]].update(entries)
        name_of = {id(parameter): name for name, parameter in self._known.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                known = [
                    self._state.settings[name]
                    for p in group["params"]
                    if (name := name_of[id(p)]) in self._state.settings
                ]
                for setting, value in (known[0] if known else {}).items():
                    held = group.get(setting)
                    if isinstance(held, Tensor):
                        held.fill_(value)
                    else:
                        group[setting] = tuple(value) if isinstance(value, list) and isinstance(held, tuple) else value
