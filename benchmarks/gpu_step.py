"""Forward and backward of Llama-3-shaped blocks on one GPU: bare, and as rank 0 of 8 whose messages take their time.

    python -m benchmarks.gpu_step --shape 8B              about a minute and a half on an H100 (estimated)
    python -m benchmarks.gpu_step --device simulated --tiny --rounds 1        the script itself, without hardware

    bare        the blocks as they are, in bf16 throughout
    fsdp2       torch's; fullshard: ours. Messages of both are those of gpu_messages
    bf16        parameters, compute and gradients in bf16;  mixed: float32 parameters, bf16 compute, float32 reduction
    recompute   each block under torch.utils.checkpoint
    link        bandwidth of each link of the ring; "no time": messages take what their copies take

Rows, each printed as soon as it is measured; medians over rounds, in which all ways take their steps in turn:

    link        a gather without compute: seconds asked for, measured, and of the host for the call
    gradients   of both libraries, how far apart
    memory      a way alone: bytes between steps, the peak of a step beyond them, reserved / allocated, retries of the
                allocator
    kernels     of one step: on the stream that computes, on others, and those that the bare step does not run
    step        ms of a step by events of the device; `over bare`, `over fsdp2`: ratios within a round; `exposed`: ms
                more than with messages that take no time; `host`: ms of the host for a step on an idle device
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from benchmarks import gpu_messages
from benchmarks.common import paired_ratio
from benchmarks.device import SIMULATED, Clock, device_of, has_times, machine, module_of, synchronize
from benchmarks.gpu_parts import attempted, row, shows_stacks

BF16, FP32 = torch.bfloat16, torch.float32
# ---- models ----------------------------------------------------------------------------------------------------------


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


class Chain(nn.Module):
    """Blocks one after the other; each computes again in backward if `recompute`."""

    def __init__(self, shape: BlockShape, *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def build(
    way: str,
    shape: BlockShape,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    *,
    precision: str = "fp32",
    recompute: bool = False,
    offload: bool = False,
    same: bool = False,
) -> Any:
    """The chain of blocks, sharded over `mesh` unless `way` is "bare". Parameters are made on the device, once; `same`:
    with equal values whatever the way, which are made on the host: for small shapes."""
    storage = BF16 if precision == "bf16" or (way == "bare" and precision == "mixed") else FP32
    torch.manual_seed(0)
    with torch.device("cpu" if same else "meta"):
        model: Any = Chain(shape, recompute=recompute).to(storage)
    if same:
        model.to(device)
    if way != "bare":
        import torch.distributed.fsdp as torch_fsdp

        import fullshard

        library: Any = torch_fsdp if way == "fsdp2" else fullshard
        options: dict[str, Any] = {"mesh": mesh}
        if precision == "mixed":
            options["mp_policy"] = library.MixedPrecisionPolicy(BF16, FP32)
        if offload:
            options["offload_policy"] = library.CPUOffloadPolicy()
        for block in model.blocks:
            library.fully_shard(block, **options)
        library.fully_shard(model, **options)
        if way == "none ahead":
            model.set_memory_budget(prefetch=0)
    if not same:
        model.to_empty(device="cpu" if offload and way != "bare" else device)
        for name, parameter in model.named_parameters():
            local = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            if "norm" in name:
                local.fill_(1.0)
            else:
                local.normal_(std=0.02)
    return model


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


class Stepper:
    """A step: forward, backward, gradients dropped. `x` (1, length, width) is on the device."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self._x = model, x
        # Says that the step is over; it finds no gradients.
        self._end = torch.optim.SGD(model.parameters(), lr=1.0)

    def __call__(self) -> torch.Tensor:
        loss = loss_of(self.model, self._x)
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._end.step()
        return loss.detach()


# ---- what is measured ------------------------------------------------------------------------------------------------

