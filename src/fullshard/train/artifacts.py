"""What a run leaves behind, apart from its checkpoints: the model in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import __version__
from fullshard.checkpoint.formats.hf import Entry, SafetensorsWriter


def save_model(run_dir: Path, model: nn.Module, *, rank: int) -> None:
    """Write `model.safetensors`, a full state dict. Collective: every rank calls it.

    Tensors are gathered one by one, and the full one is let go before the next is gathered: no rank ever holds more
    than one full tensor for this.
    """
    state = {name: value.detach() for name, value in model.state_dict().items()}
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in state.items()]
    if rank != 0:
        for value in state.values():
            _full(value)
        return
    with SafetensorsWriter(run_dir / "model.safetensors", entries, {"made_by": f"fullshard {__version__}"}) as file:
        for name, value in state.items():
            file.write(name, _full(value))


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
