"""A sharded parameter: its owner, its tensors, and its gradients on their way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import (
    dtensor_like,
    dtensor_without_data,
    local_of,
    no_torch_function,
    post_accumulate_grad_hooks,
    settled,
    tensor_hooks,
    version_of,
)
from ..layout import ShardLayout
from ..policy import Precision
from .placement import Spec
from .swap import Slot

# ---- owner -----------------------------------------------------------------------------------------------------------
# Whose a sharded parameter is.
#
# Sharded parameters are plain DTensors (ADR 0016), so no class of theirs says which unit they belong to. Their storage
# does: a DTensor has one of its own, without memory, which its views and `p.detach()` share, and so do the values of a
# state dict. Copies and pickles have another one, and no owner.


class Owner:
    """The unit of one parameter. `ranks`: those of its mesh, as ranks in the default group. `name`: the parameter's, as
    the user's model spells it, once the root formed."""

    # Of the storage.
    ATTRIBUTE = "_fullshard_owner"

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks

    @staticmethod
    def of(tensor: Tensor) -> Owner | None:
        """The owner of the sharded parameter that `tensor` is, or is a view of."""
        found = getattr(tensor.untyped_storage(), Owner.ATTRIBUTE, None) if isinstance(tensor, DTensor) else None
        return found if isinstance(found, Owner) else None


def claim(parameter: Tensor, owner: Owner | None) -> None:
    """`owner`, if there is one, owns the DTensor `parameter` from now on."""
    if owner is not None:
        setattr(parameter.untyped_storage(), Owner.ATTRIBUTE, owner)


# ---- sharded ---------------------------------------------------------------------------------------------------------
# The tensors of one parameter.
#
#     sharded   the DTensor parameter that users and optimizers hold; registered on the module outside of compute
#     local     its local tensor: this rank's rows, a view of the group's flat buffer
#     full      the parameter on the module in forward and backward: what it was before it was sharded, plain or a
#               DTensor on its own mesh; memory of `param.memory`


class Initial(NamedTuple):
    """Digests of a parameter's initial value (initial.py): 0-dim tensors on the parameter's device, so that
    `fully_shard` synchronises with no device."""

    # Of the full parameter (of a DTensor, this rank's part), and of the shard taken from it.
    full: Tensor
    shard: Tensor
    # The shard's tensor, and its version counts.
    local: weakref.ref[Tensor]
    versions: tuple[int, int]
    # How often the original parameter was written before it was sharded; -1 for a value that was loaded afterwards.
    writes: int


# Of a tensor that says itself how it is gathered (extension.py).
GATHER_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def class_of(parameter: Tensor) -> type[nn.Parameter]:
    """The class that a full parameter made of `parameter` has: its own, if that only adds attributes and methods to
    memory (bitsandbytes' `Params4bit`), else `nn.Parameter`."""
    kind = type(parameter)
    if issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__:
        return kind
    return nn.Parameter


def holds_bits(parameter: Tensor) -> bool:
    """Whether the floating dtype of `parameter` only names the size of its elements, as with bitsandbytes'
    `bnb_4bit_quant_storage`: a cast would destroy the packed values."""
    marks = parameter.__dict__
    return "quant_storage" in marks and marks.get("quant_state") is not None


