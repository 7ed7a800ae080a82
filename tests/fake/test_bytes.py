"""The counter of benchmarks/bytes.py: it agrees with what is known of FSDP2, and no write gets past it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bytes import TINY, figures
from benchmarks.counting import ByteCounter
from benchmarks.host import Chain
from fullshard.comm import PlannedGather, ShardGroup
from fullshard.comm.reduce import MessageReduce
from tests.harness.installed import has


def _figure(precision: str, world: int, way: str = "NCCL plan") -> dict[str, Any]:
    return figures(TINY, precision, world)[way]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("precision", "world", "written", "sent"),
    [("fp32", 1, 16, 0), ("fp32", 8, 13, 12), ("mixed precision", 1, 16, 0), ("mixed precision", 8, 9, 8)],
)
def test_fsdp2_writes_what_is_known_of_it(precision: str, world: int, written: float, sent: float) -> None:
    """From its source: cast, copy-in and copy-out of both gathers, and the reduction's staging."""
    found = _figure(precision, world, "fsdp2")
    if precision == "mixed precision" and has("torch.ops.fsdp.chunk_cat_mixed_dtype"):
        # From 2.15 on a norm's gradient, computed in float32, is not cast to bfloat16 on its way to the reduction.
        sizes = [(p.numel(), p.dim()) for p in Chain(TINY).parameters()]
        written -= 2 * sum(n for n, dim in sizes if dim == 1) / sum(n for n, _ in sizes)
    assert (found["written"], found["sent"]) == (pytest.approx(written, abs=5e-5), sent)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("precision", "written"), [("fp32", 0.3), ("mixed precision", 4.6), ("bf16 storage", 0.3)])
def test_with_the_plan_of_nccl_little_is_written(precision: str, written: float) -> None:
    """The norms, which are packed, and casts: into the messages of both gathers, and of gradients for their sum. FSDP2
    sends as much."""
    found, theirs = _figure(precision, 8), _figure(precision, 8, "fsdp2")
    assert found["written"] <= written, found
    assert found["sent"] == pytest.approx(theirs["sent"], rel=0.003), found


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16 storage"])
@pytest.mark.parametrize("way", ["gloo plan", "NCCL plan"])
def test_one_rank_writes_nothing_when_dtypes_agree(precision: str, way: str) -> None:
    assert _figure(precision, 1, way)["written"] == 0


def test_what_gradients_send_to_other_nodes() -> None:
    """Eight ranks on two nodes, around a ring of which two of eight ranks send to the other node: as much as FSDP2."""
    rows = figures(TINY, "mixed precision", 8)
    assert rows["fsdp2"]["across_by"] == {"all-gather": 4 * 7 / 8 * 2 / 8, "reduce-scatter": 4 * 7 / 8 * 2 / 8}
    # Norms and presence are padded a little, and 16 bytes are compared.
    expected = rows["fsdp2"]["across_by"] | {"all-reduce": 0.0}
    assert rows["NCCL plan"]["across_by"] == pytest.approx(expected, rel=0.01, abs=0.001)


def _stage_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_each = ShardGroup.gather_each

    def staged(self: ShardGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> Any:
        return gather_each(self, outs, [piece.clone() for piece in pieces])

    monkeypatch.setattr(ShardGroup, "gather_each", staged)


def _stage_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce_each = ShardGroup.reduce_scatter_each

    def staged(self: ShardGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor], op: Any) -> Any:
        return reduce_each(self, outs, [piece.clone() for piece in pieces], op)

    monkeypatch.setattr(ShardGroup, "reduce_scatter_each", staged)


def _copy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = PlannedGather.complete

    def copied(self: PlannedGather) -> None:
        complete(self)
        self._full.flat.data.copy_(self._full.flat.clone())

    monkeypatch.setattr(PlannedGather, "complete", copied)


def _cast_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    split = MessageReduce.split

    def cast(self: MessageReduce, mean: Tensor, complete: bool) -> Any:
        return split(self, mean.double().to(mean.dtype), complete)

    monkeypatch.setattr(MessageReduce, "split", cast)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("break_it", "more"), [(_stage_gathers, 0.5), (_stage_reductions, 4.0), (_copy_out, 8.0), (_cast_chunks, 1.5)]
)
def test_a_staging_copy_is_seen(break_it: Callable[..., None], more: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mixed precision at W=8: 2 bytes of a shard in each of two gathers, 4 of a gradient, 4 of each full parameter
    twice in each gather (a clone, and a `.data` write), and 8 and 4 of a chunk."""
    before = _figure("mixed precision", 8)["written"]
    break_it(monkeypatch)
    assert _figure("mixed precision", 8)["written"] - before == pytest.approx(more, abs=0.05)


def _accumulate(x: Tensor) -> None:
    """Autograd itself clones a gradient that somebody else holds."""
    torch.zeros(4, 4, requires_grad=True).backward(x)


WRITES: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "a new result": (lambda x: x + 1, 64),
    "in place": (lambda x: x.add_(1), 64),
    "through .data": (lambda x: x.data.copy_(x), 64),
    "a part": (lambda x: x[:2].zero_(), 32),
    "into out": (lambda x: torch.add(x, 1, out=x[0:4]), 64),
    "a list": (lambda x: torch._foreach_copy_([x[0], x[1]], [x[2], x[3]]), 32),
    "another dtype": (lambda x: x.to(torch.bfloat16), 32),
    "to lie contiguous": (lambda x: x.t().contiguous(), 64),
    "by autograd": (_accumulate, 64 + 64),
    "storage to storage": (lambda x: torch.UntypedStorage(64).copy_(x.untyped_storage()), 64),
    "a storage that grows": (lambda x: torch.UntypedStorage(24).resize_(48), 24),
    "nothing: views": (lambda x: x.view(16)[2:].as_strided((2, 2), (1, 1)).detach(), 0),
    "nothing: memory": (lambda x: (torch.empty(64), torch.empty_like(x), x.new_empty(3)), 0),
    "nothing: a storage from empty": (lambda x: torch.UntypedStorage(0).resize_(48), 0),
    "nothing: already so": (lambda x: (x.contiguous(), x.to(torch.float32), x.reshape(16)), 0),
}


@pytest.mark.parametrize("name", WRITES)
def test_each_way_to_write_is_counted(name: str) -> None:
    write, nbytes = WRITES[name]
    x = torch.ones(4, 4)
    with ByteCounter() as counter:
        write(x)
    assert counter.written_nbytes == nbytes, counter.written


def test_what_is_not_known_stops_the_count() -> None:
    with torch.library._scoped_library("counted", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.clone(), "CPU")
        with ByteCounter(), pytest.raises(NotImplementedError, match=r"counted.op"):
            torch.ops.counted.op(torch.ones(2))
