"""One save to a store by way of the disks of hosts, or the recovery after one; a process for each rank runs it.

    by_disks.py BUCKET LOCAL save STEP [--numel N] [--hold RANK]    rank RANK holds still before it sends its file
    by_disks.py BUCKET LOCAL recover

Prints one line of JSON for what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint
from fullshard.checkpoint import local_first
from tests.harness.shared_bucket import shared_bucket

RUN = "s3://bucket/run"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket", type=Path)
    parser.add_argument("local", type=Path)
    parser.add_argument("action", choices=("save", "recover"))
    parser.add_argument("step", type=int, nargs="?", default=0)
    parser.add_argument("--numel", type=int, default=1000)
    parser.add_argument("--hold", type=int)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def say(event: str, **fields: object) -> None:
        # In one write, so that lines of two ranks are not one.
        os.write(1, f"{json.dumps({'rank': rank, 'event': event, **fields})}\n".encode())

    def state(step: int) -> dict[str, Any]:
        full = torch.full((given.numel,), float(step))
        return {"w": distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)]), "step": step}

    if given.hold == rank:

        def hold(*_: object) -> None:
            say("holds")
            time.sleep(600)

        local_first.upload = hold  # type: ignore[assignment]
    with shared_bucket(given.bucket):
        if given.action == "save":
            try:
                url = f"{RUN}/step-{given.step}"
                checkpoint.async_save(state(given.step), checkpoint_id=url, local=given.local).result()
                say("saved")
            except checkpoint.CheckpointError as error:
                say("failed", kind=type(error).__name__, error=str(error))
        else:
            newest = checkpoint.recover(RUN, local=given.local)
            found = state(0)
            if newest is not None:
                checkpoint.load(found, checkpoint_id=newest)
                assert (found["w"].to_local() == found["step"]).all()
            say("recovered", newest=newest, step=found["step"])
    # Not `destroy_process_group`: the others may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
