"""Bytes that gathers send and that are no parameter, and what would save them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .strategy import Unit, even_dim


@dataclass(frozen=True)
class Padding:
    """Bytes of a parameter that are sent by every gather and are no parameter, over all ranks; and what would save
    them."""

    parameter: str
    nbytes: int
    share: float
    cure: str

    @property
    def by_placement(self) -> bool:
        """Whether another placement saves them."""
        return self.cure.startswith("shard_placement_fn")


def padding_of(units: Sequence[Unit], least: float = 0.01) -> tuple[Padding, ...]:
    """Parameters of whose gathers at least `least` is padding, the worst first; one line for equal ones."""
    found: dict[tuple[tuple[int, ...], int], Padding] = {}
    for unit in units:
        for group in unit.groups:
            for parameter, segment in zip(group.parameters, group.memory.pack.segments, strict=True):
                layout = segment.layout
                waste = layout.padded_full_numel - layout.numel
                if layout.world == 1 or not layout.numel or waste / layout.numel < least or waste < 1024:
                    continue
                nbytes = waste * group.memory.compute_itemsize
                key = (layout.shape, layout.dim)
                known = found.get(key)
                name = parameter.name if known is None else known.parameter
                total = nbytes + (0 if known is None else known.nbytes)
                found[key] = Padding(name, total, waste / layout.numel, _cure(layout.shape, layout.dim, layout.world))
    return tuple(sorted(found.values(), key=lambda padding: -padding.nbytes))


def _cure(shape: tuple[int, ...], dim: int, world: int) -> str:
    even = even_dim(shape, world)
    if even is not None:
        return f"shard_placement_fn: Shard({even}), whose {shape[even]} rows {world} ranks share evenly"
    fewer = max((n for n in range(1, min(world, shape[dim]) + 1) if shape[dim] % n == 0 and world % n == 0), default=1)
    if fewer > 1:
        return f"HSDP with {fewer} ranks that share, or {-(-shape[dim] // world) * world} rows instead of {shape[dim]}"
    return f"{-(-shape[dim] // world) * world} rows instead of {shape[dim]}"
