"""Small messages over all axes of a mesh, by which ranks come to one answer. Finished on return."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import backend_of
from ..guard import Scope, scope_of
from .data_group import DataGroup
from .group import all_reduce_over

_TEXT_NBYTES = 1000
# What is waited for, where nobody says more.
_SUM = "a sum between steps"


@contextmanager
def together_over(meshes: Iterable[DeviceMesh], what: str) -> Iterator[None]:
    """Inside all ranks of `meshes` do `what`, outside of a step: `Scope.together`, for those and for their axes."""
    scopes: dict[Scope, None] = {}
    for mesh in dict.fromkeys(meshes):
        axes = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        for ranks in (mesh.mesh.flatten().tolist(), *axes):
            scope = scope_of(ranks)
            if scope is not None:
                scopes[scope] = None
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.together(what))
        yield


def sum_over(mesh: DeviceMesh, counts: Tensor, what: str = _SUM) -> Tensor:
    """The sum of `counts` (any shape, integers) over all ranks of `mesh`, on the device of the mesh. No message over an
    axis of one rank."""
    return _reduce_over(mesh, counts, dist.ReduceOp.SUM, what)


def agreed(value: int, mesh: DeviceMesh, what: str = _SUM) -> bool:
    """Whether `value` (below 2**63) is the same on all ranks of `mesh`."""
    # The least value, and minus the greatest.
    low, high = _reduce_over(mesh, torch.tensor([value, -value]), dist.ReduceOp.MIN, what).tolist()
    return bool(low == -high)


def _reduce_over(mesh: DeviceMesh, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
    values = values.to(mesh.device_type)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            all_reduce_over(values, mesh.get_group(axis), op, what)
    return values


def alike(scope: Scope, said: str) -> bool | None:
    """Whether `said` is the same on all ranks of `scope`, all of which make this call: by 16 bytes over each axis of
    its mesh. None where there are no connections for that: on a device whose group has no backend for the host
    ("nccl" alone; "cpu:gloo,cuda:nccl" is what torch makes of none), and before a root formed.
    """
    groups = [group for group in scope.groups.values() if isinstance(group, DataGroup) and group.purpose == "check"]
    if not groups:
        return None
    value = int.from_bytes(hashlib.blake2s(said.encode(), digest_size=8).digest(), "big") >> 2
    extremes = torch.tensor([value, -value])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    # Along one axis after the other; data groups were opened in the order of the mesh's axes.
    for group in groups:
        # The backend's own: who counts messages, or traces them, counts those of the model.
        group.issue(backend_of(group.group, extremes.device).allreduce, [extremes], options).wait()
    most, least = extremes.tolist()
    return bool(most == -least)


def least_over(groups: Sequence[dist.ProcessGroup], value: Tensor) -> Tensor:
    """The least `value` (any shape) of all ranks of `groups`, one group after the other, in place."""
    for group in groups:
        all_reduce_over(value, group, dist.ReduceOp.MIN)
    return value


def told_by_one(groups: Sequence[dist.ProcessGroup], text: str | None, device: torch.device) -> str:
    """The `text` of the one rank of `groups` that has one, on all of them; cut at a thousand bytes."""
    message = torch.zeros(_TEXT_NBYTES, dtype=torch.int32)
    if text is not None:
        encoded = text.encode()[:_TEXT_NBYTES]
        message[: len(encoded)] = -torch.tensor(list(encoded), dtype=torch.int32)
    message = least_over(groups, message.to(device))
    return bytes((-message).tolist()).rstrip(b"\0").decode(errors="replace")


def joining_groups(meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Process groups over which an extremum is taken, one after the other, so that all ranks of `meshes` have it.

    The axes of one mesh where that has the ranks of all others: a message for each axis of several ranks. Otherwise all
    of them twice: what a rank learns on the last mesh has to reach those it meets on the first one. Every rank gets
    its own groups, in the same order.
    """
    ranks = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in dict.fromkeys(meshes)}
    # Of those that are a part of another one nothing is needed; of equal ones the first is.
    wide = [
        mesh
        for i, (mesh, own) in enumerate(ranks.items())
        if not any(own < other or (own == other and j < i) for j, other in enumerate(ranks.values()))
    ]
    groups = [mesh.get_group(axis) for mesh in wide for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return groups if len(wide) < 2 else [*groups, *groups]
