"""Save and load checkpoints with the torch and the `fullshard` of this interpreter, in three formats.

    python -m tests.data.exchange_checkpoints save FOLDER       writes own/, dcp/ and whole.pt, and expected.json
    python -m tests.data.exchange_checkpoints load FOLDER ...   loads each of them into a model whose values are wrong

    own       the crash-safe format, `fullshard.checkpoint.save`
    dcp       `torch.distributed.checkpoint.save`; an older torch reads 2.15's after `fullshard checkpoint convert`
    whole.pt  `torch.save` of full values on rank 0, `torch.load` with its default of weights only

Two ranks over gloo; parameters, buffers and the state of AdamW. Loading fails where a digest is another one. Both print
`name()` of the interpreter that they ran with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import checkpoint
from tests.data.write_checkpoints import STEPS, build, digests, state_of, train

WORLD = 2
FORMATS = ("own", "dcp", "whole.pt")


def name() -> str:
    """Of this interpreter, as tools/versions.py has it: "python3.11-torch2.10.0"."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{torch.__version__.split('+')[0]}"


def save(rank: int, folder: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer)
    state = state_of(model, optimizer, STEPS)
    checkpoint.save(state, checkpoint_id=str(folder / "own"))
    checkpoint.close()
    dcp.save({"model": state["model"], "optimizer": state["optimizer"]}, checkpoint_id=str(folder / "dcp"))
    whole = {part: _each(_full, state[part]) for part in ("model", "optimizer")}
    expected = digests(state)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
        text = json.dumps({"torch": torch.__version__, "state": expected}, indent=1)
        (folder / "expected.json").write_text(text + "\n")


def load(rank: int, folder: Path) -> None:
    said = json.loads((folder / "expected.json").read_text())
    expected = said["state"]
    for form in FORMATS:
        model, optimizer = build("plain")
        train(model, optimizer)
        state = state_of(model, optimizer, 0)
        with torch.no_grad():
            _each(lambda tensor: tensor.fill_(9), state)
        if form == "own":
            checkpoint.load(state, checkpoint_id=str(folder / form))
        elif form == "dcp":
            state.pop("step")
            _load_dcp(rank, state, folder, said["torch"])
        else:
            whole = torch.load(folder / form)
            state = {part: _each(_filled, state[part], whole[part]) for part in ("model", "optimizer")}
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        found = digests(state_of(model, optimizer, STEPS))
        other = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        assert not other, f"{folder}: {form}: expected the values of torch {said['torch']}, found others in {other[:5]}"


def _load_dcp(rank: int, state: dict[str, Any], folder: Path, wrote: str) -> None:
    """By torch; what 2.15 or newer wrote, a torch up to 2.14 refuses: then converted to the own format."""
    if not _release(wrote) >= (2, 15) > _release(torch.__version__):
        dcp.load(state, checkpoint_id=str(folder / "dcp"))
        return
    try:
        dcp.load(state, checkpoint_id=str(folder / "dcp"))
    except CheckpointException:
        pass
    else:
        raise AssertionError(
            f"torch {torch.__version__} loads what {wrote} saved by DCP: docs/torch-versions.md says no"
        )
    converted = folder / "dcp-converted"
    if rank == 0:
        command = [sys.executable, "-m", "fullshard", "checkpoint", "convert", str(folder / "dcp"), str(converted)]
        subprocess.run(command, check=True)
    dist.barrier()
    checkpoint.load(state, checkpoint_id=str(converted))


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _each(change: Callable[..., Any], state: Any, *others: Any) -> Any:
    """`state` with each of its tensors changed; `others`: what is at the same place elsewhere goes along."""
    if isinstance(state, dict):
        return {key: _each(change, value, *(other[key] for other in others)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_each(change, value, *(other[i] for other in others)) for i, value in enumerate(state)]
    return change(state, *others) if isinstance(state, Tensor) else (others[0] if others else state)


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _filled(tensor: Tensor, whole: Tensor) -> Tensor:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        return tensor.copy_(whole)


def _rank_main(rank: int, what: str, folders: tuple[str, ...], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    for folder in folders:
        {"save": save, "load": load}[what](rank, Path(folder))
    dist.destroy_process_group()


def main(what: str, *folders: str) -> None:
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as rendezvous:
        mp.spawn(_rank_main, (what, folders, f"{rendezvous}/file"), nprocs=WORLD)
    print(name())


if __name__ == "__main__":
    main(*sys.argv[1:])
