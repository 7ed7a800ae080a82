"""Peak memory beyond shards and activations: every storage of one step, counted. Fake process group.

    python -m benchmarks.memory                   on a CPU: storages, blocks of a sixteenth of Llama-3-8B's
    python -m benchmarks.memory --device cuda     on a GPU: allocator peaks, 32 blocks of Llama-3-8B's shape, world 8

A chain of blocks of nine parameters runs forward and backward with four tokens. Figures are bytes per element of one
block (`P`).

    forward, backward    the most that exists at once in that half of the step, beyond the shards and the gradient
                         shards that the step leaves; buffers that are kept from step to step are part of it.
                         Counted on a CPU, storages no larger than the largest activation of four tokens are left out:
                         activations, and vectors
    fsdp2, fsdp1         torch's; on a CPU they gather when needed, and wait: less memory, and no overlap
    gloo plan            ours, as it is on a CPU for blocks of an 8B model
    NCCL plan            ours, as it is on a GPU: buffers are not kept, gradients are the send buffers; one reduction is
                         under way, as it is there
    in flight            how many reductions may be under way (default 2 on a CPU, 1 on a device)
    1 gP                 `set_memory_budget(gradients=)` of the gradients of a block. Step times at such limits, over
                         gloo: cpu_step --implementations fsdp2 plan "plan 1.5gP" "plan 1gP"
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import ModelShape, print_json
from benchmarks.counting import MemoryCounter, gloo_plan, nccl_plan
from benchmarks.device import device_of, module_of, start_fake, synchronize
from benchmarks.host import Chain
from fullshard.policy import use_options

# A sixteenth of the elements of a Llama-3-8B block each; grouped-query attention is left out, all four are square.
SHAPE = ModelShape(vocabulary=64, width=1024, hidden=3584, heads=8, depth=5)
LLAMA_8B = ModelShape(vocabulary=64, width=4096, hidden=14336, heads=32, depth=32)
TINY = ModelShape(vocabulary=64, width=128, hidden=256, heads=2, depth=4)
TOKENS = 4
BF16, FP32 = torch.bfloat16, torch.float32
PRECISIONS = {"fp32": (FP32, None, None), "mixed precision": (FP32, BF16, FP32), "bf16 storage": (BF16, None, None)}


class Way(NamedTuple):
    """One line of the table. `options`: for `use_options`."""

    name: str
    library: str
    nccl: bool = False
    options: Mapping[str, int] = MappingProxyType({})
    # `set_memory_budget(gradients=)`, in gradients of one block; None: the default.
    gradient_bytes: float | None = None
    # Send buffers: 1 is the default on a device.
    buffers: int | None = None


WAYS = (
    Way("fsdp2", "fsdp2"),
    Way("fsdp1", "fsdp1"),
    Way("gloo plan, 2 in flight", "fullshard", options={"reductions_in_flight": 2}),
    Way("gloo plan, 1 in flight", "fullshard", options={"reductions_in_flight": 1}),
    Way("NCCL plan", "fullshard", nccl=True, buffers=1),
    Way("NCCL plan, 1 gP", "fullshard", nccl=True, buffers=1, gradient_bytes=1.0),
    Way("NCCL plan, 2 in flight", "fullshard", nccl=True, buffers=2),
    Way("NCCL plan, none ahead", "fullshard", nccl=True, buffers=1, options={"prefetch_depth": 0}),
)


def build(way: Way, shape: ModelShape, precision: str, device: torch.device) -> nn.Module:
    storage, compute, reduce = PRECISIONS[precision]
    with torch.device(device):
        model: Any = Chain(shape).to(storage)
    if way.library == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            use_orig_params=True,
            device_id=device,
            mixed_precision=MixedPrecision(compute, reduce) if compute else None,
        )
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    library: Any = torch_fsdp if way.library == "fsdp2" else fullshard
    policy = library.MixedPrecisionPolicy(compute, reduce)
    for block in model.blocks:
        library.fully_shard(block, mp_policy=policy)
    model = library.fully_shard(model, mp_policy=policy)
    if way.buffers is not None:
        model.set_reduce_scatter_max_input_buffers(way.buffers)
    if way.gradient_bytes is not None:
        model.set_memory_budget(gradients=int(way.gradient_bytes * _numel(shape) * (compute or storage).itemsize))
    return model


def count_on_cpu(way: Way, shape: ModelShape, precision: str) -> dict[str, float]:
    """Bytes at the peak of forward and backward of the third step."""
    storage, compute, _ = PRECISIONS[precision]
    norm_nbytes = shape.width * (compute or storage).itemsize
    plan = nullcontext() if way.library != "fullshard" else (nccl_plan if way.nccl else gloo_plan)(norm_nbytes + 1)
    with use_options(**way.options), plan:
        model = build(way, shape, precision, torch.device("cpu"))
        x = torch.randn(1, TOKENS, shape.width, dtype=compute or storage)
        with MemoryCounter() as counter:
            for _ in range(2):
                model(x).sum().backward()
                model.zero_grad(set_to_none=True)
            gc.collect()
            counter.mark("forward")
            loss = model(x).sum()
            counter.mark("backward")
            loss.backward()
            counter.mark("after")
        activation = TOKENS * shape.hidden * FP32.itemsize
        return {
            half: float(counter.peak(half, without_lasting=("backward",), above_nbytes=activation))
            for half in ("forward", "backward")
        }


def count_on_gpu(way: Way, shape: ModelShape, precision: str, device: torch.device) -> dict[str, float]:
    """Bytes that the caching allocator counts, and reserved bytes over allocated ones at the peak of the step."""
    storage, compute, _ = PRECISIONS[precision]
    memory = module_of(device)
    gc.collect()
    memory.empty_cache()
    # The group is a fake one, whose own plan is that of gloo.
    plan = nccl_plan(shape.width * (compute or storage).itemsize + 1) if way.nccl else nullcontext()
    with use_options(**way.options), plan:
        model = build(way, shape, precision, device)
        x = torch.randn(1, TOKENS, shape.width, dtype=compute or storage, device=device)
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
        synchronize(device)
        before = memory.memory_allocated()
        peaks: dict[str, float] = {}
        memory.reset_peak_memory_stats()
        loss = model(x).sum()
        synchronize(device)
        peaks["forward"] = memory.max_memory_allocated() - before
        memory.reset_peak_memory_stats()
        loss.backward()
        synchronize(device)
        gradients = sum(
            p.grad.to_local().nbytes if hasattr(p.grad, "to_local") else p.grad.nbytes
            for p in model.parameters()
            if p.grad is not None
        )
        # The gradient shards of all blocks but the last one are there at the peak.
        peaks["backward"] = memory.max_memory_allocated() - before - gradients
        if hasattr(memory, "max_memory_reserved"):
            peaks["reserved"] = memory.max_memory_reserved() / memory.max_memory_allocated()
        del model, loss
    return peaks


def figures(
    world: int, shape: ModelShape, precision: str, count: Callable[..., dict[str, float]], device: torch.device
) -> dict[str, Any]:
    """By way: bytes at both peaks per element of a block, and what each is over FSDP2's."""
    numel = sum(p.numel() for p in Chain(shape).blocks[0].parameters()) if shape.width < 4096 else _numel(shape)
    found: dict[str, Any] = {}
    start_fake(device, world)
    # torch's FSDP1 knows hardware by name, and gloo's plan is that of a CPU.
    ways = [way for way in WAYS if way.library != "fsdp1" or device.type in ("cpu", "cuda")]
    ways = [way for way in ways if device.type == "cpu" or way.nccl or way.library != "fullshard"]
    try:
        for way in ways:
            counted = count(way, shape, precision)
            row = {half: round(counted[half] / numel, 3) for half in ("forward", "backward")}
            row |= {key: round(value, 4) for key, value in counted.items() if key not in row}
            found[way.name] = row
    finally:
        dist.destroy_process_group()
    for row in found.values():
        for half in ("forward", "backward"):
            row[f"{half}_ratio"] = round(row[half] / found["fsdp2"][half], 3) if found["fsdp2"][half] else None
    return found


