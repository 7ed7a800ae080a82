"""Faults of what `fullshard verify` exercises beside steps, each in the words in which it must be found.

    EXERCISED["writes to full parameters are dropped"]     what it changes, and what `fullshard verify` must say

They were written before the phases that find them. `here` in the text of a fault is this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.seeded_faults import Case, SeededFault


def _change(where: str, old: str, new: str) -> SeededFault:
    return SeededFault(where, old, new, helpers=__name__)


# ---- what goes wrong -------------------------------------------------------------------------------------------------

_kept: dict[Any, Any] = {}


def ranks() -> int:
    return dist.get_world_size()


def is_of_momentum(into: Tensor, wanted: Sequence[tuple[Any, Any]]) -> bool:
    """Whether `into` is memory of the first moment of one parameter; `wanted`: entries of a checkpoint, and parts."""
    ours = [part.local for entry, part in wanted if str(entry.key).endswith("norm.norm.bias.exp_avg")]
    memory = into.untyped_storage().data_ptr()
    return any(local is not None and local.untyped_storage().data_ptr() == memory for local in ours)


def shifted(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0) if tensor.ndim else tensor


def last_rows_first(tensor: Tensor) -> Tensor:
    return tensor.flip(0) if tensor.ndim else tensor


def first_cast_alone(output: Any, dtype: torch.dtype) -> Any:
    """Of several outputs the first is cast."""
    first, *others = output
    return (first.to(dtype), *others)


def while_inference(views: list[Tensor], owner: Any) -> list[Tensor]:
    """In inference mode, what was gathered there first."""
    if not torch.is_inference_mode_enabled():
        return views
    return _kept.setdefault(id(owner), [view.clone() for view in views])  # type: ignore[no-any-return]


def buffers_kept(module: nn.Module) -> None:
    """A forward without gradients leaves the buffers as they were when this was called first."""
    for buffer in module.buffers():
        if torch.is_grad_enabled():
            _kept[id(buffer)] = buffer.clone()
        elif id(buffer) in _kept and not torch.is_inference_mode_enabled():
            buffer.copy_(_kept[id(buffer)])


def without(state: dict[str, Any], prefix: str) -> None:
    """Loading leaves out one parameter's values: it gets those that it has."""
    for key, value in state.items():
        if key.startswith(prefix) and key.endswith("3.bias") and isinstance(value, DTensor):
            state[key] = value.detach().clone().zero_()


# ---- the table -------------------------------------------------------------------------------------------------------

_CLIP = "api.clip:clip_grad_norm_"
_WRITE = "engine.full_params:OpenUnit.write_back"
_CLOSE = "engine.full_params:OpenUnit.close"
_COPY = "param.local.copy_(local_part(value.detach(), _dtensor(param)))"
_OUTPUT = "cast_outputs(output, unit.settings.policy.output_dtype, *given)"
_ARRIVED = "staging.views[: len(destinations)]"

EXERCISED: dict[str, Case] = {
    "the norm is that of local shards": Case(
        _change(_CLIP, "        for group in own:\n", "        for group in ():\n"),
        "zero3",
        "clipping",
        "norm",
        "the norm of the shards of rank 0 alone",
    ),
    "one gradient is not scaled": Case(
        _change(_CLIP, "torch._foreach_mul_(locals_, scale)", "torch._foreach_mul_(locals_[:-1], scale)"),
        "zero2+bf16",
        "clipping",
        "norm.norm.bias",
        "the gradient was not scaled",
    ),
    "inference mode computes with old weights": Case(
        _change("comm.gather:PlannedGather.complete", _ARRIVED, f"here.while_inference({_ARRIVED}, self)"),
        "zero3",
        "evaluation",
        "embedding.weight",
        "stale weights",
    ),
    "an evaluation puts buffers back": Case(
        _change(
            "engine.hooks:UnitHooks._forward_ends",
            "    return output\n",
            "    here.buffers_kept(module)\n    return output\n",
        ),
        "zero3",
        "evaluation",
        "norm.mean",
        "left it so",
    ),
    "a first moment is not loaded": Case(
        _change(
            "checkpoint.loading:write",
            "into.copy_(read)",
            "here.is_of_momentum(into, wanted.tensors) or into.copy_(read)",
        ),
        "zero3",
        "checkpoint",
        "norm.norm.bias.exp_avg",
        "",
    ),
    "rows of a checkpoint are read one further in another world": Case(
        _change(
            "checkpoint.loading:write",
            "into.copy_(read)",
            "into.copy_(here.shifted(read) if here.ranks() == 3 else read)",
        ),
        "zero3",
        "another world",
        "blocks.0.0.bias",
        "",
    ),
    "rows of a checkpoint are read in another order": Case(
        _change("checkpoint.loading:write", "into.copy_(read)", "into.copy_(here.last_rows_first(read))"),
        "zero2",
        "checkpoint",
        "blocks.0.0.bias",
        "",
    ),
    "writes to full parameters are dropped": Case(
        _change(_WRITE, _COPY, "pass"), "zero3", "full_params", "embedding.weight", "it kept the value from before"
    ),
    "full parameters are written one row further": Case(
        _change(
            _WRITE,
            "local_part(value.detach(), _dtensor(param))",
            "local_part(here.shifted(value.detach()), _dtensor(param))",
        ),
        "zero3+bf16",
        "full_params",
        "embedding.weight",
        "rows are off by one",
    ),
    "writes without writeback are kept": Case(
        _change(_CLOSE, "if writeback:", "if writeback or self._keep and not self.opening.rank0_only:"),
        "zero2",
        "full_params",
        "embedding.weight",
        "an edit without writeback reached the shards",
    ),
    "one of two outputs is cast": Case(
        _change(
            "engine.hooks:UnitHooks._forward_ends",
            _OUTPUT,
            "here.first_cast_alone(output, unit.settings.policy.output_dtype)",
        ),
        "zero3+bf16",
        "output_dtype",
        "output[1]",
        "an output in torch.bfloat16, expected torch.float32",
        program="two_outputs",
    ),
    "outputs are not cast": Case(
        _change("engine.hooks:UnitHooks._forward_ends", _OUTPUT, "output"),
        "zero3",
        "output_dtype",
        "output",
        "an output in torch.float32, expected torch.bfloat16",
    ),
    "a state dict loads zeros for one parameter": Case(
        _change(
            "engine.state_dict:_ModuleHooks.before_loading",
            "    self._prefix = prefix\n",
            "    self._prefix = prefix\n    here.without(state_dict, prefix)\n",
        ),
        "zero3",
        "state dicts",
        "blocks.0.3.bias",
        "it is zero",
    ),
}
