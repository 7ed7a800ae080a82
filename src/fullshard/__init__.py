"""Fully sharded data parallel training for PyTorch. `from fullshard import fully_shard`; see the README.

Public names are imported when the first of them is asked for (PEP 562): `fullshard --help` needs no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Drift",
    "FSDPModule",
    "GradScaler",
    "GradientCheck",
    "GradientFigures",
    "GradientReductionHandle",
    "GradientStats",
    "Installation",
    "InvariantBroken",
    "InvariantChecks",
    "MicroBatches",
    "MixedPrecisionPolicy",
    "NonFiniteError",
    "OffloadPolicy",
    "PeerFailed",
    "Prepared",
    "Program",
    "RanksDisagree",
    "Replay",
    "ReplayError",
    "Report",
    "ShardPlacementResult",
    "ShardingConfig",
    "StepInBackward",
    "Turn",
    "UnitInfo",
    "UnitReport",
    "UnshardHandle",
    "__version__",
    "check_gradients",
    "check_invariants",
    "checkpoint_activations",
    "clip_grad_norm_",
    "find_drift",
    "full_params",
    "fully_shard",
    "grad_stats",
    "guard",
    "inspect_units",
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
    "step_in_backward",
    "step_on_shards",
    "sync_module_states",
    "uninstall",
    "unit_open",
]


# Documented packages: `fullshard.observe.record(model)` needs no import of its own.
_PACKAGES = ("checkpoint", "observe")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module("._public", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`fullshard.guard` is the function, though a room has that name, which the import system would put there."""

    @property
    def guard(self) -> object:
        return self.__dict__.get("guard") or import_module("._public", __name__).guard

    @guard.setter
    def guard(self, value: object) -> None:
        if not isinstance(value, ModuleType):
            self.__dict__["guard"] = value

    @guard.deleter
    def guard(self) -> None:
        self.__dict__.pop("guard", None)


sys.modules[__name__].__class__ = _Package
