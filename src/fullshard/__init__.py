"""Fully sharded data parallel training for PyTorch. `from fullshard import fully_shard`; see the README."""

from ._version import __version__ as __version__
from .api import Drift as Drift
from .api import FSDPModule as FSDPModule
from .api import GradScaler as GradScaler
from .api import Installation as Installation
from .api import PeerFailed as PeerFailed
from .api import RanksDisagree as RanksDisagree
from .api import ShardPlacementResult as ShardPlacementResult
from .api import UnshardHandle as UnshardHandle
from .api import clip_grad_norm_ as clip_grad_norm_
from .api import find_drift as find_drift
from .api import full_params as full_params
from .api import fully_shard as fully_shard
from .api import guard as guard
from .api import install as install
from .api import mark_initialized as mark_initialized
from .api import mark_restored as mark_restored
from .api import materialize as materialize
from .api import register_fsdp_forward_method as register_fsdp_forward_method
from .api import replicate as replicate
from .api import share_comm_ctx as share_comm_ctx
from .api import step_on_shards as step_on_shards
from .api import sync_module_states as sync_module_states
from .api import uninstall as uninstall
from .extras import GradientCheck as GradientCheck
from .extras import MicroBatches as MicroBatches
from .extras import NonFiniteError as NonFiniteError
from .extras import Replay as Replay
from .extras import ReplayError as ReplayError
from .extras import StepInBackward as StepInBackward
from .extras import Turn as Turn
from .extras import check_gradients as check_gradients
from .extras import joined as joined
from .extras import replay as replay
from .extras import step_in_backward as step_in_backward
from .observe import Report as Report
from .observe import UnitInfo as UnitInfo
from .observe import inspect_units as inspect_units
from .observe import report as report
from .policy import CPUOffloadPolicy as CPUOffloadPolicy
from .policy import DataParallelMeshDims as DataParallelMeshDims
from .policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policy import OffloadPolicy as OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Drift",
    "FSDPModule",
    "GradScaler",
    "GradientCheck",
    "Installation",
    "MicroBatches",
    "MixedPrecisionPolicy",
    "NonFiniteError",
    "OffloadPolicy",
    "PeerFailed",
    "RanksDisagree",
    "Replay",
    "ReplayError",
    "Report",
    "ShardPlacementResult",
    "StepInBackward",
    "Turn",
    "UnitInfo",
    "UnshardHandle",
    "__version__",
    "check_gradients",
    "clip_grad_norm_",
    "find_drift",
    "full_params",
    "fully_shard",
    "guard",
    "inspect_units",
    "install",
    "joined",
    "mark_initialized",
    "mark_restored",
    "materialize",
    "register_fsdp_forward_method",
    "replay",
    "replicate",
    "report",
    "share_comm_ctx",
    "step_in_backward",
    "step_on_shards",
    "sync_module_states",
    "uninstall",
]
