"""The program of PyTorch's FSDP2 guide, on fullshard, with every flag that the guide names.

    torchrun --standalone --nproc-per-node 2 examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --explicit-prefetching
    torchrun --standalone --nproc-per-node 2 examples/train.py --mixed-precision
    torchrun --standalone --nproc-per-node 2 examples/train.py --dcp-api --checkpoint-dir /tmp/checkpoint

The model is built on the meta device, sharded, and only then given memory and initial values, so that no process ever
holds it whole. With --checkpoint-dir, model and optimizer are saved at the end; a second run loads them and continues.
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

from fullshard import FSDPModule, MixedPrecisionPolicy, checkpoint, fully_shard
from fullshard.checkpoint import formats

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


# ---- checkpoints: one file, the same for both ways -----------------------------------------------------------------
#
# `fullshard.checkpoint.save` is the way for trainings: every rank writes its part, and a kill loses nothing. These are
# the guide's two, which make one file that any program can read. Neither ever holds the whole model: full tensors are
# gathered one by one and go straight to the file; a file that is read is mapped into memory.


def save_dtensor(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """With DTensor's own functions: `full_tensor` of each parameter and of each moment, one at a time."""
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    _write({"model": model_state, "optimizer": optimizer_state}, path)


def load_dtensor(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Every rank maps the file and keeps its rows; nothing is sent (`formats.load_full` does this, and checks more)."""
    full = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    parameters = dict(model.named_parameters())

    def rows(value: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value  # a buffer; AdamW's counter of steps
        value = value.to(like.device)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()

    shards = {name: nn.Parameter(rows(full["model"][name], like)) for name, like in model.state_dict().items()}
    model.load_state_dict(shards, assign=True)
    moments = {
        name: {key: rows(value, parameters[name]) for key, value in held.items()}
        for name, held in full["optimizer"]["state"].items()
    }
    groups = full["optimizer"]["param_groups"]
    checkpoint.set_state_dict(model, optimizer, optim_state_dict={"state": moments, "param_groups": groups})


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """With the state dict functions of torch.distributed.checkpoint. With `full_state_dict=True` they would bring
    the whole model to rank 0; without, they give shards, which are gathered one by one."""
    _write({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}, path)


def load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Only rank 0 reads; the others get their shards from it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full: dict[str, Any] = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        full = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    set_model_state_dict(model, full["model"], options=options)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=full["optimizer"], options=options)


def _write(state: dict[str, Any], path: Path) -> None:
    # Not over the old file: it is mapped into memory where it was loaded from.
    new = path.with_name(f"{path.name}.new")
    if dist.get_rank() == 0:
        new.unlink(missing_ok=True)  # of a run that was killed here
    formats.export_full(state, new, "torch")
    if dist.get_rank() == 0:
        os.replace(new, path)
    dist.barrier()


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
    path = None if options.checkpoint_dir is None else options.checkpoint_dir / "training.pt"
    if path is not None and path.exists():
        load(model, optimizer, path)
        if dist.get_rank() == 0:
            print(f"loaded {path}")

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

    if path is not None:
        save(model, optimizer, path)
        if dist.get_rank() == 0:
            print(f"saved {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
