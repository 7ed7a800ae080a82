"""Backwards, versions, hooks of tensors, transforms, saved tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

# ---- autograd --------------------------------------------------------------------------------------------------------


# What a step asks dozens of times is C from end to end: a call of a Python function around it costs more than it does.

# Whether a torch profiler, or emit_nvtx, records now.
profiling: Callable[[], bool] = partial(operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler)

# The number of the backward that is running in this thread, or -1. A nested one has a number of its own.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# Something true while a transform (grad, vjp, jvp, vmap, ...) is running in this thread.
in_transform: Callable[[], object] = cast(Any, torch._C)._functorch.peek_interpreter_stack

# Counts the in-place writes to a tensor and its views, except those through `.data`. Raises `RuntimeError` for one that
# was made in inference mode.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# The hooks registered with `register_post_accumulate_grad_hook`, in order, by their numbers; None or empty: none.
post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)


def keeps_graph() -> bool:
    """Whether the graph of the backward that is running in this thread stays (`retain_graph`)."""
    return bool(cast(Any, torch._C._autograd)._get_current_graph_task_keep_graph())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that is running in this thread ends without an exception."""
    Variable._execution_engine.queue_callback(callback)


def gradient_versions(parameters: Sequence[Tensor]) -> tuple[int, int]:
    """How many of `parameters` have no gradient, and the sum of the versions of the others' gradients and of their
    local tensors: a write to a DTensor raises its own version, a write to its local tensor that one's. No Python per
    item, where all are DTensors with one."""
    try:
        return 0, sum(map(sum, map(_get_gradient_versions, parameters)))
    except AttributeError:
        found = list(map(versions_of_gradient, parameters))
        return found.count(()), sum(map(sum, found))


_get_gradient_versions = operator.attrgetter("grad._version", "grad._local_tensor._version")


def versions_of_gradient(parameter: Tensor) -> tuple[int, ...]:
    """The versions that `gradient_versions` adds up, of one; empty where it has no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return ()
    own = version_of(gradient)
    return (own, version_of(gradient._local_tensor)) if isinstance(gradient, DTensor) else (own,)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, or None."""
    return tensor._base


# For tensor subclasses that only intercept what reaches the dispatcher.
no_torch_function = torch._C._disabled_torch_function_impl


def tensor_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """The hooks registered with `register_hook`, in order."""
    hooks = cast(Any, parameter)._backward_hooks
    return list(hooks.values()) if hooks else []


def with_tensor_hooks(parameters: Sequence[Tensor]) -> list[int]:
    """The positions of those that have hooks registered with `register_hook`; no Python per item that has none."""
    return [i for i, hooks in enumerate(map(_get_tensor_hooks, parameters)) if hooks]


_get_tensor_hooks = operator.attrgetter("_backward_hooks")


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks of `old`, a leaf, be those of `new`: the same registries, so that handles still remove them."""
    for registry in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, registry)
        if hooks is not None:
            setattr(new, registry, hooks)


def keeping_versions(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Writes inside to `tensors` are not counted."""
    return cast("AbstractContextManager[Any]", torch.autograd._unsafe_preserve_version_counter(tuple(tensors)))


def without_transforms() -> AbstractContextManager[Any]:
    """What runs inside is not transformed."""
    return cast("AbstractContextManager[Any]", temporarily_clear_interpreter_stack())


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved tensors of this thread may go through hooks now; not so inside functorch transforms."""
    return bool(cast(Any, torch._C._autograd)._saved_tensors_hooks_is_enabled())


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The (pack, unpack) pair through which saved tensors of this thread go now."""
    return cast("tuple[Any, Any] | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
