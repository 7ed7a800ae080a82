"""Messages from rank to rank (comm/group.py), which carry large parameters and gradients on gloo: bitwise what the
collectives carry, whatever the shapes, and for every parameter there is when the sizes from which they pay are nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import group as group_module
from tests.harness.forked import run_forks
from tests.harness.models import CASES, Case, Trained, adamw, collect
from tests.harness.parity import assert_same_bits

TIMEOUT = 60.0


class Sometimes(nn.Module):
    """`unused` gets a gradient on rank 0 alone, `never` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.never = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x)
        # Batches differ, and so does the sign of their first element.
        return self.unused(y) if x[0, 0] > 0 else y


SOMETIMES = Case("sometimes", Sometimes, (), (6,), (7,))


@contextmanager
def sizes(nbytes: int) -> Iterator[None]:
    """Send from rank to rank what has this many bytes or more."""
    with (
        mock.patch("fullshard.layout.gather.PAIRWISE_PARAMETER_NBYTES", nbytes),
        mock.patch("fullshard.layout.gather.PAIRWISE_GRADIENT_NBYTES", nbytes),
    ):
        yield


def train(case: Case, rank: int, nbytes: int, options: dict[str, Any]) -> tuple[Trained, int, int]:
    """What training makes, and how many parameters and gradients were sent from rank to rank."""
    sent = {group_module.PARAMETERS_TAG: 0, group_module.GRADIENTS_TAG: 0}

    def counted(group: Any, arriving: Any, leaving: Any, tag: int) -> Any:
        sent[tag] += max((len(tensors) for tensors in leaving.values()), default=0)
        return exchange_each(group, arriving, leaving, tag)

    exchange_each = group_module.exchange_each
    with (
        sizes(nbytes),
        mock.patch.object(group_module, "exchange_each", counted),
    ):
        model = case.shard(case.build(), fullshard.fully_shard, **options)
        optimizer = adamw(model.parameters())
        for step in range(3):
            for part in range(2):
                model.set_requires_gradient_sync(part == 1 or step == 0)
                case.loss(model, case.batch(2 * step + part, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return collect(model, optimizer), sent[group_module.PARAMETERS_TAG], sent[group_module.GRADIENTS_TAG]


def both_ways(rank: int, cases: list[Case], options: dict[str, Any], axes: tuple[int, ...]) -> None:
    if axes:
        names = ("replicate", "shard")[-len(axes) :]
        options = {**options, "mesh": init_device_mesh("cpu", axes, mesh_dim_names=names)}
    for case in cases:
        one_by_one, parameters, gradients = train(case, rank, 0, options)
        packed, *none = train(case, rank, sys.maxsize, options)
        assert_same_bits(one_by_one, packed)
        assert parameters and gradients, f"{case.name}: nothing was sent from rank to rank"
        assert none[1] == 0, f"{case.name}: gradients were sent from rank to rank"


BF16 = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
}


QUICK = {(2, "float32"), (3, "bfloat16"), (2, "kept")}
EACH = [
    pytest.param(world, OPTIONS[name], id=f"{world}-{name}", marks=[] if (world, name) in QUICK else pytest.mark.slow)
    for world in (2, 3, 4)
    for name in OPTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "options"), EACH)
def test_training_is_bitwise_that_of_collectives(world: int, options: dict[str, Any]) -> None:
    cases = [*CASES, SOMETIMES] if world != 3 else [*CASES[::3], SOMETIMES]
    run_forks(world, both_ways, (cases, options, ()), TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_on_a_mesh_that_replicates(options: dict[str, Any]) -> None:
    run_forks(4, both_ways, ([*CASES, SOMETIMES], options, (2, 2)), TIMEOUT)


@pytest.mark.slow
def test_from_blocks_of_ranks() -> None:
    """An integer `reshard_after_forward`: what was kept is gathered from two ranks."""
    run_forks(4, both_ways, (list(CASES[:4]), {"reshard_after_forward": 2}, (4,)), TIMEOUT)


def _beside_the_users_own(rank: int) -> None:
    """Sends of the user, of the default tag, on the same group and under way at the same time."""
    case = CASES[1]
    other = 1 - rank
    with sizes(0):
        model = case.shard(case.build(), fullshard.fully_shard)
        optimizer = adamw(model.parameters())
        for step in range(3):
            arrived = torch.zeros(1000)
            works = [torch.distributed.irecv(arrived, other)]
            case.loss(model, case.batch(step, rank)).backward()
            works.append(torch.distributed.isend(torch.full((1000,), float(rank)), other))
            for work in works:
                work.wait()
            assert (arrived == other).all()
            optimizer.step()
            optimizer.zero_grad()


def test_a_users_messages_are_not_mistaken_for_ours() -> None:
    run_forks(2, _beside_the_users_own, (), TIMEOUT)


def _large(rank: int) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 40), nn.Linear(40, 512))
    fullshard.fully_shard(model)
    with mock.patch.object(group_module, "exchange_each", wraps=group_module.exchange_each) as exchange:
        F.mse_loss(model(torch.ones(2, 512)), torch.zeros(2, 512)).backward()
    [call] = [call for call in exchange.call_args_list if call.args[3] == group_module.GRADIENTS_TAG]
    [leaving] = call.args[2].values()
    # The large weight's half by itself; everything else, and presence, behind each other.
    assert leaving[0].numel() == 512 * 512 // 2 and len(leaving) == 2


def test_small_parameters_share_a_message() -> None:
    run_forks(2, _large, (), TIMEOUT)
