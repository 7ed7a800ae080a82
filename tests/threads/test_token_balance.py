"""`MicroBatches` with `tokens`: ranks have different numbers of samples and pieces, and train as one process would on
all samples, whose loss is the mean over the tokens of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as recomputed

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks
from tests.threads.test_micro_batches import Memory, really

# The buffer counts what this rank saw.
pytestmark = pytest.mark.filterwarnings("ignore:buffers differ between ranks")
WORDS, WIDTH = 11, 6
# Samples of each rank, step by step: more pieces on one rank than on the others, equal ones, none at all.
COUNTS = ((5, 2, 3, 1), (2, 7, 1, 2), (3, 3, 3, 3), (1, 4, 0, 6))


class Words(nn.Module):
    """Two blocks and a head over tokens, of which -100 does not count. Uneven dims, a tied weight, a buffer that each
    forward writes, and a parameter that no loss reaches."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += tokens.numel()
        h = self.embedding(tokens)
        for block in self.blocks:
            h = h + (recomputed(block, h, use_reentrant=False) if self.recompute else block(h))
        return self.head(h)


def _samples(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
    """(count, 4) tokens and targets, of which a part does not count: another number in each sample."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (count, 4), generator=generator)
    targets = torch.randint(WORDS, (count, 4), generator=generator)
    ignored = torch.rand(count, 4, generator=generator) < 0.4
    ignored[:, 0] = False
    return tokens, targets.masked_fill(ignored, -100)


def _loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Callable[[slice], Tensor]:
    return lambda piece: F.cross_entropy(model(tokens[piece]).flatten(0, 1), targets[piece].flatten(), reduction="sum")


def _shard(model: Any, way: str) -> Any:
    options: dict[str, Any] = {"reshard_after_forward": False} if way == "kept" else {}
    if way == "replicas":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fullshard.fully_shard(block, **options)
    fullshard.fully_shard(model, **options)
    if way == "factor":
        for module in model.modules():
            if isinstance(module, fullshard.FSDPModule):
                module.set_gradient_divide_factor(3.0)
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _plain(world: int) -> tuple[Any, list[float]]:
    """One process, all samples in one batch, the mean over the tokens that count."""
    model = seeded(Words)
    optimizer = tolerance.watch(_adamw(model))
    losses = []
    for step, counts in enumerate(COUNTS):
        parts = [_samples(step, rank, count) for rank, count in enumerate(counts[:world])]
        tokens, targets = (torch.cat(some) for some in zip(*parts, strict=True))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return collect(model, optimizer), losses


def _balanced(rank: int, world: int, way: str, options: dict[str, Any], limit: int = 0) -> Any:
    model = _shard(seeded(lambda: Words(way == "recomputed")), way)
    memory = Memory(model, limit, lack=really) if limit and rank == world - 1 else None
    optimizer = _adamw(model)
    micro = fullshard.MicroBatches(model, **options)
    losses, seen = [], 0
    for step, counts in enumerate(COUNTS):
        tokens, targets = _samples(step, rank, counts[rank])
        weight = int((targets != -100).sum())
        random = torch.get_rng_state()
        found = micro.backward(
            _loss_of(model, tokens, targets),
            len(tokens),
            tokens=weight,
            filler=lambda: model(torch.zeros(1, 4, dtype=torch.long)).sum(),  # noqa: B023
        )
        assert torch.equal(torch.get_rng_state(), random) or world > 1  # ranks that are threads share one
        size = micro.size or max(counts[:world])
        assert len(found) == -(-counts[rank] // size) and not any(loss.requires_grad for loss in found)
        seen += tokens.numel()
        assert float(model.seen) == seen, "what a filler wrote is put back"
        assert model.unused.grad is None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(found)))
    assert memory is None or memory.failures
    return collect(model, optimizer), losses


WAYS = [
    ("", {"size": 2, "search": "fixed"}, 3),
    ("", {"size": 2, "search": "fixed", "reduce": "each"}, 3),
    ("kept", {"size": 1, "search": "fixed"}, 2),
    ("replicas", {"size": 2, "search": "fixed"}, 4),
    ("recomputed", {"size": 1, "search": "fixed"}, 2),
    ("factor", {"size": 3, "search": "fixed"}, 2),
    ("", {}, 2),
    ("", {"size": 2, "search": "fixed"}, 1),
]
SLOW = [
    (way, {**options, "reduce": reduce}, world)
    for way in ("", "kept", "recomputed", "factor", "replicas")
    for options in ({"size": 1, "search": "fixed"}, {"size": 2, "search": "halve"}, {})
    for reduce in ("last", "each")
    for world in (1, 2, 3, 4)
    if (way == "replicas") <= (world == 4)
]


@pytest.mark.sample(1)
@behaviour(
    "`MicroBatches` with `tokens`: another number of pieces on each rank, the mean over the tokens of all",
    area="training",
    torch="none",
    reason="with torch the rank with more pieces waits for ever",
)
@pytest.mark.parametrize(("way", "options", "world"), WAYS)
def test_as_one_process_on_all_samples(way: str, options: dict[str, Any], world: int) -> None:
    expected, losses = _plain(world)
    for found, _ in (ranks := run_ranks(world, _balanced, world, way, options)):
        assert_same_training(found, expected)
    factor = 3.0 if way == "factor" else world
    for step, loss in enumerate(losses):
        total = sum(mine[step] for _, mine in ranks) / factor
        assert total == pytest.approx(loss, rel=tolerance.figure(256, len(COUNTS)))


@pytest.mark.slow
@pytest.mark.sample(full=26)
@pytest.mark.parametrize(("way", "options", "world"), SLOW)
def test_in_every_way(way: str, options: dict[str, Any], world: int) -> None:
    expected, _ = _plain(world)
    for found, _ in run_ranks(world, _balanced, world, way, options):
        assert_same_training(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["last", "each"])
def test_a_rank_without_memory_and_with_fewer_samples(reduce: str) -> None:
    """The last rank, which has another number of samples than the others, fits two."""
    expected, _ = _plain(3)
    options = {"reduce": reduce}
    searched = run_ranks(3, _balanced, 3, "", options, 2)
    for found, _ in searched:
        assert_same_training(found, expected)


def test_deferred_synchronisation_is_respected() -> None:
    """Windows before the last one of a step are held; each is a mean over its own tokens."""

    def job(rank: int) -> None:
        model, plain = _shard(seeded(Words), ""), seeded(Words)
        micro = fullshard.MicroBatches(model, size=1, search="fixed")
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            counts = COUNTS[step][:2]
            tokens, targets = _samples(step, rank, counts[rank])
            micro.backward(_loss_of(model, tokens, targets), len(tokens), tokens=int((targets != -100).sum()))
            parts = [_samples(step, one, count) for one, count in enumerate(counts)]
            tokens, targets = (torch.cat(some) for some in zip(*parts, strict=True))
            F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
            if q.grad is not None:
                tolerance.assert_close(p.grad.full_tensor(), q.grad)

    run_ranks(2, job)


def test_what_is_refused() -> None:
    def job(rank: int) -> None:
        model = _shard(seeded(Words), "")
        micro = fullshard.MicroBatches(model, size=1, search="fixed")
        tokens, targets = _samples(0, rank, 2)
        loss_of = _loss_of(model, tokens, targets)
        with pytest.raises(ValueError, match="tokens: expected some on one rank at least, found 0 on all"):
            micro.backward(loss_of, 2, tokens=0)
        with pytest.raises(ValueError, match=r"found a rank with neither \(this one has [02] samples\); pass filler="):
            micro.backward(loss_of, 2 * rank, tokens=rank)
        for name, value in (("samples", -1), ("tokens", -1), ("tokens", 1.5), ("samples", 0)):
            arguments: dict[str, Any] = {"samples": 2, "tokens": 1, name: value}
            if name == "samples" and value == 0:
                del arguments["tokens"]
            with pytest.raises(ValueError, match=f"{name}: expected a number of {name}, at least [01], found {value}"):
                micro.backward(loss_of, **arguments)
        # Nothing of this is left.
        plain = copy.deepcopy(seeded(Words))
        micro.backward(loss_of, 2, tokens=int((targets != -100).sum()))
        parts = [_samples(0, one, 2) for one in range(2)]
        whole, wanted = (torch.cat(some) for some in zip(*parts, strict=True))
        F.cross_entropy(plain(whole).flatten(0, 1), wanted.flatten(), ignore_index=-100).backward()
        tolerance.assert_close(model.blocks[0][0].weight.grad.full_tensor(), plain.blocks[0][0].weight.grad)
        model.zero_grad()
        with pytest.raises(ValueError, match="tokens: expected the outermost sharded module, found blocks.1 below it"):
            fullshard.MicroBatches(model.blocks[1]).backward(loss_of, 2, tokens=1)
        model.set_gradient_divide_factor(5.0)
        with pytest.raises(ValueError, match=r"divided by one number, found 5 \(root\), 2 \(blocks\.1\)"):
            micro.backward(loss_of, 2, tokens=1)

    run_ranks(2, job)


def test_a_filler_that_raises_on_one_rank() -> None:
    """The others raise, too, nothing is left of the window, and the next one is that of all."""

    def job(rank: int) -> None:
        model, other = _shard(seeded(Words), ""), _shard(seeded(Words), "")
        micro = fullshard.MicroBatches(model, size=1)
        tokens, targets = _samples(0, rank, 3 * rank)
        weight = int((targets != -100).sum())

        def filler() -> Tensor:
            raise ArithmeticError("no input")

        with pytest.raises(ArithmeticError if rank == 0 else fullshard.PeerFailed, match="no input"):
            micro.backward(_loss_of(model, tokens, targets), len(tokens), tokens=weight, filler=filler)
        for each in (model, other):
            micro = fullshard.MicroBatches(each, size=1)
            dummy = torch.zeros(1, 4, dtype=torch.long)
            micro.backward(
                _loss_of(each, tokens, targets),
                len(tokens),
                tokens=weight,
                filler=lambda: each(dummy).sum(),  # noqa: B023
            )
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
            assert q.grad is None or torch.equal(p.grad.full_tensor(), q.grad.full_tensor())

    run_ranks(2, job)


@pytest.mark.parametrize("tokens", [{}, {0: 1}])
def test_ranks_that_do_not_ask_for_it_alike_are_named(tokens: dict[int, int]) -> None:
    """Other numbers of samples without `tokens`, and `tokens` on one rank alone: an error on all, and no rank waits."""

    def job(rank: int) -> str:
        model = _shard(seeded(Words), "")
        micro = fullshard.MicroBatches(model, size=1, search="fixed")
        inputs, targets = _samples(0, rank, 1 + rank)
        micro.backward(_loss_of(model, inputs, targets), 1 + rank, tokens=1)
        model.zero_grad()
        with pytest.raises(fullshard.RanksDisagree) as caught:
            micro.backward(_loss_of(model, inputs, targets), 1 + rank, tokens=tokens.get(rank))
            model(inputs)
        return str(caught.value)

    for text in run_ranks(2, job):
        assert "rank 0" in text and "rank 1" in text
