"""Keys of adapters on a model of a folder, and the rules of `model.folder`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fullshard.keys import ConfigError, invalid, setting, show

ALL_LINEAR = "all-linear"
_BESIDE_4_BITS = ("tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree")
# Defaults for weights that were trained before, which the rate of a new model would destroy.
_RATES = {"none": 2e-5, "lora": 2e-4, "qlora": 2e-4}


@dataclass(frozen=True, slots=True)
class AdapterKeys:
    method: str = setting(
        "none",
        'of a model of a folder trains: "none" = all parameters; "lora" = adapters of PEFT; "qlora" = the same on a '
        "base in 4 bits",
        choices=("none", "lora", "qlora"),
    )
    rank: int = setting(8, "rank of the adapters", least=1)
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", above=0.0)
    dropout: float = setting(0.0, "of what adapters get, in training", least=0.0, most=0.99)
    targets: tuple[str, ...] = setting(
        (ALL_LINEAR,), 'modules that get adapters, by the ends of their names; "all-linear" = all but the output'
    )
    modules_to_save: tuple[str, ...] = setting((), "modules that train as a whole beside them")


def with_folder(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by `section.key`, with what a model of a folder changes of the defaults."""
    if not settings.get("model.folder"):
        return dict(settings)
    rate = _RATES.get(settings.get("adapters.method", "none"), _RATES["none"])
    return {"data.tokenizer": "folder", "optimizer.lr": rate, **settings}


def check_pretrained(config: Any, default: Any) -> None:
    """Rules of a model of a folder, for a `Config` and one of defaults. Raises `ConfigError`."""
    for key in fields(config.model):
        value, usual = getattr(config.model, key.name), getattr(default.model, key.name)
        if key.name not in ("folder", "dtype") and value != usual:
            raise invalid(f"model.{key.name}", value, "has no effect with model.folder", show(usual))
    if config.data.tokenizer != "folder":
        problem = "has no effect with model.folder, which has a tokenizer of its own"
        raise invalid("data.tokenizer", config.data.tokenizer, problem, show("folder"))
    adapters = config.adapters
    for key in fields(adapters):
        value, usual = getattr(adapters, key.name), getattr(default.adapters, key.name)
        if adapters.method == "none" and value != usual:
            problem = 'has no effect with adapters.method = "none"'
            raise invalid(f"adapters.{key.name}", value, problem, 'adapters.method = "lora"')
    if not adapters.targets or (ALL_LINEAR in adapters.targets and len(adapters.targets) > 1):
        raise invalid("adapters.targets", adapters.targets, f"expected names, or {show(ALL_LINEAR)} alone")
    parallel = config.sharding.parallelism
    if parallel.pipeline_parallel_degree > 1:
        problem = "a model of a folder has no stages in the trainer: prepare_fully_shard makes them"
        raise invalid("sharding.parallelism.pipeline_parallel_degree", parallel.pipeline_parallel_degree, problem, "1")
    refused = {"lora": ("tensor_parallel_degree",), "qlora": _BESIDE_4_BITS}.get(adapters.method, ())
    for name in refused:
        if (degree := getattr(parallel, name)) > 1:
            problem = f'is not built beside adapters.method = "{adapters.method}"'
            raise invalid(f"sharding.parallelism.{name}", degree, problem, "1")


def refuse_without_folder(config: Any, default: Any) -> None:
    """Raise `ConfigError` for what has an effect on a model of a folder alone."""
    pairs: list[tuple[str, Any, Any]] = [("model.dtype", config.model.dtype, default.model.dtype)]
    pairs += [
        (f"adapters.{key.name}", getattr(config.adapters, key.name), getattr(default.adapters, key.name))
        for key in fields(config.adapters)
    ]
    for name, value, usual in pairs:
        if value != usual:
            raise invalid(name, value, "has no effect without model.folder", show(usual))
    if config.data.tokenizer == "folder":
        raise ConfigError(
            'data.tokenizer = "folder": expected model.folder beside it, found none; nearest valid: "bytes"'
        )
