"""Private module APIs: composable state, markers and buffers that torch's own code reads."""

from __future__ import annotations

import copy
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.utils.hooks import RemovableHandle

# ---- modules ---------------------------------------------------------------------------------------------------------

# The key of torch's states. Read at import, because `install` replaces torch's function.
_STATE_OF: Any = cast(Any, torch_fsdp.fully_shard).__wrapped__


def publish_state(module: nn.Module, state: object) -> None:
    """Make torch's `fully_shard.state(module)` return `state`, and register fully_shard with the composable APIs.

    torch's function is only the lookup key; it is not called.
    """
    states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
    states[_STATE_OF] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def published_state(module: nn.Module) -> Any:
    """The state that torch's `fully_shard.state(module)` returns, published by fullshard or torch; or None.

    For code that imported fullshard's `fully_shard` under torch's name and meets a module that torch sharded.
    """
    return module.__dict__.get(STATE_KEY, {}).get(_STATE_OF)


def swappable(name: str) -> list[tuple[ModuleType, Any]]:
    """The torch modules that export the FSDP2 function `name`, each with its current value."""
    # Imported before the swap, or it would import the replaced function from the other module.
    old_path = importlib.import_module("torch.distributed._composable.fsdp")
    # The attribute of that name is the function, which shadows the submodule.
    old_file = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    modules: list[ModuleType] = [torch_fsdp, old_path, old_file]
    return [(module, vars(module)[name]) for module in modules if name in vars(module)]


def mark_managed(module: nn.Module) -> None:
    """Tell dynamo and others that FSDP manages the parameters of `module`."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


class _Refusal(NamedTuple):
    """Raises when torch asks whether it is true."""

    text: str

    def __bool__(self) -> bool:
        raise ValueError(self.text)


def refuse_distribution(module: nn.Module, text: str) -> None:
    """Let torch's `distribute_module`, and so `parallelize_module`, raise a `ValueError` with `text` for `module`.

    Its first step is to look at this mark of its own. Without it, it fails at the first parameter that is a DTensor on
    another mesh, without a name, or cuts one on the same mesh again (torch 2.13).
    """
    module.__dict__.setdefault("_distribute_module_applied", _Refusal(text))


def left_out_of_ddp(module: nn.Module) -> frozenset[str]:
    """The names of parameters below `module` that DistributedDataParallel around it ignores."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def applied_apis(module: nn.Module) -> tuple[str, ...]:
    """The composable APIs applied to `module`, of fullshard or torch: "fully_shard", "replicate", ..."""
    return tuple(module.__dict__.get(REGISTRY_KEY, ()))


def run_first(module: nn.Module, state_dict_hook: RemovableHandle) -> None:
    """Move a state dict post-hook of `module` before those that were registered earlier."""
    module._state_dict_hooks.move_to_end(state_dict_hook.id, last=False)  # type: ignore[attr-defined]


def runs_last(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether no forward hook of `module` runs after `hook`, which is one."""
    return next(reversed(module._forward_hooks.values())) is hook


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that its state dict leaves out."""
    return frozenset(module._non_persistent_buffers_set)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffer dict (not a copy); None for a buffer registered without a tensor."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dict of children (not a copy), in which one module may have two names."""
    return module._modules


def copied_around(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """A module like `module`, with other children and tables of its own; its attributes, parameters and buffers are the
    same objects."""
    made = copy.copy(module)
    for name, value in vars(module).items():
        if type(value) in (dict, OrderedDict, set):
            vars(made)[name] = copy.copy(value)
    made._modules = children
    return made


def calling_stage(module: nn.Module) -> dist.ProcessGroup | None:
    """The group of the pipeline's axis, if a stage of a pipeline around `module` called the caller's caller, or None.

    Read off the calling frames: stages have the attributes `submod` and `group`, and register nowhere. Locals of code
    that does not name `submod` are not asked for: before Python 3.13 that copies them into a dict which the frame
    keeps, and a training loop would keep the batch and the logits of its last micro-batch through the next one.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        stage = frame.f_locals.get("self") if "submod" in frame.f_code.co_names else None
        if stage is not None and getattr(stage, "submod", None) is module and hasattr(stage, "group"):
            group = stage.group
            return dist.group.WORLD if group is None else cast(dist.ProcessGroup, group)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


# How far up a stage is looked for.
_FRAMES = 3


# ---- outside ---------------------------------------------------------------------------------------------------------
# Keeps torch.compile out of the engine.
#
# Dynamo would otherwise trace hooks, with their messages and resized memory, into the graph of a block, or compile each
# function below them separately. So every callback that torch may call from compiled code goes through
# `outside_graphs`.

F = TypeVar("F", bound=Callable[..., object])


def call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: for `outside_graphs`, where the function differs from call to call."""
    return function(*args)


def outside_graphs(function: F) -> F:
    """`function` excluded from compilation with everything it calls, even if compiled code calls it.

    Wrap once: a call costs a third of a microsecond, wrapping a hundred times that. The first use in a process imports
    torch's compiler, like creating an optimizer does.
    """
    wrapped: F = torch.compiler.disable(function, reason="fullshard: messages and memory are no part of a graph")
    return wrapped


def remains_a_method(wrapper: F) -> F:
    """`wrapper`, which `functools.wraps` made of a function of `outside_graphs`: compiled as a method it keeps `self`.

    Torch notes on such a function which one it calls, and `functools.wraps` copies the note. From 2.11 on
    `torch.compile` ignores the copy; 2.10 follows it from the bound method to a function that is bound to nothing.
    """
    vars(wrapper).pop("_torchdynamo_orig_callable", None)
    return wrapper


def loads_as_torch(module: nn.Module) -> bool:
    """Whether `module` loads its own parameters and buffers, as torch does, and nothing else."""
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict


# ---- stages of a pipeline --------------------------------------------------------------------------------------------
# Imported where they run: torch's pipelines bring its compiler.


def stage_backward_input(
    ends: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor], weights: Iterator[nn.Parameter]
) -> list[dict[str, Any]]:
    """Compute the gradients of `inputs` alone; returns what `stage_backward_weight` continues with."""
    from torch.distributed.pipelining._backward import stage_backward_input as own

    return own(ends, gradients, inputs, weights)[1]


def stage_backward_weight(weights: Iterator[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of `weights` that `stage_backward_input` left out."""
    from torch.distributed.pipelining._backward import stage_backward_weight as own

    own(weights, groups)
