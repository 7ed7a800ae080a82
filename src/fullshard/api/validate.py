"""Validation of the arguments of `fully_shard`: raises before anything is changed.

Exception types are torch's where programs depend on them (torch 2.13, `fully_shard` and FSDPParam).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .._torch import applied_apis, refuse_distribution
from ..engine import unit_of
from ..engine.names import first_few
from ..engine.unit import refuse_owned
from ..param import Found, check_extension, has_extension
from ..policy import MixedPrecisionPolicy, resolve_offload
from ..policy.arguments import expect_callable, expect_each, expect_flag, expect_known_fields
from ..policy.options import check_cast_inputs

_log = logging.getLogger(__name__)


def not_built(argument: str, value: object, instead: str) -> NotImplementedError:
    """The error for an argument that torch accepts and this version does not."""
    return NotImplementedError(f"{argument}: expected what this version of fullshard has, found {value!r}; {instead}")


def check_modules(module: object) -> list[nn.Module]:
    """The modules to shard as one unit: one, or those of a list that are inside no other of it."""
    if not isinstance(module, (list, tuple)):
        return [_check_module(module)]
    if not module:
        raise ValueError(
            "module: expected at least one module, found an empty list; pass the modules to shard together"
        )
    modules = [_check_module(item) for item in module]
    if len(set(modules)) < len(modules):
        raise AssertionError("module: expected each module once, found one of them twice in the list; name it once")
    return [m for m in modules if not any(m is not other and m in other.modules() for other in modules)]


def _check_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, found {type(module).__name__}; pass the module itself")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _has_forward(module):
        raise ValueError(
            f"module: expected one with a forward, found {type(module).__name__}, whose forward never runs; "
            f"call fully_shard on each of its {len(module)} modules"
        )
    if unit_of(module) is not None:
        raise AssertionError(
            f"module: expected one that is not sharded yet, found {type(module).__name__}, to which fully_shard was "
            f"applied before; apply it once to each module"
        )
    if "fully_shard" in applied_apis(module):
        raise AssertionError(
            f"module: expected one that is not sharded yet, found {type(module).__name__}, to which torch's "
            f"fully_shard was applied before; use one of the two"
        )
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None and unit.root is not None:
            raise RuntimeError(
                f"module: expected parts that did not run yet, found {name}, which ran (or was unsharded) before; "
                f"shard the whole model bottom-up before its first forward"
            )
    return module


def check_reshard(value: object) -> bool | int | None:
    """`reshard_after_forward`."""
    if value is None or isinstance(value, int):
        return value
    raise ValueError(
        f"reshard_after_forward: expected None, a bool or an int, found {value!r}; use None for torch's default"
    )


def check_optional(value: object, roots: Sequence[nn.Module]) -> bool:
    """`optional`, for the unit of `roots`."""
    optional = expect_flag("optional", value)
    if optional and len(roots) > 1:
        raise ValueError(
            f"optional: expected one module, found {len(roots)}, of which some may run and others not; apply "
            f"fully_shard to each of them"
        )
    return optional


def degree_of(reshard: bool | int | None, worlds: Sequence[int]) -> tuple[bool | None, int | None]:
    """`reshard_after_forward` without integers, and the number of ranks to reshard over (None: all).

    worlds: the number of shard ranks, for each mesh of the unit. 1 keeps full parameters, which is False; the whole
    world keeps the shards, which is True.
    """
    if reshard is None or isinstance(reshard, bool):
        return reshard, None
    for world in worlds:
        if reshard < 1 or world % reshard:
            raise ValueError(
                f"reshard_after_forward: If passing an int, it should be a factor of {world}, the ranks that share "
                f"parameters, not {reshard}; use the ranks of a node, or True"
            )
    if all(world == reshard for world in worlds):
        return True, None
    if reshard == 1:
        _log.warning(
            "reshard_after_forward=1 keeps the full parameters of each rank between forward and backward, as False; "
            "pass True to free them"
        )
        return False, None
    return True, reshard


def check_kept(found: Iterable[Found], degree: int, dp_mesh_dims: Any) -> None:
    """Raise for parameters that cannot be resharded to a smaller world; torch's exception type."""
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"reshard_after_forward={degree}: expected a data-parallel mesh, found dp_mesh_dims; use True or False"
        )
    for item in found:
        if isinstance(item.parameter, DTensor):
            raise NotImplementedError(
                f"reshard_after_forward={degree}: expected plain parameters, found that {item.name} is a DTensor with "
                f"placements {item.parameter.placements}; use True or False"
            )
        if has_extension(item.parameter, item.name):
            raise NotImplementedError(
                f"reshard_after_forward={degree}: expected plain parameters, found that {item.name} is a "
                f"{type(item.parameter.detach()).__name__} with fsdp_pre_all_gather; use True or False"
            )


# The fields of a policy that the engine reads. Another one that is set is an error, never ignored.
_POLICY = tuple(field.name for field in fields(MixedPrecisionPolicy))


