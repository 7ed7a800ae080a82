"""Methods of a sharded module other than `forward`: their operators' complaint about sharded parameters gets a name.

Only `forward`, and what `register_fsdp_forward_method` was told of, gathers. Gathering for every method would be wrong:
a gather is a call of all ranks, and a method may be meant for one of them. Nothing is added to a method but what
happens when it fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch_compat import MIXED
from ..lifecycle import Full
from ..runtime import unit_of


def named_methods(original: type[nn.Module], taken: type) -> dict[str, Callable[..., Any]]:
    """The public methods that `original` adds to those of `nn.Module` and of `taken`, for its sharded class."""
    found: dict[str, Callable[..., Any]] = {}
    for cls in original.__mro__:
        if cls.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, attribute in vars(cls).items():
            public = not name.startswith("_") and name not in found
            if public and inspect.isfunction(attribute) and not hasattr(nn.Module, name) and not hasattr(taken, name):
                if name != "forward" and not inspect.isgeneratorfunction(attribute):
                    found[name] = _named(attribute)
    return found


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            # Not where they are full: then it is another unit's.
            if unit is None or unit.record.full is Full.FULL or MIXED not in str(error):
                raise
            name = method.__name__
            raise RuntimeError(
                f"{type(self).__name__}.{name}: expected to compute with full parameters, found those of "
                f"{unit.record.name} sharded, because a method other than forward gathers nothing; after fully_shard, "
                f"call register_fsdp_forward_method(module, {name!r}) on the sharded modules whose methods compute, or "
                f"module.unshard() before and module.reshard() after, or use fullshard.full_params(model)"
            ) from error

    return call
