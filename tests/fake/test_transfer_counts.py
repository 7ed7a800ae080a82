"""What a hand-over sends, counted: an 8B model from FSDP on 8 ranks to tensor parallelism on 2, and buckets of one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import fully_shard, transfer, weights
from fullshard.comm import exchange, ranks_of
from fullshard.comm.data_group import Line
from fullshard.extras.transfer import _side, tensors_of
from tests.harness.fake import fake_world

LIMIT = 256 << 20


def llama_8b() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, 4096)}
    for layer in range(32):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (n, 4096) for p, n in (("q", 4096), ("k", 1024), ("v", 1024))}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (14336, 4096) for p in ("gate", "up")}
        shapes |= {f"{at}.self_attn.o_proj.weight": (4096, 4096), f"{at}.mlp.down_proj.weight": (4096, 14336)}
        shapes |= {f"{at}.{p}_layernorm.weight": (4096,) for p in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (4096,), "lm_head.weight": (128256, 4096)}


def _tensor_parallel(name: str) -> Any:
    if name.endswith("norm.weight"):
        return Replicate()
    return Shard(1 if "o_proj" in name or "down_proj" in name else 0)


def _on(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any, dtype: torch.dtype) -> Tensor:
    local = torch.empty(0, dtype=dtype, device="meta")
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        full = torch.empty(shape, dtype=dtype, device="meta")
        local = full if placement.is_replicate() else full.chunk(mesh.size(), placement.dim)[coordinate[0]]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def test_an_8b_model_from_fsdp_on_8_ranks_to_tensor_parallelism_on_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 shards, bfloat16 targets. Every rank sends what the plan says; each target rank gets each element that it
    holds once, from others or from its own shard."""
    shapes = llama_8b()
    assert sum(map(math.prod, shapes.values())) == 8_030_261_248
    sent: Counter[tuple[int, int]] = Counter()
    messages: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    copied, wanted = {}, {}
    for rank in range(8):
        with fake_world(8, rank):
            trainers, engines = DeviceMesh("cpu", list(range(8))), DeviceMesh("cpu", [0, 1])
            source = {name: _on(trainers, shape, Shard(0), torch.float32) for name, shape in shapes.items()}
            target = {n: _on(engines, shape, _tensor_parallel(n), torch.bfloat16) for n, shape in shapes.items()}
            plan = transfer(source, target, limit_nbytes=LIMIT).plan()

            def note_sent(group: Any, message: Tensor, peer: int, rank: int = rank) -> Any:
                assert message.nbytes <= LIMIT
                sent[rank, peer] += message.nbytes
                messages[rank, peer] += 1
                return _Done()

            def note_received(group: Any, message: Tensor, peer: int, rank: int = rank) -> Any:
                received[peer, rank] += message.nbytes
                return _Done()

            monkeypatch.setattr(exchange, "_send", note_sent)
            monkeypatch.setattr(exchange, "_receive", note_received)
            ranks = ranks_of(None, torch.device("cpu"))._replace(device=torch.device("meta"))
            job = exchange.Exchange(
                plan,
                ranks,
                _side(tensors_of(source), plan.sources, rank),
                _side(tensors_of(target), plan.targets, rank),
            )
            buffer = job.buffer()
            assert buffer.nbytes <= LIMIT
            job.run(buffer, job.most_messages)
            assert {peer: route.nbytes for peer, route in plan.sends(rank).items()} == {
                peer: nbytes for (of, peer), nbytes in sent.items() if of == rank
            }
            copied[rank] = sum(piece.nbytes for piece in plan.copies(rank))
            wanted[rank] = sum(t.to_local().nbytes for t in target.values()) if rank < 2 else 0  # type: ignore[attr-defined]
            printed = str(plan)
    assert sent == received
    for rank in range(8):
        assert copied[rank] + sum(n for (_, to), n in received.items() if to == rank) == wanted[rank]
    for pair, nbytes in sent.items():
        assert messages[pair] <= nbytes / LIMIT + 2
    # Half of the model for each engine rank in bfloat16, and the norms whole on both.
    norms = 65 * 4096 * 2
    assert wanted == {
        0: (16_060_522_496 - norms) // 2 + norms,
        1: (16_060_522_496 - norms) // 2 + norms,
    } | dict.fromkeys(range(2, 8), 0)
    assert sum(sent.values()) + sum(copied.values()) == sum(wanted.values())
    assert printed.startswith("291 tensors, 15316.5 MiB, from 8 rank(s) to 2; messages of 256.0 MiB\n")


class _Done:
    def wait(self) -> None:
        """Done."""


def test_a_bucket_is_one_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each parameter: 48 here."""
    gathers = []
    gather = Line.gather_into

    def counted(self: Line, out: Tensor, piece: Tensor) -> Any:
        gathers.append(out.nbytes)
        return gather(self, out, piece)

    monkeypatch.setattr(Line, "gather_into", counted)
    with fake_world(8):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))
        for module in (*model, model):
            fully_shard(module)
        whole = sum(parameter.numel() * 4 for parameter in model.parameters())
        for nbytes in (1 << 30, whole // 4, 1):
            gathers.clear()
            found = weights(model, bucket_nbytes=nbytes)
            assert sum(tensor.nbytes for _, tensor in found.tensors()) == whole
            assert len(gathers) == len(found)
            assert len(found) == {1 << 30: 1, whole // 4: 4, 1: 48}[nbytes]
            assert sum(gathers) == whole