def check_policies(mp_policy: Any, offload_policy: Any, shard_placement_fn: Any, dp_mesh_dims: Any) -> None:
    """Raise for policies of the wrong type, or unsupported ones."""
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"):
        if not hasattr(mp_policy, field):
            raise TypeError(
                f"mp_policy: expected a MixedPrecisionPolicy, found {mp_policy!r}; "
                f"use fullshard.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)"
            )
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"mp_policy.{field}: expected a floating-point torch.dtype or None, found {dtype!r}")
    check_cast_inputs("mp_policy.cast_forward_inputs", mp_policy.cast_forward_inputs)
    override = getattr(mp_policy, "param_dtype_override_fn", None)
    expect_callable("mp_policy.param_dtype_override_fn", override, "a function of a parameter", or_none=True)
    expect_known_fields("mp_policy", mp_policy, _POLICY)
    resolve_offload(offload_policy, "cpu")
    expect_flag("offload_policy.pin_memory", getattr(offload_policy, "pin_memory", False))
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            f"shard_placement_fn: expected a function of a parameter, found {shard_placement_fn!r}; "
            f"return Shard(dim) or None from it"
        )
    if dp_mesh_dims is not None:
        expect_known_fields("dp_mesh_dims", dp_mesh_dims, ("shard", "replicate"))
    if dp_mesh_dims is not None and not (hasattr(dp_mesh_dims, "shard") and hasattr(dp_mesh_dims, "replicate")):
        raise TypeError(
            f"dp_mesh_dims: expected a DataParallelMeshDims, found {dp_mesh_dims!r}; "
            f"use DataParallelMeshDims(shard=..., replicate=...)"
        )


def _expect_device_of_this_rank(device_type: str) -> None:
    """Raise `ValueError` where the launcher started more processes on this machine than it has devices: DeviceMesh
    takes the device of a rank from LOCAL_RANK unless the program chose one, and fails with an error of the driver."""
    chosen = getattr(torch.get_device_module(device_type), "is_initialized", None)
    if chosen is not None and chosen():
        return
    count, local = torch.accelerator.device_count(), os.environ.get("LOCAL_RANK", "0")
    if local.isdecimal() and int(local) >= count:
        raise ValueError(
            f"mesh: expected a {device_type} device for each process of this machine, found {count} of them and "
            f"LOCAL_RANK {local}; start one process for each (--nproc-per-node {count}), or train on the processor: "
            f'fully_shard(..., mesh=init_device_mesh("cpu", (world_size,)))'
        )


# Names of axes along which parameters are cut, in torchtitan, Accelerate and NeMo.
_SHARDING_AXES = ("dp_shard", "fsdp", "shard")


def resolve_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh: (shard) or (replicate, shard).

    None: all ranks of the default group, which is initialised if needed.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator()
        device_type = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
        if device_type != "cpu":
            _expect_device_of_this_rank(device_type)
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, found {type(mesh).__name__}; use init_device_mesh")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), found {mesh.ndim}; pass the axes to shard over"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            f"mesh: expected names for 2 axes, of which the first replicates and the second shards, found {mesh}; "
            f"use init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 2 and names[0] in _SHARDING_AXES and names[1] == "cp":
        raise ValueError(
            f"mesh: expected {names[0]} and cp folded into one axis, found them as two, of which the first would have "
            f"copies (HSDP), in {mesh.size(0)} times the memory; pass "
            f'mesh["{names[0]}", "cp"]._flatten("{names[0]}_cp")'
        )
    if mesh.ndim == 2 and names[0] in _SHARDING_AXES:
        warnings.warn(
            f"mesh: expected a first axis with copies, found {names[0]!r} of {mesh.size(0)} ranks, each of which then "
            f"has a copy of what the others have (HSDP); to shard over both axes, pass "
            f"mesh[{', '.join(map(repr, names))}]._flatten()",
            UserWarning,
            stacklevel=3,
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: expected one that this rank is in, found {mesh} on rank {dist.get_rank()}; call fully_shard on the "
            f"ranks of the mesh alone, or give this rank a mesh of its own"
        )
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def check_ignored(ignored_params: Iterable[object] | None) -> set[nn.Parameter]:
    """`ignored_params` as a set of the module's parameters."""
    if ignored_params is None:
        return set()
    wanted = "nn.Parameters, the objects themselves"
    return set(expect_each("ignored_params", ignored_params, lambda one: isinstance(one, nn.Parameter), wanted))


def check_swap(root: nn.Module, made: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Raise `TypeError` if `root` cannot become an instance of the class that `made` returns for its own."""
    original = type(root)
    try:
        root.__class__ = made(original)
        root.__class__ = original
    except Exception as error:
        raise TypeError(
            f"module: expected one whose class can become a subclass of itself and FSDPModule, found "
            f"{original.__name__} ({type(error).__name__}: {error}); put it into a module of your own, and shard that"
        ) from error


def check_scripted(
    modules: Iterable[tuple[str, nn.Module]], found: Iterable[Found], roots: Sequence[nn.Module]
) -> None:
    """Raise for modules of `torch.jit`, whose hooks, class and parameters cannot be changed; torch's type."""
    changed = {*roots, *(slot.module for item in found for slot in item.slots)}
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule) and module in changed:
            raise RuntimeError(
                f"module: expected modules of Python, found {f'{name} below ' if name else ''}{_names(roots)}, a "
                f"{type(module).__name__}, on which no parameter can be replaced; shard the original and use "
                f"torch.compile, or put its parameters into ignored_params and leave it outside of a sharded module"
            )


