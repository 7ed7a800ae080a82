"""Many steps, each replayed and compared bit by bit: on sound hardware none may differ (docs/numbers.md).

    torchrun --nproc-per-node 2 -m tests.harness.replays --steps 10000

Exit status 1 when one differed.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist

import fullshard
from tests.harness.implementations import FULLSHARD
from tests.harness.models import seeded
from tests.threads.programs import Model, batch, part, shard


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.replays", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(seeded(Model), FULLSHARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begun, differ = time.monotonic(), 0
    for number in range(steps):
        tokens = part(batch(world, number % 50), rank)

        def step(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(tokens).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        differ += not fullshard.replay(step, model, optimizer, on_difference="return").ok
    if rank == 0:
        print(f"{steps} replayed steps, {differ} differences, {time.monotonic() - begun:.0f} s")
    dist.destroy_process_group()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
