"""From a configuration to a sharded, initialised model and its optimizer: the whole use of `fully_shard`.

```
meta device: Llama, no memory -> recompute_blocks -> fully_shard each block, then the root
             -> to_empty: each rank allocates its shards -> init_weights: each full value drawn, own rows kept
```
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import FSDPModule, MixedPrecisionPolicy, fully_shard
from .config import Config, OptimizerKeys, PrecisionKeys
from .model import Llama
from .recompute import recompute_blocks
from .sample import llama_shape

_RESHARD: dict[str, bool | None] = {"default": None, "always": True, "never": False}


def sharded_model(config: Config, vocab: int, mesh: DeviceMesh, device: torch.device) -> Llama:
    """The model with its initial values, sharded over `mesh`. The values depend on training.seed, not on the mesh."""
    with torch.device("meta"):
        model = Llama(llama_shape(config, vocab))
    if config.training.recompute == "block":
        recompute_blocks(model.layers)
    reshard = _RESHARD[config.parallelism.reshard_after_forward]
    policy = precision_policy(config.precision, output=False)
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # The output dtype is the root's alone: what blocks return is read by the next block, in the dtype of compute.
    policy = precision_policy(config.precision, output=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights(config.training.seed, assign=assign_own_rows)
    return model


def assign_own_rows(target: Tensor, value: Tensor) -> None:
    """`Assign` for a sharded model: put this rank's part of the full `value` on `target`.

    Every rank draws the same full value, so nothing is sent (`src_data_rank=None`).
    """
    value = value.to(target.device)
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(value)


def as_fsdp(model: nn.Module) -> FSDPModule:
    """The same object under the type that `fully_shard` gave it."""
    assert isinstance(model, FSDPModule)
    return model


def compute_dtype(keys: PrecisionKeys) -> torch.dtype:
    return _dtype(keys.param) or torch.float32


def precision_policy(keys: PrecisionKeys, *, output: bool) -> MixedPrecisionPolicy:
    """The policy of a unit; with `output` also the dtype of what its forward returns."""
    return MixedPrecisionPolicy(
        param_dtype=_dtype(keys.param),
        reduce_dtype=_dtype(keys.reduce),
        output_dtype=_dtype(keys.output) if output else None,
    )


def _dtype(name: str) -> torch.dtype | None:
    return {"default": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def adamw(model: nn.Module, keys: OptimizerKeys) -> torch.optim.AdamW:
    """AdamW over the sharded parameters; matrices are decayed, norm weights are not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": keys.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # foreach: one call for all parameters of a kind, where torch's choice for the CPU is several per parameter.
    return torch.optim.AdamW(groups, lr=keys.lr, betas=(keys.beta1, keys.beta2), eps=keys.eps, foreach=True)
