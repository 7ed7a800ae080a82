"""Checks of what must be equal along an axis, and what must differ, while a model trains, because the plan knows axes.

What a model gets is the same along `tp`, and different along the data-parallel axes. A number of 24 bits stands for all
tensors that a forward gets; the sums of it and of its square over an axis say whether all ranks have the same one. Two
whole numbers travel for each axis and forward: over `tp` always, over the data-parallel axes in the first two forwards.

Along `cp` batches are the same before they are split. On the host the ranks compare them with what they attend to, in
one message (`extras/context_parallel.py`); on a device two such numbers travel for each batch.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import all_reduce_over
from ..extras import ContextParallel
from .axes import Axes
from .experts import Divisors

_BITS = 24
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
# What ranks along an axis have to do, and why.
_ALIKE = {
    "tp": ("give the model the same inputs", "each layer"),
    "cp": ("split the same batch", "its sequences"),
}
# Forwards whose inputs are compared along the data-parallel axes.
_DATA_FORWARDS = 2


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """(), int64: a number below 2**24 that stands for the bits of `tensors`, in their order, on their device."""
    total: Tensor | None = None
    for tensor in tensors:
        words = _words(tensor)
        places = torch.arange(1, words.numel() + 1, device=words.device)
        own = (words * places * _MIX + words).sum() + words.numel()
        total = own if total is None else total.to(own.device) * _MIX + own
    if total is None:
        return torch.zeros((), dtype=torch.int64)
    return ((total * _MIX) >> (64 - _BITS)) & ((1 << _BITS) - 1)


def _words(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous().reshape(-1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    if tensor.is_floating_point():
        tensor = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return tensor.to(torch.int64)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, also those inside of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


class Relations:
    """The comparisons of one model, which its forwards begin with."""

    def __init__(
        self,
        model: nn.Module | None,
        axes: Axes,
        whole: DeviceMesh,
        *,
        sequence: bool = False,
        sequences: ContextParallel | None = None,
    ) -> None:
        # model: None for a pipeline, whose step calls `compare_step`.
        # sequence: whether each rank along tp has a part of the tokens between layers. sequences: what cuts them.
        self.axes, self.whole, self.sequence, self.sequences = axes, whole, sequence, sequences
        # torch's fake group, which plans and tests use, brings no sums.
        self.sends_nothing = dist.get_backend(whole.get_group(0)) == "fake"
        self.forwards = 0
        # The sums that the last forward sent from a device, by axis, read when the next one begins.
        self.sent: dict[str, Tensor] = {}
        if sequences is not None and axes.cp > 1:
            sequences.on_split = self._split
        self.alike = 0
        # The stages of this rank in a pipeline.
        self.stages: Sequence[nn.Module] = ()
        # Known after `fully_shard`, which comes before the first forward.
        self.divisors: Divisors | None = None
        self.handle = None if model is None else model.register_forward_pre_hook(self._before, with_kwargs=True)

    def remove(self) -> None:
        """End the comparisons."""
        if self.handle is not None:
            self.handle.remove()

    def compare_step(self, tensors: Sequence[Tensor], doing: str, problem: str) -> None:
        """Compare along `pp`, `cp` and `tp` what a step of a pipeline begins with, and raise on all ranks if one has a
        `problem`. Sends 24 bytes over each of these."""
        wrong = "" if problem else self._wrong_divisor()
        if self.sends_nothing:
            if problem:
                raise ValueError(problem)
            if wrong:
                raise RuntimeError(wrong)
            return
        self.forwards += 1
        if self.sequence:
            self._check_windows(tensors)
        text = int.from_bytes(hashlib.blake2s(doing.encode(), digest_size=6).digest(), "big")
        own = digest([*tensors, torch.tensor([text])])
        sums = torch.stack([own, own * own, torch.tensor(int(bool(problem or wrong)), device=own.device)])
        sums = sums.to(self.whole.device_type)
        axes = [name for name in ("pp", "cp", "tp") if getattr(self.axes, name) > 1]
        for name in axes:
            all_reduce_over(sums, self.whole.get_group(name), dist.ReduceOp.SUM, f"what ranks along {name} are given")
        total, squares, problems = sums.tolist()
        if self.forwards <= _DATA_FORWARDS and self.axes.shares > 1:
            # Before an error, because ranks with other data wait for this one.
            self._look_at_data(own)
        if problem:
            raise ValueError(problem)
        if wrong:
            raise RuntimeError(wrong)
        ranks = self.axes.group(self.whole.get_rank(), *axes)
        told = " and ".join(axes)
        if problems:
            raise RuntimeError(
                f"{told}: expected a batch on each of the ranks {', '.join(map(str, ranks))}, found {problems} of them "
                f"that cannot begin; see their own errors"
            )
        if len(ranks) * squares != total * total:
            raise RuntimeError(
                f"{told}: expected the ranks {', '.join(map(str, ranks))} to begin with the same batch in the same "
                f"micro-batches, found different ones, here {doing}; let ranks take their data by the position on the "
                f"other axes (prepared.share), and give all of them one configuration"
            )

    def _wrong_divisor(self) -> str:
        """Returns what is wrong with a divisor of this rank's stages, or ""."""
        if self.divisors is None:
            self.divisors = Divisors(self.stages, self.axes)
        try:
            self.divisors.check()
        except RuntimeError as error:
            return str(error)
        return ""

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or self.sends_nothing:
            return
        self.forwards += 1
        if self.divisors is None:
            self.divisors = Divisors([module], self.axes)
        self.divisors.check()
        if self.sequences is not None:
            self.sequences.expect_split()
        if self.sequence:
            self._check_windows(tensors_in((args, kwargs)))
        own = digest(tensors_in((args, kwargs)))
        if self.axes.tp > 1:
            self._sum_over("tp", own)
        if self.forwards <= _DATA_FORWARDS and self.axes.shares > 1:
            self._look_at_data(own)

    def _split(self, whole: Iterable[Any]) -> None:
        """A batch is about to be cut over `cp`."""
        tensors = [one for one in whole if isinstance(one, Tensor)]
        if not self.sends_nothing and any(one.device.type != "cpu" for one in tensors):
            self._sum_over("cp", digest(tensors))

    def _sum_over(self, axis: str, own: Tensor) -> None:
        """Send the digest of inputs over `axis`, and compare: on a device that of the last forward, without a wait."""
        sums = torch.stack([own, own * own]).to(self.whole.device_type)
        all_reduce_over(sums, self.whole.get_group(axis), dist.ReduceOp.SUM, f"the inputs along {axis}")
        if sums.device.type == "cpu":
            self._compare(axis, sums, "this forward")
            return
        before = self.sent.get(axis)
        self.sent[axis] = sums
        if before is not None:
            self._compare(axis, before, "the forward before this one")

    def _check_windows(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.ndim > 1 and tensor.shape[1] % self.axes.tp:
                nearest = max(tensor.shape[1] // self.axes.tp, 1) * self.axes.tp
                raise ValueError(
                    f"tp: expected sequences that its {self.axes.tp} ranks divide into equal parts, found "
                    f"{tensor.shape[1]} tokens; pad them, or take {nearest}"
                )

    def _compare(self, axis: str, sums: Tensor, when: str) -> None:
        total, squares = sums.tolist()
        if getattr(self.axes, axis) * squares != total * total:
            rank = self.whole.get_rank()
            ranks = ", ".join(map(str, self.axes.group(rank, axis)))
            alike, shared = _ALIKE[axis]
            raise RuntimeError(
                f"{axis}: expected the ranks {ranks} to {alike}, because they share {shared}, "
                f"found different ones in {when}; let ranks take their data by the position on the other axes "
                f"(prepared.share), and seed what is random in it alike"
            )

    def _look_at_data(self, own: Tensor) -> None:
        sums = torch.stack([own, own * own]).to(self.whole.device_type)
        for name in ("dp_replicate", "dp_shard"):
            if name in (self.whole.mesh_dim_names or ()) and getattr(self.axes, name) > 1:
                all_reduce_over(sums, self.whole.get_group(name), dist.ReduceOp.SUM, "the inputs along data axes")
        total, squares = sums.tolist()
        self.alike += self.axes.shares * squares == total * total
        if self.alike == _DATA_FORWARDS:
            axes = " and ".join(n for n in ("dp_replicate", "dp_shard") if getattr(self.axes, n) > 1)
            warnings.warn(
                f"{axes}: expected the {self.axes.shares} shares of a batch to differ, found the same inputs on all "
                f"of them in the first {_DATA_FORWARDS} forwards, which trains as one share does; give each rank its "
                f"own (prepared.share says which)",
                UserWarning,
                stacklevel=2,
            )
