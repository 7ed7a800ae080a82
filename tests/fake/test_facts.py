"""What it takes to compare facts: messages and their bytes, counted; and nothing where nobody is asked."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from benchmarks.counting import nccl_plan
from fullshard.agree.companion import Comparing
from fullshard.engine import unit_of
from fullshard.layout import FACTS_NUMEL
from tests.harness.fake import fake_world
from tests.harness.models import seeded
from tests.harness.parity import environment
from tests.threads.programs import Model, batch, shard

WORLD = 8


class Messages(TorchDispatchMode):
    """(operation, bytes of what is sent) of each message but gathers, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::").rstrip("_")
        if func.namespace == "c10d" and "gather" not in name:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[1] if "allto" in name else args[0]]
            self.sent.append((name, sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


def _messages(shape: tuple[int, ...], compares: bool, steps: int = 2, **settings: str) -> list[tuple[str, int]]:
    """Of a backward after some steps."""
    settings["FULLSHARD_GUARD"] = "full" if compares else "structure"
    with fake_world(WORLD), environment(settings):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model: Any = shard(seeded(Model), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(batch(1, 0)).pow(2).mean().backward()
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = model(batch(1, 0)).pow(2).mean()
        with Messages() as messages:
            loss.backward()
        return messages.sent


@pytest.mark.parametrize("settings", [{}, {"FULLSHARD_COMMUNICATION": "torch"}], ids=["exchanged", "torch"])
def test_messages_of_ours_carry_the_digest(settings: dict[str, str]) -> None:
    """No message more, and no byte: there is room for it in each."""
    sent = _messages((WORLD,), True, **settings)
    assert sent == _messages((WORLD,), False, **settings)
    assert len(sent) == 4


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_where_the_backend_reduces_ranks_exchange_16_bytes_in_a_backward(shape: tuple[int, ...]) -> None:
    """Nobody sees what each rank sent: as minimum and maximum, beside the 32 of replicas."""
    with nccl_plan(64):
        sent, without = _messages(shape, True), _messages(shape, False)
    more = [("allreduce", 16), ("allreduce", 32)][: len(shape)]
    assert [message for message in sent if message in more] == more
    assert [message for message in sent if message not in more] == without
    assert len(without) == 4 * len(shape) and any("reduce_scatter" in name for name, _ in without)


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_replicas_exchange_32_bytes_in_a_backward(shape: tuple[int, int]) -> None:
    sent, without = _messages(shape, True), _messages(shape, False)
    (more,) = [i for i, message in enumerate(sent) if message == ("allreduce", 32)]
    assert sent[:more] + sent[more + 1 :] == without


def test_replicas_with_torchs_messages_exchange_nothing_more() -> None:
    settings = {"FULLSHARD_COMMUNICATION": "torch"}
    assert _messages((2, 4), True, **settings) == _messages((2, 4), False, **settings)


def test_room_for_it_is_eight_elements_of_a_chunk() -> None:
    """All of a message but gradients and presence, which are aligned together."""
    with fake_world(WORLD):
        model: Any = shard(seeded(Model))
        model(batch(1, 0)).pow(2).mean().backward()
        unit: Any = unit_of(model.layers[0])
        layout = unit.channels.reduce(0).layout
        assert layout.facts_offset == layout.grad_present_offset + len(unit.params)
        least = layout.facts_offset + FACTS_NUMEL
        assert layout.chunk_numel == math.ceil(least / layout.pack.align_numel) * layout.pack.align_numel


def test_one_rank_compares_nothing() -> None:
    with fake_world(1):
        model: Any = shard(seeded(Model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch(1, 0)).pow(2).mean().backward()
            optimizer.step()
        assert not isinstance(unit_of(model).root.companion, Comparing)  # type: ignore[union-attr]


def test_a_steady_step_makes_no_new_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not change is not put together again, though the optimizer's counter of steps continues."""
    with fake_world(WORLD):
        model: Any = shard(seeded(Model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        made: list[object] = []

        def train() -> None:
            model(batch(1, 0)).pow(2).mean().backward()
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            train()
        # The package has a function of the room's name.
        room = sys.modules["fullshard.agree.ledger"]
        digest_of = room.digest_of
        monkeypatch.setattr(room, "digest_of", lambda text: (made.append(text), digest_of(text))[1])
        for _ in range(3):
            train()
        assert not made
        optimizer.param_groups[0]["lr"] = 0.2
        for _ in range(2):
            train()
        assert made
