"""Dotted names of modules and parameters, as in the user's code, for errors and reports.

Those of a sharded model come from its units. What an optimizer holds beside one belongs to no unit: its name is looked
up among all modules of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any, Protocol

from torch import Tensor, nn

from ..param import ShardedParam

_SHOWN = 4
# Names that wrappers insert into dotted names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class NamedUnit(Protocol):
    """The part of a unit that errors need. `module`: its own; `model`: the module of its root, once that formed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def params(self) -> Sequence[ShardedParam]: ...


def clean_name(name: str) -> str:
    """`name` without the components that checkpoint and compile wrappers insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper.rstrip("."))
    return name


def dotted_name(unit: NamedUnit, name: str) -> str:
    """The dotted name in the user's model of the parameter `name` of `unit`."""
    for param, dotted in parameter_names(unit.model, [unit]).items():
        if param.name == name:
            return dotted
    return name


def first_few(names: Sequence[str]) -> str:
    """The first few of `names`, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def parameter_names(model: nn.Module, units: Sequence[NamedUnit]) -> dict[ShardedParam, str]:
    """The dotted names of the parameters of `units` below `model`; relative to their unit if outside of `model`."""
    prefixes = {module: f"{clean_name(name)}." if name else "" for name, module in model.named_modules()}
    names = {}
    for unit in units:
        for param in unit.params:
            slot = next((slot for slot in param.slots if slot.module in prefixes), None)
            names[param] = param.name if slot is None else prefixes[slot.module] + slot.name
    return names


def names_elsewhere(parameters: Iterable[Tensor]) -> dict[int, str]:
    """The name of each of `parameters`, by id, in a module of this process, such as "Head.proj.weight": that of the
    outermost module which has it. Its shape, if none has it. Looks through all objects of the process."""
    wanted = {id(parameter): f"a parameter of shape {tuple(parameter.shape)}" for parameter in parameters}
    depths = dict.fromkeys(wanted, -1)
    for module in all_modules():
        for name, parameter in _parameters_below(module):
            # The more dots, the further out is the module.
            if name.count(".") > depths.get(id(parameter), name.count(".")):
                depths[id(parameter)] = name.count(".")
                wanted[id(parameter)] = f"{type(module).__name__.removeprefix('FSDP')}.{clean_name(name)}"
    return wanted


def parameter_of(gradient: Tensor) -> Tensor | None:
    """The parameter of a module of this process whose `.grad` it is; None if there is none."""
    parameters = (parameter for module in all_modules() for _, parameter in _entries(module, "_parameters"))
    return next((p for p in parameters if p.grad is gradient), None)


def _parameters_below(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_parameters`, not a wrapper's own, of a module that another thread may be building."""
    seen = set[nn.Module]()
    stack = [("", module)]
    while stack:
        prefix, one = stack.pop()
        if one not in seen:
            seen.add(one)
            yield from ((prefix + name, parameter) for name, parameter in _entries(one, "_parameters"))
            stack += [(f"{prefix}{name}.", child) for name, child in reversed(_entries(one, "_modules"))]


def _entries(module: nn.Module, registry: str) -> list[tuple[str, Any]]:
    found = getattr(module, registry, {})
    # At once, while nobody adds to it. Modules of torch.jit have others than a dict.
    found = found.copy() if isinstance(found, dict) else found
    return [(name, one) for name, one in found.items() if one is not None]


def all_modules() -> list[nn.Module]:
    """The modules of this process."""
    # A list of objects has tuples that other threads are making, and these raise SystemError if anybody else has a
    # reference to such a tuple. So both lists live inside of one call of C, and what is kept are classes and modules.
    kinds = set(map(type, chain.from_iterable(map(gc.get_objects, [None]))))
    kinds = {kind for kind in kinds if issubclass(kind, nn.Module)}
    is_one = partial(type.__instancecheck__, nn.Module)
    found = list(filter(is_one, chain.from_iterable(starmap(gc.get_referrers, [tuple(kinds)]))))
    # Without those that another thread is making: `_modules` is the last that `nn.Module.__init__` sets.
    return [one for one in found if type(one) in kinds and vars(one).keys() >= {"_parameters", "_modules"}]
