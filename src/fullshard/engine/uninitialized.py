"""From `to_empty` to the first forward: what has memory without a value, and the error that names it.

Conversion           what `_apply` is given in the place of the user's function: it notices new memory without data
                     and fills it with a pattern (param/initial.py); buffers that have data keep it
recompute_buffers    non-persistent buffers, which no checkpoint brings, by the module's own hook
find_uninitialized   what still is the pattern as a whole, on all ranks together
prove_initialized    the error of the first forward
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._torch import non_persistent_buffers
from ..comm import sum_over
from ..guard import Scope
from ..param import are_poisoned, is_poisoned, local_data, poison
from .misuse import clean_name, parameter_names
from .unit import Unit

_EMPTY = {torch.empty_like, torch.empty, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_SHOWN = 8


class Conversion:
    """Wraps the function that `nn.Module._apply` calls on every parameter, gradient and buffer."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn
        # How many tensors it left with memory and without a value.
        self.emptied = 0
        self._calls = _EmptyCalls()

    @classmethod
    def of(cls, fn: Callable[[Tensor], Tensor]) -> Conversion:
        """`fn` itself if it is one: `_apply` of a module hands its function on to the modules below."""
        return fn if isinstance(fn, cls) else cls(fn)

    def __call__(self, tensor: Tensor) -> Tensor:
        calls = self._calls
        calls.last = None
        with calls:
            result = self.fn(tensor)
        fresh, calls.last = result is calls.last, None
        if fresh and not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            # A buffer that has data (RoPE frequencies, a mask) keeps it: nobody could bring it back.
            return tensor.to(result.device)
        if result.is_meta:
            return result
        # In another dtype the pattern would be one of the many NaNs.
        if fresh or (result.dtype is not tensor.dtype and not tensor.is_meta and is_poisoned(tensor)):
            self.emptied += poison(result)
        return result


class _EmptyCalls(TorchFunctionMode):
    """Sees the calls of the user's function. `last` is what the last one made, if nothing was done with it since."""

    def __init__(self) -> None:
        super().__init__()
        self.last: object = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.last = result if func in _EMPTY else None
        return result


def note_uninitialized(unit: Unit) -> None:
    """Look at `unit` in the next forward."""
    unit.unproven = True
    if unit.root is not None:
        unit.root.unproven = True


def has_meta_buffers(top: nn.Module) -> bool:
    """Whether some buffer still is on the meta device: parameters were loaded with `assign=True`, say."""
    return any(buffer.is_meta for buffer in top.buffers())


# ---- buffers -------------------------------------------------------------------------------------------------


def hook_of(module: nn.Module) -> Callable[[], object] | None:
    """The module's own initialiser, which needs no argument: `reset_parameters`, else `init_weights`."""
    for name in ("reset_parameters", "init_weights"):
        hook = getattr(module, name, None)
        if callable(hook) and takes_no_argument(hook):
            return cast("Callable[[], object]", hook)
    return None


def takes_no_argument(hook: Callable[..., Any]) -> bool:
    """Whether `hook()` is a valid call."""
    try:
        inspect.signature(hook).bind()
    except (TypeError, ValueError):
        return False
    return True


def allocate_buffers(top: nn.Module, device: torch.device) -> None:
    """Give memory to buffers on the meta device, and the pattern that says that nobody wrote it."""
    for module in top.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                made = torch.empty_like(buffer, device=device)
                poison(made)
                setattr(module, name, made)


def recompute_buffers(top: nn.Module, device: torch.device) -> None:
    """Let modules without parameters compute their non-persistent buffers again where those have no value.

    By `reset_parameters()` or `init_weights()` of the module that owns them. What else the module holds is put back
    afterwards: it may come from a checkpoint. A module that has parameters as well is left alone, because its hook
    would draw them anew.
    """
    allocate_buffers(top, device)
    for module in top.modules():
        own = dict(module.named_buffers(recurse=False))
        lost = {name for name in non_persistent_buffers(module) if name in own and is_poisoned(own[name])}
        hook = hook_of(module)
        if not lost or hook is None or next(module.parameters(), None) is not None:
            continue
        kept = {name: (buffer, buffer.clone()) for name, buffer in own.items() if name not in lost}
        with torch.no_grad(), torch.device(device):
            hook()
            for name, (buffer, value) in kept.items():
                setattr(module, name, buffer.copy_(value))
        for name in lost:
            setattr(module, name, getattr(module, name).to(device))


# ---- what has no value ---------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    name: str
    # The object that stands on the module outside of compute.
    tensor: Tensor
    # Each rank has its own rows, rather than a copy of the whole.
    sharded: bool
    # Whose ranks are asked; None: this one alone.
    mesh: DeviceMesh | None


