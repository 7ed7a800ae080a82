"""Methods that torch's `FSDPModule` has and fullshard does not know raise.

torch's class is a base for `isinstance` alone. A method that another torch adds to it would be inherited, and
would act on state that is not there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .._torch import TorchFSDPModule


def unknown_methods(known: type, original: type[nn.Module] = nn.Module) -> dict[str, Any]:
    """What torch's class has now and neither `known` nor `original` has, as methods and properties that raise."""
    found: dict[str, Any] = {}
    for name, attribute in vars(TorchFSDPModule).items():
        acts = callable(attribute) or hasattr(attribute, "__get__")
        # What Python keeps on every class has two underlines and is no function.
        special = name.startswith("__") and name.endswith("__") and not inspect.isfunction(attribute)
        if acts and not special and name not in vars(known) and not hasattr(original, name):
            refuse = _unknown(name)
            found[name] = refuse if callable(getattr(TorchFSDPModule, name)) else property(refuse)
    return found


def _unknown(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}.{name}: expected a method of FSDPModule that fullshard has, found one that torch "
            f"{torch.__version__} added, which would act on state that torch's fully_shard makes; leave the call out, "
            f"or use a version of fullshard whose documents name it"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
