"""What the groups of a unit keep between forward and backward, where `reshard_after_forward` is an integer.

Groups without a block (all their ranks together are the k ranks) are freed in full, and gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm import GatherChannel, Links
from ..param import NarrowedGroup, ParamGroup
from .channels import Channels


class Narrowing:
    """`parts[i]` is what `groups[i]` keeps; `widens[i]` gathers it from that, or from all ranks where that is None."""

    def __init__(
        self,
        groups: Sequence[ParamGroup] = (),
        links: Sequence[Links] = (),
        gathers: Sequence[GatherChannel] = (),
        channels: Channels | None = None,
    ) -> None:
        self._groups = groups
        self.parts: list[NarrowedGroup | None] = []
        self.widens: list[GatherChannel] = []
        for group, link, gather in zip(groups, links, gathers, strict=True):
            part = None
            if link.block is not None:
                assert channels is not None
                part = NarrowedGroup(group, link.block.mesh)
                gather = channels.widen(group, part, link.block)
            self.parts.append(part)
            self.widens.append(gather)
        self._kept = [part for part in self.parts if part is not None]

    @property
    def live_nbytes(self) -> int:
        """Bytes of the parts that are there now."""
        return sum(part.memory.live_nbytes for part in self._kept)

    def keep(self) -> None:
        """Keep this rank's part of the full parameters, which are given back."""
        for group, part in zip(self._groups, self.parts, strict=True):
            if part is None:
                group.show_shards()
            else:
                part.keep()
                part.show()
            group.memory.release()

    def release(self) -> None:
        """The parts were gathered, or are not needed."""
        for part in self._kept:
            part.release()

    def show_shards(self) -> None:
        """Put the sharded parameters back where kept parts stand."""
        for part in self._kept:
            part.show_shards()

    def is_aliased(self) -> bool:
        """As `ParamGroup.is_aliased` for all groups, while kept parts or shards stand on the modules."""
        pairs = zip(self._groups, self.parts, strict=True)
        return all(group.is_aliased() if part is None else part.is_aliased() for group, part in pairs)
