"""Parameters and buffers without values: found before their first use, and initialised by whose module they are."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._torch import non_persistent_buffers
from ..comm import sum_over
from ..param import ShardedParam, are_poisoned, is_poisoned, local_data, poison
from .names import clean_name, parameter_names
from .padding_rows import note_rows_emptied, refuse_padding_rows
from .unit import Unit

# ---- without values --------------------------------------------------------------------------------------------------
# Detects parameters and buffers that are still uninitialised at the first forward after `to_empty`.
#
# Conversion           wraps the user's function in `_apply`: fills new memory without data with a pattern
#                      (param/unwritten.py); buffers with data keep it
# recompute_buffers    recomputes non-persistent buffers, which checkpoints do not contain, by the module's own hook
# find_uninitialized   finds tensors that still hold only the pattern, across all ranks
# prove_initialized    raises in the first forward


_EMPTY = {torch.empty_like, torch.empty, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_SHOWN = 8


class Conversion:
    """Wraps the function that `nn.Module._apply` calls on every parameter, gradient and buffer."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn
        # Tensors left with memory but without a value.
        self.emptied = 0
        self._calls = _EmptyCalls()

    @classmethod
    def of(cls, fn: Callable[[Tensor], Tensor]) -> Conversion:
        """`fn` itself if it is wrapped already: `_apply` passes its function on to submodules."""
        return fn if isinstance(fn, cls) else cls(fn)

    def __call__(self, tensor: Tensor) -> Tensor:
        calls = self._calls
        calls.last = None
        with calls:
            result = self.fn(tensor)
        fresh, calls.last = result is calls.last, None
        if fresh and not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            # A buffer keeps its data (RoPE frequencies, a mask): nothing could restore it.
            return tensor.to(result.device)
        if result.is_meta:
            return result
        # A dtype conversion turns the pattern into an ordinary NaN, so write it again.
        if fresh or (result.dtype is not tensor.dtype and not tensor.is_meta and is_poisoned(tensor)):
            self.emptied += poison(result)
        return result


class _EmptyCalls(TorchFunctionMode):
    """Observes torch calls of the user's function. `last`: the result of the last call if that was an empty-like."""

    def __init__(self) -> None:
        super().__init__()
        self.last: object = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.last = result if func in _EMPTY else None
        return result


def note_uninitialized(unit: Unit, emptied: Iterable[ShardedParam] | None = None) -> None:
    """Check `unit` in the next forward. `emptied`: those of its parameters that have no values; None: all of them."""
    unit.unproven = True
    note_rows_emptied(unit.params if emptied is None else emptied)
    if unit.root is not None:
        unit.root.some_unproven = True


# ---- buffers -------------------------------------------------------------------------------------------------


def hook_of(module: nn.Module) -> Callable[[], object] | None:
    """The module's own initialiser without arguments: `reset_parameters`, else `init_weights`."""
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
    """Allocate meta buffers on `device` and fill them with the pattern for uninitialised memory."""
    for module in top.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                made = torch.empty_like(buffer, device=device)
                poison(made)
                setattr(module, name, made)


def recompute_buffers(top: nn.Module, device: torch.device) -> None:
    """Recompute uninitialised non-persistent buffers of modules without parameters, and of models of transformers.

    Calls `reset_parameters()` or `init_weights()` of the owning module, or `_init_weights` of its model, and restores
    its other buffers, which may come from a checkpoint. Other modules with parameters are skipped, because the call
    would reinitialize them; transformers' initialisers leave alone what is marked.
    """
    allocate_buffers(top, device)
    foreign = foreign_initialisers(top)
    for module in top.modules():
        own = dict(module.named_buffers(recurse=False))
        lost = {name for name in non_persistent_buffers(module) if name in own and is_poisoned(own[name])}
        hook = foreign.get(module) or (None if any(True for _ in module.parameters()) else hook_of(module))
        if not lost or hook is None:
            continue
        others = {name: (buffer, buffer.clone()) for name, buffer in own.items() if name not in lost}
        with torch.no_grad(), torch.device(device), kept(module.parameters()):
            hook()
            for name, (buffer, value) in others.items():
                setattr(module, name, buffer.copy_(value))
        for name in lost:
            setattr(module, name, getattr(module, name).to(device))


# ---- what has no value ---------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    name: str
    # The object on the module outside of compute.
    tensor: Tensor
    # Each rank has its own rows, rather than a copy of the whole.
    sharded: bool
    # The mesh over which ranks agree; None: this rank alone.
    mesh: DeviceMesh | None


