"""Where a model's values come from: given on each rank, sent by rank 0, made by its initialisers, or read from files.

Rank 0's values are sent unit by unit, just before each unit is sharded: a rank holds its shards and one whole unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..api import materialize, sync_module_states
from ..checkpoint.formats import load_pretrained
from ..comm import sum_over
from ..engine.uninitialized import find_uninitialized, shown
from ..engine.unit import module_units
from ..param import local_data
from .config import InitialisationKeys
from .tree import Tree

Init = Callable[[nn.Module], object]


def source_of(model: nn.Module, keys: InitialisationKeys, mesh: DeviceMesh) -> str:
    """`keys.source` with "auto" resolved, which looks at all ranks. Collective.

    Raises `ValueError` on every rank if tensors are on the meta device where the source wants values, or the reverse.
    """
    meta = [name for name, tensor in _tensors(model).items() if local_data(tensor).is_meta]
    whole = bool(meta) and all(local_data(p).is_meta for p in model.parameters())
    rank = torch.distributed.get_rank()
    at_first = rank == mesh.mesh.flatten()[0].item()
    # By rank: all parameters on the meta device, a part of its tensors, none; and rank 0 for itself.
    told = torch.tensor([whole, bool(meta) and not whole, not meta, at_first and not meta], dtype=torch.int32)
    if torch.distributed.get_backend() == "fake":
        # torch's fake group, which plans and tests use, brings no sums: all ranks are taken to be as this one.
        told *= torch.tensor([mesh.size()] * 3 + [1], dtype=torch.int32)
    else:
        told = sum_over(mesh, told, "the initialisation of prepare_fully_shard")
    all_meta, partly, none, first_has = told.tolist()
    is_mixed = bool(first_has) and all_meta == mesh.size() - 1 and none == 1
    source = keys.source
    if source == "auto":
        if none == mesh.size():
            return "given"
        if not none:
            return "meta"
        source = "mixed"
    problem = ""
    if source in ("given", "cpu") and none < mesh.size():
        there = f" ({shown(meta)} here)" if meta else ""
        problem = f'values on every rank, found tensors on the meta device{there}; use source = "meta" or "mixed"'
    elif source == "mixed" and not is_mixed and mesh.size() > 1:
        problem = (
            f"values on rank 0 and all parameters of the others on the meta device, found {none} of {mesh.size()} "
            f"ranks with values, {all_meta} on the meta device and {partly} with some of each; build the model under "
            f'torch.device("meta") on all ranks but rank 0'
        )
    elif source == "meta" and none:
        problem = f'tensors on the meta device, found {none} of {mesh.size()} ranks without; use source = "given"'
    if problem:
        raise ValueError(f'initialisation.source = "{keys.source}": expected {problem}')
    return source


def send_values(tree: Tree, names: Iterable[str], mesh: DeviceMesh, inner: set[nn.Module]) -> None:
    """Give all ranks of `mesh` rank 0's parameters and buffers of the unit of `names`; `inner`: modules that are units.

    Tensor objects stay, also those on the meta device, so that an optimizer keeps them. Collective.
    """
    if mesh.size() == 1:
        return
    bag = nn.Module()
    originals: dict[str, Tensor] = {}
    for name in names:
        for below, module in _own(tree, name, inner):
            prefix = f"{below}." if below else ""
            for attribute, parameter in module.named_parameters(recurse=False):
                if not any(parameter is known for known in originals.values()):
                    originals[f"{prefix}{attribute}"] = parameter
            for attribute, buffer in module.named_buffers(recurse=False):
                if not any(buffer is known for known in originals.values()):
                    originals[f"{prefix}{attribute}"] = buffer
    for name, tensor in originals.items():
        key = name.replace(".", "/")  # torch's modules have no dots in names
        if isinstance(tensor, nn.Parameter):
            bag.register_parameter(key, tensor)
        else:
            bag.register_buffer(key, tensor)
    sync_module_states(bag, mesh)
    for name, tensor in originals.items():
        sent: Tensor = getattr(bag, name.replace(".", "/"))
        if sent is not tensor:
            torch.utils.swap_tensors(tensor, sent)


def _own(tree: Tree, name: str, inner: set[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    module = tree.modules[name]
    yield name, module
    for child, found in module.named_children():
        if found not in inner:
            yield from _own(tree, f"{name}.{child}" if name else child, inner)


def fill(
    model: nn.Module, source: str, keys: InitialisationKeys, init: Init | None, *, progress: bool
) -> tuple[str, ...]:
    """Make or load the values of the sharded `model`; returns the names of what is left uninitialised. Collective."""
    if source == "meta":
        materialize(model, init=init, seed=keys.seed)
    elif source == "pretrained":
        load_pretrained(
            model,
            keys.path,
            allow_missing=keys.allow_missing,
            allow_unexpected=keys.allow_unexpected,
            init=init,
            seed=keys.seed,
            progress=progress,
        )
    else:
        return ()
    units = list(dict.fromkeys(module_units(model)))
    return tuple(find_uninitialized(units, model).names)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
