"""Modules, and where torch's own code looks for what was done with them."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# ---- modules ---------------------------------------------------------------------------------------------------------

# The key of torch's states. Taken here, because `install` puts ours in the place of torch's function.
_STATE_OF: Any = cast(Any, torch_fsdp.fully_shard).__wrapped__


def publish_state(module: nn.Module, state: object) -> None:
    """Let torch's `fully_shard.state(module)` return `state`, and let composable APIs see that fully_shard was applied.

    torch's function is the key under which its own code looks, and is not called.
    """
    states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
    states[_STATE_OF] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def published_state(module: nn.Module) -> Any:
    """What torch's `fully_shard.state(module)` returns: the state that we, or torch's fully_shard, put there; or None.

    Asked for by code that imported our `fully_shard` under torch's name and meets a module that torch sharded.
    """
    return module.__dict__.get(STATE_KEY, {}).get(_STATE_OF)


def swappable(name: str) -> list[tuple[ModuleType, Any]]:
    """The modules of torch that show users its FSDP2 function `name`, each with what is there now."""
    # Imported now, so that its own import of the name does not happen while ours stands in the other module.
    old_path = importlib.import_module("torch.distributed._composable.fsdp")
    # The attribute of that name is the function; the module behind it is found by its full name alone.
    old_file = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    modules: list[ModuleType] = [torch_fsdp, old_path, old_file]
    return [(module, vars(module)[name]) for module in modules if name in vars(module)]


def mark_managed(module: nn.Module) -> None:
    """Let dynamo and others know that the parameters of `module` come and go."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def applied_apis(module: nn.Module) -> tuple[str, ...]:
    """The composable APIs, ours or torch's, that were applied to `module`: "fully_shard", "replicate", ..."""
    return tuple(module.__dict__.get(REGISTRY_KEY, ()))


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that its state dict leaves out."""
    return frozenset(module._non_persistent_buffers_set)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, None where one is registered without a tensor; the dict itself."""
    return module._buffers


# ---- outside ---------------------------------------------------------------------------------------------------------
# What torch.compile must not look into.
#
# Dynamo follows calls. Left alone it would trace our hooks into the graph of a block, and with them messages and
# resized memory, or compile each function below them by itself. So every function of ours that torch calls while
# compiled code may be running is given to torch through `outside_graphs`.

F = TypeVar("F", bound=Callable[..., object])


def outside_graphs(function: F) -> F:
    """`function`, run as plain Python, with all it calls, also where a compiled function is what calls it.

    Make it once: the call costs a third of a microsecond, making it a hundred times that. The first use in a process
    imports torch's compiler, as making an optimizer does.
    """
    wrapped: F = torch.compiler.disable(function, reason="fullshard: messages and memory are no part of a graph")
    return wrapped


@cache
def _caller() -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    return outside_graphs(call)


def call_outside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, run as `outside_graphs` runs it."""
    return _caller()(function, *args)
