"""What a reduction runs on a device, counted: operators, and the bytes that they write. Bits are those of a plain sum.

The parameters are the nine of a block of Llama: four projections of attention, three of the MLP, two norms.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_step import BlockShape, Chain
from fullshard.comm import BufferPool, Dtypes, Links, Outgoing, ReduceChannel, ShardGroup, reduce_channel
from fullshard.layout import FlatLayout, ShardLayout
from fullshard.policy import Controls
from tests.harness.pool import pool

WIDTH, HIDDEN = 16, 48
SHAPES = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)] + [(WIDTH,)] * 2
NUMEL = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH


class _Counts(TorchDispatchMode):
    """Operators that are no views, and the bytes that those write which take part."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        out = func(*args, **(kwargs or {}))
        infos = [argument.alias_info for argument in func._schema.arguments]
        if any(info is not None and not info.is_write for info in infos) or func._schema.name.startswith("aten::empty"):
            return out
        devices = {leaf.device.type for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)}
        if func.namespace != "aten" or "simulated" not in devices:
            return out  # of the harness
        name = func._schema.name.removeprefix("aten::")
        self.operators[name] += 1
        for tensor in tree_leaves(args[0] if infos and infos[0] is not None else out):
            if isinstance(tensor, Tensor):
                self.nbytes[name] += tensor.numel() * tensor.itemsize
        return out


def _gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _channel(
    world: int, dtypes: Dtypes, *, shards: bool, controls: Controls, direct: tuple[int, ...] = ()
) -> ReduceChannel:
    """Over all ranks: parameters are sharded, those of `direct` sent by themselves, or replicated."""
    import torch.distributed as dist

    from fullshard.comm.group import Alone

    device = torch.device("simulated", 0)
    assert dist.group.WORLD is not None
    group = ShardGroup(dist.group.WORLD, device)
    everyone = tuple(range(world))
    links = Links(group, everyone=everyone) if shards else Links(Alone(device, group.backend), group, everyone=everyone)
    if world == 1:
        links = Links(Alone(device, group.backend), everyone=everyone)
    pack = FlatLayout.build([ShardLayout(shape, 0, world if shards else 1) for shape in SHAPES], 8, first=direct)
    pool = BufferPool(keep=False)
    return reduce_channel(links.under("auto"), pack, direct, dtypes, pool, strategy="auto", controls=controls)


def _reduce(
    rank: int,
    world: int,
    sent: torch.dtype,
    dtypes: Dtypes,
    shards: bool,
    controls: Controls,
    direct: tuple[int, ...] = (),
    partials: int = 0,
) -> tuple[Counter[str], Counter[str], list[Tensor | None]]:
    """What one reduction runs, with `partials` sums of an earlier one."""
    channel = _channel(world, dtypes, shards=shards, controls=controls, direct=direct)
    gradients = [gradient.to("simulated") for gradient in _gradients(rank, sent)]
    kept: list[Tensor | None] = []
    if partials:
        kept = channel.issue(gradients, Outgoing(False, keep=True)).collect()
        kept[partials:] = [None] * (len(kept) - partials)
    with _Counts() as counts:
        parts = channel.issue(gradients, Outgoing(False, kept)).collect()
    return counts.operators, counts.nbytes, [None if part is None else part.cpu() for part in parts]


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("factor", [None, 3.0])
def test_one_rank_casts_and_divides_all_gradients_in_one_operation_each(factor: float | None) -> None:
    dtypes = Dtypes(BF16, F32, F32, F32)
    controls = Controls() if factor is None else Controls(divide_factor=factor)
    ((operators, nbytes, parts),) = pool(1, backend="nccl").run(_reduce, 1, BF16, dtypes, True, controls)
    assert operators == {"_foreach_copy_": 1, **({} if factor is None else {"div_": 1, "_to_copy": 1})}
    assert factor is not None or nbytes == {"_foreach_copy_": 4 * NUMEL}
    for part, gradient in zip(parts, _gradients(0, BF16), strict=True):
        assert part is not None and torch.equal(part, (gradient / (factor or 1.0)).float())


def test_one_rank_hands_over_what_needs_no_cast() -> None:
    dtypes = Dtypes(F32, F32, F32, F32)
    ((operators, _, parts),) = pool(1, backend="nccl").run(_reduce, 1, F32, dtypes, True, Controls())
    assert not operators
    assert all(map(torch.equal, parts, _gradients(0, F32)))  # type: ignore[arg-type]


# Nine flags, and up to a multiple of eight elements.
TAIL = 16


def test_replicas_sum_in_the_buffer_that_they_hand_over() -> None:
    """One copy in; the flags with the padding after them, and the division; none out."""
    dtypes = Dtypes(F32, F32, F32, F32)
    mean = [(a + b) / 2 for a, b in zip(_gradients(0, F32), _gradients(1, F32), strict=True)]
    for operators, nbytes, parts in pool(2, backend="nccl").run(_reduce, 2, F32, dtypes, False, Controls()):
        assert operators == {"_foreach_copy_": 1, "fill_": 1, "div_": 1}
        assert nbytes["_foreach_copy_"] == 4 * NUMEL and nbytes["fill_"] == 4 * TAIL
        for part, expected in zip(parts, mean, strict=True):
            assert part is not None and torch.equal(part, expected)


