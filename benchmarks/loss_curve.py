"""The same training by four libraries: DDP, FSDP1, torch's FSDP2 and fullshard, on the trainer's model and text.

    python -m benchmarks.loss_curve                       300 steps on 2 ranks; some minutes on two cores
    python -m benchmarks.loss_curve --picture curve.png   and the curves (needs matplotlib)

Equal initial values and batches, AdamW with the trainer's schedule and clipping. The figure is the largest difference
of a step's loss to DDP's, in nats; for scale, "ddp'" is DDP with the same sequences dealt out otherwise to the ranks,
which shows how far float32 rounding alone carries a run.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.common import ModelShape, on_ranks, print_json

WAYS = ("ddp", "ddp'", "fsdp1", "fsdp2", "fullshard")
LENGTH, SEQUENCES, LR, WARMUP, CLIP = 128, 8, 2e-3, 20, 1.0


def build(way: str, vocabulary: int) -> tuple[nn.Module, Any]:
    """The trainer's default model, made parallel in one way, and that way's clipping."""
    import torch.distributed.fsdp as torch_fsdp
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import fullshard
    from fullshard.train.model import Block, Llama, LlamaShape

    shape = LlamaShape(vocab=vocabulary, layers=4, dim=128, heads=4, kv_heads=2, ffn_dim=352, context=LENGTH)
    model: Any = Llama(shape)
    model.init_weights(0)
    clip: Any = nn.utils.clip_grad_norm_
    if way.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model), clip
    if way == "fsdp1":
        policy = ModuleWrapPolicy({Block})
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        return wrapped, lambda _parameters, norm: wrapped.clip_grad_norm_(norm)
    library: Any = fullshard if way == "fullshard" else torch_fsdp
    for block in model.layers:
        library.fully_shard(block)
    return library.fully_shard(model), fullshard.clip_grad_norm_ if way == "fullshard" else clip


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))))


def train(rank: int, world: int, way: str, steps: int) -> list[float]:
    """The loss over all ranks of every step."""
    from fullshard.train.config import DataKeys
    from fullshard.train.data import ByteTokenizer, SampleOrder, read_corpus, tokenize, windows

    tokenizer = ByteTokenizer()
    tokens = tokenize(read_corpus(DataKeys()), tokenizer, 0.1).train
    order = SampleOrder(num_tokens=len(tokens), sequence_length=LENGTH, seed=0)
    model, clip = build(way, tokenizer.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    mine = slice(rank, None, world) if way == "ddp'" else slice(rank * SEQUENCES, (rank + 1) * SEQUENCES)
    losses = []
    for step in range(steps):
        starts = order.starts(step, world * SEQUENCES)[mine]
        inputs, targets = windows(tokens, starts, LENGTH)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        clip(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def draw(curves: dict[str, list[float]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, losses in curves.items():
        if name != "ddp'":
            above.plot(losses, label=name, linewidth=1)
        below.plot([abs(a - b) for a, b in zip(losses, curves["ddp"], strict=True)], label=name, linewidth=1)
    above.set(ylabel="loss (nats per byte)")
    below.set(ylabel="difference to ddp", xlabel="step", yscale="log")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--picture", default="", help="file for the curves")
    parser.add_argument("--tiny", action="store_true", help="three steps, to try the script itself")
    options = parser.parse_args()
    steps = 3 if options.tiny else options.steps
    curves = {way: on_ranks(options.world, train, way, steps)[0] for way in WAYS}
    print(f"{steps} steps, {options.world} ranks; nats per byte")
    print(f"  {'':12} {'first':>9} {'last':>9} {'largest difference to ddp':>27}")
    results: dict[str, Any] = {}
    for way, losses in curves.items():
        difference = max(abs(a - b) for a, b in zip(losses, curves["ddp"], strict=True))
        print(f"  {way:12} {losses[0]:9.5f} {losses[-1]:9.5f} {difference:27.2e}")
        results[way] = {"first": losses[0], "last": losses[-1], "difference": difference}
    if options.picture:
        draw(curves, options.picture)
        print(options.picture)
    print()
    print_json("loss_curve", ModelShape(), {"steps": steps, "world": options.world, "ways": results})


if __name__ == "__main__":
    main()
