"""Conformance, the other way: what torch's FSDP2 2.13 refuses or gets wrong, in the fewest lines that show it.

Tests here run for fullshard; for torch when docs/compatibility.md is written, which notes how torch fails (and the
check of the page turns red when it does no longer). The thorough tests are in the files of their subjects.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, run
from tests.harness.models import seeded


def _odd() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7)))


@behaviour(
    "`shard_placement_fn`: `Shard(i)` of a dim that the world does not divide",
    area="placement",
    torch="better",
    reason="shards are cut as `torch.chunk` cuts along any dim; torch asks for even ones",
)
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_columns(world: int, impl: Implementation) -> None:
    expected = _odd()
    expected(torch.ones(1, 5)).sum().backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_odd(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        model(torch.ones(1, 5)).sum().backward()
        for name, p in model.named_parameters():
            grad, whole = p.grad, expected.get_parameter(name).grad
            chunks = whole.chunk(world, dim=p.ndim - 1)
            assert grad.placements == (Shard(p.ndim - 1),)
            assert grad.to_local().shape[-1] == (chunks[rank].shape[-1] if rank < len(chunks) else 0)
            tolerance.assert_close(grad.full_tensor(), whole)

    run(rank_main, impl, world=world)


@behaviour(
    "`clip_grad_norm_` by the largest element, where a rank owns none",
    area="clipping",
    torch="better",
    reason="`fullshard.clip_grad_norm_` takes an empty shard for 0; torch's function fails on it",
)
def test_largest_element_of_an_empty_shard(impl: Implementation) -> None:
    expected = _odd()
    expected(torch.ones(1, 5)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01, float("inf"))

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_odd())  # 3 and 7 rows
        model(torch.ones(1, 5)).sum().backward()
        found = impl.clip(model.parameters(), 0.01, float("inf"))
        tolerance.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, norm)
        for name, p in model.named_parameters():
            tolerance.assert_close(p.grad.full_tensor(), expected.get_parameter(name).grad)

    run(rank_main, impl, world=4)


class _Rotary(nn.Module):
    """A buffer that was computed on a real device, and no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4, device="cpu") + 1.0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.frequencies


@behaviour(
    "a buffer with data keeps it through `to_empty`",
    area="initialisation",
    torch="better",
    reason="only what has no data is given new memory; torch leaves whatever is in memory",
)
def test_buffers_with_data_keep_it(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_Rotary())
        torch.full((4,), 7.0)  # freed at once: memory that is likely to be handed out next is not as it should be
        model.to_empty(device="cpu")
        assert torch.equal(model.frequencies, torch.arange(4) + 1.0)

    run(rank_main, impl)


@behaviour(
    "parameters that nothing wrote since `to_empty` are an error of the first forward, by name",
    area="initialisation",
    torch="better",
    reason="torch trains on whatever is in memory",
)
def test_uninitialised_parameters_are_named(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        impl.fully_shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in (*model[0].parameters(), model[1].bias):
                p.zero_()
        with pytest.raises(RuntimeError, match="1.weight"):
            model(torch.ones(1, 4))

    run(rank_main, impl)


@behaviour(
    "a child sharded after its root is an error that names the parameter",
    area="errors",
    torch="better",
    reason="torch raises a TypeError that names nothing ('value was None')",
)
def test_root_sharded_before_its_children(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = impl.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises((ValueError, RuntimeError), match="weight"):
            impl.fully_shard(model[0])

    run(rank_main, impl)
