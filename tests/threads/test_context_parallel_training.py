"""Models trained with `context_parallel` and `fully_shard` over data and context ranks equal one process: parameters,
the optimizer's state after several steps, losses and the norm by which gradients are clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import context_parallel, fully_shard
from fullshard.train.model import Llama, LlamaShape
from tests.harness import tolerance
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

SHAPE = LlamaShape(vocab=29, layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, context=16)
STEPS, MOST = 3, 0.5


def llama() -> Llama:
    model = Llama(SHAPE)
    model.init_weights(0)
    return model


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, shifted labels of which the chunks have uneven numbers, and documents: (2, 16) each."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(SHAPE.vocab, (2, SHAPE.context + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 9 + replica :] = -100
    labels[1, :3] = -100
    documents = (torch.arange(SHAPE.context) >= 5 + step + replica).long().expand(2, -1)
    return tokens[:, :-1], labels, documents


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def alone(replicas: int, packed: bool) -> tuple[Any, list[float]]:
    """One process, on the batches of all replicas: the mean over all tokens. With documents each one by itself."""
    model = seeded(llama)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch_of(step, replica) for replica in range(replicas)]
        count = sum(int((labels != -100).sum()) for _, labels, _ in batches)
        total = torch.zeros(())
        for tokens, labels, documents in batches:
            border = int((documents[0] == 0).sum()) if packed else SHAPE.context
            for part in (slice(0, border), slice(border, SHAPE.context)):
                if tokens[:, part].numel():
                    at = torch.arange(SHAPE.context)[part]
                    total = total + summed(model(tokens[:, part], at), labels[:, part])
        loss = total / count
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return collect(model, optimizer, losses), norms


def _trains(rank: int, dp: int, cp_degree: int, variant: str, packed: bool, recompute: str) -> tuple[Any, list[float]]:
    mesh = init_device_mesh("cpu", (dp, cp_degree), mesh_dim_names=("dp_shard", "cp"))
    data = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    model: Any = seeded(llama)
    for block in model.layers:
        if recompute:
            forward = block.forward
            block.forward = lambda x, positions, forward=forward: checkpoint(
                forward, x, positions, use_reentrant=recompute == "reentrant"
            )
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    optimizer = adamw(model.parameters(), watched=False)
    cp = context_parallel(mesh["cp"], variant=variant)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels, documents = batch_of(step, mesh.get_local_rank("dp_shard"))
        with cp:
            tokens, labels = cp.split((tokens, labels), documents=documents if packed else None)
            loss = summed(model(tokens, cp.positions(SHAPE.context)), labels) / cp.tokens_per_rank(labels, data)
            loss.backward()
        norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(float(whole) / (dp * cp_degree))
    return collect(model, optimizer, losses), norms


CASES = [
    (1, 2, "ulysses", False, ""),
    (1, 2, "ring", True, ""),
    (1, 4, "ring", False, "other"),
    (1, 4, "ulysses", True, ""),
    (2, 2, "ring", True, "reentrant"),
    (2, 2, "ulysses", False, "other"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dp", "degree", "variant", "packed", "recompute"), CASES)
def test_a_llama_trains_as_one_process(dp: int, degree: int, variant: str, packed: bool, recompute: str) -> None:
    expected, wanted = alone(dp, packed)
    for actual, norms in run_ranks(dp * degree, _trains, dp, degree, variant, packed, recompute):
        assert_same_training(actual, expected)
        assert actual.losses == pytest.approx(expected.losses, rel=tolerance.figure(steps=STEPS))
        assert norms == pytest.approx(wanted, rel=tolerance.figure(steps=STEPS))


def _positions(rank: int) -> None:
    """Buffers that each block reads are cut in place, as torch's own context does it; without positions."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    whole, model = seeded(llama), seeded(llama)
    tokens, labels, _ = batch_of(0, 0)
    expected = whole(tokens)
    tables = [table for block in model.layers for table in (block.attention.rope_cos, block.attention.rope_sin)]
    with context_parallel(
        mesh,
        buffers=[tokens, *tables],
        buffer_seq_dims=[1, *[0] * len(tables)],
        no_restore_buffers=[tokens],
    ) as cp:
        found = cp.unsplit(model(tokens))
    assert (found - expected).abs().max() < tolerance.allowed(expected, whole)
    assert all(len(table) == SHAPE.context for table in tables)


def test_positions_by_buffers() -> None:
    run_ranks(2, _positions)
