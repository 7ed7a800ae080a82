"""`context_parallel`: attention over sequences cut over ranks is that of one process, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointError, checkpoint

from fullshard import context_parallel
from fullshard._torch import attend, attend_backward
from fullshard.comm.data_group import Line
from fullshard.extras import sequence_attention
from fullshard.extras.sequence_attention import Sight
from fullshard.layout import AttentionShape, SequenceSplit
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks, several

B, H, S, E = 2, 4, 16, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 3 + [1] * 9 + [2] * 4])
ALIKE = torch.tensor([[3] * 5 + [1] * 7 + [2] * 4] * 2)  # in both rows at the same places


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


@contextmanager
def entered(cp: Any) -> Iterator[None]:
    """Where each rank raises by itself: a rank that enters later would raise that another one failed."""
    with cp:
        torch.distributed.barrier()
        yield


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def seen(causal: bool, documents: Tensor | None) -> Tensor | None:
    """The mask of one process."""
    mask = torch.ones(S, S, dtype=torch.bool).tril()[None, None] if causal else None
    if documents is None:
        return mask
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same if mask is None else same & mask


def compare(
    cp: Any,
    heads: int,
    kv_heads: int,
    *,
    causal: bool = False,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Result and gradients of one attention, in the context and in one process."""
    *tensors, weight = drawn((B, heads, S, E), (B, kv_heads, S, E), (B, kv_heads, S, E), (B, heads, S, E), dtype=dtype)
    whole = [tensor.double().requires_grad_() for tensor in tensors]
    expected = F.scaled_dot_product_attention(
        *whole, attn_mask=mask if mask is not None else seen(causal, documents), scale=scale, enable_gqa=True
    )
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), whole)]
    with cp:
        *parts, share = cp.split([*tensors, weight], seq_dim=2, documents=documents)
        parts = [part.requires_grad_() for part in parts]
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
        assert out.shape == share.shape and out.dtype is dtype
        found = [out, *torch.autograd.grad((out * share).sum(), parts)]
        found = [cp.unsplit(one, seq_dim=2) for one in found]
    for name, one, other in zip(("result", "query", "key", "value"), found, wanted, strict=True):
        # Sums of E, of the tokens, and over the heads of a group and the ranks; the weights are rounded, too.
        off = tolerance.allowed(other.to(dtype), 4 * E * S * heads, dtype=dtype)
        assert (one - other).abs().max() <= off, (name, heads, kv_heads, causal, (one - other).abs().max(), off)


