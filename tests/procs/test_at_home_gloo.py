"""At home in torch, where threads cannot show it: DistributedDataParallel beside us, torch's counter of messages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation, sharded
from tests.harness.models import seeded
from tests.harness.pool import pool

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}


def _model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def _around(rank: int, impl: str) -> str:
    try:
        DistributedDataParallel(sharded(IMPLEMENTATIONS[impl], _model()))
    except NotImplementedError as error:
        return str(error)
    return "accepted"


@pytest.mark.slow
@behaviour("DistributedDataParallel around a sharded model is refused", area="errors")
@for_each_implementation
def test_ddp_around_a_sharded_model_is_refused(impl: Implementation) -> None:
    """By torch itself, which cannot broadcast DTensors; by us before, with names."""
    text = "c10d.broadcast_" if impl is TORCH else "fully_shard sharded 0.weight, 0.bias, 2.weight, 2.bias"
    for said in pool(2).run(_around, impl.name):
        assert text in said


def _inside(rank: int, impl: str) -> tuple[str, bool]:
    fully_shard = IMPLEMENTATIONS[impl].fully_shard
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    both = nn.Sequential(wrapped, nn.Linear(4, 4))
    refused = ""
    try:
        fully_shard(both)
    except RuntimeError as error:
        refused = str(error)
    # It averages its part beside a unit that leaves this part alone.
    whole: Any = nn.Sequential(wrapped, nn.Linear(4, 4))
    fully_shard(whole, ignored_params=set(wrapped.parameters()))
    for _ in range(2):
        whole.zero_grad()
        whole(torch.full((2, 4), rank + 1.0)).sum().backward()
    gradients = [whole[0].module.weight.grad, whole[1].weight.grad.full_tensor()]
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for to, value in zip(plain.parameters(), whole.parameters(), strict=True):
            to.copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)
    for other in range(2):
        (plain(torch.full((2, 4), other + 1.0)).sum() / 2).backward()
    wanted: Any = [plain[0].weight.grad, plain[1].weight.grad]
    return refused, all(tolerance.close(a, b) for a, b in zip(gradients, wanted, strict=True))


@behaviour(
    "`fully_shard` refuses what DistributedDataParallel or `replicate` averages",
    area="errors",
    torch="better",
    reason="torch shards it, and the other one waits for gradients of parameters that are gone",
)
def test_fully_shard_of_a_part_under_ddp(impl: Implementation) -> None:
    for refused, right in pool(2).run(_inside, impl.name):
        assert "found 0 under DistributedDataParallel" in refused
        assert right


def _counted(rank: int, impl: str) -> dict[str, int]:
    model = sharded(IMPLEMENTATIONS[impl], _model())
    with warnings.catch_warnings(), CommDebugMode() as messages:
        # Its module hooks make outputs views, of which torch's FSDP2 warns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return {str(op): number for op, number in messages.get_comm_counts().items()}


@behaviour("CommDebugMode counts messages: a gather in forward and in backward, a reduction, for each unit",
           area="communication")  # fmt: skip
@for_each_implementation
@pytest.mark.parametrize("communication", ["auto", "torch"])
def test_messages_are_counted(communication: str, impl: Implementation) -> None:
    """As programs count those of torch's; with FULLSHARD_COMMUNICATION=torch also by the same names."""
    environment = {"FULLSHARD_COMMUNICATION": communication}
    for counts in pool(2).run(_with, environment, _counted, impl.name):
        gathers = counts.pop("c10d._allgather_base_")
        assert gathers == 4 and sum(counts.values()) == 2
        if communication == "torch":
            assert counts == {"c10d._reduce_scatter_base_": 2}


def _with(rank: int, environment: dict[str, str], fn: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return fn(rank, *args)
