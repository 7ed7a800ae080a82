"""The public API: a thin layer, and the only one that validates the caller's arguments."""

from ..guard import PeerFailed as PeerFailed
from ..guard import RanksDisagree as RanksDisagree
from .clip import GradScaler as GradScaler
from .clip import clip_grad_norm_ as clip_grad_norm_
from .full_params import full_params as full_params
from .fully_shard import fully_shard as fully_shard
from .fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
from .fully_shard import replicate as replicate
from .guard import guard as guard
from .guard import mark_restored as mark_restored
from .install import Installation as Installation
from .install import install as install
from .install import uninstall as uninstall
from .materialize import Drift as Drift
from .materialize import allocate as allocate
from .materialize import find_drift as find_drift
from .materialize import forget_values as forget_values
from .materialize import mark_initialized as mark_initialized
from .materialize import materialize as materialize
from .materialize import sync_module_states as sync_module_states
from .module import FSDPModule as FSDPModule
from .module import UnshardHandle as UnshardHandle
from .module import share_comm_ctx as share_comm_ctx
from .optimizer import step_on_shards as step_on_shards
from .rebind import rebind_optimizer as rebind_optimizer
from .validate import ShardPlacementResult as ShardPlacementResult
