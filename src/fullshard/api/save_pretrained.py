"""`save_pretrained` of transformers and PEFT, of a sharded module: what would try to write shards is refused.

They hand `state_dict()` to safetensors, which needs plain tensors and finds DTensors: torch's FSDP2 ends in "Attempted
to access the data pointer on an invalid python storage" when the folder and its config.json are written already.
To gather here instead would hang programs that save on one rank alone, as many do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..runtime import unit_of

_NAME = "save_pretrained"


def checked_save(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods that the sharded class of `original` gets: `save_pretrained`, if it has one.

    It is the module's own wherever what it saves is plain: with a full `state_dict`, and inside `full_params`. There,
    on a rank that keeps sharded parameters and says `is_main_process=False`, it does nothing. With a
    `config.distributed_config` transformers gathers by itself. Otherwise it raises `RuntimeError`, on each rank that
    calls it and before anything is written.
    """
    save = getattr(original, _NAME, None)
    if not callable(save):
        return {}
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        state = kwargs.get("state_dict", bound.get("state_dict"))
        if state is not None:
            sharded = _sharded(state.items())
        elif getattr(getattr(self, "config", None), "distributed_config", None) is not None:
            sharded = None
        else:
            sharded = _sharded(self.named_parameters())
            unit = unit_of(self)
            if sharded and unit is not None and unit.opened is not None and bound.get("is_main_process") is False:
                return None
        if sharded is not None:
            raise RuntimeError(
                f"{_NAME}: expected plain full tensors, found {sharded} sharded; on every rank enter `with "
                f"fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):` and save in it on the first "
                f"rank, or pass state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                f"cpu_offload=True)) of torch.distributed.checkpoint.state_dict, taken on every rank"
            )
        return save(self, *args, **kwargs)

    return {_NAME: save_pretrained}


def _sharded(tensors: Iterable[tuple[str, Any]]) -> str | None:
    """The name of the first that is sharded."""
    return next((name for name, tensor in tensors if isinstance(tensor, DTensor)), None)