def test_of_a_send_buffer_flags_and_padding_are_filled_in_one_operation() -> None:
    dtypes = Dtypes(BF16, F32, F32, F32)
    sums = [a.float() + b.float() for a, b in zip(_gradients(0, BF16), _gradients(1, BF16), strict=True)]
    found = pool(2, backend="nccl").run(_reduce, 2, BF16, dtypes, True, Controls())
    for rank, (operators, nbytes, parts) in enumerate(found):
        # The backend takes the mean.
        assert operators == {"_foreach_copy_": 1, "fill_": 1}
        assert nbytes["_foreach_copy_"] == 4 * NUMEL and nbytes["fill_"] == 2 * 4 * TAIL
        for part, total in zip(parts, sums, strict=True):
            assert part is not None and torch.equal(part, total.chunk(2)[rank] / 2)


@pytest.mark.parametrize("partials", [9, 4])
def test_partial_sums_are_added_in_one_operation(partials: int) -> None:
    dtypes = Dtypes(F32, F32, F32, F32)
    both = list(zip(_gradients(0, F32), _gradients(1, F32), strict=True))
    found = pool(2, backend="nccl").run(_reduce, 2, F32, dtypes, False, Controls(), (), partials)
    for operators, nbytes, parts in found:
        flags = {"add_": 1, "_foreach_add_": 1} if partials == 9 else {"_foreach_add_": 2}
        assert operators == {"_foreach_copy_": 1, "fill_": 1, "div_": 1, **flags}
        # Shards are padded to eight elements, which changes none of these sizes.
        numel = sum(gradient.numel() for gradient, _ in both[:partials])
        assert nbytes["_foreach_add_"] + nbytes["add_"] == 4 * (numel + partials)
        for i, (part, (a, b)) in enumerate(zip(parts, both, strict=True)):
            once = (a + b) / 2
            assert part is not None and torch.equal(part, 2 * once if i < partials else once)


def test_gradients_that_travel_by_themselves_are_cast_in_one_operation() -> None:
    """Seven matrices from where they are, and a message of the norms: one cast of each."""
    dtypes = Dtypes(BF16, F32, F32, F32)
    sums = [a.float() + b.float() for a, b in zip(_gradients(0, BF16), _gradients(1, BF16), strict=True)]
    found = pool(2, backend="nccl").run(_reduce, 2, BF16, dtypes, True, Controls(), tuple(range(7)))
    for rank, (operators, nbytes, parts) in enumerate(found):
        assert operators == {"_foreach_copy_": 2, "fill_": 1}
        assert nbytes["_foreach_copy_"] == 4 * NUMEL
        for part, total in zip(parts, sums, strict=True):
            assert part is not None and torch.equal(part, total.chunk(2)[rank] / 2)


# ---- a step ----------------------------------------------------------------------------------------------------------


class _Names(_Counts):
    """And the collectives, by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            self.operators[func._schema.name.removeprefix("c10d::")] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _accumulate(rank: int) -> tuple[list[Counter[str]], float, float]:
    """By micro-batch what runs beyond a plain block, and what clipping runs; the norm, and that of the gradients in
    float64."""
    import fullshard

    shape = BlockShape(width=WIDTH, hidden=HIDDEN, heads=4, kv_heads=4, blocks=1, length=4)
    found: list[Counter[str]] = []
    inputs = [torch.randn(2, 1, 4, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    torch.manual_seed(0)
    plain: Any = Chain(shape).to("simulated")
    sharded: Any = copy.deepcopy(plain)
    mixed = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain.to(torch.bfloat16)
    # Matrices travel by themselves, norms are packed.
    with mock.patch("fullshard.api.fully_shard.DIRECT_GATHER_NBYTES", 2 * WIDTH + 1):
        fullshard.fully_shard(sharded.blocks[0], mp_policy=mixed)
        fullshard.fully_shard(sharded, mp_policy=mixed)
        for model in (plain, sharded):
            for step in range(2):
                for micro in range(2):
                    if model is sharded:
                        model.set_requires_gradient_sync(micro == 1)
                    x = inputs[micro][rank].to("simulated", torch.bfloat16)
                    with _Names() as counts:
                        model(x).float().square().sum().backward()
                    if step:
                        found.append(counts.operators)
                if not step:
                    model.zero_grad()
        with _Names() as counts:
            norm = fullshard.clip_grad_norm_(sharded.parameters(), 1e9)
    gradients = [parameter.grad.full_tensor().cpu().double() for parameter in sharded.parameters()]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    return [found[2] - found[0], found[3] - found[1], counts.operators], norm.item(), expected


def test_micro_batches_and_clipping_run_few_operators() -> None:
    for (first, last, clip), norm, expected in pool(2, backend="nccl").run(_accumulate):
        # Casts into the messages and copies out of them, of two gathers. Gradients are held one by one, as in FSDP2.
        assert first == {"allgather_into_tensor_coalesced_": 2, "_foreach_copy_": 4, "_to_copy": 9}
        # Gradients come in two dtypes, because torch's norm computes those of its weight in float32; then the message.
        sums = {"_foreach_copy_": 4 + 2 + 1, "_foreach_add_": 1, "fill_": 1, "reduce_scatter_tensor_coalesced_": 1}
        compared = {"allreduce_": 1, "bitwise_not": 1, "ne": 1, "any": 1, "copy_": 1}
        assert last == {"allgather_into_tensor_coalesced_": 2, **sums, **compared}
        # However many gradients there are.
        assert clip.total() == 13 and clip["_foreach_norm"] == clip["_foreach_mul_"] == clip["allreduce_"] == 1
        # One rounding to float32.
        assert norm == pytest.approx(expected, rel=2**-24 + 2**-40)