def _compares(rank: int, world: int, variant: str, balanced: bool) -> None:
    cp = context_parallel(mesh_of(world), variant=variant, load_balance=balanced)
    for kv_heads in (4, 2, 1):
        for causal in (True, False):
            for documents in (None, DOCUMENTS, ALIKE):
                compare(cp, H, kv_heads, causal=causal, documents=documents)
    compare(cp, H, 2, causal=True, scale=0.3)
    compare(cp, H, 2, causal=True, dtype=torch.float32)
    compare(cp, H, 2, causal=True, dtype=torch.bfloat16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("variant", ["ulysses", "ring"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_attention_is_that_of_one_process(world: int, variant: str, balanced: bool) -> None:
    run_ranks(world, _compares, world, variant, balanced)


def test_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long sequences; with masks of one head and of all."""
    monkeypatch.setattr(sequence_attention, "_SLICE_NUMEL", 1)

    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(2), variant="ring")
        mask = torch.rand(B, H, S, S, generator=torch.Generator().manual_seed(4)) < 0.6
        for kv_heads in (4, 2):
            compare(cp, H, kv_heads, causal=True, documents=DOCUMENTS)
            compare(cp, H, kv_heads, mask=mask)
            compare(cp, H, kv_heads, causal=True, dtype=torch.bfloat16)

    run_ranks(2, job)


def _masked(rank: int, variant: str) -> None:
    cp = context_parallel(mesh_of(2), variant=variant)
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(B, H, S, S, generator=generator) < 0.6
    allowed[..., 0] = True
    summands = torch.randn(B, 1, S, S, generator=generator, dtype=torch.float64)
    keys = allowed[:1, :1, :1].clone()
    for mask in (allowed, allowed[:1], allowed[:, :1], summands, allowed[0, 0], keys):
        compare(cp, H, H, mask=mask)
    nobody = allowed.clone()
    nobody[:, :, 3:6] = False  # queries that see nothing have 0
    compare(cp, H, 2, mask=nobody)
    if variant == "ring":  # the rows of this rank alone
        whole = [tensor.requires_grad_() for tensor in drawn((B, H, S, E))] * 3
        with cp:
            rows = allowed[:, :, cp.positions(S)]
            parts = cp.split(whole, seq_dim=2)
            out = cp.unsplit(F.scaled_dot_product_attention(*parts, attn_mask=rows), seq_dim=2)
        expected = F.scaled_dot_product_attention(*whole, attn_mask=allowed)
        assert (out - expected).abs().max() < tolerance.allowed(expected, 4 * E * S)


@pytest.mark.parametrize("variant", ["ulysses", "ring"])
def test_masks_have_the_keys_of_the_whole_sequence(variant: str) -> None:
    run_ranks(2, _masked, variant)


def test_heads_that_do_not_divide_go_around() -> None:
    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(4))
        compare(cp, 6, 2, causal=True)
        compare(cp, 6, 3)
        with pytest.raises(ValueError, match=r"heads that divide by 4 ranks .* found 6; use variant='ring', or 3 or 6"):
            one = context_parallel(mesh_of(4), variant="ulysses")
            with entered(one):
                F.scaled_dot_product_attention(*drawn(*[(1, 6, 4, E)] * 3))

    run_ranks(4, job)


# ---- the parts of attention ------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["kernel", "scores", "few rows"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_parts_of_attention(
    kind: str, causal: bool, masked: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, and the scores written out, which devices use: all queries at once, and three at a time."""
    from fullshard._torch import attention

    if kind != "kernel":
        monkeypatch.setattr(attention, "_kernel", lambda *_: "")
    if kind == "few rows":
        monkeypatch.setattr(attention, "_SCORES_NBYTES", 3 * B * H * S * 8)
    shapes = [(B, heads, S, E) for heads in (H, kv_heads, kv_heads, H)]
    query, key, value, weight = (one.requires_grad_() for one in drawn(*shapes))
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(2)) < 0.5 if masked else None
    if mask is not None:
        mask[:, :, 4] = False
    both = mask if not causal else seen(True, None) if mask is None else mask & seen(True, None)  # type: ignore[operator]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=both, enable_gqa=True)
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    with torch.no_grad():
        asked = {"mask": both} if masked else {"causal": causal}
        out, sums = attend(query, key, value, E**-0.5, **asked)  # type: ignore[arg-type]
        found = attend_backward(weight, query, key, value, out, sums, E**-0.5, **asked)  # type: ignore[arg-type]
    assert sums.shape == (B, H, S) and (not masked or bool((sums[:, :, 4] == -torch.inf).all()))
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        assert (one - other).abs().max() <= tolerance.allowed(other, 4 * E * S)


def test_the_kernel_for_cuda_is_called_as_it_is_declared() -> None:
    """Shapes alone: it needs a device to run (tests/gpu)."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        query, key = (torch.empty(B, H, n, 16, device="cuda", dtype=torch.bfloat16) for n in (S, 2 * S))
        out, sums = attend(query, key, key, 0.25)
        assert (out.shape, sums.shape, sums.dtype) == (query.shape, (B, H, S), torch.float32)
        found = attend_backward(out, query, key, key, out, sums, 0.25)
        assert [one.shape for one in found] == [query.shape, key.shape, key.shape]


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_split_and_unsplit() -> None:
    def job(rank: int) -> None:
        world = several()
        cp = context_parallel(mesh_of(world))
        length = 8 * world
        ids = torch.arange(2 * length).view(2, length)
        with cp:
            part = cp.split(ids)
            assert part.tolist() == ids[:, cp.positions(length)].tolist()
            assert torch.equal(cp.unsplit(part), ids)
            pair = cp.split((ids, ids + 1))
            assert type(pair) is tuple and torch.equal(pair[1], part + 1)
            scalar = torch.tensor(3.0)
            kept = cp.split([ids, scalar, "text"])
            assert kept[1] is scalar and kept[2] == "text"
        each = 4
        assert part[0].tolist() == [
            *range(rank * each, (rank + 1) * each),
            *range((2 * world - 1 - rank) * each, (2 * world - rank) * each),
        ]

    run_ranks(several(), job)


def test_labels_positions_and_documents_of_a_mapping() -> None:
    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(2))
        ids = torch.arange(100, 108)[None]
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
        found = cp.split({"input_ids": ids, "labels": ids, "position_ids": positions})
        at = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        following = [*range(101, 108), -100]
        assert found["labels"].tolist() == found["shift_labels"].tolist() == [[following[i] for i in at]]
        assert found["position_ids"].tolist() == [[positions[0, i] for i in at]]
        assert found["attention_mask"].tolist() == [[1, 1, 1, 1]]
        assert cp._batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
        found = cp.split({"input_ids": ids, "shift_labels": ids, "attention_mask": (ids > 101).long()})
        assert found["shift_labels"].tolist() == [[100 + i for i in at]] and "labels" not in found
        assert found["position_ids"].tolist() == [at]
        assert cp._batch.documents.tolist() == [[-1, -1, 0, 0, 0, 0, 0, 0]]
        short = {"input_ids": ids[:, :6], "labels": ids[:, :6]}
        with pytest.raises(
            ValueError, match=r"divides by 4 \(2 ranks, load_balance=True\), found 6; the nearest: 4 and 8"
        ):
            cp.split(short)
        found = cp.split(short, pad_with=7)
        assert found["input_ids"].tolist() == [[[*range(100, 106), 7, 7][i] for i in at]]
        assert found["labels"].tolist() == [[[*range(101, 106), -100, -100, -100][i] for i in at]]
        assert found["position_ids"].tolist() == [at]
        with cp:
            assert cp.unsplit(found["input_ids"]).tolist() == short["input_ids"].tolist()

    run_ranks(2, job)


def test_padding_is_seen_by_nobody() -> None:
    def job(rank: int) -> None:
        length = 13
        (query,) = drawn((1, 2, length, E))
        for causal in (True, False):
            expected = F.scaled_dot_product_attention(query, query, query, is_causal=causal)
            for variant in ("ring", "ulysses"):
                cp = context_parallel(mesh_of(2), variant=variant)
                with cp:
                    cp.split({"input_ids": torch.zeros(1, length, dtype=torch.int64)}, pad_with=0)
                    here = F.pad(query, (0, 0, 0, 3), value=5.0)[:, :, cp.positions(16)]
                    out = F.scaled_dot_product_attention(here, here, here, is_causal=causal)
                    whole = cp.unsplit(out, seq_dim=2)
                assert (whole - expected).abs().max() < tolerance.allowed(expected, 4 * E * S)

    run_ranks(2, job)


def test_buffers_are_cut_in_place_and_restored() -> None:
    def job(rank: int) -> None:
        ids, table = torch.arange(16).view(2, 8), torch.arange(24.0).view(8, 3)
        cp = context_parallel(
            mesh_of(2), buffers=[ids, table], buffer_seq_dims=[1, 0], no_restore_buffers={ids}, load_balance=False
        )
        at = slice(4 * rank, 4 * rank + 4)
        with cp:
            assert ids.tolist() == torch.arange(16).view(2, 8)[:, at].tolist()
            assert table.tolist() == torch.arange(24.0).view(8, 3)[at].tolist()
        assert ids.shape == (2, 4) and table.tolist() == torch.arange(24.0).view(8, 3).tolist()

    run_ranks(2, job)


# ---- who calls attention ---------------------------------------------------------------------------------------------


class Unbatched(nn.Module):
    """Attention without heads, as (B, tokens, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.into(x).chunk(3, -1))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return out


LAYERS: dict[str, Any] = {
    "unbatched": Unbatched,
    "MultiheadAttention": Attends,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(E, 4, 16, dropout=0.0, batch_first=True),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("train", [True, False])
def test_layers_of_torch(name: str, train: bool) -> None:
    def job(rank: int) -> None:
        layer, whole = seeded(LAYERS[name]).train(train), seeded(LAYERS[name]).train(train)
        (x,) = drawn((B, S, E), dtype=torch.float32)
        expected = whole(x)
        cp = context_parallel(mesh_of(several()))
        with cp:
            with torch.set_grad_enabled(train):
                out = layer(cp.split(x))
            assert (cp.unsplit(out) - expected).abs().max() < tolerance.allowed(expected, 8 * E * S)
            if train:
                out.square().sum().backward()
        if not train:
            return
        expected.square().sum().backward()
        for one, other in zip(layer.parameters(), whole.parameters(), strict=True):
            grad = one.grad.clone()  # type: ignore[union-attr]
            torch.distributed.all_reduce(grad)
            assert (grad - other.grad).abs().max() < tolerance.allowed(other.grad, 8 * E * S * B)  # type: ignore[arg-type, operator]

    run_ranks(several(), job)


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("dropout", NotImplementedError, {"dropout_p": 0.1}, "dropout_p=0.0, found 0.1"),
    ("local mask", ValueError, {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "the 16 keys of the whole sequence"),
    ("both", ValueError, {"attn_mask": torch.ones(16, 16), "is_causal": True}, "found is_causal=True beside it"),
    ("gradient", ValueError, {"attn_mask": torch.ones(16, 16, requires_grad=True)}, "one that requires a gradient"),
    ("groups", ValueError, {"kv": (B, 2, 8, E)}, "groups with enable_gqa=True"),
    ("cache", ValueError, {"kv": (B, H, 12, E)}, "as many keys as queries"),
    ("flat", ValueError, {"kv": (H, 8, E)}, r"expected \(B, H, tokens, E\)"),
    ("dtypes", ValueError, {"kv_dtype": torch.bfloat16}, "one dtype"),
]


@pytest.mark.parametrize(("error", "options", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_by_name(error: type[Exception], options: dict[str, Any], text: str) -> None:
    def job(rank: int) -> None:
        given = dict(options)
        (query,) = drawn((B, H, 8, E))
        key = torch.zeros(given.pop("kv", query.shape), dtype=given.pop("kv_dtype", query.dtype))
        with pytest.raises(error, match=text), entered(context_parallel(mesh_of(2))):
            F.scaled_dot_product_attention(query, key, key, **given)

    run_ranks(2, job)


def test_refused_programs() -> None:
    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(2))
        ids = torch.zeros(1, 16, dtype=torch.int64)
        (x,) = drawn((1, 8, E), dtype=torch.float32)
        attention = nn.MultiheadAttention(E, 4, batch_first=True)
        with pytest.raises(NotImplementedError, match="need_weights=False"), entered(cp):
            attention(x, x, x)
        with pytest.raises(ValueError, match="the 16 keys of the whole sequence"), entered(cp):
            attention(x, x, x, key_padding_mask=torch.zeros(1, 8, dtype=torch.bool), need_weights=False)
        extra = nn.MultiheadAttention(E, 4, batch_first=True, add_zero_attn=True)
        with pytest.raises(NotImplementedError, match="no keys beside those of tokens"), entered(cp):
            extra(x, x, x, need_weights=False)
        with pytest.raises(NotImplementedError, match="a softmax over 8 keys of this rank"), entered(cp):
            cp.split(ids)
            torch.zeros(1, 2, 8, 8).softmax(-1)
        with pytest.raises(ValueError, match="expected 8 queries of the batch that was split, found 4"), entered(cp):
            cp.split(ids)
            F.scaled_dot_product_attention(*drawn(*[(1, 2, 4, E)] * 3))
        with pytest.raises(RuntimeError, match="found an open one"), cp, cp:
            pass
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        with pytest.raises(ValueError, match=r"mesh: expected one axis, found \('dp', 'cp'\)"):
            context_parallel(two)
        with pytest.raises(ValueError, match="variant: expected one of auto, ulysses, ring"):
            context_parallel(mesh_of(2), variant="alltoall")
        assert F.scaled_dot_product_attention(*drawn(*[(1, 2, 4, E)] * 3)).shape == (1, 2, 4, E), (
            "outside it is torch's"
        )

    run_ranks(2, job)


@pytest.mark.threads_only("over gloo tests/procs/test_context_parallel_gloo.py has it, with its names")
def test_ranks_with_other_batches_are_named() -> None:
    def job(rank: int) -> None:
        from fullshard import RanksDisagree

        cp = context_parallel(mesh_of(2))
        with (
            pytest.raises(RanksDisagree, match="same sequences on all ranks that share them, found rank 0: .*; rank 1"),
            cp,
        ):
            cp.split(torch.full((1, 8), rank))
            F.scaled_dot_product_attention(*drawn(*[(1, 2, 4, E)] * 3))
        with (
            pytest.raises(RanksDisagree, match=r"rank 0: ulysses, \(1, 2, 4, 8\) float64.*; rank 1: .*\(1, 2, 8, 8\)"),
            cp,
        ):
            F.scaled_dot_product_attention(*drawn(*[(1, 2, 4 * (rank + 1), E)] * 3))

    run_ranks(2, job)


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("variant", ["ulysses", "ring"])
def test_recomputation_inside_is_right_and_outside_an_error(variant: str) -> None:
    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(2), variant=variant)
        whole, weight = drawn((1, 2, S, E), (1, 2, S, E))
        whole.requires_grad_()

        def attend_(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x * 2, x, x + 1, is_causal=True)

        (wanted,) = torch.autograd.grad((attend_(whole) * weight).sum(), whole)

        def begun(reentrant: bool, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
            part, share = cp.split([whole.detach(), weight], seq_dim=2, documents=documents)
            part.requires_grad_()
            return part, (checkpoint(attend_, part, use_reentrant=reentrant) * share).sum()

        for reentrant in (True, False):
            with cp:
                part, loss = begun(reentrant)
                loss.backward()
                found = cp.unsplit(part.grad, seq_dim=2)
            assert (found - wanted).abs().max() < tolerance.allowed(wanted, 8 * E * S)
        with (
            pytest.raises(RuntimeError, match="the backward inside of the context, which recomputes 1"),
            entered(cp),
        ):
            begun(True)
        with pytest.raises(RuntimeError, match="the backward of the last batch before the next one"), entered(cp):
            begun(True)
            begun(True)
        with cp:
            part, loss = begun(False)
        with pytest.raises(CheckpointError):
            loss.backward()
        with cp:  # of the documents of another batch
            part, loss = begun(False, DOCUMENTS[:1])
            begun(False, DOCUMENTS[1:])
            with pytest.raises(CheckpointError):
                loss.backward()
        with cp:  # evaluations owe nothing
            with torch.no_grad():
                checkpoint(attend_, cp.split(whole.detach(), seq_dim=2), use_reentrant=True)

    run_ranks(2, job)


def test_a_backward_outside_without_recomputation_is_right() -> None:
    def job(rank: int) -> None:
        cp = context_parallel(mesh_of(2))
        whole, weight = drawn((1, 2, S, E), (1, 2, S, E))
        whole.requires_grad_()
        expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        (wanted,) = torch.autograd.grad((expected * weight).sum(), whole)
        with cp:
            part, share = cp.split([whole.detach(), weight], seq_dim=2)
            part.requires_grad_()
            loss = (F.scaled_dot_product_attention(part, part, part, is_causal=True) * share).sum()
        loss.backward()
        found = cp.unsplit(part.grad, seq_dim=2)
        assert (found - wanted).abs().max() < tolerance.allowed(wanted, 8 * E * S)

    run_ranks(2, job)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.threads_only("counts in one process")
@pytest.mark.parametrize("variant", ["ulysses", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_messages_and_bytes_are_those_of_the_plan(world: int, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, list[int]] = {}

    exchange = Line.exchange

    def counting(line: Any, out: Tensor, pieces: Tensor, arriving: Any = (), leaving: Any = ()) -> Any:
        rank, size = line.process_group.rank(), line.process_group.size()
        numel = sum(n for at, n in enumerate(leaving) if at != rank) if leaving else pieces.numel() * (size - 1) // size
        sent[rank].append(numel * pieces.element_size())
        return exchange(line, out, pieces, arriving, leaving)

    def job(rank: int) -> None:
        sent[rank] = []
        for dtype, kv_heads in ((torch.float32, 2), (torch.bfloat16, 4), (torch.float64, 1)):
            cp = context_parallel(mesh_of(world), variant=variant)
            expected = cp.traffic(AttentionShape(B, S, H, kv_heads, E, dtype.itemsize))
            query, key = drawn((B, H, S // world, E), (B, kv_heads, S // world, E), dtype=dtype)
            query.requires_grad_()
            with cp:
                out = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
                assert (len(sent[rank]), sum(sent[rank])) == expected[:2]
                sent[rank].clear()
                out.sum().backward()
                assert (len(sent[rank]), sum(sent[rank])) == expected[2:]
                sent[rank].clear()

    monkeypatch.setattr(Line, "exchange", counting)
    run_ranks(world, job)


def test_positions_are_where_tokens_are() -> None:
    for split in (SequenceSplit(4, balanced=True), SequenceSplit(4, balanced=False)):
        sight = Sight(split, causal=True)
        found = torch.cat([sight.positions(rank, 24, torch.device("cpu")) for rank in range(4)])
        assert sorted(found.tolist()) == list(range(24))
    assert WORLD >= 1
