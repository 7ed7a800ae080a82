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
    the others leave. `sp_size`, DeepSpeed's sequence parallelism, is context parallelism that exchanges heads. Raises
    `ConfigError` for asynchronous tensor parallelism, which has no counterpart. `cp_handler` says how attention is
    computed, which `context_parallel_variant` decides here."""
    sizes = {name: getattr(config, name) for name in SIZES}
    given: dict[str, Any] = {SIZES[name]: 1 if size is None else size for name, size in sizes.items()}
    heads = getattr(config, "sp_size", None)
    if heads not in (None, 1):
        if given["context_parallel_degree"] != 1:
            problem = f"expected cp_size = 1 beside it, found {sizes['cp_size']}; both cut sequences"
            raise ConfigError(f"parallelism.sp_size = {heads}: {problem}; nearest valid: 1")
        given |= {"context_parallel_degree": heads, "context_parallel_variant": "ulysses"}
    if (experts := getattr(config, "ep_size", None)) is not None:
        given["expert_parallel_degree"] = experts
    refuse_async(bool(getattr(getattr(config, "tp_handler", None), "enable_async_tp", False)))
    return Parallelism(**given)