def _numel(shape: ModelShape) -> int:
    return 4 * shape.width**2 + 3 * shape.width * shape.hidden + 2 * shape.width


def report(
    world: int, shape: ModelShape, precision: str, count: Callable[..., dict[str, float]], device: torch.device
) -> dict[str, Any]:
    """Print one table; return its figures."""
    rows = figures(world, shape, precision, count, device)
    print(f"\n{precision}, W={world}: bytes per element of one block, beyond shards and gradient shards")
    print(f"  {'':24} {'forward':>8} {'/ fsdp2':>8} {'backward':>9} {'/ fsdp2':>8}")
    for name, row in rows.items():
        ratios = [
            ("-" if row[f"{half}_ratio"] is None else f"{row[f'{half}_ratio']:.3f}") for half in ("forward", "backward")
        ]
        reserved = f"   reserved / allocated {row['reserved']:.3f}" if "reserved" in row else ""
        print(
            f"  {name:24} {row['forward']:8.2f} {ratios[0]:>8} {row['backward']:9.2f} {ratios[1]:>8}{reserved}",
            flush=True,
        )
    return {"precision": precision, "world": world, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, another one, or simulated")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    count: Callable[..., dict[str, float]] = count_on_cpu
    shape = TINY if options.tiny else SHAPE
    device = device_of(options.device)
    if device.type != "cpu":
        shape = TINY if options.tiny else LLAMA_8B

        def count(way: Way, shape: ModelShape, precision: str) -> dict[str, float]:
            return count_on_gpu(way, shape, precision, device)

    results = [report(world, shape, precision, count, device) for world in options.worlds for precision in PRECISIONS]
    print()
    print_json("memory", shape, results)


if __name__ == "__main__":
    main()