def full_of(param: ShardedParam, view: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    """The full parameter on the memory of `view`, with the attributes `marks`: the dict itself. A tensor extension
    keeps its own."""
    full = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
    if type(view) is Tensor:
        # The constructor of a class of the user's is not called again: it may quantise, or want arguments.
        full.__class__, full.__dict__ = param.kind, marks
    return full


class ShardedParam:
    """See the module's table. Made and re-made by `ParamGroup`; `name` is relative to the unit."""

    __slots__ = (
        "__weakref__",
        "full",
        "gradients",
        "initial",
        "kept",
        "kind",
        "layout",
        "local",
        "marks",
        "name",
        "own_spec",
        "owner",
        "precision",
        "sharded",
        "slots",
        "spec",
    )

    def __init__(
        self,
        name: str,
        slots: tuple[Slot, ...],
        layout: ShardLayout,
        spec: Spec,
        own_spec: Spec | None = None,
        kind: type[nn.Parameter] = nn.Parameter,
    ) -> None:
        self.name = name
        self.slots = slots
        # How the ranks of the shard axis split it; the shape is that of `full`, or of its local tensor.
        self.layout = layout
        # The DTensor spec of `sharded`.
        self.spec = spec
        # The DTensor spec of `full`, if it is a DTensor.
        self.own_spec = own_spec
        # The class of `full`, unless it is a DTensor.
        self.kind = kind
        # The dtypes of the group.
        self.precision: Precision
        self.sharded: nn.Parameter
        self.local: Tensor
        self.full: nn.Parameter
        # The unit that owns `sharded`; set by the runtime.
        self.owner: Owner | None = None
        # The parameter on the module while a part is kept after forward (SecondaryGroup).
        self.kept: nn.Parameter | None = None
        # Digests of its value before sharding, until ranks have compared them.
        self.initial: Initial | None = None
        self.gradients = ParamGradients(self)
        # Attributes that users set on `sharded`: the dict itself, because torch's conversions take it from the object.
        self.marks: dict[str, Any] = {}


# ---- gradients -------------------------------------------------------------------------------------------------------
# The gradients of one parameter on their way.
#
#     fresh     the full gradient of the running backward, taken from autograd; of a DTensor, this rank's part of it
#     held      full gradients of earlier backwards that were not reduced, in the reduce dtype; `full.grad` shows them
#     reduced   this rank's gradient shard of the running backward; becomes `sharded.grad` when the backward ends
#     partial   this rank's shard of a sum to which the replicas have not contributed yet: flat and padded,
#               in the reduce dtype; `fresh_partial` is its counterpart for the running backward
#
# Gradients move from `fresh` or `reduced` to `held` or `.grad` only at the end of a backward, so a failing backward
# leaves the gradients of earlier micro-batches exactly as they were.


class ParamGradients:
    """See the table above. Belongs to one `ShardedParam`."""

    __slots__ = ("_param", "fresh", "fresh_partial", "held", "marker", "partial", "reduced", "shown", "shows_held")

    def __init__(self, param: ShardedParam) -> None:
        self._param = param
        self.fresh: Tensor | None = None
        self.held: Tensor | None = None
        self.reduced: Tensor | None = None
        self.partial: Tensor | None = None
        self.fresh_partial: Tensor | None = None
        # The `.grad` at the time `held` and `partial` were kept; a different one means that the user cleared them.
        self.marker: Tensor | None = None
        # What `full.grad` shows of `held`; and whether it may.
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

    def _own_part(self, gradient: Tensor, own: Spec) -> Tensor:
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
        is shown unless a hook takes it away before the next gradient arrives (`shows_held`, engine/gradients.py).
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
                self._param.sharded.grad = dtensor_like(self._param.sharded, reduced.data)
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
        """Without a reduction `fresh` joins `held`, and `.grad` shows it."""
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


# ---- kept ------------------------------------------------------------------------------------------------------------
# A snapshot of the gradients of a parameter, so that later changes can be undone.


class KeptTensor:
    """A tensor and a copy of its contents; no copy for None and for tensors without data."""

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
    """`.grad` of one parameter, with the gradients held beside it. Takes memory only for those that exist:
    none after `zero_grad()`."""

    __slots__ = ("_grad", "_held", "_marker", "_param", "_partial")

    def __init__(self, param: ShardedParam) -> None:
        self._param = param
        self._held = KeptTensor(param.gradients.live_held())
        self._partial = KeptTensor(param.gradients.live_partial())
        self._marker = param.gradients.marker
        self._grad = KeptTensor(param.sharded.grad)

    def restore(self) -> None:
        """Call it outside of a backward, with no gradients in flight."""
        gradients = self._param.gradients
        gradients.hold(self._held.restore())
        gradients.partial = self._partial.restore()
        gradients.marker = self._marker
        self._param.sharded.grad = self._grad.restore()


# ---- pending ---------------------------------------------------------------------------------------------------------
# The placeholder on a sharded parameter's `.grad` while its gradient, or a partial sum, is kept between micro-batches.
#
# FSDP2 leaves `.grad` at None there. So `zero_grad()` cannot clear an abandoned accumulation window, and `step()` with
# synchronisation left off silently does nothing. A `PendingGrad` has the shape and dtype of the gradient and no data:
#
#     zero_grad()                    removes or zeroes it: the kept gradient is dropped before the next backward
#     step(), clip, any arithmetic   raises a RuntimeError that says what to do
#
# `SteppedGrad` is the placeholder after a step in backward (`step_in_backward`), whose gradient was freed.


class PendingGrad(DTensor):
    """Placeholder for a gradient that exists on each rank but was not reduced yet. It has the parameter's shape and
    placements, the gradient's dtype, and no data.

    A subclass of DTensor: torch asks the first tensor subclass of an operation, unless another one is *its* subclass.
    So this class raises before DTensor complains about mixed types.
    """

    cleared: bool
    parameter_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, dtype: torch.dtype) -> PendingGrad:
        made = dtensor_without_data(cls, parameter, dtype)
        assert isinstance(made, PendingGrad)
        made.cleared = False
        made.parameter_name = name
        return made

    def __init__(self, parameter: Tensor, name: str, dtype: torch.dtype) -> None:
        pass

    @property
    def is_sparse(self) -> NoReturn:  # type: ignore[override]
        # torch's optimizers read this of every gradient before they change anything (weight decay comes first), so
        # step() raises while all parameters are still unchanged.
        self._refuse([self])

    def full_tensor(self, **_: Any) -> NoReturn:
        self._refuse([self])

    def to_local(self, **_: Any) -> NoReturn:
        self._refuse([self])

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse([self])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingGrad({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pending = _pending(args, kwargs or {})
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in _ZEROING:
            for gradient in pending:
                gradient.cleared = True
            return args[0] if func is torch.ops.aten.zero_.default else None
        cls._refuse(pending)

    @staticmethod
    def _refuse(pending: list[PendingGrad]) -> NoReturn:
        names = ", ".join(dict.fromkeys(gradient.parameter_name for gradient in pending))
        raise RuntimeError(
            f"expected a reduced gradient, found one that was only accumulated on some ranks, of {names}: the last "
            f"backward ran with set_requires_gradient_sync(False) or set_requires_all_reduce(False); run the last "
            f"micro-batch with both True before reading gradients, clipping or optimizer.step()"
        )

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class SteppedGrad(PendingGrad):
    """Placeholder for a gradient that its optimizer consumed in backward: reading it raises."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SteppedGrad({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @staticmethod
    def _refuse(pending: list[PendingGrad]) -> NoReturn:
        names = ", ".join(dict.fromkeys(gradient.parameter_name for gradient in pending))
        raise RuntimeError(
            f"expected a gradient, found that the optimizer took a step with it in backward already and freed it "
            f"(fullshard.step_in_backward), of {names}: clipping by a global norm and torch.amp.GradScaler need all "
            f"gradients at once; leave them out, or leave step_in_backward out"
        )


_ZEROING: tuple[Callable[..., Any], ...] = (
    torch.ops.aten.zero_.default,
    torch.ops.aten._foreach_zero_.default,
)


def _pending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PendingGrad]:
    found: list[PendingGrad] = []
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        value = stack.pop(0)
        if isinstance(value, PendingGrad):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
    return found
