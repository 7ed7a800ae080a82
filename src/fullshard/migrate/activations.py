"""`checkpoint_activations`: modules that compute their activations again in backward, or hold them in host memory.

A module's `forward` is replaced, and nothing else: names of parameters stay, and units gather their parameters around
it, so it may be called before or after sharding. Seed 004 asks for it apart from the wrapper, per direct child.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._torch import base_of
from ..policy.arguments import expect_callable, expect_choice, expect_flag, expect_keys, expect_module, expect_whole
from .config import ActivationKeys
from .tree import Tree, class_of, names_above, nearest
from .wrapping import UnitPlan

Chosen = Callable[[str, nn.Module], bool]


def checkpoint_activations(
    model: nn.Module,
    at: str = "children",
    *,
    classes: Sequence[str] = (),
    where: Chosen | None = None,
    every: int = 1,
    recompute: bool = True,
    save: Sequence[str] = (),
    offload: bool = False,
) -> tuple[str, ...]:
    """Let modules of `model` keep their inputs alone in forward and compute the rest again in backward.

        fullshard.checkpoint_activations(model, "classes", classes=["Block"], every=2)

    at: "children": direct children with parameters, and the members of those that are lists; "classes": modules of the
        classes named in `classes`; "attributes": modules whose `_activation_checkpointing` is True, or for which the
        `activation_checkpointing_fn` of a module around them says so.
    where: (name, module) -> bool, instead of `at`.
    every: of these modules, in their order, the n-th, 2n-th, and so on.
    save: names of operators whose results are kept anyway, such as "aten.mm" or
        "aten._scaled_dot_product_flash_attention.default": selective checkpointing.
    offload: what is kept is held in page-locked host memory until backward, parameters excepted. No effect on a CPU.
    recompute: False with `offload` holds all activations on the host and computes nothing twice.

    Random states are kept for the second forward; gradients are bitwise those without. It is never reentrant. A module
    inside another one of them is left alone. Returns the names of the modules. Raises `ValueError` if there are none,
    an operator does not exist, a module is chosen twice, or neither `recompute` nor `offload` is set. Source:
    `torch.utils.checkpoint` and its selective contexts; Composer's `apply_ac` for the choice.
    """
    expect_module("model", model)
    expect_choice("at", at, ("children", "classes", "attributes"))
    expect_callable("where", where, "a function of (name, module)", or_none=True)
    expect_whole("every", every, 1)
    recompute, offload = expect_flag("recompute", recompute), expect_flag("offload", offload)
    classes, save = expect_keys("classes", classes), expect_keys("save", save)
    if not recompute and not offload:
        raise ValueError(
            "recompute: expected True, or offload=True, found neither, which changes nothing; leave it out"
        )
    if save and not recompute:
        raise ValueError("save: expected recompute=True beside it, found False; then all is kept anyway")
    operators = _operators(save)
    tree = Tree(model)
    names = _chosen(tree, at, classes, where)
    run = partial(_run, operators=operators, recompute=recompute, offload=offload)
    return checkpoint_modules(tree, names[every - 1 :: every], run)


Run = Callable[..., Any]


def checkpoint_modules(tree: Tree, names: Iterable[str], run: Run) -> tuple[str, ...]:
    """Replace the forwards of the modules `names` of `tree`; nothing is changed if one of them has been already."""
    found = tuple(names)
    for name in found:
        if isinstance(vars(tree.modules[name]).get("forward"), Checkpointed):
            raise ValueError(
                f"{name}: expected a module whose activations are kept, found one checkpointed before; once"
            )
    for name in found:
        module: Any = tree.modules[name]
        module.forward = Checkpointed(module.forward, run)
    return found


class Checkpointed:
    """The forward of a module, run by `run`. An object, so that a deepcopy of the module calls the copy's forward."""

    def __init__(self, forward: Callable[..., Any], run: Run) -> None:
        functools.update_wrapper(self, forward)  # callers look at signatures
        self.forward, self.run = forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.forward, args, kwargs)


