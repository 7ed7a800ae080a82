"""Attention over sequences cut over ranks, by variant, length and number of ranks: time, memory and bytes of a rank.

    python -m benchmarks.context_parallel                       1, 2 and 4 ranks over gloo
    python -m benchmarks.context_parallel --lengths 1024 4096   these lengths alone

One causal attention, forward and backward. With one rank it is torch's own. Each round takes all variants of a length
in turn. Memory is that of all storages which an attention makes, at most at once, counted in a round of its own
(benchmarks/counting.py); bytes and messages are those of the plan, which tests compare with what is sent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import ModelShape, on_ranks, print_json
from benchmarks.counting import MemoryCounter
from fullshard import context_parallel
from fullshard.layout import AttentionShape

HEADS, KV_HEADS, WIDTH = 8, 4, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def attention(cp: Any, parts: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    with cp:
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, parts, weight)]


def measure(rank: int, world: int, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    variants = {
        name: context_parallel(mesh, variant=name) for name in (("ulysses", "ring") if world > 1 else ("auto",))
    }
    results = []
    for length in lengths:
        shape = AttentionShape(1, length, HEADS, KV_HEADS, WIDTH, 4)
        generator = torch.Generator().manual_seed(0)
        here = length // world
        parts = [torch.randn(1, heads, here, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        parts = [part.requires_grad_() for part in parts]
        weight = torch.randn(1, HEADS, here, WIDTH, generator=generator)
        times: dict[str, list[float]] = {name: [] for name in variants}
        peaks: dict[str, int] = {}
        found: dict[str, list[Tensor]] = {}
        for turn in range(rounds + 1):
            for name, cp in variants.items():
                if not turn:  # this one connects, and the next is counted
                    attention(cp, parts, weight)
                    with MemoryCounter() as counter:
                        counter.mark(name)
                        found[name] = attention(cp, parts, weight)
                    peaks[name] = counter.peak(name)
                    continue
                dist.barrier()
                start = time.perf_counter()
                found[name] = attention(cp, parts, weight)
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                times[name].append(float(seconds))
        if len(found) > 1:
            for one, other in zip(*found.values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for name, cp in variants.items():
            traffic = cp.traffic(shape)
            results.append(
                {
                    "world": world,
                    "length": length,
                    "variant": name if world > 1 else "torch",
                    "seconds": times[name],
                    "peak_nbytes": peaks[name],
                    "messages": traffic.forward_messages + traffic.backward_messages,
                    "nbytes": traffic.forward_nbytes + traffic.backward_nbytes,
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"causal attention, {HEADS} heads, {KV_HEADS} key/value heads of {WIDTH}, float32: forward and backward")
    print(f"  {'length':>7} {'ranks':>6} {'variant':>8} {'s':>8} {'peak MiB':>9} {'messages':>9} {'sent MiB':>9}")
    results = []
    for world in options.worlds:
        every = on_ranks(world, measure, options.lengths, options.rounds)
        for row, *others in zip(*every, strict=True):
            row["peak_nbytes"] = max(row["peak_nbytes"], *(other["peak_nbytes"] for other in others), 0)
            row["seconds"] = statistics.median(row["seconds"])
            results.append(row)
            print(
                f"  {row['length']:7} {world:6} {row['variant']:>8} {row['seconds']:8.3f} "
                f"{row['peak_nbytes'] / 2**20:9.1f} {row['messages']:9} {row['nbytes'] / 2**20:9.1f}",
                flush=True,
            )
    print()
    print_json("context_parallel", ModelShape(), results)


if __name__ == "__main__":
    main()
