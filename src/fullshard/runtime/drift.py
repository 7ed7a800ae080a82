"""What several ranks have the same of, and have not any more: buffers, replicas of shards, unsharded parameters.

Nothing brings them together: gradients are averaged, running statistics are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..guard import Scope, ask, scope_of, shown_ranks, tell, variants
from ..param import can_digest, digest, local_data
from .describe import mesh_of, meshes_of, ranks_of
from .names import clean_name, parameter_names
from .unit import Unit, unit_of

_SHOWN = 8


class Drift(NamedTuple):
    """One tensor that differs: its dotted name, "buffer", "replica" or "unsharded parameter", and the ranks that agree
    among each other, those of most ranks first."""

    name: str
    kind: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.name} ({' unlike '.join(shown_ranks(ranks) for ranks in self.ranks)})"


def buffers_on(top: nn.Module, ranks: tuple[int, ...]) -> dict[str, Tensor]:
    """The buffers below `top` whose module is in a unit (or below one) on the mesh of `ranks`, by dotted name."""
    return {
        name: buffer for name, module, on in _modules(top) if on == ranks for name, buffer in _buffers(name, module)
    }


def unsharded_on(top: nn.Module, ranks: tuple[int, ...]) -> dict[str, Tensor]:
    """Likewise the parameters that no unit has (`ignored_params`)."""
    found: dict[str, Tensor] = {}
    for prefix, module, on in _modules(top):
        if on == ranks:
            for name, parameter in module.named_parameters(recurse=False):
                if can_digest(parameter):
                    found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def _modules(top: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Every module once, with its dotted name and the ranks of the nearest unit above it that has parameters."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, mesh: DeviceMesh | None) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
        seen.add(module)
        unit = unit_of(module)
        mesh = (mesh_of(unit) if unit is not None else None) or mesh
        yield clean_name(name), module, () if mesh is None else ranks_of(mesh)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk(f"{name}.{child_name}" if name else child_name, child, mesh)

    yield from walk("", top, None)


def _buffers(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if can_digest(buffer):
            yield f"{prefix}.{name}" if prefix else name, buffer


def differing(scope: Scope, kind: str, tensors: Mapping[str, Tensor]) -> list[Drift]:
    """Those of `tensors` that have other values, shapes or dtypes on some rank of `scope`, all of which call this.

    Names that some ranks do not have are left out. One question where all are equal, two otherwise.
    """
    values = digests_of(tensors)
    text = json.dumps(values, separators=(",", ":"))
    what = f"{kind}s"
    if ask(scope, what, text) is None:
        return []
    by_rank = {rank: json.loads(told) for rank, told in tell(scope, f"{what} in full", text).items()}
    common = [name for name in values if all(name in known for known in by_rank.values())]
    found = []
    for name in sorted(common):
        groups = variants({rank: known[name] for rank, known in by_rank.items()})
        if len(groups) > 1:
            found.append(Drift(name, kind, tuple(tuple(ranks) for ranks in groups.values())))
    return found


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each, a text of its values, shape and dtype. One synchronisation for each device."""
    digests = [digest(tensor) for tensor in tensors.values()]
    numbers = [0] * len(digests)
    by_device: dict[torch.device, list[int]] = {}
    for i, one in enumerate(digests):
        by_device.setdefault(one.device, []).append(i)
    for places in by_device.values():
        for i, number in zip(places, torch.stack([digests[i] for i in places]).tolist(), strict=True):
            numbers[i] = number
    return {
        name: f"{number & (1 << 64) - 1:x} {tuple(tensor.shape)} {tensor.dtype}"
        for number, (name, tensor) in zip(numbers, tensors.items(), strict=True)
    }


def shown(found: Sequence[Drift]) -> str:
    """The first of many."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more


def find_drift(units: Sequence[Unit], top: nn.Module) -> list[Drift]:
    """Everything that differs. Collective: every rank of every mesh of `units` calls it."""
    meshes = meshes_of(units)
    questions = [(ranks, "buffer", buffers_on(top, ranks)) for ranks in meshes]
    questions += [(ranks, "unsharded parameter", unsharded_on(top, ranks)) for ranks in meshes]
    questions += [(ranks, "replica", shards) for ranks, shards in sorted(replicas_of(units, top).items())]
    found: list[Drift] = []
    for ranks, kind, tensors in questions:
        scope = scope_of(ranks)
        if scope is not None:
            scope.resume()
            found += differing(scope, kind, tensors)
    return found


def replicas_of(units: Sequence[Unit], top: nn.Module) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """This rank's shards of which other ranks have copies, by those ranks."""
    names = parameter_names(top, units)
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for unit in units:
        for group, links in zip(unit.groups, unit.links, strict=True):
            if links.replicate is not None:
                shards = found.setdefault(tuple(sorted(links.replicate.ranks)), {})
                for param in group.params:
                    local = local_data(param.sharded)
                    if can_digest(local):
                        shards[names[param]] = local
    return found
