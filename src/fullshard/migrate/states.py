"""State dicts in the form that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import whole_of


def in_form(state: Mapping[str, Any], *, full: bool, offload_to_cpu: bool, keep: bool = True) -> dict[str, Any]:
    """`state` with whole tensors if `full`, in host memory if `offload_to_cpu`; {} unless `keep`.

    Whole tensors are gathered one after the other, and stay where their shards are: shards on the host go over the
    device where only the device sends. Collective if `full`, on ranks that do not keep them too.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if full and isinstance(value, DTensor):
            value = whole_of(value, f"the state dict of {name}")
        if keep:
            found[name] = value.cpu() if offload_to_cpu and isinstance(value, Tensor) else value
    return found
