"""Layout and commands at worlds no machine here has: 64 and 1000 ranks; the first, a middle one and the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import fully_shard, report
from fullshard.comm import ShardGroup
from fullshard.layout import FACTS_NUMEL
from fullshard.observe import record
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.models import BY_NAME, CASES, Case, adamw

WORLDS = [(64, 0), (64, 31), (64, 63), (1000, 0), (1000, 499), (1000, 999)]
# Dims from 1 to 64: more than 64 rows, fewer, and one.
SOME = [BY_NAME[name] for name in ("tiny_dims", "mixed_shapes", "transformer", "tied", "frozen")]
at_large = pytest.mark.parametrize(("world", "rank"), WORLDS)


def _sharded(case: Case) -> Any:
    return case.shard(case.build(), fully_shard)


@behaviour(
    "shards at 64 and 1,000 ranks are those of `torch.chunk`",
    area="parameters",
    torch="none",
    reason="run for fullshard alone; small worlds are compared",
)
@at_large
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_local_shards_are_those_of_torch_chunk(case: Case, world: int, rank: int) -> None:
    plain = case.build()
    with fake_world(world, rank):
        model = _sharded(case)
        for (name, ours), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            chunks = torch.chunk(whole.detach(), world)
            expected = chunks[rank] if rank < len(chunks) else whole.detach()[:0]
            assert isinstance(ours, DTensor) and ours.shape == whole.shape, name
            assert ours.placements == (Shard(0),)
            assert ours.to_local().shape == expected.shape, name
            assert torch.equal(ours.to_local(), expected), name
        infos = report(model).units
        assert sum(info.numel for info in infos) == sum(p.numel() for p in plain.parameters())
        assert sum(info.local_numel for info in infos) == sum(p.to_local().numel() for p in model.parameters())
        assert {info.world for info in infos if info.num_params} == {world}


def _last_dim(p: torch.nn.Parameter) -> Shard:
    return Shard(p.ndim - 1)


@behaviour(
    "`shard_placement_fn`: shards of any dim at 64 and 1,000 ranks are those of `torch.chunk`",
    area="placement",
    torch="none",
    reason="run for fullshard alone; small worlds are compared",
)
@at_large
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_shards_of_the_last_dim(case: Case, world: int, rank: int) -> None:
    plain = case.build()
    with fake_world(world, rank):
        model = case.shard(case.build(), fully_shard, shard_placement_fn=_last_dim)
        for (name, ours), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            chunks = torch.chunk(whole.detach(), world, dim=-1)
            expected = chunks[rank] if rank < len(chunks) else whole.detach()[..., :0]
            assert isinstance(ours, DTensor) and ours.placements == (Shard(whole.ndim - 1),), name
            assert torch.equal(ours.to_local(), expected), name


def _commands(case: Case, world: int, rank: int, **options: Any) -> list[list[tuple[str, str]]]:
    """Of three steps: the first, one with the recorded order, one whose window stays open; then an evaluation."""
    with fake_world(world, rank):
        model = case.shard(case.build(), fully_shard, **options)
        steps = []
        for step in range(3):
            model.set_requires_gradient_sync(step < 2)
            with record(model) as trace:
                case.loss(model, case.batch(step)).backward()
            steps.append(trace.commands)
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor), name
                if p.requires_grad and step == 1:
                    assert p.grad is not None and p.grad.to_local().shape == p.to_local().shape, name
            if step < 2:
                model.zero_grad()
        with record(model) as trace, torch.no_grad():
            case.loss(model, case.batch(3))
        assert not any(info.full_nbytes_live for info in report(model).units if info.name)
        return [*steps, trace.commands]


@pytest.mark.sample(2)
@behaviour(
    "what is gathered, freed and reduced, and in which order, depends neither on the world nor on the rank",
    area="communication",
    torch="none",
    reason="seen in fullshard's trace",
)
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_commands_are_those_of_two_ranks(case: Case) -> None:
    """What is gathered, freed and reduced, and in which order, depends neither on the world nor on the rank."""
    expected = _commands(case, 2, 0)
    assert {kind for kind, _ in expected[1]} >= {"unshard", "wait", "reshard", "reduce", "finish"}
    assert _commands(case, 2, 1) == expected
    for world, rank in WORLDS:
        assert _commands(case, world, rank) == expected, f"rank {rank} of {world}"
        across = _commands(case, world, rank, shard_placement_fn=_last_dim)
        assert across == expected, f"rank {rank} of {world}, cut along the last dim"


# Which dim is cut: the first, the last, and one after the other in one unit.
DIMS: dict[str, Callable[[nn.Parameter], Shard | None] | None] = {
    "dim 0": None,
    "last dim": lambda parameter: Shard(-1),
    "mixed dims": lambda parameter: Shard(parameter.shape[-1] % parameter.ndim),
}


def _dim(parameter: nn.Parameter, dims: str) -> int:
    fn = DIMS[dims]
    placement = None if fn is None else fn(parameter)
    return 0 if placement is None else placement.dim % parameter.ndim


def _aligned(numel: int) -> int:
    """float32 shards begin at multiples of 16 bytes."""
    return -(-numel // 4) * 4


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("world", [64, 1000])
def test_bytes_of_messages(world: int, dims: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each unit's gather and reduction, from the plain shapes alone: several dims in one unit are one message."""
    case = BY_NAME["transformer"]
    sent: list[tuple[str, int, int]] = []

    def noting(what: str) -> Callable[..., Any]:
        original = getattr(ShardGroup, what)

        def note(group: ShardGroup, out: torch.Tensor, piece: torch.Tensor) -> Any:
            sent.append((what, out.nbytes, piece.nbytes))
            return original(group, out, piece)

        return note

    for what in ("gather_into", "exchange"):
        monkeypatch.setattr(ShardGroup, what, noting(what))
    gathers, exchanges = {}, {}
    plain = case.build()
    for unit in ("", *case.units):
        shares = []
        for name, p in plain.named_parameters():
            if name.startswith(unit + ".") if unit else not name.startswith("layers."):
                rows = p.shape[_dim(p, dims)]
                shares.append(-(-rows // world) * (p.numel() // rows))
        local = sum(map(_aligned, shares))
        gathers[unit] = ("gather_into", 4 * world * local, 4 * local)
        # The presence of each gradient goes along, and what ranks compare.
        exchanges[unit] = ("exchange", *[4 * world * (local + _aligned(len(shares) + FACTS_NUMEL))] * 2)
    with fake_world(world, 5):
        model: Any = case.shard(case.build(), fully_shard, shard_placement_fn=DIMS[dims])
        for step in range(2):
            sent.clear()
            case.loss(model, case.batch(step)).backward()
    forward = [gathers[unit] for unit in ("", *case.units)]
    first, second, third = case.units
    backward = [
        gathers[third],
        gathers[second],
        exchanges[third],
        gathers[first],
        exchanges[second],
        exchanges[first],
        exchanges[""],
    ]
    assert sent == [*forward, *backward]


@at_large
def test_ranks_that_own_nothing_step_and_save_as_the_others(world: int, rank: int) -> None:
    """On 1000 ranks most own no row of anything; optimizers, clipping and state dicts see empty tensors."""
    from fullshard import clip_grad_norm_

    case = BY_NAME["tiny_dims"]
    with fake_world(world, rank):
        model = _sharded(case)
        optimizer = adamw(model.parameters())
        case.loss(model, case.batch(0)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict()
        assert list(state) == list(case.build().state_dict())
        for name, value in state.items():
            rows = -(-value.shape[0] // world)
            assert value.to_local().shape[0] == max(0, min(rows, value.shape[0] - rank * rows)), name
        assert sum(info.local_numel for info in report(model).units) == (
            0 if rank > 4 else sum(value.to_local().numel() for value in state.values())
        )
