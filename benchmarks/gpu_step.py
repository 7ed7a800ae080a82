"""One GPU: forward and backward of Llama-3-shaped blocks, bare and sharded; a world of one, and a fake group of 8.

    python -m benchmarks.gpu_step                     all settings, about four minutes on an H100
    python -m benchmarks.gpu_step --device cpu --tiny the script itself, on any machine; or --device simulated

    bare         the blocks as they are; in mixed precision, computed in bf16 throughout
    fsdp2, fsdp1 torch's
    fullshard    ours, with the plan of NCCL

    world 1      a group of one rank: what sharding costs where there is nothing to share
    fake 8       this rank's part of eight. Messages take no time and bring nothing, so values are meaningless, while
                 kernels, streams, allocations and host time are those of a rank of eight
    bf16         parameters, compute and gradients in bf16;  mixed: float32 parameters, bf16 compute, float32 reduction

A setting has processes of its own, one for each way that measures memory and one in which all ways take their steps in
turn. Reported: the median time of a step by events of the device, its ratio to the bare step of the same round; bytes
that a way holds between steps, the peak of a step beyond them, and what the allocator reserved over what it gave out;
the kernels of a step that are not among those of the bare step, on the stream that computes and on others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.common import facts, paired_ratio
from benchmarks.counting import nccl_plan
from benchmarks.device import Clock, device_of, has_times, module_of, name_of, spelt, start_fake, synchronize

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class BlockShape:
    """Blocks of Llama 3: grouped-query attention, nine parameters each. `blocks` of them, `length` tokens."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    blocks: int
    length: int = 4096


SHAPES = {
    "1B": BlockShape(width=2048, hidden=8192, heads=32, kv_heads=8, blocks=8),  # 61 M parameters a block
    "8B": BlockShape(width=4096, hidden=14336, heads=32, kv_heads=8, blocks=4),  # 218 M parameters a block
}
TINY = BlockShape(width=32, hidden=48, heads=4, kv_heads=2, blocks=3, length=8)
WAYS = ("bare", "fsdp2", "fsdp1", "fullshard")
GROUPS = {"world 1": 1, "fake 8": 8}
PRECISIONS = ("bf16", "mixed")
WARMUP = 3


class Block(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width, kv_width = shape.width, shape.width // shape.heads * shape.kv_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, shape.hidden, bias=False)
        self.up = nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, length, width)
        n, length, width = x.shape
        y = self.attention_norm(x)
        q = self.q(y).view(n, length, self.heads, -1).transpose(1, 2)
        k, v = (f(y).view(n, length, self.kv_heads, -1).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def build(way: str, shape: BlockShape, precision: str, device: torch.device) -> nn.Module:
    """The chain of blocks with the same initial values whatever the way; sharded unless `way` is "bare"."""
    torch.manual_seed(0)
    storage = BF16 if precision == "bf16" or way == "bare" else FP32
    with device:
        model: Any = nn.Sequential(*(Block(shape) for _ in range(shape.blocks))).to(storage)
    if way == "bare":
        return model
    param_dtype, reduce_dtype = (None, None) if precision == "bf16" else (BF16, FP32)
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            use_orig_params=True,
            device_id=device,
        )
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    library: Any = torch_fsdp if way == "fsdp2" else fullshard
    policy = library.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model:
        library.fully_shard(block, mesh=mesh, mp_policy=policy)
    return library.fully_shard(model, mesh=mesh, mp_policy=policy)


