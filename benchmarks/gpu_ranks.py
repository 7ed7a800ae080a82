"""Real messages on the devices of one machine, one rank each: numbers, memory, time, overlap and offload; one table.

python -m benchmarks.gpu_ranks                          one GPU, and two where there are two
python -m benchmarks.gpu_ranks --device simulated --tiny  the script itself, without hardware: times are left out

bare            plain blocks with a batch of their own: no messages
fsdp2           torch's
fullshard       ours
none ahead      ours, gathers when they are needed: what overlap saves is the difference to `fullshard`
offload         ours, shards and optimizer on the host

apart           parity: the largest difference of a parameter to plain training on the batches of all ranks, after
                three steps of SGD in float32, over the largest element of that parameter
peak, report    the peak of forward and backward, beyond optimizer state and what a bare model holds between its
                forward and backward; what `fullshard.report` says of it (4 tokens, so that parameters dominate)
step            forward, backward and AdamW, mixed precision, by events of the device; medians, ways in turns
exposed         step of a way minus that of the bare blocks: what sharding costs in all
hidden          1 - exposed / messages alone: the bytes of all gathers and reductions, sent in a row without compute
up, down        bytes per second between host and device, page-locked memory of a block's shards
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import facts, paired_ratio
from benchmarks.device import Clock, count_of, device_of, has_times, module_of, name_of, spelt, synchronize
from benchmarks.gpu_step import BF16, FP32, TINY, Block, BlockShape

SHAPE = BlockShape(width=4096, hidden=14336, heads=32, kv_heads=8, blocks=4, length=4096)
# Numbers are compared in float32, where both sides fit.
SMALL = BlockShape(width=512, hidden=1024, heads=8, kv_heads=4, blocks=3, length=64)
# For bytes, where parameters are to dominate.
TINY_BYTES = BlockShape(width=256, hidden=512, heads=4, kv_heads=2, blocks=3)
WAYS = ("bare", "fsdp2", "fullshard", "none ahead", "offload")
FEW_TOKENS = 4
WARMUP = 3


def build(way: str, shape: BlockShape, device: torch.device, *, mixed: bool) -> nn.Module:
    """The chain of blocks, with the same initial values whatever the way."""
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block(shape) for _ in range(shape.blocks))).to(device)
    if way == "bare":
        return model.to(BF16) if mixed else model
    library: Any = torch_fsdp if way == "fsdp2" else fullshard
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if mixed:
        options["mp_policy"] = library.MixedPrecisionPolicy(BF16, FP32)
    if way == "offload":
        options["offload_policy"] = library.CPUOffloadPolicy()
    for block in model:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)
    if way == "none ahead":
        model.set_memory_budget(prefetch=0)
    return model


def batch_of(shape: BlockShape, step: int, rank: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(1, shape.length, shape.width, generator=generator).to(device, dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


# ---- what is measured, on each rank ---------------------------------------------------------------------------------


def parity(ways: list[str], shape: BlockShape, device: torch.device) -> dict[str, float]:
    """By way: the largest difference to plain training, over the largest element of the parameter."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained: dict[str, list[torch.Tensor]] = {}
    for way in ways:
        model = build(way, shape, device, mixed=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for other in range(world) if way == "bare" else [rank]:
                loss = loss_of(model, batch_of(shape, step, other, device, FP32))
                (loss / world if way == "bare" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained[way] = [whole(p, device) for p in model.parameters()]
        del model, optimizer
    pairs = {way: zip(trained[way], trained["bare"], strict=True) for way in ways}
    return {way: max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs[way]) for way in ways}


def whole(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values of a parameter, on the host; those of shards on the host go over the device."""
    found = parameter.detach()
    if hasattr(found, "full_tensor"):
        found = found.to(device).full_tensor()
    return found.cpu()


def memory_of(way: str, shape: BlockShape, device: torch.device, bare_nbytes: int) -> dict[str, int]:
    """Bytes of a steady step on the device, and what the report says."""
    import fullshard
    from fullshard.param.initial import table_nbytes

    memory = module_of(device)
    gc.collect()
    # Earlier models of ours left a table, which is theirs alone.
    begun = memory.memory_allocated() - (table_nbytes(device) if way not in ("bare", "fsdp2") else 0)
    model = build(way, shape, device, mixed=True)
    optimizer = torch.optim.AdamW(model.parameters())
    x = batch_of(shape, 0, dist.get_rank(), device, BF16)
    found: dict[str, int] = {}
    for _ in range(WARMUP):
        synchronize(device)
        memory.reset_peak_memory_stats()
        loss = loss_of(model, x)
        if way == "bare":
            found["held"] = memory.memory_allocated() - begun - sum(p.nbytes for p in model.parameters())
        loss.backward()
        synchronize(device)
        state = [local(t) for values in optimizer.state.values() for t in values.values()]
        found["peak"] = memory.max_memory_allocated() - begun - bare_nbytes
        found["peak"] -= sum(t.nbytes for t in state if t.device.type == device.type)
        optimizer.step()
        if way == "bare":
            break
        optimizer.zero_grad()
    if way not in ("bare", "fsdp2"):
        found["report"] = fullshard.report(model).peak_nbytes
    return found


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def times_of(ways: list[str], shape: BlockShape, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by way and round."""
    steps = {}
    for way in ways:
        model = build(way, shape, device, mixed=True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        steps[way] = model, optimizer
    x = batch_of(shape, 0, dist.get_rank(), device, BF16)
    clocks = {way: Clock(device) for way in ways}
    for current in range(WARMUP + rounds):
        for way, (model, optimizer) in steps.items():
            if current >= WARMUP:
                clocks[way].mark()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if current >= WARMUP:
                clocks[way].mark()
    return {way: clock.seconds() for way, clock in clocks.items()}


def messages_alone(shape: BlockShape, device: torch.device, rounds: int) -> list[float]:
    """Seconds of the gathers of forward and backward and of the reductions of one step, without compute."""
    world = dist.get_world_size()
    with torch.device("meta"):
        numel = sum(p.numel() for p in Block(shape).parameters())
    numel = -(-numel // world) * world
    full, gradient = (torch.zeros(numel, dtype=dtype, device=device) for dtype in (BF16, FP32))
    shard, reduced = (torch.zeros(numel // world, dtype=dtype, device=device) for dtype in (BF16, FP32))
    clock = Clock(device)
    for current in range(WARMUP + rounds):
        if current >= WARMUP:
            clock.mark()
        for _ in range(shape.blocks):
            dist.all_gather_into_tensor(full, shard)
            dist.all_gather_into_tensor(full, shard)
            dist.reduce_scatter_tensor(reduced, gradient)
        if current >= WARMUP:
            clock.mark()
    return clock.seconds()


def copies(shape: BlockShape, device: torch.device, rounds: int) -> dict[str, float]:
    """Bytes per second of the shards of a block, up to the device and down to the host."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in Block(shape).parameters()) // dist.get_world_size()
    host, there = torch.zeros(numel, pin_memory=True), torch.zeros(numel, device=device)
    found = {}
    for name, (out, source) in {"up": (there, host), "down": (host, there)}.items():
        clock = Clock(device)
        for _ in range(WARMUP + rounds):
            clock.mark()
            out.copy_(source, non_blocking=True)
            clock.mark()
        found[name] = host.nbytes / statistics.median(clock.seconds()[WARMUP:])
    return found


def work(options: argparse.Namespace) -> dict[str, Any]:
    """All of it, on this rank."""
    device = device_of(options.device, 0 if options.device == "simulated" else options.rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{options.folder}/rendezvous", rank=options.rank, world_size=options.world
    )
    shape, ways = (TINY, list(WAYS)) if options.tiny else (SHAPE, list(WAYS))
    small = TINY if options.tiny else SMALL
    found: dict[str, Any] = {"apart": parity(ways, small, device)}
    few = replace(TINY_BYTES if options.tiny else shape, length=FEW_TOKENS)
    held = memory_of("bare", few, device, 0)["held"]
    found["memory"] = {way: memory_of(way, few, device, held) for way in ways if way != "bare"}
    gc.collect()
    module_of(device).empty_cache()
    times, copied = times_of(ways, shape, device, options.rounds), copies(shape, device, options.rounds)
    alone = messages_alone(shape, device, options.rounds) if options.world > 1 else None
    if has_times(device):
        found |= {"times": times, "copies": copied, "messages_alone": alone}
    dist.destroy_process_group()
    return found


# ---- in the process that asks ---------------------------------------------------------------------------------------


def ask(world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank found, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_ranks", "--device", options.device, "--folder", folder]
        command += ["--world", str(world), "--rounds", str(options.rounds)] + ["--tiny"] * options.tiny
        ranks = []
        for rank in range(world):
            output = open(f"{folder}/output{rank}", "w+")  # noqa: SIM115
            ranks.append((subprocess.Popen([*command, "--rank", str(rank)], stdout=output, stderr=output), output))
        end = time.monotonic() + options.limit
        try:
            while any(process.poll() is None for process, _ in ranks):
                if time.monotonic() > end or any(process.poll() for process, _ in ranks):
                    break
                time.sleep(0.1)
        finally:
            for process, _ in ranks:
                process.kill()
                process.wait()
        texts = []
        for _, output in ranks:
            output.seek(0)
            texts.append(output.read())
            output.close()
        for (process, _), text in zip(ranks, texts, strict=True):
            if process.returncode:
                raise SystemExit(f"{world} ranks: a rank ended with {process.returncode}:\n{text[-3000:]}")
        return [json.loads(text.splitlines()[-1]) for text in texts]


def report(world: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure with `world` ranks and print the table; its figures, those of rank 0."""
    found = ask(world, options)[0]
    times, alone = found.get("times"), found.get("messages_alone")
    sent = statistics.median(alone) if alone else None
    print(f"\n{world} of {name_of(device)}; times in ms, bytes in MiB")
    if times is None:
        print("  no hardware: its times mean nothing, and are left out")
    print(
        f"  {'':12} {'apart':>9} {'peak':>9} {'report':>9} {'ratio':>7} {'step':>9} {'/ bare':>7} {'/ fsdp2':>8} "
        f"{'exposed':>8} {'hidden':>7}"
    )
    rows: dict[str, dict[str, float | None]] = {}
    for way in WAYS:
        memory = found["memory"].get(way, {})
        peak, told = memory.get("peak"), memory.get("report")
        row: dict[str, float | None] = {
            "apart": found["apart"][way],
            "peak": peak and peak / 2**20,
            "report": told and told / 2**20,
            "peak / report": peak / told if told else None,
            **dict.fromkeys(("step", "/ bare", "/ fsdp2", "exposed", "hidden")),
        }
        if times is not None:
            exposed = statistics.median(a - b for a, b in zip(times[way], times["bare"], strict=True))
            row |= {
                "step": 1e3 * statistics.median(times[way]),
                "/ bare": paired_ratio(times[way], times["bare"]),
                "/ fsdp2": paired_ratio(times[way], times["fsdp2"]),
                "exposed": 1e3 * exposed,
                "hidden": 1 - exposed / sent if sent else None,
            }
        rows[way] = row
        cells = zip(row.values(), (".1e", ".2f", ".2f", ".3f", ".2f", ".3f", ".3f", ".2f", ".2f"), strict=True)
        widths = (9, 9, 9, 7, 9, 7, 8, 8, 7)
        print(f"  {way:12} " + " ".join(spelt(v, f, w) for (v, f), w in zip(cells, widths, strict=True)), flush=True)
    copied = found.get("copies")
    if times is not None:
        up, down = copied["up"] / 1e9, copied["down"] / 1e9
        print(
            f"  messages alone {spelt(sent and 1e3 * sent, '.2f', 1)}; copies: up {up:.1f} GB/s, down {down:.1f} GB/s"
        )
    return {"world": world, "ways": rows, "copies": copied, "messages_alone_s": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds (default: 10)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each number of ranks (default: 120)")
    parser.add_argument("--tiny", action="store_true", help="small blocks, to try the script itself")
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if options.rank is not None:
        print(json.dumps(work(options)))
        return
    device = device_of(options.device)
    results = [report(world, options, device) for world in range(1, count_of(options.device) + 1)]
    shape = TINY if options.tiny else SHAPE
    found = {"benchmark": "gpu_ranks", "facts": facts(), "device": name_of(device), "model": vars(shape)}
    print()
    print(json.dumps(found | {"results": results}))


if __name__ == "__main__":
    main()
