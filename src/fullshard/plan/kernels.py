"""The kernels that a step will run, where torch would choose others on the meta device: attention, dropout, products of
groups; and the floating-point operations of products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from .._torch import asked_once, attention_for_cpu, operation_name, overloads, without_torch_functions
from ..program import ProgramError
from . import recurrent


class Kernels(TorchFunctionMode):
    """Attention and dropout by the kernels that the step will run. On the meta device torch would choose others: those
    that write all scores, and noise in the dtype of the input instead of one byte for each element. Numbers in a list
    that indexes stay known."""

    def __init__(self, on_cpu: bool) -> None:
        super().__init__()
        self._on_cpu = on_cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ProgramError(
                "torch.autocast: expected casts by the precision of units (--param-dtype, MixedPrecisionPolicy), found "
                "a step under autocast, whose casts a plan does not count; leave it out of the loss and the model"
            )
        if func is F.scaled_dot_product_attention:
            return _attend(self._on_cpu, *args, **(kwargs or {}))
        if func is F.dropout and not self._on_cpu:
            return _drop(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with self:  # attention and dropout are in it
                return asked_once(func)(*args, **(kwargs or {}))
        if func in _BACKWARDS:
            with self:  # it may compute forwards again
                return asked_once(func)(*args, **(kwargs or {}))
        if func is Tensor.__format__ and args[0].is_meta and not args[0].ndim:
            return format(args[0].item(), *args[1:])  # a number of experts, in a name
        if self._on_cpu and func in recurrent.FUNCTIONS:
            return recurrent.on_cpu(func, args)
        if func is Tensor.__getitem__:
            args = (args[0], _with_numbers(args[1]))
        return func(*args, **(kwargs or {}))


_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _with_numbers(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_with_numbers, index))
    plain = isinstance(index, list) and index and all(type(each) is int for each in index)
    return torch.tensor(index, device="cpu") if plain else index


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    with without_torch_functions():
        if not training or inplace or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        out: Tensor = torch.native_dropout(input, p, True)[0]
        return out


def _attend(
    on_cpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by a kernel that holds no scores, where there is one: a CPU has none with dropout, a device's keeps the
    state of a generator."""
    fused = (
        query.ndim == 4
        and query.shape[-1] == value.shape[-1]
        and (attn_mask is None or not attn_mask.requires_grad)
        and (enable_gqa or query.shape[1] == key.shape[1])
        and not (on_cpu and dropout_p)
    )
    if not fused:
        with without_torch_functions():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # Kernels add a mask.
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), float("-inf"))
    return attention_for_cpu(query, key, value, is_causal, attn_mask, scale)


def grouped(left: Tensor, right: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Products by group, of any dtype: on the meta device torch has them in bfloat16 alone."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim:
        # Of two matrices the common dim is divided, and each group has a result.
        groups = len(left) if offsets is None else len(offsets)
        return left.new_empty(groups, rows, columns)
    return left.new_empty(rows, columns)


def operations(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of matrix products, convolutions and attention; 0 for others."""
    count = flop_registry.get(overloads(func))
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    if operation_name(func) == "aten._grouped_mm":
        return _grouped_operations(*args[:2])
    if operation_name(func) in (recurrent.LAYER, recurrent.LAYER_BACKWARD):
        return recurrent.flops(args, operation_name(func) == recurrent.LAYER_BACKWARD)
    if "attention_for_cpu" not in operation_name(func):
        return 0
    backward = "backward" in operation_name(func)
    query, key = args[1:3] if backward else args[:2]
    batch, heads, length, width = query.shape
    causal = args[7] if backward and len(args) > 7 else (args[4] if len(args) > 4 and not backward else False)
    # Two products forward; backward makes five, one of which is the scores again.
    products = 5 if backward else 2
    whole = 2 * products * batch * heads * length * key.shape[2] * width
    return int(whole // 2 if causal else whole)


def _grouped_operations(left: Tensor, right: Tensor) -> int:
    """Each row of a divided dim is in one group."""
    rows, common, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return 2 * rows * common * columns * (len(left) if left.ndim == right.ndim == 3 else 1)