class Uninitialized(NamedTuple):
    """`tensors`, named `names`, were written on no rank; `partly` were written on some ranks only.

    `elsewhere`: other ranks have such tensors, this one has none.
    """

    names: list[str]
    tensors: list[Tensor]
    partly: list[str]
    elsewhere: bool


def find_uninitialized(units: Sequence[Unit], top: nn.Module) -> Uninitialized:
    """Find tensors below `top` that nothing wrote since `to_empty`; checks unproven `units` only.

    Collective. Every rank gets the same answer, even if it owns no rows of a parameter.
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
        # Ranks of different expert meshes share other meshes: if one raises, all must raise.
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


def prove_initialized(units: Sequence[Unit]) -> None:
    """Raise `RuntimeError` on all ranks if memory from `to_empty` was not written on any of them."""
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
            "expected every parameter and buffer to have a value before the first forward, found uninitialised ones on "
            "other ranks; their error names them"
        )
    if found.partly:
        warnings.warn(
            f"{shown(found.partly)}: some ranks wrote their rows since to_empty and others did not; those hold NaN. "
            f"Was a checkpoint loaded on one rank only? If intended, call fullshard.mark_initialized(model)",
            stacklevel=2,
        )
    with torch.inference_mode(False):
        refuse_padding_rows(units, top)
    for unit in units:
        unit.unproven = False


def shown(names: Sequence[str]) -> str:
    """The first few of `names`, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---- foreign init ----------------------------------------------------------------------------------------------------
# Initialisers of other packages, by module: `_init_weights` of transformers' models, the resets of PEFT's LoRA layers.
#
# Their modules have no `reset_parameters()` of their own (RMSNorm, rotary embeddings); the model above does it.

# transformers' mark on tensors that its initialisers leave alone.
_KEEP = "_is_hf_initialized"


def foreign_initialisers(top: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    """The function that initialises each module below `top` of a model of transformers; empty without such a model.

    The nearest model above decides. A LoRA layer initialises its adapters itself, because they have to begin as zero.
    """
    pretrained, adapters = _class("transformers.modeling_utils", "PreTrainedModel"), _class(*_TUNER)
    found: dict[nn.Module, Callable[[], object]] = {}
    if pretrained is None:
        return found
    configs = {name: one for module in top.modules() for name, one in _peft_configs(module)} if adapters else {}

    def walk(module: nn.Module, model: Any) -> None:
        model = module if isinstance(module, pretrained) else model
        if adapters is not None and isinstance(module, adapters):
            inner = module.get_base_layer()
            found.update({each: _nothing for each in module.modules()})
            found[module] = lambda: _reset_adapters(module, configs)
            walk(inner, model)
            return
        if model is not None and module not in found:
            found[module] = lambda: _init_weights(model, module)
        elif model is None and _peft_configs(module):
            found[module] = _nothing  # owns nothing, and answers for the model inside
        for child in module.children():
            walk(child, model)

    walk(top, None)
    return found


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """transformers' initialisers leave `tensors` alone inside."""
    marked = [tensor for tensor in tensors if not hasattr(tensor, _KEEP)]
    for tensor in marked:
        setattr(tensor, _KEEP, True)
    try:
        yield
    finally:
        for tensor in marked:
            tensor.__dict__.pop(_KEEP, None)


_TUNER = ("peft.tuners.tuners_utils", "BaseTunerLayer")


def _class(module: str, name: str) -> Any:
    """The class, if the package is imported at all."""
    return getattr(sys.modules.get(module), name, None)


def _nothing() -> None:
    pass


def _init_weights(model: Any, module: nn.Module) -> None:
    # The functions of torch.nn.init heed the mark inside, for models whose code is not transformers' own.
    guard: Callable[[], AbstractContextManager[object]] = getattr(
        sys.modules.get("transformers.initialization"), "guard_torch_init_functions", nullcontext
    )
    with guard():
        getattr(model, "_init_weights")(module)  # noqa: B009  the one private name of transformers', of each model


def _peft_configs(module: nn.Module) -> Iterable[tuple[str, Any]]:
    found = getattr(module, "peft_config", None)
    return found.items() if isinstance(found, dict) else ()


def _reset_adapters(layer: Any, configs: dict[str, Any]) -> None:
    for name in getattr(layer, "r", ("default",)):
        ways = getattr(configs.get(name), "init_lora_weights", None)
        if not hasattr(layer, "reset_lora_parameters") or ways not in (True, False, "gaussian"):
            raise ValueError(
                f"init: expected a LoRA adapter whose init_lora_weights is True, False or 'gaussian', found {name!r} "
                f"in {type(layer).__name__} with {ways!r}; pass init=, a function that initialises its module"
            )
        layer.reset_lora_parameters(name, ways)
