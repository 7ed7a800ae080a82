"""Whether equal bits are to be expected: the plain model gives them in the processes of the training, and the optimizer
gives them on shards.

Both are found by experiment, with plain torch alone. `control` is what the plain model makes of a rank's first batch in
the process of that rank, before it is sharded there; where the comparison's own process makes the same bits of it, the
same kernels run, and whatever differs in the sharded training is a finding. `elementwise` steps a second optimizer on
the shards of each rank, one rank after the other, as plain tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullshard.program import Program, to_device

from .reference import Expected, Reference
from .replicas import digest
from .setting import Setting, batch_index, seed_generators, seed_of


def can_be_equal(setting: Setting) -> bool:
    """Axes beside data parallelism compute other products, or in another order, and FSDP1 and DDP reduce in buckets
    of their own. On a device kernels with atomic additions may differ in any run, not only in the two that the
    comparison takes."""
    repeats = setting.device == "cpu" or torch.are_deterministic_algorithms_enabled()
    return repeats and setting.is_fsdp2 and not setting.strategy.divides


def control(program: Program, setting: Setting, device: torch.device, rank: int) -> dict[str, int]:
    """Digests of the loss and the gradients of `rank`'s first batch, by the plain model."""
    if not can_be_equal(setting):
        return {}
    loss, _, parts = Reference(program, setting, device).forward(0, 0, rank)
    return _digests(loss, parts)


def _digests(loss: Tensor, parts: dict[str, Tensor | None]) -> dict[str, int]:
    return {"loss": digest(loss)} | {name: digest(part) for name, part in parts.items() if part is not None}


def other_bits(controls: list[dict[str, int]], expected: Expected) -> str:
    """The first value of `expected`, of the first step, whose bits a rank's control does not have; "" if all have."""
    for rank, found in enumerate(controls):
        wanted = _digests(expected.losses[rank][0], expected.parts[rank][0])
        for name in reversed(wanted):
            if found.get(name) != wanted[name]:
                return f"{name}, rank {rank}"
    return ""


def differentiates(reference: Reference) -> bool:
    """Whether the loss takes gradients itself. The backward of these is a further path to each parameter, and a unit
    adds to what earlier micro-batches left when the first path arrives, before it knows of the other."""
    ran: list[Tensor] = []

    def unpack(saved: Tensor) -> Tensor:
        ran.append(saved)
        return saved

    index = batch_index(reference.setting, 0, 0, 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        seed_generators(seed_of(index))
        reference.program.loss(reference.stepped, to_device(reference.program.batch(index), reference.device))
    return bool(ran)


def elementwise(
    program: Program,
    before: dict[str, Tensor],
    gradients: dict[str, Tensor | None],
    after: dict[str, Tensor],
    cuts: dict[str, int],
    shards: int,
) -> bool:
    """Whether the optimizer's first step gives the same bits on the shards of each rank as on whole parameters, which
    it took from `before` to `after`. `before` is in the order of the model; frozen parameters have no gradient."""
    names = list(before)
    pieces = {name: _pieces(before[name], cuts.get(name, 0), shards) for name in names}
    slopes = {name: [] if (g := gradients[name]) is None else _pieces(g, cuts.get(name, 0), shards) for name in names}
    for rank in range(shards):
        own = [nn.Parameter(pieces[name][rank].clone(), requires_grad=_trains(before[name])) for name in names]
        for name, parameter in zip(names, own, strict=True):
            if slopes[name]:
                parameter.grad = slopes[name][rank].to(parameter.dtype)
        try:
            program.optimizer(own).step()
        except Exception:  # an optimizer that needs whole matrices, or names
            return False
        for name, parameter in zip(names, own, strict=True):
            if not same(parameter.detach(), _pieces(after[name], cuts.get(name, 0), shards)[rank]):
                return False
    return True


def _trains(value: Tensor) -> bool:
    return value.is_floating_point()


def _pieces(value: Tensor, dim: int, shards: int) -> list[Tensor]:
    """Returns the pieces that `Shard(dim)` cuts it into: the last ones may be smaller, or empty."""
    if not value.ndim:
        return [value] * shards
    size = -(-value.shape[dim] // shards)
    starts = [min(rank * size, value.shape[dim]) for rank in range(shards + 1)]
    return [value.narrow(dim, a, b - a) for a, b in zip(starts, starts[1:], strict=False)]


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether all values are equal; NaN is equal to NaN."""
    return torch.equal(found, wanted) or bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())
