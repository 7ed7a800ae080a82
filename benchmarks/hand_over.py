"""What a hand-over of an 8B model sends, counted on fake process groups: `fullshard.transfer` in each rank's place.

python -m benchmarks.hand_over             32 layers, 8.03 billion parameters: about a minute
python -m benchmarks.hand_over --tiny      2 layers

Float32 shards go into a bfloat16 target. Each rank in turn plans and runs its part with tensors that have no memory. Of
each message that it hands to the backend the bytes are counted, and where in the target each received box belongs. The
script stops if

    bytes      a rank sends or receives another number of bytes, or of messages, than its plan says
    sent twice an element of a rank's part of the target arrives twice, or not at all
    messages   one is larger than the limit, or two ranks send each other more than bytes / limit + 2
    agreement  what one rank sends to another one is not what that one expects of it
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import transfer
from fullshard.comm import exchange, ranks_of
from fullshard.extras.transfer import _side, tensors_of
from fullshard.layout import Box, overlap

LIMIT = 256 << 20
LAYERS = 32


def llama_8b(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Llama 3 8B."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, 4096)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (n, 4096) for p, n in (("q", 4096), ("k", 1024), ("v", 1024))}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (14336, 4096) for p in ("gate", "up")}
        shapes |= {f"{at}.self_attn.o_proj.weight": (4096, 4096), f"{at}.mlp.down_proj.weight": (4096, 14336)}
        shapes |= {f"{at}.{p}_layernorm.weight": (4096,) for p in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (4096,), "lm_head.weight": (128256, 4096)}


class Layout(NamedTuple):
    """A mesh of sizes `mesh` over `ranks`, and the placements of each tensor, by name."""

    mesh: tuple[int, ...]
    ranks: range
    placements: Callable[[str], list[Any]]

    def tensors(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
        """This rank's parts, without memory."""
        mesh = DeviceMesh("cpu", torch.tensor(self.ranks).view(self.mesh))
        return {name: _part(mesh, shape, self.placements(name), dtype) for name, shape in shapes.items()}


