"""Composer's `prepare_fsdp_module`: its call shape on `prepare_fully_shard`, as seed 004 promises its users."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from fullshard import Prepared, prepare_fully_shard
from fullshard.migrate.settings.conversion import convert
from fullshard.migrate.verdict import DROPPED, EXACT, UNSUPPORTED


def prepare_fsdp_module(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
    fsdp_config: Any,
    precision: object = None,
    device: object = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
) -> Prepared:
    """Shard `model` as Composer's function of that name does: each direct child a unit, in place.

        prepare_fsdp_module(model, optimizer, {"mixed_precision": "PURE", "cpu_offload": True}, "amp_bf16")

    optimizers: those from before, which continue with the sharded parameters; or None, and built afterwards.
    fsdp_config: Composer's keys, as a dict, or an object of `FSDPConfig` or `FSDP2Config`. A `_fsdp_wrap` or
        `fsdp_wrap_fn` on modules goes before the rule of direct children, `_activation_checkpointing` and
        `activation_checkpointing_fn` before that of activations. A `device_mesh` in it is used. Modules on the meta
        device are initialised by their `param_init_fn`, or their own initialisers.
    precision: Composer's, "amp_bf16" and so on, also as an enum; None keeps the dtypes of the parameters.
    auto_microbatching: sizes are found by `micro_batches` of the result, also with FSDP2, where Composer refuses.
    device, te_rng_seed: have no effect; parameters go to the device of the mesh.

    Each key that means something else here, or nothing, is one warning. Returns what `prepare_fully_shard` returns,
    which has `micro_batches` and `state_dict`. Raises `ValueError` for keys that cannot be followed (`process_group` by
    a name, planners, Transformer Engine) and `MigrationError` for unknown ones. Source: Composer 0.33; seed 004.
    """
    keys = _keys(fsdp_config)
    mesh = keys.pop("device_mesh", None)
    table: dict[str, Any] = {"fsdp": keys}
    if precision is not None:
        table["precision"] = str(getattr(precision, "value", precision))
    elif isinstance(keys.get("mixed_precision", "DEFAULT"), str):
        keys["mixed_precision"] = "FULL"
    if auto_microbatching:
        table["device_train_microbatch_size"] = "auto"
    conversion = convert(table, "fsdp_config", ".yaml", "", "composer")
    refused = [finding for finding in conversion.findings if finding.verdict == UNSUPPORTED]
    if refused:
        raise ValueError(f"fsdp_config: {refused[0].key} = {refused[0].value}: {refused[0].reason}")
    for finding in conversion.findings:
        if finding.verdict not in (EXACT,) and not finding.default and not _is_silent(finding.key, finding.verdict):
            warnings.warn(f"prepare_fsdp_module: {finding.key}: {finding.reason}", stacklevel=2)
    config = conversion.config
    if config.wrap.by == "auto":
        config = replace(config, wrap=replace(config.wrap, by="children", group_ends=False))
    if config.activation_checkpointing.at == "children" and _marks_activations(model):
        config = replace(config, activation_checkpointing=replace(config.activation_checkpointing, at="attributes"))
    return prepare_fully_shard(model, optimizers, config, mesh=mesh, init=_initialise, show=bool(keys.get("verbose")))


def _keys(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if is_dataclass(config) and not isinstance(config, type):
        mesh = getattr(config, "device_mesh", None)
        given = {key: value for key, value in asdict(replace(config, device_mesh=None)).items() if key[0] != "_"}
        return {**given, "device_mesh": mesh}
    raise TypeError(
        f"fsdp_config: expected a dict, or an FSDPConfig or FSDP2Config of Composer, found {type(config).__name__}; "
        f"pass the dict under parallelism_config['fsdp']"
    )


def _is_silent(key: str, verdict: str) -> bool:
    """Nothing to tell: the table itself, not a key of it."""
    return verdict == DROPPED and key == "fsdp"


def _marks_activations(model: nn.Module) -> bool:
    names = ("_activation_checkpointing", "activation_checkpointing_fn")
    return any(getattr(module, name, None) is not None for module in model.modules() for name in names)


def _initialise(module: nn.Module) -> None:
    """Initialises as Composer does: `param_init_fn` of the module or of the nearest one that has it, else
    `reset_parameters`."""
    initialise: Any = getattr(module, "param_init_fn", None)
    if callable(initialise):
        initialise(module)
    elif callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]