class Uninitialized(NamedTuple):
    """`tensors`, named `names`, were written by nobody, on any rank; `partly` by some ranks and not by others.

    `elsewhere`: ranks that share another mesh with this one have such tensors, this one has not.
    """

    names: list[str]
    tensors: list[Tensor]
    partly: list[str]
    elsewhere: bool


def find_uninitialized(units: Sequence[Unit], top: nn.Module) -> Uninitialized:
    """What below `top` is as `to_empty` left it. Collective, when there is more than one rank: every rank gets the same
    answer, also those that own nothing of a parameter. Of `units`, those that are unproven are looked at.
    """
    judged = _to_judge(units, top)
    poisoned = are_poisoned(item.tensor for item in judged)
    written = [not flag and local_data(item.tensor).numel() > 0 for item, flag in zip(judged, poisoned, strict=True)]
    lost: list[_Judged] = []
    partly: list[str] = []
    meshes = list(dict.fromkeys(item.mesh for item in judged))
    for mesh in meshes:
        here = [i for i, item in enumerate(judged) if item.mesh == mesh]
        counts = torch.tensor([[poisoned[i] for i in here], [written[i] for i in here]], dtype=torch.int32)
        if mesh is not None:
            counts = sum_over(mesh, counts)
        for i, without, having in zip(here, *counts.tolist(), strict=True):
            item = judged[i]
            if without and (having == 0 or not item.sharded):
                lost.append(item)
            elif without:
                partly.append(item.name)
    elsewhere = False
    if len(meshes) > 1:
        # Ranks that differ on one mesh meet on the others (experts): none may go on while another one stops.
        total = torch.tensor([len(lost)], dtype=torch.int32)
        for mesh in meshes:
            total = total if mesh is None else sum_over(mesh, total)
        elsewhere = not lost and bool(total.item())
    return Uninitialized([item.name for item in lost], [item.tensor for item in lost], partly, elsewhere)


def _to_judge(units: Sequence[Unit], top: nn.Module) -> list[_Judged]:
    judged: dict[int, _Judged] = {}
    names = parameter_names(top, units)
    of_units: set[int] = set()
    for unit in units:
        for param in unit.params:
            of_units |= {id(param.full), id(param.sharded)}
            if unit.unproven:
                judged[id(param.sharded)] = _Judged(names[param], param.sharded, True, param.spec.mesh)
    mesh = next((group.placing.mesh for unit in units for group in unit.groups), None)
    for name, tensor in (*top.named_parameters(), *top.named_buffers()):
        if id(tensor) not in of_units:
            asked = tensor.device_mesh if isinstance(tensor, DTensor) else mesh
            judged[id(tensor)] = _Judged(clean_name(name), tensor, isinstance(tensor, DTensor), asked)
    return list(judged.values())


def agree_what_is_unproven(scopes: Sequence[Scope], units: Sequence[Unit], unproven: bool) -> bool:
    """Look at a unit on all ranks where one of them has to; whether anything has to be looked at.

    Ranks may differ in what they know: rank 0 built the model with its values, the others on the meta device. Called by
    all ranks in the first forward of a root, once; equal ranks pay one question for each scope.
    """
    mine = "".join("01"[unit.unproven] for unit in units)
    for scope in scopes:
        differing = scope.agree("units with memory that was made without values", f"{int(unproven)} {mine}")
        for theirs in (differing or {}).values():
            any_, _, bits = theirs.partition(" ")
            unproven = unproven or any_ == "1"
            for unit, bit in zip(units, bits, strict=False):
                # Units of this scope alone: another one's may be other units.
                unit.unproven = unit.unproven or bit == "1"
    return unproven


def prove_initialized(units: Sequence[Unit]) -> None:
    """Raise `RuntimeError` on all ranks when something that `to_empty` made was not written on any of them."""
    top = units[0].module
    with torch.inference_mode(False):
        recompute_buffers(top, units[0].device)
        found = find_uninitialized(units, top)
    if found.tensors:
        raise RuntimeError(
            f"expected every parameter and buffer to have a value before the first forward, found memory that nothing "
            f"was written to since to_empty (or the meta device): {shown(found.names)}; initialise it "
            f"(reset_parameters, init_weights, fullshard.materialize), load a checkpoint that has it, or call "
            f"fullshard.mark_initialized(model) if it is never read"
        )
    if found.elsewhere:
        raise RuntimeError(
            "expected every parameter and buffer to have a value before the first forward, found that other ranks have "
            "some without; their error names them"
        )
    if found.partly:
        warnings.warn(
            f"{shown(found.partly)}: some ranks wrote their rows since to_empty and others did not; those hold NaN. "
            f"Was a checkpoint loaded on one rank only? fullshard.mark_initialized(model) says that it is meant",
            stacklevel=2,
        )
    for unit in units:
        unit.unproven = False


def shown(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