def _part(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Any], dtype: torch.dtype) -> Tensor:
    full = torch.empty(shape, dtype=dtype, device="meta")
    local, coordinate = full, mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if coordinate is None:
            local = full.new_empty(0)
        elif isinstance(placement, Shard):
            local = local.chunk(mesh.size(axis), placement.dim)[coordinate[axis]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def tensor_parallel(name: str) -> list[Any]:
    """Columns of the projections that end a block, rows of all others; norms whole."""
    if name.endswith("norm.weight"):
        return [Replicate()]
    return [Shard(1 if "o_proj" in name or "down_proj" in name else 0)]


def _fsdp(world: int) -> Layout:
    return Layout((world,), range(world), lambda name: [Shard(0)])


# Source, target, and the ranks of the world.
CASES: dict[str, tuple[Layout, Layout, int]] = {
    "FSDP 8 -> TP 2 on two of them": (_fsdp(8), Layout((2,), range(2), tensor_parallel), 8),
    "FSDP 8 -> TP 2 on two others": (_fsdp(8), Layout((2,), range(8, 10), tensor_parallel), 10),
    "HSDP 2 x 4 -> TP 2 on two others": (
        Layout((2, 4), range(8), lambda name: [Replicate(), Shard(0)]),
        Layout((2,), range(8, 10), tensor_parallel),
        10,
    ),
}


class Found(NamedTuple):
    """Bytes by rank. `sent`, `received`: over links; `copied`: within a rank; `wanted`: of its part of the target."""

    sent: dict[int, int]
    received: dict[int, int]
    copied: dict[int, int]
    wanted: dict[int, int]
    messages: int
    buffer_nbytes: int
    plan: str


class _Done:
    def wait(self) -> None:
        """A message on a fake group has arrived."""


def counted(source: Layout, target: Layout, world: int, layers: int = LAYERS, limit_nbytes: int = LIMIT) -> Found:
    """Count a hand-over on all ranks, one after the other. Raises `AssertionError` as the module says."""
    from tests.harness.fake import fake_world

    shapes = llama_8b(layers)
    sent, received, messages = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    copied, wanted, largest, plan_text = dict[int, int](), dict[int, int](), 0, ""
    saved = exchange._send, exchange._receive, exchange.Exchange._from_target
    try:
        for rank in range(world):
            with fake_world(world, rank):
                there = source.tensors(shapes, torch.float32)
                here = target.tensors(shapes, torch.bfloat16)
                plan = transfer(there, here, limit_nbytes=limit_nbytes).plan()
                arrived: dict[str, list[Box]] = {}

                def note_sent(group: Any, message: Tensor, peer: int, rank: int = rank) -> Any:
                    assert message.nbytes <= limit_nbytes
                    sent[rank, peer] += message.nbytes
                    messages[rank, peer] += 1
                    return _Done()

                def note_received(group: Any, message: Tensor, peer: int, rank: int = rank) -> Any:
                    received[peer, rank] += message.nbytes
                    return _Done()

                def note_written(
                    self: Any, link: Any, outer: Box, box: Box, arrived: dict[str, list[Box]] = arrived
                ) -> Tensor:
                    offsets = (a + b + c for a, b, c in zip(link.at_target, outer.offsets, box.offsets, strict=True))
                    arrived.setdefault(link.target, []).append(Box(tuple(offsets), box.lengths))
                    return saved[2](self, link, outer, box)

                exchange._send, exchange._receive = note_sent, note_received
                exchange.Exchange._from_target = note_written  # type: ignore[method-assign]
                ranks = ranks_of(None, torch.device("cpu"))._replace(device=torch.device("meta"))
                parts = _side(tensors_of(there), plan.sources, rank), _side(tensors_of(here), plan.targets, rank)
                job = exchange.Exchange(plan, ranks, *parts)
                buffer = job.buffer()
                job.run(buffer, job.most_messages)
                largest, plan_text = max(largest, buffer.nbytes), str(plan)
                for routes, counts, own in ((plan.sends(rank), sent, 0), (plan.receives(rank), received, 1)):
                    of_rank = {pair[1 - own]: nbytes for pair, nbytes in counts.items() if pair[own] == rank}
                    assert of_rank == {peer: route.nbytes for peer, route in routes.items()}, f"rank {rank}"
                _expect_each_once(arrived, plan.targets, rank)
                copied[rank] = sum(piece.nbytes for piece in plan.copies(rank))
                wanted[rank] = sum(t.to_local().nbytes for t in here.values())  # type: ignore[attr-defined]
    finally:
        exchange._send, exchange._receive = saved[:2]
        exchange.Exchange._from_target = saved[2]  # type: ignore[method-assign]
    assert sent == received, "two ranks disagree"
    for pair, nbytes in sent.items():
        assert messages[pair] <= nbytes / limit_nbytes + 2
    by_sender, by_receiver = Counter[int](), Counter[int]()
    for (one, other), nbytes in sent.items():
        by_sender[one] += nbytes
        by_receiver[other] += nbytes
    for rank in range(world):
        assert copied[rank] + by_receiver[rank] == wanted[rank]
    return Found(dict(by_sender), dict(by_receiver), copied, wanted, messages.total(), largest, plan_text)


def _expect_each_once(arrived: dict[str, list[Box]], targets: Any, rank: int) -> None:
    for name, held in targets.items():
        own, boxes = held.parts.box(rank), arrived.get(name, [])
        if own is None:
            assert not boxes
            continue
        assert sum(box.numel for box in boxes) == own.numel, f"{name}: not each element once on rank {rank}"
        for number, box in enumerate(boxes):
            assert overlap(box, own) == box, f"{name}: an element that rank {rank} does not hold"
            assert all(overlap(box, other) is None for other in boxes[:number]), f"{name}: an element sent twice"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two layers")
    layers = 2 if parser.parse_args().tiny else LAYERS
    print(f"{sum(map(math.prod, llama_8b(layers).values())):,} parameters; messages of {LIMIT >> 20} MiB\n")
    print("| from, to | sent | most of a rank | received, most of a rank | copied in place | messages | buffer |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for name, (source, target, world) in CASES.items():
        found = counted(source, target, world, layers)
        sent, copied = sum(found.sent.values()), sum(found.copied.values())
        mib = [sent, max(found.sent.values()), max(found.received.values()), copied, found.buffer_nbytes]
        total, most, arrived, stays, buffer = (f"{nbytes / 2**20:,.1f} MiB" for nbytes in mib)
        print(f"| {name} | {total} | {most} | {arrived} | {stays} | {found.messages} | {buffer} |")
        results.append({"case": name, **found._asdict()})
    print()
    print(json.dumps({"layers": layers, "results": results}))


if __name__ == "__main__":
    main()
