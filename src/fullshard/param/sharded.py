"""A sharded parameter: its owner and its tensors. Its gradients are in gradients.py."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import local_of
from ..layout import ShardLayout
from ..policy import Precision
from .gradients import ParamGradients
from .pending import PendingGrad
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

    # The attribute of the storage.
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

    # The digests of the full parameter (of a DTensor, this rank's part), and of the shard taken from it.
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


def local_data(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's part of a DTensor."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def full_of(param: ShardedParam, view: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    """The full parameter on the memory of `view`, with the attributes `marks`: the dict itself. A tensor extension
    keeps its own."""
    full = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
    if type(view) is Tensor:
        # The constructor of a class of the user's is not called again: it may quantise, or want arguments.
        full.__class__, full.__dict__ = param.kind, marks
    return full


class ShardedParam:
    """Holds the tensors of the table above. `ParamGroup` makes them, and makes them again; `name` is relative to the
    unit."""

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
