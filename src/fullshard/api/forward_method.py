"""`register_fsdp_forward_method`: a method that gathers and frees parameters as forward does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from .._torch_compat import TorchFSDPModule
from ..runtime import unit_of

_MARK = "_fullshard_forward_of"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` gather and free parameters as `module(...)` does (`generate`, `encode`, ...).

    From now on a call is a use of the module: inputs and outputs are cast by its `mp_policy`, its parameters are full
    while the method runs, also where it calls `forward` or other registered methods in between, and backward finds
    them. Register it on the module whose parameters the method uses. Does nothing for a module that is not sharded, or
    the second time.

    Raises `ValueError` when there is no such method, or when torch sharded the module, and `NotImplementedError` for
    generators and coroutines, whose body runs after the call has returned. Source: torch 2.13.
    """
    unit = unit_of(module)
    if unit is None:
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"module: expected one that fullshard.fully_shard was applied to, found {type(module).__name__}, "
                f"sharded by torch; use torch.distributed.fsdp.register_fsdp_forward_method for it"
            )
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"method_name: expected a method of {type(module).__name__}, found {method_name!r}; check its spelling"
        )
    if any(test(method) for test in _RUN_LATER):
        raise NotImplementedError(
            f"method_name: expected a method that is over when it returns, found {method_name!r}, a generator or "
            f"coroutine; call unshard() before it and reshard() after it, or register what it calls"
        )
    if getattr(method, _MARK, None) is module:
        return
    hooks = unit.hooks
    assert hooks is not None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hooks.call(module, method, args, kwargs)

    setattr(call, _MARK, module)
    # On the object: other objects of the class may not be sharded.
    setattr(module, method_name, call)


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
