"""Accelerate's `ParallelismConfig`, by the names of its fields, as a declaration. Accelerate itself is not imported."""

from __future__ import annotations

from typing import Any, Protocol

from ..keys import ConfigError
from .parallelism import Parallelism, refuse_async

# Its sizes, each with the degree that is the same.
SIZES = {
    "dp_replicate_size": "data_parallel_replicate_degree",
    "dp_shard_size": "data_parallel_shard_degree",
    "cp_size": "context_parallel_degree",
    "tp_size": "tensor_parallel_degree",
}


class ParallelismSizes(Protocol):
    """The fields of Accelerate's `ParallelismConfig` that are read beside handlers."""

    dp_replicate_size: int | None
    dp_shard_size: int | None
    cp_size: int | None
    tp_size: int | None


def is_parallelism_config(value: object) -> bool:
    """Whether `value` has the fields of Accelerate's class."""
    return not isinstance(value, (dict, type)) and all(hasattr(value, name) for name in SIZES)


def of_accelerate(config: Any) -> Parallelism:
    """The declaration that an instance stands for. A size that was left out is 1, also `dp_shard_size`: it is not what
    the others leave. Raises `ConfigError` for what has no counterpart: DeepSpeed's sequence parallelism, asynchronous
    tensor parallelism. `cp_handler` says how attention is computed, which `fullshard.context_parallel` decides."""
    sizes = {name: getattr(config, name) for name in SIZES}
    given: dict[str, Any] = {SIZES[name]: 1 if size is None else size for name, size in sizes.items()}
    others = {name: getattr(config, name, None) for name in ("sp_size", "ep_size")}
    for name, size in others.items():
        if size not in (None, 1):
            instead = (
                "give cp_size, with fullshard.context_parallel" if name == "sp_size" else "divide experts yourself"
            )
            raise ConfigError(f"parallelism.{name} = {size}: expected 1; {instead}; nearest valid: 1")
    refuse_async(bool(getattr(getattr(config, "tp_handler", None), "enable_async_tp", False)))
    return Parallelism(**given)
