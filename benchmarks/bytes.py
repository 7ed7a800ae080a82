"""Bytes that sharding writes beyond its collectives, and bytes it sends: fake process group, every write counted.

    python -m benchmarks.bytes                    about a minute; byte counts do not need a quiet machine

A chain of blocks of nine parameters, as in Llama, runs forward and backward; the fourth step is counted, and what the
bare model (in the compute dtype) writes in the same step is taken off. Both figures are bytes per element of the
parameters (`P`). "sent" is the size of the messages: the output of an all-gather, the input of a reduce-scatter or an
all-to-all; each rank sends (W - 1) / W of it. What goes from rank to rank is given in the same measure.

    fsdp2        torch's fully_shard
    gloo plan    ours, as it is on a CPU for blocks of an 8B model: matrices go from rank to rank, norms are packed,
                 buffers are kept from step to step
    NCCL plan    ours, as it is on a GPU for blocks of an 8B model: matrices are gathered by themselves, norms are
                 packed, the backend reduces gradients, no buffers are kept

"across" is what of "sent" goes to other nodes (benchmarks/counting.py says how).
"""

from __future__ import annotations

import argparse
import os
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import ModelShape, print_json
from benchmarks.counting import ByteCounter, gloo_plan, nccl_plan
from benchmarks.host import Chain

# Rows divide by 64 ranks, so that padding is not what is measured.
SHAPE = ModelShape(vocabulary=64, width=256, hidden=704, heads=4, depth=4)
TINY = ModelShape(vocabulary=64, width=64, hidden=128, heads=2, depth=2)
WAYS = ("fsdp2", "gloo plan", "NCCL plan")
BF16, FP32 = torch.bfloat16, torch.float32
# (storage, compute, reduce)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype | None]] = {
    "fp32": (FP32, None, None),
    "mixed precision": (FP32, BF16, FP32),
    "bf16 storage": (BF16, None, None),
}


def build(way: str, shape: ModelShape, precision: str) -> nn.Module:
    """The chain, sharded block by block; "bare" is the model itself in the compute dtype."""
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    storage, compute, reduce = PRECISIONS[precision]
    torch.manual_seed(0)
    model: Any = Chain(shape).to(compute or storage if way == "bare" else storage)
    if way == "bare":
        return model
    library: Any = torch_fsdp if way == "fsdp2" else fullshard
    policy = library.MixedPrecisionPolicy(compute, reduce)
    for block in model.blocks:
        library.fully_shard(block, mp_policy=policy)
    return library.fully_shard(model, mp_policy=policy)


def local_ranks(world: int) -> int:
    """How many of the ranks are on a node."""
    return 8 if world > 8 else max(1, world // 2)


def count(way: str, shape: ModelShape, precision: str, world: int) -> ByteCounter:
    """What one step writes and sends, once buffers exist and the order is known."""
    local = local_ranks(world)
    storage, compute, _ = PRECISIONS[precision]
    norm_nbytes = shape.width * (compute or storage).itemsize
    plans = {"gloo plan": gloo_plan, "NCCL plan": nccl_plan}
    plan = plans[way](norm_nbytes + 1) if way in plans else nullcontext()
    with plan, mock.patch.dict(os.environ, {"FULLSHARD_COMMUNICATION": "auto"}):
        model = build(way, shape, precision)
        x = torch.randn(1, 4, shape.width, dtype=compute or storage)
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
        with ByteCounter(local) as counter:
            model(x).sum().backward()
    return counter


def figures(shape: ModelShape, precision: str, world: int) -> dict[str, dict[str, Any]]:
    """By way: bytes written and sent per element of the parameters, and what wrote them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    bare = count("bare", shape, precision, 1)
    numel = sum(p.numel() for p in Chain(shape).parameters())
    found: dict[str, dict[str, Any]] = {}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        for way in WAYS:
            counter = count(way, shape, precision, world)
            if world > 1:
                counter.messages["send"] = counter.messages["send"] * world // (world - 1)
            beyond = {name: nbytes - bare.written[name] for name, nbytes in counter.written.items()}
            found[way] = {
                "written": round((counter.written_nbytes - bare.written_nbytes) / numel, 4),
                "sent": round(counter.messages_nbytes / numel, 4),
                "across": round(sum(counter.across.values()) / numel, 4),
                "written_by": {name: round(n / numel, 3) for name, n in beyond.items() if abs(n) >= numel / 500},
                "across_by": {kind: round(n / numel, 3) for kind, n in counter.across.items() if n},
                "sent_by": {kind: round(n / numel, 3) for kind, n in counter.messages.items() if n},
            }
    finally:
        dist.destroy_process_group()
    for row in found.values():
        theirs = found["fsdp2"]
        row["written_ratio"] = round(row["written"] / theirs["written"], 4)
        row["sent_ratio"] = round(row["sent"] / theirs["sent"], 4) if theirs["sent"] else None
    return found


def report(precision: str, worlds: list[int], shape: ModelShape) -> list[dict[str, Any]]:
    """Print one table; return its figures."""
    print(f"\n{precision}: bytes per element of the parameters and step")
    print(f"  {'W':>3} {'':10} {'written':>8} {'/ fsdp2':>8} {'sent':>7} {'/ fsdp2':>8} {'across':>7}   written by")
    results = []
    for world in worlds:
        ways = figures(shape, precision, world)
        for way, row in ways.items():
            sent_ratio = "-" if row["sent_ratio"] is None else f"{row['sent_ratio']:.3f}"
            by = ", ".join(f"{name} {nbytes:.2f}" for name, nbytes in row["written_by"].items())
            print(
                f"  {world:>3} {way:10} {row['written']:8.2f} {row['written_ratio']:8.3f} {row['sent']:7.2f} "
                f"{sent_ratio:>8} {row['across']:7.2f}   {by}",
                flush=True,
            )
        results.append({"precision": precision, "world": world, "ways": ways})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    shape = TINY if options.tiny else SHAPE
    results = [row for precision in PRECISIONS for row in report(precision, options.worlds, shape)]
    print()
    print_json("bytes", shape, results)


if __name__ == "__main__":
    main()