def stepper(way: str, shape: BlockShape, precision: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """A step: forward, backward, gradients dropped. Returns the loss."""
    model = build(way, shape, precision, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, shape.length, shape.width, generator=generator).to(device, BF16)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return step


def kernels_of(step: Callable[[], object], device: torch.device) -> dict[str, Counter[str]]:
    """Names of what one step runs, with how often, by stream: "compute" and "other". Without CUDA, torch's
    operations."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        synchronize(device)
    found: dict[str, Counter[str]] = {"compute": Counter(), "other": Counter()}
    if not cuda:
        found["compute"] = Counter(event.name for event in profiler.events() if event.name.startswith("aten::"))
        return found
    # The public events do not say on which stream they ran; the trace does.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_stream: dict[Any, Counter[str]] = {}
    for event in on_device:
        by_stream.setdefault(event["args"].get("stream"), Counter())[event["name"]] += 1
    if by_stream:
        # Matrix products run where the model computes, and on no other stream.
        compute = max(by_stream, key=lambda stream: by_stream[stream].total())
        for stream, names in by_stream.items():
            found["compute" if stream == compute else "other"].update(names)
    return found


# ---- in a process of its own ---------------------------------------------------------------------------------


def start(group: str, device: torch.device, folder: str) -> None:
    if group == "fake 8":
        start_fake(device, GROUPS[group])
        return
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)


def measure_memory(way: str, shape: BlockShape, precision: str, device: torch.device) -> dict[str, int]:
    """Bytes of the allocator: held between steps, the peak of a step beyond them, and reserved at that time."""
    step = stepper(way, shape, precision, device)
    loss = [float(step()) for _ in range(WARMUP)]
    found = {"finite": int(all(value == value for value in loss))}
    memory = module_of(device)
    if memory is not None:
        gc.collect()
        memory.empty_cache()
        step()
        synchronize(device)
        held = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        step()
        synchronize(device)
        most = memory.max_memory_allocated()
        found |= {"held_nbytes": held, "peak_nbytes": most - held, "allocated_nbytes": most}
        if hasattr(memory, "max_memory_reserved"):
            found["reserved_nbytes"] = memory.max_memory_reserved()
    return found


def measure_time(
    ways: list[str], shape: BlockShape, precision: str, device: torch.device, rounds: int, *, same: bool
) -> dict[str, Any]:
    """Seconds by way and round, and the kernels of a step. `same`: values mean something, so compare them."""
    steps = {way: stepper(way, shape, precision, device) for way in ways}
    losses = {way: [float(step()) for _ in range(WARMUP)][-1] for way, step in steps.items()}
    if same:
        for way, loss in losses.items():
            # Mixed precision rounds parameters to bf16 in another place than the bare model, which starts from them.
            if not abs(loss - losses["bare"]) <= 2e-2 * abs(losses["bare"]):
                raise SystemExit(f"{way}: loss {loss}, the bare model's {losses['bare']}")
    clocks = {way: Clock(device) for way in ways}
    # Several steps for each mark: the device is to be late by as much, as it is in training.
    repeats = 4 if device.type != "cpu" and has_times(device) else 1
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for way, step in steps.items():
            step()
            clocks[way].mark()
            for _ in range(repeats):
                step()
            clocks[way].mark()
    gc.enable()
    kernels = {way: kernels_of(step, device) for way, step in steps.items()}
    return {
        "times": {way: [s / repeats for s in clock.seconds()] for way, clock in clocks.items()}
        if has_times(device)
        else dict.fromkeys(steps),
        "kernels": kernels,
        "losses": losses,
    }


def work(options: argparse.Namespace) -> None:
    """One setting; prints one line for the process that asked."""
    # FSDP1 calls names that torch itself has renamed since.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    precision, group, shape_name = options.setting
    shape = TINY if options.tiny else SHAPES[shape_name]
    device = device_of(options.device)
    with tempfile.TemporaryDirectory() as folder:
        start(group, device, folder)
        # A real group of NCCL has that plan anyway.
        plan = nccl_plan(1 << 20) if group == "fake 8" else nullcontext()
        with plan:
            ways = options.ways
            if options.memory:
                answer: Any = measure_memory(ways[0], shape, precision, device)
            else:
                same = group == "world 1"
                answer = measure_time(ways, shape, precision, device, options.rounds, same=same)
        dist.destroy_process_group()
    print(json.dumps(answer))


# ---- in the process that asks --------------------------------------------------------------------------------


def ask(setting: tuple[str, str, str], options: argparse.Namespace, ways: list[str], *, memory: bool) -> Any:
    """What `work` printed; a text when it failed (one way that cannot run is to cost no other its figures)."""
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--device", options.device, "--rounds", str(options.rounds)]
    command += ["--setting", *setting, "--ways", *ways] + ["--tiny"] * options.tiny + ["--memory"] * memory
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if run.returncode:
        return (run.stderr.strip().splitlines() or ["failed"])[-1]
    return json.loads(run.stdout.splitlines()[-1])


def beyond(kernels: dict[str, dict[str, int]], bare: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The kernels of a step that the bare step does not run, or not so often; by stream."""
    return {stream: dict(Counter(names) - Counter(bare.get(stream, {}))) for stream, names in kernels.items()}


def report(setting: tuple[str, str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure one setting, print its table; its figures."""
    precision, group, shape_name = setting
    print(f"\n{shape_name} blocks, {precision}, {group}, {options.device}")
    memory = {way: ask(setting, options, [way], memory=True) for way in options.ways}
    running = [way for way in options.ways if not isinstance(memory[way], str)]
    answer = ask(setting, options, running, memory=False)
    if isinstance(answer, str):
        raise SystemExit(f"{setting}: {answer}")
    times, kernels = answer["times"], answer["kernels"]
    print(
        f"  {'':10} {'step ms':>9} {'/ bare':>8} {'held MiB':>10} {'peak MiB':>10} {'reserved':>9} "
        f"{'kernels: compute':>17} {'beyond bare':>12} {'other streams':>14}"
    )
    rows: dict[str, Any] = {}
    for way in options.ways:
        if way not in times:
            print(f"  {way:10} does not run: {memory[way]}")
            rows[way] = {"failed": memory[way]}
            continue
        more = beyond(kernels[way], kernels["bare"])
        row: dict[str, Any] = {
            "step_ms": times[way] and round(statistics.median(times[way]) * 1e3, 4),
            "ratio": times[way] and round(paired_ratio(times[way], times["bare"]), 5),
            "memory": memory[way],
            "kernels": {stream: sum(names.values()) for stream, names in kernels[way].items()},
            "kernels_beyond_bare": more,
        }
        allocator = "".join(
            f" {memory[way][key] / 2**20:10.1f}" if key in memory[way] else f" {'-':>10}"
            for key in ("held_nbytes", "peak_nbytes")
        )
        reserved = memory[way].get("reserved_nbytes", 0) / max(memory[way].get("allocated_nbytes", 0), 1)
        print(
            f"  {way:10} {spelt(row['step_ms'], '.3f', 9)} {spelt(row['ratio'], '.4f', 8)}{allocator} "
            f"{spelt(reserved or None, '.3f', 9)} "
            f"{row['kernels']['compute']:17d} {sum(more['compute'].values()):12d} {row['kernels']['other']:14d}",
            flush=True,
        )
        rows[way] = row
    for name, count in sorted(rows.get("fullshard", {}).get("kernels_beyond_bare", {}).get("compute", {}).items()):
        print(f"      fullshard beyond bare: {count:4d} x {name[:100]}")
    return {"shape": shape_name, "precision": precision, "group": group, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, cpu, or simulated")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, of four steps on a GPU (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="small blocks, to try the script itself")
    parser.add_argument("--setting", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting is not None:
        work(options)
        return
    device = device_of(options.device)
    if "bare" not in options.ways:
        options.ways = ["bare", *options.ways]
    settings = [(p, g, s) for s in options.shapes for p in options.precisions for g in options.groups]
    results = [report(setting, options) for setting in settings]
    shapes = {"tiny": TINY} if options.tiny else SHAPES
    model = {name: vars(shape) for name, shape in shapes.items()}
    found = {"benchmark": "gpu_step", "facts": facts(), "device": name_of(device), "model": model, "results": results}
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
