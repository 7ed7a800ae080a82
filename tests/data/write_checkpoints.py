"""Write checkpoints with the `fullshard` that is on the path, for later versions to load (checkpoints_0.1.0/README.md).

    PYTHONPATH=/path/to/that/version/src:. python -m tests.data.write_checkpoints FOLDER

Only what 0.1.0 has is used here, and none of the harness: it changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import checkpoint

STEPS = 3
# Name -> (ranks, how they are laid out).
KINDS = {
    "1-rank": (1, "plain"),
    "2-ranks": (2, "plain"),
    "4-ranks": (4, "plain"),
    "hsdp-2x2": (4, "hsdp"),
    "offload-2-ranks": (2, "offload"),
    "async-2-ranks": (2, "async"),
}


class Model(nn.Module):
    """Uneven rows, fewer rows than ranks, one element, tied, frozen, unused, a buffer, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.unused = nn.Linear(2, 2).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.frozen(torch.tanh(self.second(hidden) + self.tied(hidden))) * self.scale


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model, with values that depend on nothing, and an optimizer of two groups."""
    model = Model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    options: dict[str, Any] = {}
    if layout == "hsdp":
        options["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )
    if layout == "offload":
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=False)
    for child in (model.first, model.frozen, model.unused):
        fullshard.fully_shard(child, **options)
    fullshard.fully_shard(model, **options)
    groups = [{"params": [p for n, p in model.named_parameters() if "first" in n], "lr": 0.02, "betas": (0.8, 0.9)}]
    groups.append({"params": [p for n, p in model.named_parameters() if "first" not in n]})
    return model, torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        x = torch.rand(4, 5, generator=torch.Generator().manual_seed(step))  # the same on all: buffers have to be equal
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def digests(state: Any, where: str = "") -> dict[str, str]:
    """What is in `state`, by its path: shape, dtype and SHA-256 of full tensors, the repr of values. A collective."""
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in digests(value, f"{where}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for i, value in enumerate(state) for k, v in digests(value, f"{where}/{i}").items()}
    if not isinstance(state, Tensor):
        return {where: repr(state)}
    full = (state.full_tensor() if isinstance(state, DTensor) else state).detach().cpu().contiguous()
    data = bytes(full.reshape(-1).view(torch.uint8).tolist())
    return {where: f"{list(full.shape)} {full.dtype} {hashlib.sha256(data).hexdigest()}"}


def _rank_main(rank: int, kind: str, folder: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    world, layout = KINDS[kind]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    model, optimizer = build(layout)
    train(model, optimizer)
    state = state_of(model, optimizer, STEPS)
    if layout == "async":
        checkpoint.async_save(state, checkpoint_id=folder).result()
    else:
        checkpoint.save(state, checkpoint_id=folder)
    checkpoint.close()
    found = digests(state)
    if rank == 0:
        text = json.dumps({"version": fullshard.__version__, "world": world, "state": found}, indent=1)
        Path(folder, "..", "expected.json").resolve().write_text(text + "\n")
    dist.destroy_process_group()


def main(folder: str) -> None:
    for kind, (world, _) in KINDS.items():
        os.makedirs(f"{folder}/{kind}")
        with tempfile.TemporaryDirectory() as rendezvous:
            mp.spawn(_rank_main, (kind, f"{folder}/{kind}/checkpoint", f"{rendezvous}/file"), nprocs=world)


if __name__ == "__main__":
    main(*sys.argv[1:])
