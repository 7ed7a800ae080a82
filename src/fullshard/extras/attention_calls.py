"""Calls of attention inside a context: each `scaled_dot_product_attention` goes to a function, others are refused.

So do losses, if the context has a function for them.

A mode of torch's own (`TorchFunctionMode`), of one thread: no function of torch is replaced.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .._torch import asked_once

_WHAT = "context_parallel"
_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_LOSSES = frozenset(
    {F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
    | {F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div}
)
# Whole layers of torch's inference, with attention in them.
_FAST = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})


class Call(NamedTuple):
    """One call, checked. `tensors`: query, key and value, (B, H, tokens here, E). `window`: of a sliding window that
    the caller knows and torch's function does not."""

    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    is_causal: bool
    scale: float
    window: int | None

    def mask_of(self, length: int, variant: str) -> Tensor | None:
        """The mask as (B or 1, H or 1, rows, `length`), its columns the tokens of the whole sequence."""
        mask, query = self.mask, self.tensors[0]
        if mask is None:
            return None
        here, found = query.shape[-2], tuple(mask.shape)
        mask = mask.view((1,) * (4 - mask.ndim) + found)
        rows, columns = mask.shape[-2:]
        fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
        if columns != length or not fits:
            raise ValueError(
                f"{_WHAT}: expected an attn_mask with the {length} keys of the whole sequence, found {found}, which "
                f"says nothing of the keys of other ranks; pass is_causal=True, or documents to split, or the columns "
                f"of all keys"
            )
        if rows not in (length, 1) and (rows != here or variant == "ulysses"):
            wanted = f"{length}" if variant == "ulysses" else f"{length} or {here}"
            raise ValueError(
                f"{_WHAT}: expected an attn_mask with {wanted} rows with variant={variant!r}, found {found}; pass the "
                f"rows of all queries"
            )
        return mask.expand(-1, -1, length, -1) if rows == 1 else mask


