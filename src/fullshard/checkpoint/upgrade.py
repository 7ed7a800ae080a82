"""Checkpoints of an older schema, rewritten in the newest."""

from __future__ import annotations

import os
from collections.abc import Callable

from .api import Location, open_checkpoint
from .directory import clear_older, is_free
from .errors import CheckpointMismatch
from .files import doing
from .manifest import SCHEMA
from .writing import CheckpointWriter


def upgrade(
    checkpoint_id: Location, out: Location | None = None, *, progress: Callable[[str, int], object] | None = None
) -> bool:
    """Write the checkpoint in `checkpoint_id`, of any schema, to `out` in the newest; without `out`, if it is older,
    as its own next generation. Returns whether anything was written. One process alone.

    Tensor by tensor, each byte checked, and atomic as a save: until the end, and after an error or a kill, the old one
    is there, and the next call writes the new one, also where a killed one left an unfinished `out`. It needs as much
    space on the disk as the checkpoint has. `progress`: called with the key and the bytes of each tensor.

    Raises `CheckpointMismatch` if something is at `out`, `CheckpointDamaged`, `CheckpointIOError`.
    """
    with open_checkpoint(checkpoint_id) as found:
        manifest = found.manifest
        if out is None and manifest.schema == SCHEMA:
            with doing(f"upgrading {checkpoint_id}"):
                clear_older(os.fspath(checkpoint_id))
            return False
        target = checkpoint_id if out is None else out
        if out is not None and not is_free(os.fspath(out)):
            raise CheckpointMismatch(f"upgrading {checkpoint_id}: expected a place that is free, found", [str(out)])
        values = {entry.path: entry.value for entry in manifest.values.values()}
        with CheckpointWriter(target, [entry.spec for entry in manifest.tensors.values()], values) as writer:
            for key, entry in manifest.tensors.items():
                writer.write(key, found.tensor(key))
                if progress is not None:
                    progress(key, entry.nbytes)
    return True
