"""Which axes of a mesh mean data parallelism, when the mesh has others too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel axes of a full mesh; names and meaning are those of torch's class.

    shard: axes over which parameters are sharded; several are taken as one, in their order.
    replicate: axes over which shards are repeated; likewise.

    Raises `ValueError` when neither is given.

    >>> DataParallelMeshDims(shard=("dp", "cp")).shard_names
    ('dp', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims: expected the name of at least one data-parallel axis, found neither shard nor "
                "replicate; name the axes of the mesh to shard over, as in DataParallelMeshDims(shard='dp')"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in `shard`, none, one or several."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in `replicate`, none, one or several."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
