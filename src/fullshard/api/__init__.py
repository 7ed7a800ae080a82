"""The public surface: thin, and the only place that raises errors about what the caller gave."""

from ..comm import PeerFailed as PeerFailed
from ..comm import RanksDisagree as RanksDisagree
from .check_gradients import GradientCheck as GradientCheck
from .check_gradients import NonFiniteError as NonFiniteError
from .check_gradients import check_gradients as check_gradients
from .clip import clip_grad_norm_ as clip_grad_norm_
from .forward_method import register_fsdp_forward_method as register_fsdp_forward_method
from .full_params import full_params as full_params
from .fully_shard import fully_shard as fully_shard
from .grad_scaler import GradScaler as GradScaler
from .guard import guard as guard
from .info import UnitInfo as UnitInfo
from .info import inspect_units as inspect_units
from .install import Installation as Installation
from .install import install as install
from .install import uninstall as uninstall
from .materialize import mark_initialized as mark_initialized
from .materialize import materialize as materialize
from .module import FSDPModule as FSDPModule
from .module import UnshardHandle as UnshardHandle
from .module import share_comm_ctx as share_comm_ctx
from .optimizer import step_on_shards as step_on_shards
from .placement import ShardPlacementResult as ShardPlacementResult
from .replicate import replicate as replicate
from .step_in_backward import StepInBackward as StepInBackward
from .step_in_backward import step_in_backward as step_in_backward
