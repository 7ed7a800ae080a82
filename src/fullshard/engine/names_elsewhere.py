"""Names of parameters that belong to no sharded model: what an optimizer holds beside one, for an error or a report."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn

from .names import clean_name


def names_elsewhere(parameters: Iterable[Tensor]) -> dict[int, str]:
    """For each of `parameters`, by id, its name in a module of this process, such as "Head.proj.weight": that of the
    outermost module which has it. Its shape, if none has it. Looks through all objects of the process."""
    wanted = {id(parameter): f"a parameter of shape {tuple(parameter.shape)}" for parameter in parameters}
    depths = dict.fromkeys(wanted, -1)
    for module in all_modules():
        for name, parameter in nn.Module.named_parameters(module):  # not a wrapper's own
            # The more dots, the further out is the module.
            if name.count(".") > depths.get(id(parameter), name.count(".")):
                depths[id(parameter)] = name.count(".")
                wanted[id(parameter)] = f"{type(module).__name__.removeprefix('FSDP')}.{clean_name(name)}"
    return wanted


def parameter_of(gradient: Tensor) -> Tensor | None:
    """The parameter of a module of this process whose `.grad` it is; None if there is none."""
    parameters = (p for module in all_modules() for p in vars(module)["_parameters"].values() if p is not None)
    return next((p for p in parameters if p.grad is gradient), None)


def all_modules() -> list[nn.Module]:
    """The modules of this process."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_parameters" in vars(one)]