class AttentionCalls(TorchFunctionMode):
    """Inside, calls go to `attend`. `length`: tokens of this rank, 0 if not known: for attention of another kind.
    `loss`: is called with a function of torch that is a loss, and its arguments, instead of that."""

    def __init__(
        self,
        attend: Callable[[Call], Tensor],
        length: Callable[[], int],
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._attend, self._length, self._loss = attend, length, loss
        # Calls in reentrant checkpoints whose recomputation has not come yet.
        self._owed = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._called(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._called_whole(*args, **kwargs)
        if func in _BACKWARDS:
            # Recomputation has to find this mode.
            with _Again(self):
                return asked_once(func)(*args, **kwargs)
        if func in _LOSSES and self._loss is not None:
            return self._loss(func, *args, **kwargs)
        if func in _SOFTMAX:
            self._expect_other(args, kwargs)
        elif getattr(func, "__name__", "") in _FAST:
            raise NotImplementedError(f"{_WHAT}: expected scaled_dot_product_attention, found torch.{func.__name__}")
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        owed, self._owed = self._owed, 0
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if owed and kind is None:
            raise RuntimeError(
                f"{_WHAT}: expected the backward inside of the context, which recomputes {owed} calls of attention "
                f"(use_reentrant=True), found the context left before it; call backward() inside"
            )

    def refuse_new_batch(self) -> None:
        """Raise if a backward would recompute attention of the last batch with what is known of another one."""
        if self._owed:
            raise RuntimeError(
                f"{_WHAT}.split: expected the backward of the last batch before the next one, because "
                f"use_reentrant=True recomputes {self._owed} calls of its attention; call backward() first, or "
                f"checkpoint with use_reentrant=False"
            )

    def _called(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            raise NotImplementedError(_COMPILES)
        flat = query.ndim == 3
        tensors = tuple(one.unsqueeze(1) if flat else one for one in (query, key, value))
        _expect_shapes(tensors, enable_gqa=enable_gqa)
        if dropout_p:
            raise NotImplementedError(
                f"{_WHAT}: expected dropout_p=0.0, found {dropout_p}: ranks would drop other weights than one process; "
                f"set the dropout of attention to 0"
            )
        if attn_mask is not None and (is_causal or attn_mask.requires_grad):
            found = "is_causal=True beside it" if is_causal else "one that requires a gradient"
            raise ValueError(f"{_WHAT}: expected an attn_mask alone, without a gradient, found {found}; leave one out")
        self._count()
        call = Call(
            tensors,  # type: ignore[arg-type]
            attn_mask,
            bool(is_causal),
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            _window_of_caller(),
        )
        out = self._attend(call)
        return out.squeeze(1) if flat else out

    def _called_whole(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            raise NotImplementedError(
                f"{_WHAT}: expected need_weights=False, found the default of nn.MultiheadAttention, which returns the "
                f"weights of all pairs; pass need_weights=False"
            )
        for name in ("bias_k", "static_k"):
            if given.arguments[name] is not None or given.arguments["add_zero_attn"]:
                raise NotImplementedError(
                    f"{_WHAT}: expected no keys beside those of tokens, found {name} or add_zero_attn"
                )
        with _Again(self):
            return asked_once(F.multi_head_attention_forward)(*args, **kwargs)

    def _count(self) -> None:
        """Note the calls of reentrant checkpoints, whose recomputation comes in backward."""
        if not torch.is_grad_enabled():
            frame = _frame_of(CheckpointFunction.forward)
            self._owed += frame is not None and any(frame.f_locals["ctx"].needs_input_grad)
        elif self._owed:
            self._owed -= _frame_of(CheckpointFunction.backward) is not None

    def _expect_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scores, length = args[0] if args else kwargs.get("input"), self._length()
        if length and isinstance(scores, Tensor) and scores.ndim == 4 and scores.shape[-2:] == (length, length):
            raise NotImplementedError(
                f"{_WHAT}: expected attention by scaled_dot_product_attention, found a softmax over {length} keys of "
                f'this rank; load the model with attn_implementation="sdpa"'
            )


class _Again(TorchFunctionMode):
    """Asks `calls` inside of a function for which torch took it away."""

    def __init__(self, calls: AttentionCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._calls.__torch_function__(func, types, args, kwargs)


_COMPILES = (
    f"{_WHAT}: expected attention outside of compiled code, found it inside; compile what is between the calls of "
    f"scaled_dot_product_attention"
)


def _expect_shapes(tensors: tuple[Tensor, ...], *, enable_gqa: bool) -> None:
    query, key, value = tensors
    found = ", ".join(str(tuple(one.shape)) for one in tensors)
    if any(isinstance(one, DTensor) or one.is_nested for one in tensors):
        raise TypeError(f"{_WHAT}: expected plain tensors, found a DTensor or a nested one; pass to_local() of them")
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(f"{_WHAT}: expected (B, H, tokens, E) or (B, tokens, E), found {found}")
    if len({one.dtype for one in tensors}) > 1 or len({one.shape[0] for one in tensors}) > 1:
        raise ValueError(f"{_WHAT}: expected one dtype and one batch size of query, key and value, found {found}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if value.shape[1] != kv_heads or heads % kv_heads or (heads != kv_heads and not enable_gqa):
        raise ValueError(f"{_WHAT}: expected equal heads, or groups with enable_gqa=True, found {found}")
    if not query.shape[-2] == key.shape[-2] == value.shape[-2] >= 2:
        raise ValueError(
            f"{_WHAT}: expected as many keys as queries, two or more, found {found}: attention to other sequences, and "
            f"to a cache, is not split"
        )


def _frame_of(function: Any) -> types.FrameType | None:
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


def _window_of_caller() -> int | None:
    """The sliding window of transformers' attention, which makes a mask for what a rank has, if it makes one at all."""
    frame: types.FrameType | None = inspect.currentframe()
    for _ in range(7):
        if frame is None:
            return None
        if frame.f_code.co_name == "sdpa_attention_forward":
            window = frame.f_locals.get("kwargs", {}).get("sliding_window")
            return window if isinstance(window, int) else None
        frame = frame.f_back
    return None
