"""Checkpoints that are whole or absent: saved by any number of ranks, loaded by any other, every byte checked.

    from fullshard import checkpoint

    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    checkpoint.save(state, checkpoint_id="out/step-100")

Reading order: `manifest` (the contents of a checkpoint), `directory` (how it becomes current), `plan` (who holds which
part), `saving`, `loading`. docs/checkpoints.md lists the guarantees.
"""

from .api import (
    RandomState,
    async_save,
    derived_seed,
    inspect,
    is_complete,
    latest,
    list_checkpoints,
    load,
    open_checkpoint,
    recover,
    retain,
    save,
    set_aside,
    verify,
    wait,
)
from .background import SaveFuture, Waited, close
from .errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatch,
    CheckpointNotFound,
)
from .manifest import Manifest
from .plan import TensorSpec
from .retention import CheckpointInfo
from .state import get_state_dict, set_state_dict
from .writing import CheckpointWriter

__all__ = [
    "CheckpointBusy",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIOError",
    "CheckpointInfo",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointWriter",
    "Manifest",
    "RandomState",
    "SaveFuture",
    "TensorSpec",
    "Waited",
    "async_save",
    "close",
    "derived_seed",
    "get_state_dict",
    "inspect",
    "is_complete",
    "latest",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "recover",
    "retain",
    "save",
    "set_aside",
    "set_state_dict",
    "verify",
    "wait",
]
