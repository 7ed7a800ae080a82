"""Dividing a model's experts over `ep`, and each of them over `etp`: which modules they are, their mesh, their divisor.

The ranks of `dp_shard`, `cp` and `tp` are divided anew: `ep` ranks have different experts, `etp` of them parts of each,
and what is left, EXPERT_SHARDS, cuts parameters. Gradients are divided by the number of ranks of the whole batch.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..comm import ExpertLine
from ..engine.names import clean_name
from ..engine.unit import Unit, unit_of
from ..extras.experts import Experts
from ..extras.fused_experts import FusedExperts, FusedLayout, layout_of
from ..keys import ConfigError
from ..policy import MixedPrecisionPolicy
from .axes import Axes
from .parallelism import ModelShape, Parallelism
from .styles import Style, expanded
from .tensor_parallel import Replaced
from .tree import Tree, class_of
from .wrapping import UnitPlan

EXPERT_SHARDS = "efsdp"
# The dim of each parameter of `Experts` along which `etp` cuts it, beside `ep` along dim 0.
_CUT_BY_ETP = {"gate": 1, "up": 1, "down": 2}


@dataclass(frozen=True)
class ExpertDivision:
    """The modules that are experts, by name, and the meshes. data: the axes of `fully_shard`, (replicate, shard) or
    (shard); own: `ep`, or `ep` and `etp`. None where no expert is divided. ranks: all of the model."""

    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    data: DeviceMesh | None = None
    own: DeviceMesh | None = None


def find_experts(tree: Tree, plan: Parallelism) -> tuple[str, ...]:
    """The names of the modules whose experts `plan` divides. Raises `ConfigError` for a model without, and for modules
    that are none.

    Under tensor parallelism `Experts` are always among them, if over one rank: they work on parts of the tokens."""
    styles, _ = expanded(dict(plan.styles), [name for name in tree.names.values() if name])
    asked = [name for name, style in styles.items() if style.kind == "expert"]
    if plan.expert_parallel_degree == 1:
        if asked:
            problem = "has no effect with expert_parallel_degree = 1"
            raise ConfigError(f'parallelism.styles["{asked[0]}"] = "expert": {problem}; nearest valid: "keep"')
        own = (name for module, name in tree.names.items() if isinstance(module, Experts))
        return tuple(own) if plan.tensor_parallel_degree > 1 else ()
    why = {name: _why_not(tree.modules[name]) for name in asked}
    for name in asked:
        if why[name] is not None:
            raise ConfigError(
                f'parallelism.styles["{name}"] = "expert": expected a module with the weights of all experts as '
                f"gate_up_proj and down_proj, or a fullshard.Experts, found a {class_of(tree.modules[name])}"
                f'{", but " if why[name] else ""}{why[name]}; nearest valid: "keep"'
            )
    kept = {name for name, style in styles.items() if style.kind == "keep"}
    why |= {name: _why_not(module) for module, name in tree.names.items() if name not in kept and name not in why}
    names = [name for name in tree.names.values() if name in why and why[name] is None]
    if not names:
        found = next(
            (f"{name}, a {class_of(tree.modules[name])}, but {text}" for name, text in why.items() if text), ""
        )
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {plan.expert_parallel_degree}: expected experts in "
            f"{class_of(tree.model)}, found {found or 'none'}; nearest valid: expert_parallel_degree = 1"
        )
    if plan.expert_tensor_parallel_degree > 1:
        for name in names:
            layout = fused_layout(tree.modules[name])
            if layout is not None and not layout.can_be_cut:
                raise ConfigError(
                    f"parallelism.expert_tensor_parallel_degree = {plan.expert_tensor_parallel_degree}: expected "
                    f"features of gate and up in two halves or in pairs, so that ranks have parts of both, found "
                    f"another gate in {name}, a {class_of(tree.modules[name])}; nearest valid: 1"
                )
    return tuple(names)


def shape_with_experts(tree: Tree, names: Sequence[str], shape: ModelShape, *, sequence: bool) -> ModelShape:
    """`shape` with the numbers that degrees have to divide: of experts, and of the features of fused ones; where
    layers have different ones, what divides them all. sequence: whether each rank along tp has a part of the tokens,
    which routers of other libraries do not know; raises `ConfigError` for fused experts then."""
    modules: list[Any] = [tree.modules[name] for name in names]
    for name, module in zip(names if sequence else (), modules, strict=False):
        if not isinstance(module, Experts):
            raise ConfigError(
                f"parallelism.styles: expected whole sequences between layers, because each rank along tp sends its "
                f"part of all tokens to the experts {name}, found parts of them; nearest valid: styles without "
                f'"sequence"'
            )
    experts = math.gcd(*(module.num_experts for module in modules))
    width = math.gcd(*(_width(module) for module in modules if not isinstance(module, Experts)))
    return replace(shape, experts=experts, expert_width=width)


def _width(module: Any) -> int:
    """F of fused experts."""
    layout, down = fused_layout(module), module.down_proj
    assert layout is not None
    return int(down.shape[1 if layout.transposed else 2])


def fused_layout(module: nn.Module) -> FusedLayout | None:
    """The layout of fused experts; None of others."""
    if isinstance(module, FusedExperts):
        return module.layout
    found = None if isinstance(module, Experts) else layout_of(module)
    return found if isinstance(found, FusedLayout) else None


def cut_by_etp(module: nn.Module, attribute: str) -> int | None:
    """The dim of a parameter of experts along which `etp` cuts it; None if it is whole on each rank."""
    layout = fused_layout(module)
    return _CUT_BY_ETP[attribute] if layout is None else layout.cut(attribute)


def _why_not(module: nn.Module) -> str | None:
    """None of experts that can be divided; else why not, "" for another module."""
    found = None if isinstance(module, Experts) else layout_of(module)
    return found if isinstance(found, str) else None


def without_experts(styles: Mapping[str, str]) -> dict[str, str]:
    """`styles` without those of experts, which no style of tensor parallelism is."""
    return {name: text for name, text in styles.items() if Style.read(text).kind != "expert"}


# ---- meshes ----------------------------------------------------------------------------------------------------------


def divide_experts(names: Sequence[str], axes: Axes, whole: DeviceMesh) -> ExpertDivision:
    """The meshes of experts, over the ranks of `whole`. Collective, if there are experts to divide."""
    if not names:
        return ExpertDivision()
    shards = axes.shards * axes.tp // (axes.ep * axes.etp)
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, EXPERT_SHARDS: shards, "ep": axes.ep, "etp": axes.etp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name in (EXPERT_SHARDS, "ep")}
    ranks = whole.mesh.reshape(*kept.values())
    mesh = DeviceMesh(whole.device_type, ranks, mesh_dim_names=tuple(kept))
    data = ("dp_replicate", EXPERT_SHARDS) if axes.dp_replicate > 1 else (EXPERT_SHARDS,)
    own = ("ep", "etp") if axes.etp > 1 else ("ep",)
    return ExpertDivision(tuple(names), tuple(mesh[*data, *own].mesh.flatten().tolist()), mesh[data], mesh[own])


def expert_units(tree: Tree, names: Sequence[str], plans: Iterable[UnitPlan]) -> list[UnitPlan]:
    """`plans` with the experts `names` as units of their own, before the units around them."""
    found = [UnitPlan((name,), "experts") for name in names]
    modules = {tree.modules[name] for name in names}
    for plan in plans:
        inside = [name for name in plan.modules if tree.modules[name] in modules]
        if not inside:
            found.append(plan)
        elif len(plan.modules) > 1 or plan.arguments:
            raise ConfigError(
                f"wrap: expected the experts {inside[0]} as a unit of their own, because ep divides them, found them "
                f"in {plan.name}, with arguments or with other modules; leave them out"
            )
    return found


def unit_arguments(module: nn.Module, experts: ExpertDivision, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """The arguments of `fully_shard` for the experts `module`, of a unit with `policy`."""
    assert experts.data is not None and experts.own is not None
    world = experts.data.size(experts.data.ndim - 1)
    here = module.num_experts // experts.own.size(0)  # type: ignore[operator]
    # Whole experts, where their number allows it; else some of the rows of each.
    dim = 0 if here % world == 0 else 1
    # Their forward casts tokens itself, and leaves the weights of the router.
    return {
        "mesh": experts.data,
        "shard_placement_fn": lambda parameter: Shard(dim),
        "mp_policy": replace(policy, cast_forward_inputs=False),
    }


# ---- application -----------------------------------------------------------------------------------------------------


def apply_experts(
    tree: Tree,
    experts: ExpertDivision,
    names: Iterable[str],
    whole: DeviceMesh,
    replaced: Replaced,
    *,
    divided: bool = False,
) -> None:
    """Divide the experts of the modules `names`: each rank keeps its part of its own values. No messages.

    divided: whether each rank along `tp` has its part of the tokens, which `MixtureOfExperts` knows to handle."""
    own = experts.own
    assert own is not None
    for name in names:
        module: Any = tree.modules[name]
        send_by(module)
        tp = whole["tp"].get_group() if "tp" in (whole.mesh_dim_names or ()) else None
        module.line = ExpertLine(own.get_group(0), tp, experts.ranks, _device(whole), cut=own.ndim > 1, name=name)
        module.line.divided = divided
        for attribute, old in dict(module.named_parameters(recurse=False)).items():
            placements: list[Placement] = [Shard(0)]
            if own.ndim > 1:
                dim = cut_by_etp(module, attribute)
                placements.append(Replicate() if dim is None else Shard(dim))
            value = distribute_tensor(old.detach(), own, placements, src_data_rank=None)
            new = nn.Parameter(value, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            module.register_parameter(attribute, new)
            replaced.pairs.append((old, new))


def _device(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def send_by(module: Any) -> None:
    """Put the forward that sends tokens above that of the class of fused experts."""
    if (layout := fused_layout(module)) is not None:
        module.layout = layout
        kind: Any = type(module)
        with _MAKING:
            module.__class__ = _above(kind)


# Two threads that shard experts of one class at the same moment would each make one, and `functools.cache` keep one.
_MAKING = threading.RLock()


@functools.cache
def _above(kind: Any) -> type[nn.Module]:
    """The class of experts with our forward above its own; under its own name."""
    return type(kind.__name__, (FusedExperts, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def divide_gradients(modules: Iterable[nn.Module], axes: Axes) -> None:
    """Set the divisor of experts that were sharded: gradients of an expert are sums over the ranks that sent it
    tokens."""
    for module in modules:
        module.set_gradient_divide_factor(float(axes.averaged))  # type: ignore[operator]


# ---- relations -------------------------------------------------------------------------------------------------------


class Divisors:
    """The divisors of units whose parameters are on fewer ranks than those of a batch: experts."""

    def __init__(self, models: Iterable[nn.Module], axes: Axes) -> None:
        """models: one, or the stages of a pipeline that this rank has."""
        self.axes = axes
        self.fewer: list[tuple[str, Unit, int]] = []
        for name, module in (each for model in models for each in model.named_modules()):
            unit = unit_of(module)
            for group in () if unit is None else unit.groups:
                ranks = group.placing.mesh.size()
                if unit is not None and ranks != axes.averaged:
                    self.fewer.append((clean_name(name) or "the model", unit, ranks))

    def check(self) -> None:
        """Raise `RuntimeError` for one that is not the number of ranks of the whole batch. No messages."""
        batch = self.axes.averaged
        for name, unit, ranks in self.fewer:
            found = unit.settings.controls.divide_factor or ranks
            if found != batch and self.axes.cp > 1 and not isinstance(unit.module, (Experts, FusedExperts)):
                raise RuntimeError(
                    f"cp: expected the parameters of {name} on the {batch} ranks over which gradients are averaged, "
                    f"because those along cp have parts of the same sequences, found a mesh of {ranks} ranks; shard it "
                    f"over dp_shard and cp as one axis, as prepare_fully_shard does"
                )
            if found != batch:
                raise RuntimeError(
                    f"ep: expected the gradients of {name} to be divided by {batch}, the ranks of the whole batch, "
                    f"because experts get tokens of all of them, found {found:g}, on a mesh of {ranks} ranks; call "
                    f"set_gradient_divide_factor({batch}) on it, or leave experts to expert_parallel_degree"
                )