def warn_of_gradients(found: Iterable[Found]) -> None:
    """Warn, as Python warns: once for a program, if gradients from before are dropped."""
    if any(item.parameter.grad is not None for item in found):
        # Without names: Python shows equal texts once.
        warnings.warn(
            "fully_shard: expected parameters without gradients, found .grad from before, which the sharded parameters "
            "do not take over, as in torch; shard before the first backward, or call zero_grad() first",
            stacklevel=3,
        )


def refuse_parallelism(modules: Iterable[tuple[str, nn.Module]], found: Iterable[Found], name: str) -> None:
    """Let `parallelize_module` say so where it comes too late: for modules with parameters of the unit `name`."""
    own = {slot.module for item in found for slot in item.slots}
    modules = list(modules)
    parts = [path.split(".") if path else [] for path, module in modules if module in own]
    outer = {".".join(part[:length]) for part in parts for length in range(len(part) + 1)}
    for path, module in modules:
        if path in outer:
            refuse_distribution(
                module,
                f"parallelize_module: expected tensor parallelism before fully_shard, found that the parameters of "
                f"{path or name} ({type(module).__name__.removeprefix('FSDP')}) belong to the unit {name}, which cut "
                f"them already; build the model again, call parallelize_module(model, mesh['tp'], plan) first, and "
                f"then fully_shard(..., mesh=mesh['dp']), on another axis of one mesh",
            )


def check_averaged(found: Iterable[Found], roots: Sequence[nn.Module]) -> None:
    """Raise for parameters whose gradients DistributedDataParallel or torch's `replicate` already averages.

    torch's FSDP2 accepts them, and the other one then waits for gradients of parameters that no longer exist.
    """
    parameters = {item.parameter for item in found}
    for root in roots:
        for name, module in root.named_modules():
            by = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else None
            by = "torch's replicate" if "replicate" in applied_apis(module) else by
            if by is not None and any(parameter in parameters for parameter in module.parameters()):
                raise RuntimeError(
                    f"module: expected parameters whose gradients nobody else averages, found "
                    f"{name or type(root).__name__} under {by}; use one of the two (for copies of shards: a mesh of "
                    f"two axes), or name its parameters in ignored_params"
                )


def check_parameters(found: Iterable[Found], roots: Sequence[nn.Module]) -> None:
    """Check the parameters of the unit of `roots`, before any of them is sharded."""
    module_name = _names(roots)
    for item in found:
        parameter, name = item.parameter, item.name
        refuse_owned(item, module_name, roots)
        check_extension(parameter, name)
        if parameter.ndim == 0:
            raise ValueError(
                f"{name}: expected a parameter with at least one dim, found a scalar. "
                f"Change {name} to a 1D tensor with numel equal to 1, or keep it whole on every rank: name it in "
                f"ignored_params, or in wrap.ignored of prepare_fully_shard, and average its gradient in your own code"
            )
        if not parameter.is_contiguous():
            raise NotImplementedError(
                f"{name}: expected a contiguous parameter, found strides {parameter.stride()} for shape "
                f"{tuple(parameter.shape)}; make it contiguous before fully_shard"
            )


def check_inference(found: Iterable[Found], roots: Sequence[nn.Module]) -> None:
    """Raise `RuntimeError` where shards would be inference tensors, which do not count the writes to them."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{_names(roots)}: expected fully_shard to be called outside of torch.inference_mode(), found it enabled: "
            f"shards made there do not count the writes to them; shard the model first, and run its forward inside"
        )
    made = [item.name for item in found if item.parameter.is_inference() and not item.parameter.is_meta]
    if made:
        raise RuntimeError(
            f"{_names(roots)}: expected parameters made outside of torch.inference_mode(), found {first_few(made)} "
            f"made inside: they do not count the writes to them; build or load the model under torch.no_grad() instead"
        )


def _names(roots: Sequence[nn.Module]) -> str:
    return "+".join(type(root).__name__ for root in roots)


def check_sharded(modules: object, what: str, unit: Callable[[nn.Module], Any]) -> list[Any]:
    """The units of `modules`, any iterable, such as an `nn.ModuleList`; `what` names it in errors."""
    if not isinstance(modules, Iterable) or isinstance(modules, Mapping):
        raise TypeError(
            f"{what}: expected a list of sharded modules, found {type(modules).__name__}; put it into a list"
        )
    units = []
    for module in modules:
        found = unit(module) if isinstance(module, nn.Module) else None
        if found is None:
            raise ValueError(
                f"{what}: expected modules to which fully_shard was applied, found {type(module).__name__}; "
                f"apply it first"
            )
        units.append(found)
    return units


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Module.forward)
