"""The gradients of a parameter as they are at a moment, so that what comes after it can be taken back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import local_of
from .pending import PendingGrad
from .sharded import ShardedParam


class KeptTensor:
    """A tensor and a copy of what is in it; nothing for None and for what has no data."""

    __slots__ = ("_copy", "_local", "tensor")

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self._local: Tensor | None = None
        self._copy: Tensor | None = None
        if tensor is not None and not isinstance(tensor, PendingGrad) and not tensor.is_meta:
            self._local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
            self._copy = self._local.clone()

    def restore(self) -> Tensor | None:
        """The same tensor, with the same values in it."""
        if self._local is not None and self._copy is not None:
            with torch.no_grad():
                self._local.copy_(self._copy)
        return self.tensor


class KeptGradients:
    """`.grad`, and what is held beside it (sharded.py), of one parameter. Takes memory for what exists, which is
    nothing behind `zero_grad()`."""

    __slots__ = ("_grad", "_held", "_marker", "_param", "_partial")

    def __init__(self, param: ShardedParam) -> None:
        self._param = param
        self._held = KeptTensor(param.live_held())
        self._partial = KeptTensor(param.live_partial())
        self._marker = param.marker
        self._grad = KeptTensor(param.sharded.grad)

    def restore(self) -> None:
        """Outside of a backward, with nothing of one under way."""
        param = self._param
        param.held, param.partial = self._held.restore(), self._partial.restore()
        param.marker = self._marker
        param.sharded.grad = self._grad.restore()
