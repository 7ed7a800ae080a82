"""The state of an optimizer in a transfer: what it holds for each parameter, under the names of the parameters.

A tensor of a parameter's shape goes where the parameter goes: renamed, fused, split or packed with it, and placed like
it in the target. One of another shape (the factors of Adafactor and Shampoo), and one in a list or dict (SOAP), goes
whole to the rank that owns the matrix (`step_on_owners`), or else to every rank that has the parameter, which must not
be fused or split. So does one without dims (a count of steps); of fused parameters the first one's counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from .._torch import dtensor_like, settled
from ..engine.foreign import ON_OWNERS
from ..engine.names import clean_name
from ..layout import Held, Link, Names, Parts, Portion, rename, whole
from ..param import dtype_named, local_data

# Between the name of a parameter and that of its state; before the place in a list or dict.
_MARK, _INSIDE = "\0", "\1"
# In a value of the state that is no tensor: the place of a tensor; a tuple.
_TENSOR, _TUPLE = "\0tensor", "\0tuple"


def key_of(name: str, entry: str) -> str:
    """The name of a state tensor in a plan."""
    return f"{name}{_MARK}{entry}"


def shown(text: str) -> str:
    """`text` with names of state tensors for people: state["exp_avg"] of weight."""
    return text.replace(_MARK, " of the optimizer's state, ").replace(_INSIDE, "")


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


class Kind(NamedTuple):
    """Whether a tensor is a DTensor, and where it is: "host" (the parameter is not), "device", or "" (both on the
    host)."""

    is_dtensor: bool
    place: str


def _kind(tensor: Tensor, parameter: Tensor) -> Kind:
    place = "" if parameter.device.type == "cpu" else "host" if tensor.device.type == "cpu" else "device"
    return Kind(isinstance(tensor, DTensor), place)


class Described(NamedTuple):
    """The state that one rank has. `tensors`: state by `key_of`, and `kinds` of it; `values`: state that is no tensor;
    `groups`: names and settings of each group; `names`: of the parameters of its optimizers, in any role; `owned`: of
    parameters that have owners, the matrices that this rank owns."""

    tensors: dict[str, Tensor]
    kinds: dict[str, Kind]
    values: dict[str, Any]
    groups: list[tuple[list[str], dict[str, Any]]]
    names: list[str]
    owned: dict[str, list[int | None]]

    def text(self) -> str:
        """Everything but the tensors."""
        return json.dumps([self.values, self.groups, self.names, self.kinds, self.owned], sort_keys=True)


def described(side: Any) -> Described:
    """The optimizers of one side on this rank."""
    optimizers = optimizers_of(side)
    if not optimizers:
        return Described({}, {}, {}, [], [], {})
    parameters = parameters_of(side[0], optimizers)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    tensors, kinds, values = dict[str, Tensor](), dict[str, Kind](), dict[str, Any]()
    groups = list[tuple[list[str], dict[str, Any]]]()
    owned = dict[str, list[int | None]]()
    for optimizer in optimizers:
        owners = vars(optimizer).get(ON_OWNERS)
        for parameter_id, numbers in owners.owned().items() if owners is not None else ():
            owned[name_of[parameter_id]] = numbers
        for parameter, entries in optimizer.state.items():
            if id(parameter) not in name_of:
                raise TypeError(f"expected state of parameters in its groups, found {parameter!r:.60}")
            for entry, value in entries.items():
                key = key_of(name_of[id(parameter)], entry)
                if isinstance(value, Tensor):
                    tensors[key], kinds[key] = settled(value), _kind(value, parameter)
                else:
                    inside = dict[str, Tensor]()
                    values[key] = _without_tensors(value, key, inside)
                    tensors |= inside
                    kinds |= {place: _kind(tensor, parameter) for place, tensor in inside.items()}
        for group in optimizer.param_groups:
            settings = {
                name: value.item() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            groups.append(([name_of[id(parameter)] for parameter in group["params"]], settings))
    return Described(tensors, kinds, values, groups, list(parameters), owned)


def _without_tensors(value: Any, key: str, found: dict[str, Tensor]) -> Any:
    """`value` as JSON has it, with places of tensors, which are put into `found`."""
    if isinstance(value, Tensor):
        key = key if _INSIDE in key else f"{key}{_INSIDE}"
        found[key] = settled(value)
        return {_TENSOR: key.partition(_MARK)[2]}
    start = key if _INSIDE in key else f"{key}{_INSIDE}"
    if isinstance(value, (list, tuple)):
        made = [_without_tensors(entry, f"{start}[{number}]", found) for number, entry in enumerate(value)]
        return made if isinstance(value, list) else {_TUPLE: made}
    if isinstance(value, dict) and all(isinstance(one, str) for one in value):
        return {one: _without_tensors(entry, f"{start}[{one}]", found) for one, entry in value.items()}
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `_without_tensors` was given. Raises `KeyError` if a tensor is not among `tensors`."""
    if isinstance(value, list):
        return [_with_tensors(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_with_tensors(entry, tensors) for entry in value[_TUPLE])
    return {one: _with_tensors(entry, tensors) for one, entry in value.items()}


class State(NamedTuple):
    """The state that goes from the optimizers of the source into those of the target, the same on all ranks.

    `values`, `settings`: by the target's name of a parameter; the first what is no tensor, by entry. `whole`: the
    targets that are whole on some ranks, and of what kind they are in the source."""

    links: list[Link]
    targets: dict[str, Held]
    values: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    problems: list[str]
    whole: dict[str, Kind]


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
    made = State([], {}, {}, {}, [], {})
    holders: dict[str, list[int]] = {}
    # The owners of matrices, by name and number in a stack.
    owners: dict[str, dict[int | None, list[int]]] = {}
    for (_, _, known, _, owned), those in here:
        for name in known:
            holders.setdefault(name, []).extend(those)
        for name, numbers in owned.items():
            for number in numbers:
                owners.setdefault(name, {}).setdefault(number, []).extend(those)
    if not holders or not any(known for _, _, known, *_ in there):
        if holders or any(known for _, _, known, *_ in there):
            made.problems.append("an optimizer on one side alone; pass (model, optimizer) for both, or for none")
        return made
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
    kinds = {key: Kind(*kind) for _, _, _, known, _ in there for key, kind in known.items()}
    links: dict[str, list[Link]] = {}
    for link in everything.links:
        if link.target in holders:
            links.setdefault(link.source, []).append(link)
    parts: dict[object, Parts] = {}
    for key, held in state.items():
        source, _, entry = key.partition(_MARK)
        shape = sources[source].shape
        for link in links.get(source, ()):
            target, goal = key_of(link.target, entry), targets[link.target]
            if held.shape == shape and shape and _INSIDE not in entry:
                made.links.append(link._replace(source=key, target=target))
                made.targets.setdefault(target, Held(goal.shape, held.dtype, goal.parts, target))
            elif held.shape and (link.lifted or not link.lengths == shape == goal.shape):
                made.problems.append(
                    f"{source}: state {entry!r} of shape {held.shape}, not of the parameter's {shape}, so it cannot be "
                    f"cut or joined as the parameter is for {link.target}"
                )
            elif first[link.target] == source and target not in made.targets:
                # A count of steps goes everywhere.
                those = _owners_of(entry, owners.get(link.target, {})) if held.shape else []
                at, ranks = (0,) * len(held.shape), tuple(sorted(set(those or holders[link.target])))
                alike = parts.setdefault((held.shape, ranks), Parts([Portion(whole(held.shape), ranks)]))
                made.links.append(Link(key, target, at, at, held.shape))
                made.targets[target] = Held(held.shape, held.dtype, alike, target)
                made.whole[target] = kinds[key]
    return made


def _owners_of(entry: str, owners: Mapping[int | None, list[int]]) -> list[int]:
    """The ranks that own what `entry` is of: a matrix, or one of a stack, whose number is at its end."""
    number = re.search(r"\[(\d+)\]$", entry.partition(_INSIDE)[0])
    return owners.get(None) or (owners.get(int(number[1]), []) if number else [])


class Filled:
    """The target's optimizers on this rank while their state arrives: new tensors where there are none that fit."""

    def __init__(self, side: Any, state: State, rank: int) -> None:
        self._state, self._optimizers = state, optimizers_of(side)
        self._known = parameters_of(side[0], self._optimizers) if self._optimizers else {}
        # The tensors of this rank, to be written, by `key_of`.
        self.tensors: dict[str, Tensor] = {}
        for key, held in state.targets.items():
            name, _, entry = key.partition(_MARK)
            parameter = self._known.get(name)
            if parameter is not None and (key not in state.whole or rank in held.parts.by_rank or not held.parts.parts):
                self.tensors[key] = self._tensor(key, entry, parameter, held)

    def _owner(self, parameter: nn.Parameter) -> tuple[Optimizer, dict[str, Any]]:
        """The optimizer of `parameter`, and its group."""
        return next(
            (optimizer, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(parameter is one for one in group["params"])
        )

    def _tensor(self, key: str, entry: str, parameter: nn.Parameter, held: Held) -> Tensor:
        optimizer, group = self._owner(parameter)
        known, dtype, device = (
            optimizer.state[parameter].get(entry),
            dtype_named(held.dtype),
            local_data(parameter).device,
        )
        if isinstance(known, Tensor) and known.shape == torch.Size(held.shape) and known.dtype is dtype:
            shape = held.shape if key in self._state.whole else tuple(local_data(parameter).shape)
            if local_data(known).shape == torch.Size(shape):
                return known
        if key not in self._state.whole:
            local = torch.zeros_like(local_data(parameter), dtype=dtype)
            return dtensor_like(parameter, local) if isinstance(parameter, DTensor) else local
        kind = self._state.whole[key]
        # Where the source had no choice, as torch's optimizers have it.
        counts = entry == "step" and not (group.get("capturable") or group.get("fused"))
        if kind.place == "host" or (kind.place == "" and counts):
            device = torch.device("cpu")
        local = torch.zeros(held.shape, dtype=dtype, device=device)
        if not (kind.is_dtensor and isinstance(parameter, DTensor)):
            return local
        mesh = parameter.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def commit(self) -> None:
        """Everything has arrived: the optimizers have it, and nothing else."""
        arrived: dict[str, dict[str, Any]] = {name: {} for name in self._known}
        inside: dict[str, dict[str, Tensor]] = {name: {} for name in self._known}
        for key, tensor in self.tensors.items():
            name, _, entry = key.partition(_MARK)
            (inside if _INSIDE in entry else arrived)[name][entry] = tensor
        for name, tensors in inside.items():
            for entry, value in self._state.values.get(name, {}).items():
                with suppress(KeyError):  # its owner has it
                    arrived[name][entry] = _with_tensors(value, tensors)
        for name, parameter in self._known.items():
            state = self._owner(parameter)[0].state
            state.pop(parameter, None)
            if arrived[name]:
                state[parameter] = arrived[name]
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