# What operators keep is not moved to the host, in every version: newer ones warn where a program does not say
# which way it wants, because a later one will move it.
_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def _run(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    operators: Sequence[Any],
    recompute: bool,
    offload: bool,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with OnHost() if offload and _on_device(args, kwargs) else nullcontext():
        if not recompute:
            return forward(*args, **kwargs)
        if not operators:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, list(operators))
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **_HOOKS, **kwargs)


# ---- choice ----------------------------------------------------------------------------------------------------------


def _chosen(tree: Tree, at: str, classes: Sequence[str], where: Chosen | None) -> list[str]:
    if where is not None:
        found, looked = (
            [name for module, name in tree.names.items() if name and where(name, module)],
            "where says yes of",
        )
    elif at == "children":
        found, looked = tree.children(), "are direct children with parameters"
    elif at == "attributes":
        found, looked = [name for name in tree.names.values() if name and _marked(tree, name)], "attributes mark"
    else:
        for wanted in classes:
            if not tree.of_class(wanted):
                raise ValueError(
                    f"classes: expected classes of modules in {type(tree.model).__name__}, found no "
                    f"{wanted}{nearest(wanted, tree.classes())}"
                )
        found, looked = (
            [n for n in tree.names.values() if class_of(tree.modules[n]) in classes],
            "are of `classes`",
        )
    found = [name for name in found if name and tree.can_be_unit(name)]
    outermost = [name for name in found if not {*found} & {*list(names_above(name))[1:]}]
    if not outermost:
        raise ValueError(f"at: expected modules that {looked}, found none in {type(tree.model).__name__}")
    return outermost


def _marked(tree: Tree, name: str) -> bool:
    module = tree.modules[name]
    mark = getattr(module, "_activation_checkpointing", None)
    if mark is not None:
        return bool(mark)
    above: Iterable[Any] = (tree.modules[outer] for outer in names_above(name))
    asked = next((outer for outer in above if callable(getattr(outer, "activation_checkpointing_fn", None))), None)
    return asked is not None and bool(asked.activation_checkpointing_fn(module))


def _operators(names: Sequence[str]) -> list[Any]:
    """The overloads of the operators: of "aten.mm" all, of "aten.mm.default" that one."""
    found: list[Any] = []
    for name in names:
        parts = name.removeprefix("torch.ops.").split(".")
        try:
            operator: Any = torch.ops
            for part in parts:
                operator = getattr(operator, part)
            overloads = [operator] if len(parts) > 2 else [getattr(operator, each) for each in operator.overloads()]
        except (AttributeError, RuntimeError):
            raise ValueError(
                f"save: expected names of torch's operators, found {name!r}; such as aten.mm or aten.addmm.default"
            ) from None
        found += overloads
    return found


# ---- host memory -----------------------------------------------------------------------------------------------------


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Tensors that autograd saves inside are held in page-locked host memory; parameters and their views stay."""

    def __init__(self) -> None:
        super().__init__(_to_host, _to_device)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    base = base_of(tensor)
    if isinstance(tensor if base is None else base, nn.Parameter) or tensor.device.type == "cpu":
        return tensor.device, tensor
    host = torch.empty_strided(
        tensor.shape, torch.empty_like(tensor, device="meta").stride(), dtype=tensor.dtype, pin_memory=_can_pin(tensor)
    )
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor if tensor.device == device else tensor.to(device, non_blocking=tensor.is_pinned())


def _can_pin(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and not tensor.is_sparse


def _on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return any(tensor.device.type != "cpu" for tensor in tensors)


def checkpoint_by_config(model: nn.Module, plans: Iterable[UnitPlan], keys: ActivationKeys) -> tuple[str, ...]:
    """`checkpoint_activations` of `model`, whose units are `plans`, as the section `keys` of a configuration says."""
    if keys.at == "none":
        return ()
    blocks = {
        name
        for plan in plans
        for name in plan.modules
        if plan.why not in ("embedding", "root", "experts") and not plan.last
    }
    is_unit = (lambda name, module: name in blocks) if keys.at == "units" else None
    return checkpoint_activations(
        model,
        "children" if keys.at == "units" else keys.at,
        classes=keys.classes,
        where=is_unit,
        every=keys.every,
        recompute=keys.recompute,
        save=keys.save,
        offload=keys.offload,
    )
