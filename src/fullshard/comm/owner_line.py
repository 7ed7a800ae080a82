"""The ranks over which the parts of matrices are, and what they send when each matrix is stepped whole by its owner."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..peers import Scope, scope_of
from .data_group import DataGroup, Line, Work, can_cut, data_group, open_data_group
from .exchange import texts_of
from .group import backend_name, group_beside, message_device, other_backend
from .messages import messenger

# Groups over several axes of a mesh, by the ranks, for as long as the group of its first axis exists.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def owner_ranks(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The coordinates in `mesh` of the ranks that differ from this one along `axes` at most, in row-major order."""
    here = mesh.get_coordinate()
    assert here is not None
    found: list[tuple[int, ...]] = [()]
    for axis in range(mesh.ndim):
        places = range(mesh.size(axis)) if axis in axes else (here[axis],)
        found = [(*known, place) for known in found for place in places]
    return tuple(found)


class OwnerLine:
    """These ranks, and their messages of tensors on `device`. Making one over several axes is collective over them;
    without axes it is this rank alone, which sends nothing."""

    def __init__(self, mesh: DeviceMesh, axes: Sequence[int], device: torch.device) -> None:
        self.ranks = tuple(int(mesh.mesh[place]) for place in owner_ranks(mesh, axes))
        self.rank = self.ranks.index(dist.get_rank())
        self.device = device
        self._line: Line | None = None
        if not axes:
            return
        first = mesh.get_group(axes[0])
        elsewhere = message_device(str(dist.get_backend_config(first)), device)
        # Where its messages are; tensors of another device are copied.
        self.device = device if elsewhere is None else torch.device(elsewhere)
        origin = first
        everyone = dist.group.WORLD
        if len(axes) > 1 and everyone is not None and self.ranks == tuple(dist.get_process_group_ranks(everyone)):
            origin = everyone
        elif len(axes) > 1:
            known = _groups.setdefault(first, {})
            if self.ranks not in known:
                scope = scope_of(self.ranks)
                if scope is not None:
                    scope.resume()
                backend = other_backend(first)
                made = group_beside(scope, self.ranks, first, self.device, backend, "fullshard_owners")
                known[self.ranks] = made
            origin = known[self.ranks]
        self._line = Line(origin, self._data_group(origin))
        self._texts = messenger(origin, "owner")

    def _data_group(self, origin: dist.ProcessGroup) -> DataGroup | None:
        """The connections of a unit's messages, where there are any: a communicator more costs memory."""
        backend = backend_name(origin, self.device)
        if not can_cut(backend):
            return None
        known = data_group(origin, "data")
        if known is not None and known.device.type == self.device.type:
            return known
        scope = scope_of(self.ranks)
        return None if scope is None else open_data_group(scope, origin, self.device, backend, "owners")

    @property
    def scope(self) -> Scope | None:
        """The scope whose failures end its messages, if its backend has any."""
        return None if self._line is None or self._line.data_group is None else self._line.data_group.scope

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All these ranks do `what` inside: an exception on one is reported to all, and a rank that does not come is
        named."""
        if self.scope is None:
            yield
            return
        with self.scope.together(what):
            yield

    def exchange(self, out: Tensor, pieces: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Work:
        """All-to-all of bytes: `leaving[r]` bytes of `pieces` go to the rank at r, `arriving[r]` of `out` come from it.
        Both must not change, and must be kept, until the work is over."""
        assert self._line is not None
        return self._line.exchange(out, pieces, arriving, leaving)

    def told(self, mine: str) -> dict[int, str]:
        """The texts of all these ranks, by rank of the default group. Collective; each different text travels once."""
        return {self.ranks[number]: text for text, numbers in texts_of(self._texts, mine) for number in numbers}

    def same(self, mine: str) -> bool:
        """Whether `mine` is the same on all these ranks. Collective, 16 bytes."""
        return self._line is None or self._texts.is_same(mine)
