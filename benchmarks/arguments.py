"""Host time of carrying back what forwards write into containers that a mixed-precision policy copies.

    python -m benchmarks.arguments          a list, a dict and a dataclass handed through all blocks; a minute

Blocks in bfloat16 get `(x, aux)`, where `aux` holds one float32 tensor, so every block copies it. Two ways take turns:

    carried   as fullshard does: copies are compared after the forward, and changes carried to the caller's object
    dropped   the same casts, and nothing compared: what is written into the copy is lost, as in torch's FSDP2

extra       microseconds that one forward takes more when carried: making the arguments of a block, and comparing them
step        microseconds of forward and backward for each block, carried, at a fake group of 8 with tiny tensors: what
            is left is Python and dispatch, and no step has less
share       extra / step: the most that it can be of any step

Each figure is the least of many turns, because a busy machine only adds. In processes of their own, of which the median
is printed: where objects lie in memory moves each by some percent.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import Block, ModelShape, print_json

SHAPE = ModelShape(vocabulary=64, width=16, hidden=24, heads=2, depth=8)
WORLD = 8


@dataclass
class State:
    """What a model of experts hands from layer to layer."""

    loss: Tensor
    tokens: int = 0


CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.zeros(1)],
    "dict": lambda: {"loss": torch.zeros(1), "tokens": 0},
    "dataclass": lambda: State(torch.zeros(1)),
    "nothing": lambda: None,
}


class Noting(nn.Module):
    """A block that takes the container beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(SHAPE)

    def forward(self, x: Tensor, aux: Any) -> Tensor:
        found: Tensor = self.block(x)
        return found


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(SHAPE.depth))

    def forward(self, x: Tensor, aux: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, aux)
        return x


def measured(kind: str, rounds: int) -> dict[str, float]:
    """The figures of one process."""
    import fullshard
    from fullshard.engine import arguments

    def carried(args: tuple[Any, ...]) -> None:
        made = arguments.Arguments(args, {}, None, torch.bfloat16)
        if made.has_copies:
            made.carry_back("block", None, warn=False)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def dropped(args: tuple[Any, ...]) -> None:
        tuple([arguments.map_tensors(cast, item, 1) for item in args])

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=dist.HashStore())
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = Chain()
    for block in model.blocks:
        fullshard.fully_shard(block, mp_policy=policy)
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    x, aux = torch.ones(1, 4, SHAPE.width), CONTAINERS[kind]()

    def step() -> None:
        model(x, aux).sum().backward()
        model.zero_grad()

    args = (x.bfloat16(), aux)
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: carried(args), 200),
        (lambda: dropped(args), 200),
        (step, 1),
    ]
    least = [math.inf] * len(ways)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for place, (way, times) in enumerate(ways):
            began = time.perf_counter()
            for _ in range(times):
                way()
            least[place] = min(least[place], (time.perf_counter() - began) / times * 1e6)
        gc.collect()
    dist.destroy_process_group()
    extra, block = least[0] - least[1], least[2] / SHAPE.depth
    return {"extra": extra, "step": block, "share": extra / block}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arguments", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="turns of each way")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--kind", choices=list(CONTAINERS), help="measure this one here, and print one JSON line")
    options = parser.parse_args()
    if options.kind:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(measured(options.kind, options.rounds)))
        return
    results: dict[str, Any] = {}
    for kind in CONTAINERS:
        command = [sys.executable, "-m", "benchmarks.arguments", "--kind", kind, "--rounds", str(options.rounds)]
        outputs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(options.processes)
        ]
        found = [json.loads(output.splitlines()[-1]) for output in outputs]
        results[kind] = {name: statistics.median(one[name] for one in found) for name in found[0]}
        extra, step, share = results[kind].values()
        print(f"{kind:10} {extra:5.1f} us of {step:6.0f} us for each block: {100 * share:.2f} %", flush=True)
    print_json("arguments", SHAPE, results)


if __name__ == "__main__":
    main()
