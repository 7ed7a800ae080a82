"""A recomputed part of a unit's forward hands tensors out by a list, and the loss is on these: no gradient comes to an
output of the unit before its weights are read again. The oracle is the same model without units."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import fully_shard
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks
from tests.threads.programs import WIDTH, Block, compare_gradients

_checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False)


class Appends(Block):
    def body(self, x: Tensor, aux: list[Tensor]) -> Tensor:
        y = super().forward(x)
        aux.append(y.pow(2).mean())
        return y


class AndReturns(Appends):
    """Both ways out."""

    def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:  # type: ignore[override]
        y: Tensor = _checkpoint(self.body, x, aux)
        return y


class ReturnsItsInput(Appends):
    def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:  # type: ignore[override]
        _checkpoint(self.body, x, aux)
        return x


class ByAnAttribute(Appends):
    def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:  # type: ignore[override]
        self.kept: list[Tensor] = []
        _checkpoint(lambda y: self.body(y, self.kept), x)
        aux += self.kept
        return x * 1.0


class WithoutArguments(Appends):
    """Nothing is saved for the recomputation, so that nothing shows that it begins."""

    def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:  # type: ignore[override]
        _checkpoint(lambda: self.body(x, aux))
        return x * 1.0


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, aux = self.first(x), []  # type: ignore[var-annotated]
        for block in self.blocks:
            x = block(x, aux)
        return x, list(aux)  # recomputation appends again


def on_both(model: Any, x: Tensor) -> Tensor:
    out, aux = model(x)
    return out.pow(2).mean() + sum(aux)  # type: ignore[no-any-return]


def on_the_list(model: Any, x: Tensor) -> Tensor:
    return sum(model(x)[1])  # type: ignore[return-value]


def on_the_output(model: Any, x: Tensor) -> Tensor:
    return model(x)[0].pow(2).mean()  # type: ignore[no-any-return]


def of_rank(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 3 * WIDTH).reshape(3, WIDTH)


def sharded(reference: nn.Module) -> Any:
    model: Any = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=True)


def compare(model: Any, reference: Any, loss: Callable[..., Tensor], rank: int, step: int = 0) -> None:
    loss(model, of_rank(rank)).backward()
    world = dist.get_world_size()
    for other in range(world):
        (loss(reference, of_rank(other)) / world).backward()
    compare_gradients(model, reference, step)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "world", [1, WORLD]
)  # alone, the weights are the shards: nothing is freed, but they are not the module's
@pytest.mark.parametrize("loss", [on_the_list, on_both])
@pytest.mark.parametrize("block", [AndReturns, ReturnsItsInput, ByAnAttribute])
def test_a_loss_on_what_a_recomputed_part_appended(block: type[Block], loss: Callable[..., Tensor], world: int) -> None:
    def rank_fn(rank: int) -> None:
        reference = seeded(lambda: Model(block))
        model = sharded(reference)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        tolerance.watch(optimizers[1])
        for step in range(3):
            compare(model, reference, loss, rank, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        live = {unit.name: unit.full_nbytes_live for unit in fullshard.report(model).units if unit.full_nbytes_live}
        assert not live

    run_ranks(world, rank_fn)


def test_a_loss_that_later_moves_to_the_list() -> None:
    """The forwards are not watched any more: one error, which says so, and the same step again is right."""

    def rank_fn(rank: int) -> None:
        reference: Any = seeded(lambda: Model(AndReturns))
        model = sharded(reference)
        for _ in range(3):
            on_the_output(model, of_rank(rank)).backward()
            model.zero_grad()
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            on_the_list(model, of_rank(rank)).backward()
        assert "Run the step again" in caught.value.__notes__[0]
        model.zero_grad()
        compare(model, reference, on_the_list, rank)

    run_ranks(WORLD, rank_fn)


def test_a_recomputation_without_arguments_is_an_error_with_the_cure() -> None:
    def rank_fn(rank: int) -> None:
        reference: Any = seeded(lambda: Model(WithoutArguments))
        model = sharded(reference)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            on_the_list(model, of_rank(rank)).backward()
        (note,) = caught.value.__notes__
        for part in (r"blocks.1.norm.weight of unit blocks.1", "no output of the unit", "Run the step again"):
            assert part in note
        assert "pass a tensor to torch.utils.checkpoint" in note
        compare(model, reference, on_the_output, rank)

    run_ranks(WORLD, rank_fn)
