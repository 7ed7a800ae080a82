"""The gradients of one parameter on their way.

    fresh     the full gradient of the running backward, taken from autograd; of a DTensor, this rank's part of it
    held      full gradients of earlier backwards that were not reduced, in the reduce dtype; `full.grad` shows them
    reduced   this rank's gradient shard of the running backward; becomes `sharded.grad` when the backward ends
    partial   this rank's shard of a sum to which the replicas have not contributed yet: flat and padded,
              in the reduce dtype; `fresh_partial` is its counterpart for the running backward

Gradients move from `fresh` or `reduced` to `held` or `.grad` only at the end of a backward, so a failing backward
leaves the gradients of earlier micro-batches exactly as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import (
    dtensor_like,
    dtensor_of,
    local_of,
    post_accumulate_grad_hooks,
    settled,
    spec_of,
    tensor_hooks,
    version_of,
)
from ..layout import ShardLayout
from ..policy import Precision
from .pending import PendingGrad


class ParamTensors(Protocol):
    """The parameter (sharded.py), as its gradients see it."""

    name: str
    layout: ShardLayout
    own_spec: Any  # a `Spec` (sharded.py, which imports this file), or None
    precision: Precision
    sharded: nn.Parameter
    full: nn.Parameter


class ParamGradients:
    """Holds the gradients of the table above, of one `ShardedParam`."""

    __slots__ = ("_param", "fresh", "fresh_partial", "held", "marker", "partial", "reduced", "shown", "shows_held")

    def __init__(self, param: ParamTensors) -> None:
        self._param = param
        self.fresh: Tensor | None = None
        self.held: Tensor | None = None
        self.reduced: Tensor | None = None
        self.partial: Tensor | None = None
        self.fresh_partial: Tensor | None = None
        # The `.grad` at the time `held` and `partial` were kept; a different one means that the user cleared them.
        self.marker: Tensor | None = None
        # The tensor with which `full.grad` shows `held`; and whether it may.
        self.shown: Tensor | None = None
        self.shows_held = False

    def take_fresh(self) -> None:
        """Take the gradient that autograd just accumulated. A second one in the same backward is added.

        A DTensor's gradient is redistributed to the parameter's own placements. Partial sums are added in the reduce
        dtype, or in the gradient's if that is wider. Collective over the parameter's own mesh if the placements differ.
        """
        gradient = self._param.full.grad
        if gradient is None:
            return
        if self.shown is not None:
            # No hook ran, so no backward brought it: a pipeline schedule, or the user, added to what is shown.
            self._drop_cleared()
            return
        self._param.full.grad = None
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{self._param.name}: expected a dense gradient, found layout {gradient.layout}; "
                f"use sparse=False in the embedding that owns this parameter"
            )
        precision = self._param.precision
        if gradient.dtype is not precision.compute and precision.accepts is None:
            raise RuntimeError(
                f"{self._param.name}: expected a gradient in {precision.compute}, in which grad_dtype=None reduces it, "
                f"found one in {gradient.dtype}; set reduce_dtype or grad_dtype to {gradient.dtype}"
            )
        if self._param.own_spec is not None:
            gradient = self._own_part(gradient, self._param.own_spec)
        self.fresh = gradient if self.fresh is None else self.fresh + gradient

    def _own_part(self, gradient: Tensor, own: Any) -> Tensor:
        """This rank's part of a DTensor gradient, with the parameter's placements."""
        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"{self._param.name}: expected a DTensor gradient, because the parameter is a DTensor, found "
                f"{type(gradient).__name__}; compute with the parameter, or with its to_local()"
            )
        if gradient.placements != own.placements:
            with torch.no_grad():
                wider = self._param.precision.reduce.itemsize > gradient.dtype.itemsize
                summands: Any = gradient
                if wider and any(placement.is_partial() for placement in gradient.placements):
                    summands = gradient.to(self._param.precision.reduce)
                gradient = summands.redistribute(placements=own.placements)
        return settled(local_of(gradient))

    def live_held(self) -> Tensor | None:
        """`held`, unless the user cleared it with `zero_grad()`."""
        self._drop_cleared()
        return self.held

    def live_partial(self) -> Tensor | None:
        """`partial`, unless the user cleared it with `zero_grad()`."""
        self._drop_cleared()
        return self.partial

    def _drop_cleared(self) -> None:
        if self.held is None and self.partial is None:
            return
        marker = self.marker
        if self._param.sharded.grad is not marker or (isinstance(marker, PendingGrad) and marker.cleared):
            self.hold(None)
            self.partial = self.marker = None
        elif self.shown is not None and self._param.full.grad is not self.shown:
            # The user cleared or replaced the gradient on the full parameter.
            gradient = self._param.full.grad
            self.hold(settled(local_of(gradient)) if isinstance(gradient, DTensor) else gradient)
            if gradient is None and self.partial is None:
                self._param.sharded.grad, self.marker = None if isinstance(marker, PendingGrad) else marker, None

    def hold(self, gradient: Tensor | None) -> None:
        """Keep `gradient` until a backward reduces it, and show it on `full.grad`, as torch's FSDP2 does, for programs
        that read, scale or clear the local gradients of micro-batches.

        Autograd adds in place to what it finds there, and a backward that fails must leave `held` as it was: so nothing
        is shown unless a hook takes it away before the next gradient arrives (`shows_held`, engine/channels.py).
        """
        self.withdraw()
        self.held = gradient
        full = self._param.full
        if gradient is not None and self.shows_held and full.requires_grad:
            if gradient.dtype is not full.dtype:
                full.grad_dtype = None  # or torch refuses another dtype
            self.shown = gradient if self._param.own_spec is None else dtensor_like(full, gradient)
            full.grad = self.shown

    def withdraw(self) -> None:
        """Stop showing `held`."""
        if self.shown is not None:
            full = self._param.full
            if full.grad is self.shown:
                full.grad = None
            if full.grad is None and self.shown.dtype is not full.dtype:
                full.grad_dtype = self._param.precision.accepts
            self.shown = None

    def zero(self) -> Tensor:
        """A zero in place of a missing full gradient: one element of memory."""
        return torch.zeros((), dtype=self._param.full.dtype, device=self._param.full.device).expand(
            self._param.layout.shape
        )

    def sum_with_held(self) -> Tensor | None:
        """The gradients of this and of earlier backwards, in the reduce dtype; None if there are none."""
        fresh, held = self.fresh, self.live_held()
        if held is None or fresh is None:
            gradient = fresh if held is None else held
            return None if gradient is None else gradient.to(self._param.precision.reduce)
        # Not in place: if this backward fails later, `held` must be unchanged.
        return held + fresh.to(self._param.precision.reduce)

    def commit(self) -> bool:
        """Hand over the gradients of this backward, which ended. Returns whether a reduced gradient arrived."""
        reduced = self.reduced
        if reduced is not None:
            self.reduced = None
            if self.held is not None:
                self.hold(None)
            self.partial = self.marker = None
            gradient = self._param.sharded.grad
            if gradient is None or isinstance(gradient, PendingGrad):
                # `.data` gives it its own version counter, separate from the buffer's: ranks compare it.
                spec, local = spec_of(self._param.sharded), reduced.data
                same = spec.tensor_meta.dtype is local.dtype
                made = dtensor_of(local, spec) if same else dtensor_like(self._param.sharded, local)
                self._param.sharded.grad = made
            else:
                local_of(gradient).add_(reduced)
        if self.fresh_partial is not None:
            self._commit_partial(self.fresh_partial)
        if self.fresh is not None:
            self._commit_held(self.fresh)
        return reduced is not None

    def run_tensor_hooks(self) -> bool:
        """Run the hooks of `sharded.register_hook`. Each sees this backward's reduced gradient before it is added to
        `.grad` and may return a replacement. Returns whether a hook changed the gradient.

        Collective over the parameter's mesh if a hook returns other placements. Raises `TypeError` for a non-tensor and
        `RuntimeError` for a tensor of another shape, dtype or mesh, as autograd does."""
        if self.reduced is None:
            return False
        gradient = dtensor_like(self._param.sharded, self.reduced)
        given = gradient
        with torch.no_grad():
            for hook in tensor_hooks(self._param.sharded):
                returned = hook(gradient)
                if returned is not None:
                    gradient = self._returned(hook, returned)
        # A hook may keep its argument or its result, and `.grad` is written in place.
        self.reduced = settled(local_of(gradient)).clone()
        return gradient is not given or version_of(given) > 0

    def _returned(self, hook: Any, returned: Any) -> DTensor:
        """The result of `hook`, with the parameter's placements."""
        sharded: Any = self._param.sharded
        dtype = self._param.precision.gradient
        wanted = f"a DTensor of shape {tuple(sharded.shape)} and dtype {dtype}, as the gradient it was given"
        hook_name = getattr(hook, "__name__", hook)
        said = f"{self._param.name}: expected the tensor hook {hook_name!r} to return None or {wanted}"
        if not isinstance(returned, Tensor):
            raise TypeError(f"{said}; found {type(returned).__name__}")
        if not isinstance(returned, DTensor) or returned.device_mesh != sharded.device_mesh:
            where = f"a DTensor on {returned.device_mesh}" if isinstance(returned, DTensor) else "a plain tensor"
            raise RuntimeError(
                f"{said}; found {where}: compute with the DTensor, or use distribute_tensor on the result"
            )
        if returned.shape != sharded.shape or returned.dtype is not dtype:
            raise RuntimeError(f"{said}; found shape {tuple(returned.shape)} and dtype {returned.dtype}")
        if returned.placements == sharded.placements:
            return returned
        return returned.redistribute(placements=sharded.placements)

    def standing(self) -> Callable[[], None]:
        """Remember the gradients of earlier backwards, with copies of the tensors that `commit` writes in place. The
        result restores them."""
        gradient, marker = self._param.sharded.grad, self.marker
        held, partial = self.live_held(), self.live_partial()
        written = [] if gradient is None or isinstance(gradient, PendingGrad) else [local_of(gradient)]
        written += [] if held is None else [held]
        copies = [tensor.clone() for tensor in written]

        def bring_back() -> None:
            with torch.no_grad():
                for tensor, copy in zip(written, copies, strict=True):
                    tensor.copy_(copy)
            self._param.sharded.grad, self.marker = gradient, marker
            self.hold(held)
            self.partial = partial

        return bring_back

    def run_hooks(self) -> bool:
        """Run the hooks that see `sharded.grad` whenever it was written. Returns whether they changed the gradient or
        the parameter in a way that every rank does alike; writes to this rank's local tensors do not count."""
        hooks = post_accumulate_grad_hooks(self._param.sharded)
        if not hooks:
            return False
        gradient, written = self._param.sharded.grad, self._versions()
        for hook in list(hooks.values()):
            hook(self._param.sharded)
        return self._param.sharded.grad is not gradient or self._versions() != written

    def _versions(self) -> tuple[int, int]:
        gradient = self._param.sharded.grad
        return version_of(self._param.sharded), -1 if gradient is None else version_of(gradient)

    def _commit_held(self, fresh: Tensor) -> None:
        """Add `fresh`, which is not reduced, to `held`, and show that on `.grad`."""
        self.fresh = None
        held = self.live_held()
        if held is not None:
            # A wider gradient is rounded first, as in torch and in `sum_with_held`; a narrower one needs no copy.
            self.hold(held.add_(fresh.to(held.dtype) if fresh.dtype.itemsize > held.dtype.itemsize else fresh))
            return
        self.hold(
            fresh.to(self._param.precision.reduce)
            if fresh.dtype is not self._param.precision.reduce
            else fresh.detach()
        )
        self._mark()

    def _commit_partial(self, partial: Tensor) -> None:
        """After a partial reduction, which included `held` and earlier partial sums."""
        self.fresh_partial = None
        self.hold(None)
        self.partial = partial
        self._mark()

    def _mark(self) -> None:
        if self._param.sharded.grad is None or isinstance(self._param.sharded.grad, PendingGrad):
            self._param.sharded.grad = PendingGrad(
                self._param.sharded, self._param.name, self._param.precision.gradient
            )
        self.marker = self._param.sharded.grad

    def discard(self) -> None:
        """Forget the gradients of the running backward; `held`, `partial` and `.grad` stay."""
        if self.shown is None:
            self._param.full.grad = None
            if self.held is not None:
                self.hold(self.held)
        self.fresh = self.reduced = self.fresh_partial = None
