"""Private autograd APIs: backwards, versions, tensor hooks, transforms, saved tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable

# ---- autograd --------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., object])

# Queries on the hot path are plain C callables: a Python wrapper would cost more than the query itself.

# Whether a torch profiler, or emit_nvtx, records now.
profiling: Callable[[], bool] = partial(operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler)

# The number of the backward running in this thread, or -1. A nested backward has its own number.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# Truthy while a transform (grad, vjp, jvp, vmap, ...) is running in this thread.
in_transform: Callable[[], object] = cast(Any, torch._C)._functorch.peek_interpreter_stack

# The number of in-place writes to a tensor and its views, except through `.data`. Raises `RuntimeError` for inference
# tensors.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# The hooks of `register_post_accumulate_grad_hook` by their ids, in order; None or empty if there are none.
post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)

# Whether the backward running in this thread keeps its graph (`retain_graph`).
keeps_graph: Callable[[], bool] = cast(Any, torch._C._autograd)._get_current_graph_task_keep_graph

# Calls its argument when the backward running in this thread ends without an exception.
queue_backward_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# The registry of `register_hook`; None or empty if there are no hooks.
registered_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], Any]] | None] = operator.attrgetter("_backward_hooks")


def grad_dtype_of(parameter: Tensor) -> torch.dtype | Literal["unset", "any"]:
    """The `grad_dtype` that was set on a leaf: "any" for None. Before torch 2.15 one that is the tensor's own dtype
    counts as unset."""
    found = parameter.grad_dtype
    if not getattr(parameter, "_has_grad_dtype_override", found != parameter.dtype):
        return "unset"
    return "any" if found is None else found


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, or None."""
    return tensor._base


# For tensor subclasses that only intercept what reaches the dispatcher.
no_torch_function = torch._C._disabled_torch_function_impl


def tensor_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """The hooks of `register_hook`, in order."""
    hooks = registered_hooks(parameter)
    return list(hooks.values()) if hooks else []


def with_tensor_hooks(parameters: Sequence[Tensor]) -> list[int]:
    """The positions of `parameters` with hooks of `register_hook`; no Python per item without."""
    return [i for i, hooks in enumerate(map(registered_hooks, parameters)) if hooks]


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Move the hooks of the leaf `old` to `new`: the same registries, so that handles still work."""
    for registry in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, registry)
        if hooks is not None:
            setattr(new, registry, hooks)


def keeping_versions(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Context in which writes to `tensors` do not bump their versions."""
    return cast("AbstractContextManager[Any]", torch.autograd._unsafe_preserve_version_counter(tuple(tensors)))


def without_transforms() -> AbstractContextManager[Any]:
    """Context in which torch.func transforms are suspended."""
    return cast("AbstractContextManager[Any]", temporarily_clear_interpreter_stack())


# Whether saved-tensor hooks are allowed in this thread now; they are not inside functorch transforms.
saved_tensor_hooks_allowed: Callable[[], bool] = cast(Any, torch._C._autograd)._saved_tensors_hooks_is_enabled


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The active (pack, unpack) hooks of this thread."""
    return cast("tuple[Any, Any] | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def internal_to_checkpoints(pack: F) -> F:
    """`pack`, the first of a pair of hooks with none below them, marked so that selective recomputation (torch 2.14 and
    later) neither sends what it keeps through the pair nor warns that it does not."""
    marks: Any = pack
    marks._checkpoint_internal, marks._user_hooks = True, None
    return pack


# ---- recomputation ---------------------------------------------------------------------------------------------------
# `torch.utils.checkpoint` (not reentrant) saves the arguments of a function as autograd saves tensors. Without hooks it
# gets the same objects back; what a hook returns, autograd makes a new tensor of, one for each time that an argument
# was saved: not the same object twice, no subclass, no view, no attributes.

# Its code that saves arguments, which has them as `args` and the run as `new_frame`.
_SAVES_ARGUMENTS = getattr(
    torch.utils.checkpoint,
    "_checkpoint_without_reentrant_generator_impl",
    torch.utils.checkpoint._checkpoint_without_reentrant_generator,
).__code__
# How far above a saved-tensor hook it is: at most two frames of dynamo and three of torch.
_FRAMES = 6


def saved_for_recomputation() -> dict[str, Any] | None:
    """Called by a saved-tensor hook: what `recompute_with_arguments` takes if the tensor is an argument of a function
    that will be recomputed, else None."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code is _SAVES_ARGUMENTS:
            return frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def recompute_with_arguments(saved: dict[str, Any]) -> None:
    """Let the function be recomputed with the very arguments of its forward. Once or more."""
    run = saved["new_frame"]
    if not isinstance(run.recompute_fn, _Recomputed):
        run.recompute_fn = _Recomputed(run.recompute_fn, tuple(saved["args"]))


class _Recomputed:
    """A function that runs again. It keeps its arguments alive exactly as long as torch keeps those that it saved."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __call__(self, *unpacked: Any) -> None:
        # Up to 2.11 the keyword arguments come first.
        self.function(*unpacked[: len(unpacked) - len(self.args)], *self.args)
