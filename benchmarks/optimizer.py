"""Clipping, a look for NaN and AdamW over sharded parameters, beside the same on plain local tensors of the same sizes.

    python -m benchmarks.optimizer                2 ranks, 100 and 1,000 parameters; a minute on two cores

    local        plain tensors of this rank's rows: torch's clip_grad_norm_ and AdamW, each rank by itself
    + message    the same with the one all-reduce of eight bytes without which there is no norm over ranks: the bound
    dtensor      the sharded parameters of torch's fully_shard: torch's clip_grad_norm_ and AdamW
    fullshard    ours: fullshard.clip_grad_norm_ and AdamW after fullshard.step_on_shards

The look for NaN and inf: local and + message by the norm, as users write it (a sum of squares is the cheapest that sees
both); dtensor is the norm by torch; fullshard is fullshard.check_gradients, which also knows which parameter it was.

AdamW in torch's default form (on a CPU a loop over parameters) and with foreach=True. Medians of interleaved rounds;
the ratio is to "+ message" for clipping and the look, to "local" for AdamW. Where ranks share cores, a message waits
until the other rank gets one, which is neither torch's nor ours: so CPU time stands beside the time on the clock.
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

WAYS = ("local", "+ message", "dtensor", "fullshard")
PARTS = ("clip", "check", "adamw", "adamw foreach")
BOUNDS = {"clip": "+ message", "check": "+ message", "adamw": "local", "adamw foreach": "local"}
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
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
    if way in ("dtensor", "fullshard"):
        return list(model.parameters())
    made = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        made.append(nn.Parameter(parameter.to_local().detach().clone()))
        made[-1].grad = parameter.grad.to_local().clone()
    return made


def clip_with_message(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """The norm over all ranks of plain tensors, in the fewest steps that torch offers."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    power = nn.utils.get_total_norm(gradients).double().square()
    dist.all_reduce(power)
    norm = power.sqrt().float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def look(parameters: list[nn.Parameter]) -> bool:
    """Whether all gradients are finite, by their norm."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return bool((norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite())


def look_with_message(parameters: list[nn.Parameter]) -> bool:
    """The same of plain tensors on all ranks."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    dist.all_reduce(norm)
    return bool(norm.isfinite())


def measure(rank: int, world: int, count: int, rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Seconds by way, part and clock."""
    import fullshard

    clips: dict[str, Any] = {"fullshard": fullshard.clip_grad_norm_, "+ message": clip_with_message}
    looks: dict[str, Any] = {
        "fullshard": lambda parameters: fullshard.check_gradients(parameters).ok,
        "+ message": look_with_message,
    }
    steps: dict[tuple[str, str], Any] = {}
    norms = {}
    for way in WAYS:
        parameters = prepare(way, count)
        clip = clips.get(way, nn.utils.clip_grad_norm_)
        norms[way] = float(clip(parameters, 1e9))
        steps[way, "clip"] = lambda clip=clip, parameters=parameters: clip(parameters, 1e9)
        finite = looks.get(way, look)
        if not finite(parameters):
            raise AssertionError(f"{way}: gradients that are finite were called broken")
        steps[way, "check"] = lambda finite=finite, parameters=parameters: finite(parameters)
        for part, options in (("adamw", {}), ("adamw foreach", {"foreach": True})):
            optimizer = torch.optim.AdamW(parameters, lr=1e-5, **options)
            if way == "fullshard":
                fullshard.step_on_shards(optimizer)
            if way != "+ message":
                steps[way, part] = optimizer.step
    for way, norm in norms.items():
        if way != "local" and abs(norm / norms["fullshard"] - 1) > 1e-4:
            raise AssertionError(f"{way}: norm {norm}, fullshard {norms['fullshard']}")
    times: dict[str, dict[str, dict[str, list[float]]]] = {}
    for current in range(rounds + 2):
        for (way, part), step in steps.items():
            dist.barrier()
            start = [clock() for clock in CLOCKS.values()]
            step()
            end = [clock() for clock in CLOCKS.values()]
            if current >= 2:
                clocks = times.setdefault(way, {}).setdefault(part, {clock: [] for clock in CLOCKS})
                for clock, begun, ended in zip(CLOCKS, start, end, strict=True):
                    clocks[clock].append(ended - begun)
    return times


def report(count: int, world: int, times: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Print one table; return its figures."""
    print(f"\n{count} parameters, {world} ranks; median ms on the clock (ratio to the bound), ms of CPU time (ratio)")
    print(f"  {'':12}" + "".join(f"{part:>36}" for part in PARTS))
    rows: dict[str, Any] = {}
    for way, parts in times.items():
        cells = {
            f"{part}, {clock}": {
                "median_ms": round(statistics.median(seconds) * 1e3, 4),
                "ratio": round(paired_ratio(seconds, times[BOUNDS[part]][part][clock]), 4),
            }
            for part, clocks in parts.items()
            for clock, seconds in clocks.items()
        }
        shown = "".join(f"{c['median_ms']:12.2f} ({c['ratio']:.2f})" for c in cells.values())
        print(f"  {way:12}{shown}", flush=True)
        rows[way] = cells
    return {"parameters": count, "world": world, "rounds": len(times["local"]["clip"]["wall"]), "ways": rows}


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
