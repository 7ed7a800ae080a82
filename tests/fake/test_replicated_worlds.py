"""Meshes that replicate, of 64 and 1,000 ranks: shards, order of commands and of messages, and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.layout import FlatLayout, ReduceLayout, ShardLayout
from fullshard.observe import record
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import Implementation, for_each_implementation, probes, sharded
from tests.harness.models import BY_NAME
from tests.harness.parity import environment

# CommDebugMode puts backward hooks on modules that get tokens, and torch warns of that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

# (replicate, shard), rank
PLACES = [((8, 8), 0), ((8, 8), 37), ((125, 8), 999), ((1000, 1), 500)]


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Messages(TorchDispatchMode):
    """The messages that are sent while it is on: kind, bytes of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
            self.sent.append(
                (func._schema.name.removeprefix("c10d::"), max(t.nbytes for t in tensors if torch.is_tensor(t)))
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "rank"), PLACES, ids=str)
def test_shards_are_those_of_the_axis_that_shards(shape: tuple[int, int], rank: int) -> None:
    for name in ("tiny_dims", "mixed_shapes"):
        case = BY_NAME[name]
        plain = case.build()
        with fake_world(shape[0] * shape[1], rank):
            model = case.shard(case.build(), fully_shard, mesh=_mesh(shape))
            for (what, ours), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
                chunks = torch.chunk(whole.detach(), shape[1])
                place = rank % shape[1]
                assert isinstance(ours, DTensor) and ours.placements == (Replicate(), Shard(0)), what
                expected = chunks[place] if place < len(chunks) else whole.detach()[:0]
                assert torch.equal(ours.to_local(), expected), what


def _steps(shape: tuple[int, ...], rank: int) -> tuple[list[Any], list[Any]]:
    """Commands and messages of three steps, the last without all-reduce, of five units on `shape`."""
    with fake_world(torch.Size(shape).numel(), rank):
        mesh = _mesh((shape[0], shape[1])) if len(shape) == 2 else None
        model: Any = probes(5)
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
        commands, messages = [], []
        for all_reduce in (True, True, False):
            model.set_requires_all_reduce(all_reduce)
            with record(model) as trace, Messages() as sent:
                model(torch.ones(2, 5)).sum().backward()
            commands.append(trace.commands)
            messages.append(sent.sent)
            model.zero_grad()
        return commands, messages


@pytest.mark.parametrize(("shape", "rank"), PLACES[:3], ids=str)
def test_commands_are_those_without_replicas_and_messages_are_two_stages(shape: tuple[int, int], rank: int) -> None:
    """A gather brings the bytes of W shards, an all-reduce those of one. The all-reduce of a unit is sent after the
    exchange of the second next one, which travels at the same time; the first one with the digest of facts."""
    commands, messages = _steps(shape, rank)
    assert commands == _steps((2,), 0)[0]
    layouts = [ShardLayout((5, 5), world=8), ShardLayout((5,), world=8)]
    chunk = ReduceLayout(FlatLayout.build(layouts, align_numel=4)).chunk_numel * 4
    gather = FlatLayout.build(layouts, align_numel=4).padded_local_numel * 4 * 8
    gathers, exchange, sums = ("_allgather_base_", gather), ("alltoall_base_", 8 * chunk), ("allreduce_", chunk)
    facts = ("allreduce_", 32)
    # Five units are gathered in forward and again in backward.
    reductions = [message for message in messages[1] if message != gathers]
    assert messages[1].count(gathers) == len(messages[1]) - len(reductions) == 10
    assert reductions == [exchange, exchange, exchange, facts, sums, exchange, sums, exchange, sums, sums, sums]
    assert [message for message in messages[2] if message != gathers] == [exchange] * 5


def test_replicas_of_one_shard_send_a_flat_bucket_and_the_digest_of_facts() -> None:
    """Each unit's all-reduce is sent as soon as its gradients are there, in the dtype of the sum."""
    bucket = 5 * 5 + 3 + 5 + 3 + 4  # two parameters aligned to four elements, and presence of both
    for reduce, itemsize, communication in (
        (None, 4, "auto"),
        (torch.bfloat16, 2, "auto"),
        (torch.bfloat16, 2, "torch"),
    ):
        with fake_world(1000, 7), environment({"FULLSHARD_COMMUNICATION": communication}):
            model = probes(3)
            policy = MixedPrecisionPolicy(reduce_dtype=reduce)
            for module in (*model.children(), model):
                fully_shard(module, mesh=_mesh((1000, 1)), mp_policy=policy)
            with Messages() as sent:
                model(torch.ones(2, 5)).sum().backward()
        numel = bucket if reduce is None else 5 * 5 + 7 + 5 + 3 + 8  # aligned to eight
        facts = [("allreduce_", 32)] if communication == "auto" else []
        assert sent.sent == [*facts, *[("allreduce_", numel * itemsize)] * 3]


@behaviour("collectives counted by CommDebugMode on a mesh {shape}: those of FSDP2", area="communication")
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
@for_each_implementation
def test_counts_of_collectives(impl: Implementation, shape: tuple[int, ...]) -> None:
    """With `communication="torch"`: one gather per unit in forward and again in backward, one reduce-scatter, and one
    all-reduce where there are replicas. The same operators."""
    c10d = torch.ops.c10d
    with fake_world(4):
        names = ("replicate", "shard")[-len(shape) :]
        model = sharded(impl, probes(3), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        if hasattr(model, "set_communication"):
            model.set_communication("torch")
        for _ in range(2):
            with CommDebugMode() as comm:
                model(torch.ones(2, 5)).sum().backward()
        counts = {op: n for op, n in comm.get_comm_counts().items() if n}
        expected = {} if shape[-1] == 1 else {c10d._allgather_base_: 6, c10d._reduce_scatter_base_: 3}
        if len(shape) == 2:
            expected[c10d.allreduce_] = 3
        assert counts == expected
