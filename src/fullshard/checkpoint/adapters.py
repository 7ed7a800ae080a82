"""The record of adapters that PEFT put into a model, kept so that one process can write their files later.

A companion of the model's state, `fullshard_adapters.json`: PEFT's configuration of each adapter, and what was changed
since on its layers. Weights are in the state under the names of the model, those of the base and of adapters together.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..api import original_class
from .companions import adapted, base_of
from .errors import CheckpointDamaged, CheckpointNotFound
from .manifest import parse_json
from .state import plain_name

FILE = "fullshard_adapters.json"
_CONFIG = "adapter_config.json"  # PEFT's file of one adapter
# How a PeftModel names its base.
PREFIX = "base_model.model."
_PREFIXED = re.compile(r"(?:^|\.)base_model\.model\.")
# The original of a module that PEFT replaced, in names.
_INSIDE = re.compile(r"(.+)\.(?:base_layer|original_module)\.")


class Adapters(NamedTuple):
    """The adapters of a model.

    `configs`: by the name of the adapter, as PEFT writes them. `base`: the class of the model without adapters.
    `trained`: names of parameters that required a gradient; None: unknown. `scaling`, `merged`: by the name of a layer,
    the factor of each adapter, and the adapters that its weight contains already.
    """

    configs: dict[str, dict[str, Any]]
    active: list[str]
    base: str = ""
    trained: list[str] | None = None
    scaling: dict[str, dict[str, float]] = {}
    merged: dict[str, list[str]] = {}

    def to_bytes(self) -> bytes:
        return (json.dumps(self._asdict(), indent=1, sort_keys=True, default=_plain_value) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Adapters:
        """Raises `CheckpointDamaged` for anything but what `to_bytes` writes."""
        found = parse_json(data, f"{where}, its adapters")
        if isinstance(found, dict) and found.keys() <= set(cls._fields) and {"configs", "active"} <= found.keys():
            configs, active = found["configs"], found["active"]
            if isinstance(configs, dict) and configs and isinstance(active, list) and set(active) <= configs.keys():
                return cls(**found)
        raise CheckpointDamaged(f"{where}: expected {FILE} as a save writes it, found {data[:200]!r}")


def _plain_value(value: object) -> object:
    """The JSON of an object that PEFT's configurations have and JSON has not."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def described(owner: object) -> dict[str, bytes]:
    """{`FILE`: its bytes} for a model with adapters. A failure is a warning: training state is worth more."""
    model = adapted(owner)  # type: ignore[arg-type]
    if model is None:
        return {}
    try:
        return {FILE: _adapters_of(model).to_bytes()}
    except Exception as error:
        warnings.warn(
            f"the checkpoint has no configuration of the adapters: {type(error).__name__}: {error}; give it to "
            f"`checkpoint export` with --adapter-config",
            stacklevel=2,
        )
        return {}


def _adapters_of(model: Any) -> Adapters:
    from peft.tuners.tuners_utils import BaseTunerLayer

    active = model.active_adapters
    scaling: dict[str, dict[str, float]] = {}
    merged: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            name = plain_name(f"{name}.").removesuffix(".")
            factors = getattr(module, "scaling", None)
            factors = factors.items() if isinstance(factors, dict) else ()
            if numbers := {key: value for key, value in factors if isinstance(value, (int, float))}:
                scaling[name] = numbers
            if module.merged_adapters:
                merged[name] = list(module.merged_adapters)
    base = original_class(base_of(model))
    return Adapters(
        configs={name: config.to_dict() for name, config in model.peft_config.items()},
        active=list(active() if callable(active) else active),
        base=f"{base.__module__}.{base.__qualname__}",
        trained=[plain_name(name) for name, p in model.named_parameters() if p.requires_grad],
        scaling=scaling,
        merged=merged,
    )


def given(path: Path) -> Adapters:
    """The adapters that PEFT's files describe: `adapter_config.json`, of the adapter `default`, or a folder with it and
    with folders of other adapters, as its `save_pretrained` writes them. Raises `CheckpointNotFound`,
    `CheckpointDamaged`."""
    files = {"default": path if path.is_file() else path / _CONFIG}
    files |= {one.parent.name: one for one in sorted(path.glob(f"*/{_CONFIG}"))}
    configs = {}
    for name, file in files.items():
        if file.is_file():
            config = parse_json(file.read_bytes(), str(file))
            if not isinstance(config, dict) or "peft_type" not in config:
                raise CheckpointDamaged(f"{file}: expected a configuration of PEFT, which has a peft_type")
            configs[name] = config
    if not configs:
        raise CheckpointNotFound(f"{path}: expected {_CONFIG}, or a folder with it, found none")
    return Adapters(configs, active=[next(iter(configs))])


def names_of_adapters(names: Iterable[str]) -> list[str]:
    """The ones of `names` by which a state is that of a model under PEFT: everything in a `PeftModel`, and modules that
    have their original and something else beside it.

    >>> names_of_adapters(["q.base_layer.weight", "q.lora_A.default.weight", "k.weight", "my.base_layer.weight"])
    ['q.base_layer.weight']
    """
    names = list(names)
    inside = {name: found[1] for name in names if (found := _INSIDE.match(name))}
    beside = {name.rpartition(".")[0] for name in names if name not in inside}
    # Every module above a tensor that is not inside of an original.
    above = {module[: dot.start()] for module in beside for dot in re.finditer(r"\.", module)} | beside
    return [name for name in names if _PREFIXED.search(name) or inside.get(name) in above]
