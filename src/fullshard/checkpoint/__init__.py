"""Checkpoints that are whole or absent: saved by any number of ranks, loaded by any other, every byte checked.

    from fullshard import checkpoint

    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    checkpoint.save(state, checkpoint_id="out/step-100")

Read in this order: `manifest` (what is in a checkpoint), `directory` (how it becomes current), `plan` (who has which
part), `saving`, `loading`. docs/checkpoints.md says what is promised.
"""

from .api import RandomState as RandomState
from .api import async_save as async_save
from .api import derived_seed as derived_seed
from .api import inspect as inspect
from .api import is_complete as is_complete
from .api import latest as latest
from .api import load as load
from .api import open_checkpoint as open_checkpoint
from .api import retain as retain
from .api import save as save
from .api import verify as verify
from .background import close as close
from .errors import CheckpointBusy as CheckpointBusy
from .errors import CheckpointDamaged as CheckpointDamaged
from .errors import CheckpointError as CheckpointError
from .errors import CheckpointIOError as CheckpointIOError
from .errors import CheckpointMismatch as CheckpointMismatch
from .errors import CheckpointNotFound as CheckpointNotFound
from .manifest import Manifest as Manifest
from .plan import TensorSpec as TensorSpec
from .saving import CheckpointWriter as CheckpointWriter
from .state import get_state_dict as get_state_dict
from .state import set_state_dict as set_state_dict

__all__ = [
    "CheckpointBusy",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIOError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointWriter",
    "Manifest",
    "RandomState",
    "TensorSpec",
    "async_save",
    "close",
    "derived_seed",
    "get_state_dict",
    "inspect",
    "is_complete",
    "latest",
    "load",
    "open_checkpoint",
    "retain",
    "save",
    "set_state_dict",
    "verify",
]
