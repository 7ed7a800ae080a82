"""What a reduction runs on a device, counted: operators, and the bytes that they write. Bits are those of a plain sum.

The parameters are the nine of a block of Llama: four projections of attention, three of the MLP, two norms.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.comm import BufferPool, Dtypes, Links, ReduceChannel, ShardGroup, reduce_channel
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
        written = args[0] if infos[0] is not None else out
        for tensor in written if isinstance(written, list) else [written]:
            self.nbytes[name] += tensor.numel() * tensor.itemsize
        return out


def _gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _channel(world: int, dtypes: Dtypes, *, shards: bool, controls: Controls) -> ReduceChannel:
    """Over all ranks: parameters are sharded, or replicated."""
    import torch.distributed as dist

    from fullshard.comm.group import Alone

    device = torch.device("simulated", 0)
    assert dist.group.WORLD is not None
    group = ShardGroup(dist.group.WORLD, device)
    everyone = tuple(range(world))
    links = Links(group, everyone=everyone) if shards else Links(Alone(device, group.backend), group, everyone=everyone)
    if world == 1:
        links = Links(Alone(device, group.backend), everyone=everyone)
    pack = FlatLayout.build([ShardLayout(shape, 0, world if shards else 1) for shape in SHAPES], 8)
    return reduce_channel(links, pack, (), dtypes, BufferPool(keep=False), communication="auto", controls=controls)


def _reduce(
    rank: int, world: int, sent: torch.dtype, dtypes: Dtypes, shards: bool, controls: Controls
) -> tuple[Counter[str], Counter[str], list[Tensor | None]]:
    channel = _channel(world, dtypes, shards=shards, controls=controls)
    gradients = [gradient.to("simulated") for gradient in _gradients(rank, sent)]
    with _Counts() as counts:
        parts = channel.issue(gradients, accumulated=False).collect()
    return counts.operators, counts.nbytes, [None if part is None else part.cpu() for part in parts]


F32, BF16 = torch.float32, torch.bfloat16


def test_one_rank_casts_all_gradients_in_one_operation() -> None:
    dtypes = Dtypes(BF16, F32, F32, F32)
    ((operators, nbytes, parts),) = pool(1, backend="nccl").run(_reduce, 1, BF16, dtypes, True, Controls())
    assert operators == {"_foreach_copy_": 1}
    assert nbytes == {"_foreach_copy_": 4 * NUMEL}
    for part, gradient in zip(parts, _gradients(0, BF16), strict=True):
        assert part is not None and torch.equal(part, gradient.float())


def test_one_rank_divides_all_gradients_in_one_operation() -> None:
    dtypes = Dtypes(BF16, F32, F32, F32)
    controls = Controls(divide_factor=3.0)
    ((operators, _, parts),) = pool(1, backend="nccl").run(_reduce, 1, BF16, dtypes, True, controls)
    assert operators == {"_foreach_copy_": 1, "div_": 1, "_to_copy": 1}
    for part, gradient in zip(parts, _gradients(0, BF16), strict=True):
        assert part is not None and torch.equal(part, (gradient / 3.0).float())


def test_one_rank_hands_over_what_needs_no_cast() -> None:
    dtypes = Dtypes(F32, F32, F32, F32)
    ((operators, _, parts),) = pool(1, backend="nccl").run(_reduce, 1, F32, dtypes, True, Controls())
    assert not operators
    assert all(map(torch.equal, parts, _gradients(0, F32)))  # type: ignore[arg-type]


# Nine flags, and up to a multiple of eight elements.
TAIL = 16 - 9


def test_replicas_sum_in_the_buffer_that_they_hand_over() -> None:
    """One copy in; the flags, the padding after them, and the division; none out."""
    dtypes = Dtypes(F32, F32, F32, F32)
    mean = [(a + b) / 2 for a, b in zip(_gradients(0, F32), _gradients(1, F32), strict=True)]
    for operators, nbytes, parts in pool(2, backend="nccl").run(_reduce, 2, F32, dtypes, False, Controls()):
        assert operators == {"_foreach_copy_": 1, "zero_": 1, "fill_": 1, "div_": 1}
        assert nbytes["_foreach_copy_"] == 4 * NUMEL and nbytes["zero_"] == 4 * TAIL
        for part, expected in zip(parts, mean, strict=True):
            assert part is not None and torch.equal(part, expected)


def test_of_a_send_buffer_padding_alone_is_zeroed() -> None:
    dtypes = Dtypes(BF16, F32, F32, F32)
    sums = [a.float() + b.float() for a, b in zip(_gradients(0, BF16), _gradients(1, BF16), strict=True)]
    found = pool(2, backend="nccl").run(_reduce, 2, BF16, dtypes, True, Controls())
    for rank, (operators, nbytes, parts) in enumerate(found):
        # The backend takes the mean.
        assert operators == {"_foreach_copy_": 1, "zero_": 1, "fill_": 1}
        assert nbytes["_foreach_copy_"] == 4 * NUMEL and nbytes["zero_"] == 2 * 4 * TAIL
        for part, total in zip(parts, sums, strict=True):
            assert part is not None and torch.equal(part, total.chunk(2)[rank] / 2)
