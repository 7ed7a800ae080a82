"""Tied embeddings under transformers' own FSDP2: what torch's `fully_shard` trains, and what fullshard trains.

    torchrun --standalone --nproc-per-node 2 examples/tied_embeddings.py --shard-with torch
    torchrun --standalone --nproc-per-node 2 examples/tied_embeddings.py --shard-with fullshard

The program is the same; `fullshard.install()` is the only line between the two. Each prints its losses beside those
of plain training on the batches of all ranks. Ranks are CPU processes over gloo, the model is a small Qwen3 of random
values.

transformers ties the head to the embedding after it sharded both (`from_pretrained(..., distributed_config=...)`), so
that two units manage one parameter. Where its rows do not divide among the ranks, torch's FSDP2 copies the shorter
shard into padded memory, once for each unit, and lets the parameter point to the last copy. The optimizer writes that
one; the head gathers the other, and its rows of that rank stay as they were loaded. The 151,936 rows of the published
Qwen3 divide among 8 ranks, and do not among 24.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--shard-with", choices=["torch", "fullshard"], default="fullshard")
parser.add_argument("--vocabulary", type=int, default=29, help="rows of the tied weight")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()
if arguments.shard_with == "fullshard":
    import fullshard

    fullshard.install()  # before transformers takes torch's names

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=True,
    )


def train(model: torch.nn.Module, batches: torch.Tensor) -> list[float]:
    """The loss of each step. `batches`: [parts, sequences, tokens], parts of one batch that never changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(arguments.steps):
        parts = [model(input_ids=part, labels=part).loss / len(batches) for part in batches]
        for part in parts:
            part.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
batches = torch.randint(0, arguments.vocabulary, (world, 2, 8), generator=torch.Generator().manual_seed(1))
folders: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folders)
folder = Path(str(folders[0])) / "model"
if rank == 0:
    torch.manual_seed(0)
    Qwen3ForCausalLM(config()).save_pretrained(folder)
dist.barrier()

plain = train(Qwen3ForCausalLM.from_pretrained(folder), batches)
model = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=world))
assert model.lm_head.weight is model.model.embed_tokens.weight
mean = torch.tensor(train(model, batches[rank : rank + 1]))
dist.all_reduce(mean)
mean /= world

if rank == 0:
    print(f"{'plain':>10}  {arguments.shard_with:>10}")
    for expected, found in zip(plain, mean.tolist(), strict=True):
        print(f"{expected:10.4f}  {found:10.4f}")
    apart = max(abs(expected - found) for expected, found in zip(plain, mean.tolist(), strict=True))
    print("equal" if apart < 1e-4 else f"they are {apart:.4f} apart: these are two trainings")
dist.destroy_process_group()
