"""Fully sharded data parallel training for PyTorch. `from fullshard import fully_shard`; see the README.

Public names are imported when the first of them is asked for (PEP 562): `fullshard --help` needs no torch.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import extras as extras
    from . import observe as observe
    from ._public import *

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradScaler",
    "GradientReductionHandle",
    "MicroBatches",
    "MixedPrecisionPolicy",
    "MixtureOfExperts",
    "OffloadPolicy",
    "Parallelism",
    "PeerFailed",
    "Prepared",
    "Program",
    "RanksDisagree",
    "ShardPlacementResult",
    "ShardingConfig",
    "UnshardHandle",
    "__version__",
    "average",
    "balance_loss",
    "check_gradients",
    "check_invariants",
    "checkpoint_activations",
    "clip_grad_norm_",
    "context_parallel",
    "find_drift",
    "full_params",
    "fully_shard",
    "grad_stats",
    "guard",
    "install",
    "joined",
    "load_pretrained",
    "mark_initialized",
    "mark_restored",
    "materialize",
    "original_classes",
    "prepare_fully_shard",
    "rebind_optimizer",
    "register_fsdp_forward_method",
    "replay",
    "replicate",
    "report",
    "share_comm_ctx",
    "sleep",
    "step_in_backward",
    "step_on_owners",
    "step_on_shards",
    "sync_module_states",
    "transfer",
    "uninstall",
    "unit_open",
    "wake",
    "weights",
]


# Documented packages: `fullshard.observe.record(model)` needs no import of its own.
_PACKAGES = ("checkpoint", "extras", "observe")
# Types of results were here up to 0.2, and go from here in 0.4: where they are.
_FORMER = {
    **dict.fromkeys(("Drift", "GradientCheck", "Installation", "InvariantBroken", "InvariantChecks"), "extras"),
    **dict.fromkeys(("NonFiniteError", "Replay", "ReplayError", "StepInBackward", "Turn"), "extras"),
    **dict.fromkeys(("Report", "UnitInfo", "UnitReport", "inspect_units"), "observe"),
}


if not TYPE_CHECKING:  # a type checker would believe that every name is here

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f".{name}", __name__)
        if name in _FORMER:
            place = f"{__name__}.{_FORMER[name]}"
            former: object = getattr(import_module(place), name)
            globals()[name] = former  # one warning
            if name != "inspect_units":  # which warns itself, when it is called
                message = f"fullshard.{name} is {place}.{name} from 0.3 on; the former place goes in 0.4"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
            return former
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found: object = getattr(import_module("._public", __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_PACKAGES})
