"""A program for many machines, as the pages write it: it loads the newest checkpoint, trains, and saves.

    torchrun ... tests/hosts/train.py FOLDER --steps 6 [--save-every 2] [--pause SECONDS] [--see FOLDER]

The batch of a step is a function of its number, and is divided by the present number of ranks. Prints one line of JSON
for each step, and one at the end; the losses are those of the whole batch. On SIGTERM to any rank all save after the
same step and end with code 75.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.peers import store

WIDTH, BATCH = 32, 12


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(3))
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def alone(steps: int) -> list[float]:
    """The losses of the same training in one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--see", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stopping = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def say(**fields: object) -> None:
        line = json.dumps({"rank": rank, "world": world, "host": socket.gethostname(), **fields})
        # In one write: torchrun starts Python without buffers, and `print` writes the end of the line on its own, so
        # that lines of two ranks could be one.
        os.write(1, f"{line}\n".encode())

    model = build()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_at(step: int) -> dict[str, Any]:
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    state = state_at(0)
    if arguments.save_every and (newest := checkpoint.latest(arguments.folder)) is not None:
        checkpoint.load(state, checkpoint_id=newest)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    say(event="begins", step=state["step"], node=store.node(), pid=os.getpid())
    with fullshard.observe.Recorder(model, arguments.see, optimizer) if arguments.see else nullcontext() as recorder:
        for step in range(state["step"], arguments.steps):
            if recorder is not None:
                recorder.begin(step + 1)
            loss = model(batch(step).chunk(world)[rank]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # One rank that was asked to stop stops all.
            both = torch.stack([loss.detach() / world, stopping[0]])
            dist.all_reduce(both)
            whole, asked = both[0], bool(both[1])
            if recorder is not None:
                recorder.end(loss=whole.item())
            say(event="step", step=step + 1, loss=whole.item())
            if arguments.save_every and (asked or (step + 1) % arguments.save_every == 0):
                checkpoint.save(state_at(step + 1), checkpoint_id=arguments.folder / f"step-{step + 1}")
            if asked:
                say(event="stops", step=step + 1)
                sys.exit(75)
            time.sleep(arguments.pause)
    say(event="ends")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
