"""What an operation on a sharded parameter costs, beside the same operation on FSDP2's.

    python -m benchmarks.operations            half a minute

Two models of the same linear layers over a fake process group, one sharded by torch's fully_shard and one by ours. A
round times `mul_`, `add`, `detach` on a weight and a step of AdamW (for each of its ways: a loop over parameters, and
`foreach`) on each model, in turns, by CPU time; `same` are FSDP2's figures of a second series over the first, which is
what a ratio may be off by. The ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fullshard
from benchmarks.common import TINY, paired_ratio, print_json

WORLD = 8
# As many parameters as sixteen blocks of Llama have.
WIDTH, LAYERS = 16, 72
TURNS = ("fsdp2", "fullshard", "fsdp2 again")


def operations(library: Any) -> dict[str, Callable[[], object]]:
    """By name, on a model that `library` shards and that took a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        library.fully_shard(layer)
    library.fully_shard(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    weight: Any = model[0].weight
    steps = {
        f"AdamW step{', foreach' if foreach else ''}": torch.optim.AdamW(model.parameters(), foreach=foreach).step
        for foreach in (False, True)
    }
    return {"mul_": lambda: weight.mul_(1.0), "add": lambda: weight + 1.0, "detach": weight.detach, **steps}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Of each operation: microseconds of FSDP2's, ours over it, and FSDP2's over itself."""
    sharded = {"fsdp2": operations(torch_fsdp), "fullshard": operations(fullshard)}
    sharded["fsdp2 again"] = sharded["fsdp2"]
    results = {}
    with torch.no_grad():
        for name in sharded["fsdp2"]:
            times: dict[str, list[float]] = {turn: [] for turn in TURNS}
            repeats = 1 if "step" in name else 100
            for number in range(rounds + 1):
                for turn in TURNS if number % 2 else TURNS[::-1]:
                    does = sharded[turn][name]
                    begun = time.process_time_ns()
                    for _ in range(repeats):
                        does()
                    if number:  # the first round is for caches
                        times[turn].append((time.process_time_ns() - begun) / repeats / 1000)
            base = times["fsdp2"]
            results[name] = {
                "fsdp2_us": round(sorted(base)[len(base) // 2], 2),
                "of_fsdp2": round(paired_ratio(times["fullshard"], base), 3),
                "same": round(paired_ratio(times["fsdp2 again"], base), 3),
            }
    return results


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="a few rounds, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    gc.disable()
    results = measure(4 if options.tiny else options.rounds)
    print(f"{'operation':22} {'FSDP2, us':>10} {'ours / FSDP2':>13} {'FSDP2 / FSDP2':>14}")
    for name, row in results.items():
        print(f"{name:22} {row['fsdp2_us']:10.2f} {row['of_fsdp2']:13.3f} {row['same']:14.3f}")
    dist.destroy_process_group()
    print_json("operations", TINY, results)


if __name__ == "__main__":
    main()
