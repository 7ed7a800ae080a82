"""The names that keys of the trainer had up to 0.2, read in this version too. No torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from fullshard.keys import ConfigError, invalid

_RECOMPUTE, _OFFLOAD = "training.recompute", "training.offload_activations"
_ACTIVATIONS = "sharding.activation_checkpointing"
FORMER = {
    "parallelism.reshard_after_forward": "sharding.reshard_after_forward",
    "parallelism.cpu_offload": "sharding.cpu_offload",
    "parallelism.timeout_seconds": "training.timeout_seconds",
    "precision.param": "sharding.precision.param",
    "precision.reduce": "sharding.precision.reduce",
    "precision.output": "sharding.precision.output",
    _RECOMPUTE: f"{_ACTIVATIONS}.at",
    "training.recompute_every": f"{_ACTIVATIONS}.every",
    "training.recompute_save": f"{_ACTIVATIONS}.save",
    _OFFLOAD: f"{_ACTIVATIONS}.offload",
}
SECTIONS = frozenset(name.partition(".")[0] for name in FORMER)


def renamed(former: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their former names, by the names that they have now. Raises `ConfigError` for a value that no
    setting has any more."""
    found = {FORMER[name]: value for name, value in former.items() if name not in (_RECOMPUTE, _OFFLOAD)}
    recompute, offload = former.get(_RECOMPUTE, "none"), former.get(_OFFLOAD, False)
    if recompute not in ("none", "block"):
        raise invalid(_RECOMPUTE, recompute, 'expected one of "none", "block"', f'{_ACTIVATIONS}.at = "units"')
    if type(offload) is not bool:
        raise invalid(_OFFLOAD, offload, "expected true or false", f"{_ACTIVATIONS}.offload = true")
    if recompute == "block" or offload:
        found[f"{_ACTIVATIONS}.at"] = "units"
        found[f"{_ACTIVATIONS}.offload"] = offload
    if recompute == "none" and offload:
        found[f"{_ACTIVATIONS}.recompute"] = False
    return found


def refuse_both(former: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a setting is there under its former name and under its new one."""
    for name in former:
        if FORMER[name] in settings:
            raise ConfigError(f"{name}: expected once, found it as {FORMER[name]} too; leave out {name}")


def warn(former: Mapping[str, Any]) -> None:
    """Warn once of all former names, in one process of a run."""
    if former and os.environ.get("RANK", "0") == "0":
        names = ", ".join(f"{name} is {FORMER[name]} now" for name in former)
        warnings.warn(f"{names}; the next version does not read the former names", FutureWarning, stacklevel=3)
