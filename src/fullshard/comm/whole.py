"""The whole tensor of one that is sharded, on all ranks, over a data group: a peer that fails is named."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat import local_of
from .group import gather_over, small_group


def whole_of(tensor: DTensor, what: str) -> Tensor:
    """What `tensor.full_tensor()` returns, without its graph: every rank of its mesh makes this call. Finished on
    return. `what`: what the text of an error says that it is for.

    Of what one axis of the mesh cuts, as parameters of `fully_shard` are; torch gathers the rest (tensor parallelism).
    """
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not axes:
        return local_of(tensor)
    (axis, *more), mesh = axes, tensor.device_mesh
    placement = tensor.placements[axis]
    if more or type(placement) is not Shard or mesh.size(axis) == 1:
        return tensor.full_tensor()
    group = small_group(mesh.get_group(axis), local_of(tensor).device, what)
    if group is None:
        return tensor.full_tensor()
    world, dim = mesh.size(axis), placement.dim
    # As torch cuts: equal parts, of which the last ones may be smaller or empty.
    rows = -(-tensor.shape[dim] // world)
    part = local_of(tensor).movedim(dim, 0)
    padded = part.contiguous()
    if len(part) < rows:
        padded = part.new_zeros((rows, *part.shape[1:]))
        padded[: len(part)] = part
    gathered = padded.new_empty((world * rows, *part.shape[1:]))
    if gathered.numel():
        gather_over(gathered, padded, group, what)
    return gathered[: tensor.shape[dim]].movedim(0, dim)
