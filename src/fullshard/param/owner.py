"""Whose a sharded parameter is.

Sharded parameters are plain DTensors (ADR 0016), so no class of theirs says which unit they belong to. Their storage
does: a DTensor has one of its own, without memory, which its views and `p.detach()` share, and so do the values of a
state dict. Copies and pickles have another one, and no owner.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


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
