"""Clipping and AdamW over sharded parameters, beside the same on plain local tensors of the same sizes.

    python -m benchmarks.optimizer                2 ranks, 100 and 1,000 parameters; a minute on two cores

    local        plain tensors of this rank's rows: torch's clip_grad_norm_ and AdamW. No norm over ranks: the bound.
    dtensor      the sharded parameters of torch's fully_shard: torch's clip_grad_norm_ and AdamW
    fullshard    ours: fullshard.clip_grad_norm_ and AdamW after fullshard.step_on_shards

AdamW in torch's default form (on a CPU a loop over parameters) and with foreach=True. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.common import TINY, ModelShape, on_ranks, paired_ratio, print_json

WAYS = ("local", "dtensor", "fullshard")
PARTS = ("clip", "adamw", "adamw foreach")
# (rows, columns) of most parameters of a small block; every fourth is a norm or bias.
MATRIX, VECTOR = (256, 256), (256,)


class Many(nn.Module):
    """`count` parameters; a forward that gives each a gradient without computing much."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(VECTOR if i % 4 == 3 else MATRIX, generator=generator)) for i in range(count)
        )

    def forward(self) -> torch.Tensor:
        return torch.stack([(w * w).sum() for w in self.weights]).sum()


def prepare(way: str, count: int) -> list[nn.Parameter]:
    """Parameters with gradients on them."""
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    model: Any = Many(count)
    (fullshard if way == "fullshard" else torch_fsdp).fully_shard(model)
    model().backward()
    if way != "local":
        return list(model.parameters())
    made = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        made.append(nn.Parameter(parameter.to_local().detach().clone()))
        made[-1].grad = parameter.grad.to_local().clone()
    return made


def measure(rank: int, world: int, count: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by way and part."""
    import fullshard

    steps: dict[tuple[str, str], Any] = {}
    for way in WAYS:
        parameters = prepare(way, count)
        clip = fullshard.clip_grad_norm_ if way == "fullshard" else nn.utils.clip_grad_norm_
        steps[way, "clip"] = lambda clip=clip, parameters=parameters: clip(parameters, 1e9)
        for part, options in (("adamw", {}), ("adamw foreach", {"foreach": True})):
            optimizer = torch.optim.AdamW(parameters, lr=1e-5, **options)
            if way == "fullshard":
                fullshard.step_on_shards(optimizer)
            steps[way, part] = optimizer.step
    times: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in WAYS}
    for current in range(rounds + 2):
        for (way, part), step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if current >= 2:
                times[way][part].append(time.perf_counter() - start)
    return times


def report(count: int, world: int, times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Print one table; return its figures."""
    print(f"\n{count} parameters, {world} ranks; median ms, and the ratio to local tensors")
    print(f"  {'':12}" + "".join(f"{part:>24}" for part in PARTS))
    rows: dict[str, Any] = {}
    for way, parts in times.items():
        cells = {
            part: {
                "median_ms": round(statistics.median(seconds) * 1e3, 4),
                "ratio": round(paired_ratio(seconds, times["local"][part]), 4),
            }
            for part, seconds in parts.items()
        }
        print(f"  {way:12}" + "".join(f"{c['median_ms']:16.2f} {c['ratio']:7.2f}" for c in cells.values()), flush=True)
        rows[way] = cells
    return {"parameters": count, "world": world, "rounds": len(times["local"]["clip"]), "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000], help="parameters (default: 100 1000)")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds, after two that are not (default: 15)")
    parser.add_argument("--tiny", action="store_true", help="8 parameters, to try the script itself")
    options = parser.parse_args()
    results = []
    for count in [8] if options.tiny else options.counts:
        results.append(report(count, 2, on_ranks(2, measure, count, options.rounds)[0]))
    print()
    print_json("optimizer", TINY if options.tiny else ModelShape(), results)


if __name__ == "__main__":
    main()
