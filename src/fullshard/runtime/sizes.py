"""Bytes of one parameter group, as its layout has them; the same on every rank."""

from __future__ import annotations

from ..layout import UnitMemory
from ..param import ParamGroup


def memory_of(group: ParamGroup) -> UnitMemory:
    """As far as gathers are concerned."""
    storage, compute, wire = (group.precision.storage, group.precision.compute, group.precision.wire)
    return UnitMemory("", group.pack, group.plan, storage.itemsize, compute.itemsize, wire.itemsize)


def gather_nbytes(group: ParamGroup) -> int:
    """What its gather takes, in bytes."""
    if group.shares_memory:
        return 0
    memory = memory_of(group)
    # Shards on the host are copied to the device first.
    return memory.gather_nbytes + (memory.shard_nbytes if group.placing.offload.to_host else 0)
