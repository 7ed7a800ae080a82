"""The program of PyTorch's FSDP2 guide, on fullshard, with every flag that the guide names.

    torchrun --standalone --nproc-per-node 2 examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --explicit-prefetching
    torchrun --standalone --nproc-per-node 2 examples/train.py --mixed-precision
    torchrun --standalone --nproc-per-node 2 examples/train.py --dcp-api --checkpoint-dir /tmp/checkpoint

The model is built on the meta device, sharded, and only then given memory and initial values, so that no process ever
holds it whole. With --checkpoint-dir, model and optimizer are saved at the end; a second run loads them and goes on.
Runs on the machine's accelerators (one process for each) or on its CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard

# ---- the model: it knows nothing of sharding -----------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """Attention and MLP, as much of them as the guide has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """tokens (n, length) -> logits (n, length, vocab_size)"""

    def __init__(self, vocab_size: int = 512, dim: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim) for _ in range(num_layers))
        self.output = nn.Linear(dim, vocab_size)

    def reset_parameters(self) -> None:
        """Give every parameter an initial value: those of all modules below, not only of this one."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


# ---- sharding ------------------------------------------------------------------------------------------------------


def setup_model(device: torch.device, *, mixed_precision: bool) -> Transformer:
    """Built on the meta device, sharded bottom-up, then allocated and initialised."""
    options: dict[str, Any] = {}
    if mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        assert tensor.device.type == "meta"
    model.to_empty(device=device)
    # On a CPU every rank draws the values of its own rows; on other devices DTensor sees to that, from equal seeds.
    torch.manual_seed(dist.get_rank() if device.type == "cpu" else 0)
    model.reset_parameters()
    assert isinstance(model, Transformer) and isinstance(model, FSDPModule)
    return model


def inspect_model(model: nn.Module, *, mixed_precision: bool) -> None:
    """What the guide says about parameters, checked."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        assert parameter.dtype == torch.float32
    if mixed_precision:
        layer: Any = model.get_submodule("layers.0")
        layer.unshard()
        assert all(p.dtype == torch.bfloat16 and not isinstance(p, DTensor) for p in layer.parameters())
        layer.reshard()


def set_explicit_prefetching(model: Any, ahead: int = 2) -> None:
    """Each layer's forward gathers the next `ahead` layers, its backward the `ahead` before it."""
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])


# ---- checkpoints: one file each, written and read by rank 0 --------------------------------------------------------


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """With the state dict functions of torch.distributed.checkpoint."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = {
        "model.pt": get_model_state_dict(model, options=options),
        "optimizer.pt": get_optimizer_state_dict(model, optimizer, options=options),
    }
    _write(states, folder)


def load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Only rank 0 reads; the others get their shards from it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    reads = dist.get_rank() == 0
    set_model_state_dict(model, _read(folder / "model.pt") if reads else {}, options=options)
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict=_read(folder / "optimizer.pt") if reads else {}, options=options
    )


def save_dtensor(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """With DTensor's own functions, one whole tensor at a time."""
    states = {"model.pt": _whole(model.state_dict()), "optimizer.pt": _whole(optimizer.state_dict())}
    _write(states, folder)


def load_dtensor(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every rank maps the file and keeps its rows."""
    shards = {
        name: nn.Parameter(distribute_tensor(whole, like.device_mesh, like.placements))
        for (name, like), whole in zip(model.state_dict().items(), _read(folder / "model.pt").values(), strict=True)
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Copied in place: the optimizer holds these parameter objects.
    model.load_state_dict(shards)
    state = _read(folder / "optimizer.pt")
    for index, entries in state["state"].items():
        like = parameters[index]
        for key, value in entries.items():
            if value.shape == like.shape:
                entries[key] = distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    optimizer.load_state_dict(state)


def _whole(value: Any) -> Any:
    """`value` with DTensors gathered, on the CPU; on rank 0 alone something is kept."""
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _write(states: dict[str, Any], folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name, state in states.items():
            # Not over the old file: it is mapped into memory where it was loaded from.
            torch.save(state, folder / f"{name}.new")
            os.replace(folder / f"{name}.new", folder / name)
    dist.barrier()


def _read(path: Path) -> Any:
    return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


# ---- training ------------------------------------------------------------------------------------------------------


def batch(model: Transformer, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, and as targets their successors: something that can be learned."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(0, model.output.out_features, (8, 32), generator=generator).to(device)
    return tokens, (tokens + 1) % model.output.out_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explicit-prefetching", action="store_true", help="prefetch lists instead of the default")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--dcp-api", action="store_true", help="checkpoints by DCP's functions instead of DTensor's")
    parser.add_argument("--checkpoint-dir", type=Path, help="load from here what is there; save here at the end")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device if accelerator is not None else None)

    model = setup_model(device, mixed_precision=options.mixed_precision)
    inspect_model(model, mixed_precision=options.mixed_precision)
    if options.explicit_prefetching:
        set_explicit_prefetching(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    load, save = (load_dcp, save_dcp) if options.dcp_api else (load_dtensor, save_dtensor)
    if options.checkpoint_dir is not None and (options.checkpoint_dir / "model.pt").exists():
        load(model, optimizer, options.checkpoint_dir)
        if dist.get_rank() == 0:
            print(f"loaded {options.checkpoint_dir}")

    for step in range(options.steps):
        if options.explicit_prefetching:
            model.unshard()  # the first gather travels while the batch is made
        tokens, targets = batch(model, step, device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}  loss {loss.item():.4f}")

    if options.checkpoint_dir is not None:
        save(model, optimizer, options.checkpoint_dir)
        if dist.get_rank() == 0:
            print(f"saved {options.checkpoint_dir}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