WORLD = 8
WAYS = ("bare", "fsdp2", "fullshard")
# Bytes per second of a link; the first is what the others are compared with.
BANDWIDTHS = (math.inf, 450e9, 50e9, 200e9, 25e9)
# Slow links take long, and steps over them differ little.
MOST_ROUNDS = (math.inf, 200e9)
# In the order of worth.
SETTINGS = (("mixed", False), ("mixed", True), ("bf16", False), ("bf16", True))
WARMUP = 3


def memory_of(step: Callable[[], object], device: torch.device, held_before: int, warmup: int) -> dict[str, Any]:
    """MiB of the allocator in a steady step, beyond what was there before the model."""
    memory = module_of(device)
    for _ in range(warmup):
        step()
    synchronize(device)
    gc.collect()
    memory.empty_cache()
    retries = _retries(memory)
    for _ in range(2):
        synchronize(device)
        held = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        step()
        synchronize(device)
    most = memory.max_memory_allocated()
    found: dict[str, Any] = {"held_mib": (held - held_before) / 2**20, "peak_mib": (most - held) / 2**20}
    if hasattr(memory, "max_memory_reserved"):
        found |= {"reserved_over_allocated": memory.max_memory_reserved() / max(most, 1)}
        found |= {"retries": _retries(memory) - retries}
    return found


def _retries(memory: Any) -> int:
    return int(memory.memory_stats().get("num_alloc_retries", 0)) if hasattr(memory, "memory_stats") else 0


def host_seconds(step: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one step on an idle device: the host does not wait for it."""
    found = []
    for _ in range(rounds):
        synchronize(device)
        begun = time.perf_counter()
        step()
        found.append(time.perf_counter() - begun)
    synchronize(device)
    return statistics.median(found)


def seconds_of(
    steps: dict[str, Callable[[], object]], device: torch.device, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a step by way and round. `repeats`: steps of a mark; the device is to be late, as in training."""
    clocks = {way: Clock(device) for way in steps}
    for step in steps.values():
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for way, step in steps.items():
                step()
                clocks[way].mark()
                for _ in range(repeats):
                    step()
                clocks[way].mark()
    finally:
        gc.enable()
    return {way: [s / repeats for s in clock.seconds()] for way, clock in clocks.items()}


def kernels_of(step: Callable[[], object], device: torch.device) -> dict[str, Counter[str]]:
    """Names of what one step runs, with how often, by stream: "compute" and "other"; "waits": what the host called to
    wait. Of the simulated device all operators, whatever their stream."""
    if device.type == SIMULATED:
        from tests.harness import simulated

        with simulated.watched() as seen:
            step()
        return {"compute": Counter(seen.operators), "other": Counter(), "waits": Counter()}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    # The public events do not say on which stream they ran; the trace does.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return sorted_events(json.load(file)["traceEvents"])


def sorted_events(events: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """`kernels_of` from the events of a trace of kineto."""
    found: dict[str, Counter[str]] = {"compute": Counter(), "other": Counter(), "waits": Counter()}
    by_stream: dict[Any, Counter[str]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_stream.setdefault(event.get("args", {}).get("stream"), Counter())[event["name"]] += 1
        elif event.get("cat") == "cuda_runtime" and "Synchronize" in event.get("name", ""):
            found["waits"][event["name"]] += 1
    if by_stream:
        # Matrix products run where the model computes, and on no other stream.
        compute = max(by_stream, key=lambda stream: by_stream[stream].total())
        for stream, names in by_stream.items():
            found["compute" if stream == compute else "other"].update(names)
    return found


def shortened(names: Counter[str], most: int) -> dict[str, int]:
    """The most frequent kernels by a name of at most 60 characters: template arguments are left out but for the
    functor that tells one kernel of torch from the next."""
    found: Counter[str] = Counter()
    for name, count in names.items():
        outer = re.sub(r"^void |at::native::|\(anonymous namespace\)::|c10::", "", name)
        functor = re.search(r"(\w+(?:Functor|Ops|_kernel(?:_cuda|_impl)?))\b(?!.*\1)", outer.partition("<")[2])
        found[f"{re.split('[<(]', outer)[0]}{f' {functor[1]}' if functor else ''}"[:60]] += count
    return dict(found.most_common(most))


def ring(bandwidth: float) -> str:
    """A bandwidth as a column has it."""
    return "no time" if math.isinf(bandwidth) else f"{bandwidth / 1e9:g} GB/s"


class Bench:
    """One shape on one device; what it measures it prints."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device, self.rounds, self.tiny = device, options.rounds, options.tiny
        self.name = "tiny" if options.tiny else options.shape
        self.shape = TINY if options.tiny else SHAPES[options.shape]
        self.times = has_times(device)
        self.warmup = 1 if options.tiny else WARMUP
        self.link = gpu_messages.start(device, WORLD)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(1, self.shape.length, self.shape.width, generator=generator)
        self._x = x.to(device, BF16)

    def stepper(self, way: str, precision: str, recompute: bool) -> Stepper:
        model = build(way, self.shape, self.device, self.link.mesh, precision=precision, recompute=recompute)
        return Stepper(model, self._x)

    def links(self) -> None:
        """Whether messages take what they are to take."""
        numel = sum(p.numel() for p in _meta(self.shape).blocks[0].parameters()) // WORLD * WORLD
        for bandwidth in BANDWIDTHS[: 2 if self.tiny else None]:
            self.link.bandwidth = bandwidth
            found = self.link.alone(numel)
            shown = {f"{key}_us": 1e6 * value if self.times else None for key, value in found.items()}
            row("link", link=ring(bandwidth), numel=numel, clock=self.link.group.timer.kind, **shown)

    def gradients(self) -> None:
        """Whether both libraries get the same gradients from these messages, in float32."""
        # Weights of a megabyte travel by themselves, as in large models.
        shape = BlockShape(width=512, hidden=512, heads=4, kv_heads=2, blocks=2, length=8)
        x = torch.randn(1, shape.length, shape.width, generator=torch.Generator().manual_seed(1)).to(self.device)
        found: dict[str, list[torch.Tensor]] = {}
        messages = self.link.group.messages
        for way in ("fsdp2", "fullshard"):
            messages.clear()
            model = build(way, shape, self.device, self.link.mesh, same=True)
            loss_of(model, x).backward()
            found[way] = [p.grad.to_local().cpu() for p in model.parameters()]
        pairs = zip(found["fullshard"], found["fsdp2"], strict=True)
        apart = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
        if not apart <= 1e-4:
            raise ValueError(f"{apart:.2e} apart from FSDP2's, over the largest element")
        row("gradients", apart=apart, messages_of_fullshard=dict(messages))

    def setting(self, precision: str, recompute: bool) -> None:
        """Memory of each way alone; then kernels, and steps of all ways in turn at each bandwidth."""
        setting = {"shape": self.name, "precision": precision, "recompute": recompute}
        self.link.bandwidth = math.inf
        for way in WAYS:
            with attempted("memory", **setting, way=way):
                for _ in range(2):
                    gc.collect()
                held = module_of(self.device).memory_allocated()
                found = memory_of(self.stepper(way, precision, recompute), self.device, held, self.warmup)
                row("memory", **setting, way=way, **found)
            gc.collect()
            module_of(self.device).empty_cache()
        steps: dict[str, Callable[[], object]] = {}
        for way in WAYS:
            with attempted("step", **setting, way=way):
                step = self.stepper(way, precision, recompute)
                losses = [float(step()) for _ in range(self.warmup)]
                if not all(map(math.isfinite, losses)):
                    raise ValueError(f"losses {losses}")
                steps[way] = step
        self.kernels(setting, steps)
        self.steps(setting, steps, BANDWIDTHS[: 2 if self.tiny else None])

    def kernels(self, setting: dict[str, Any], steps: dict[str, Callable[[], object]]) -> None:
        """Beyond those of the bare step, and what the host waited for."""
        bare: dict[str, Counter[str]] = {}
        for way, step in steps.items():
            with attempted("kernels", **setting, way=way):
                found = kernels_of(step, self.device)
                bare = bare or found
                more = found["compute"] - bare["compute"]
                row(
                    "kernels",
                    **setting,
                    way=way,
                    compute=found["compute"].total(),
                    other_streams=found["other"].total(),
                    waits=dict(found["waits"]),
                    beyond_bare=more.total(),
                    most=shortened(more, 8),
                )

    def steps(
        self, setting: dict[str, Any], steps: dict[str, Callable[[], object]], bandwidths: Sequence[float]
    ) -> None:
        """One row for each way and bandwidth."""
        host = {way: host_seconds(step, self.device, min(self.rounds, 3)) for way, step in steps.items()}
        quiet: dict[str, list[float]] = {}
        for bandwidth in bandwidths:
            with attempted("step", **setting, link=ring(bandwidth)):
                self.link.bandwidth = bandwidth
                rounds = self.rounds if bandwidth in MOST_ROUNDS else min(self.rounds, 3)
                taken = seconds_of(steps, self.device, rounds, 2 if self.times else 1)
                quiet = quiet or taken
                for way, times in taken.items():
                    figures: dict[str, float | None] = dict.fromkeys(("ms", "over_bare", "over_fsdp2", "exposed_ms"))
                    if self.times:
                        figures["ms"] = 1e3 * statistics.median(times)
                        for name, base in (("over_bare", "bare"), ("over_fsdp2", "fsdp2")):
                            figures[name] = paired_ratio(times, taken[base]) if base in taken else None
                        figures["exposed_ms"] = 1e3 * (statistics.median(times) - statistics.median(quiet[way]))
                    host_ms = 1e3 * host[way] if self.times else None
                    row("step", **setting, link=ring(bandwidth), way=way, **figures, host_ms=host_ms)

    def compiled(self) -> None:
        """Steps with each block compiled, after it was sharded."""
        setting = {"shape": self.name, "precision": "mixed", "recompute": False}
        backend = "inductor" if self.device.type == "cuda" else "eager"
        steps: dict[str, Callable[[], object]] = {}
        for way in WAYS:
            with attempted("compiled", **setting, way=way):
                step = self.stepper(way, "mixed", recompute=False)
                for block in step.model.blocks:  # type: ignore[union-attr]
                    block.compile(backend=backend)
                begun = time.perf_counter()
                loss = float(step())
                seconds = time.perf_counter() - begun if self.times else None
                row("compiled", **setting, way=way, backend=backend, loss=loss, first_step_s=seconds)
                steps[way] = step
        self.kernels(setting, steps)
        self.steps(setting, steps, (math.inf, 200e9))


def _meta(shape: BlockShape) -> Any:
    with torch.device("meta"):
        return Chain(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, of two steps each (default: 5)")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="only so many of the settings")
    parser.add_argument("--compiled", action="store_true", help="compiled blocks instead")
    parser.add_argument("--tiny", action="store_true", help="small blocks, to try the script itself")
    options = parser.parse_args()
    shows_stacks()
    # What torch warns of once is a row of gpu_tests; here it would only hide figures.
    warnings.filterwarnings("ignore", module="torch")
    device = device_of(options.device)
    row("machine", **machine(device))
    bench = Bench(options, device)
    if options.compiled:
        bench.compiled()
        return
    with attempted("link"):
        bench.links()
    with attempted("gradients"):
        bench.gradients()
    for precision, recompute in SETTINGS[: options.settings]:
        with attempted("setting", precision=precision, recompute=recompute):
            bench.setting(precision, recompute)
        gc.collect()
    bench.link.close()


if __name__ == "__main__":
    main()
