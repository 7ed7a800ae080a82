"""`fullshard plan` beside one GPU: its shares of the device fitted, the error before and after; `verify` and `doctor`.

python -m benchmarks.gpu_plan
python -m benchmarks.gpu_plan --device simulated --tiny       the script itself, without hardware

share       what kernels reach of the profile's peaks (plan/machine.py), measured one by one: matrix products and
            attention in bf16, forward and backward, memory, page-locked copies; and the host's time of an operation,
            from the steps of the lines
plan        steps of fullshard's Llama as rank 0 of 8 over messages of the profile's bandwidth (gpu_messages), mixed
            precision, without an optimizer: predicted with the profile's shares, with the measured ones, and with
            shares fitted to the lines "fitted"; "predicted" lines were not used. And the peak of the allocator,
            counted by the plan
fit         the fitted shares, for plan/machine.py
verify      `fullshard verify` on the device; doctor: `fullshard doctor`
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import gpu_messages
from benchmarks.device import SIMULATED, Clock, device_of, has_times, machine, module_of, name_of, synchronize
from benchmarks.gpu_parts import attempted, row, shows_stacks
from benchmarks.gpu_step import host_seconds
from fullshard.plan import Planner, Strategy, find_hardware
from fullshard.plan.facts import describe
from fullshard.plan.machine import Hardware
from fullshard.train import shapes
from fullshard.train.model import LlamaShape

WORLD = 8
BF16, FP32 = torch.bfloat16, torch.float32


class Line(NamedTuple):
    """A model to measure. `used`: "fitted" or "predicted"."""

    name: str
    used: str
    shape: LlamaShape
    micro: int = 1
    recompute: str = "none"


def _line(name: str, used: str, layers: int, width: int, hidden: int, length: int, **more: Any) -> Line:
    return Line(name, used, LlamaShape(32000, layers, width, width // 128, 8, hidden, length), **more)


LINES = (
    _line("8B blocks", "fitted", 4, 4096, 14336, 4096),
    _line("1B blocks", "fitted", 8, 2048, 8192, 4096),
    _line("8B blocks, recomputed", "predicted", 4, 4096, 14336, 4096, recompute="whole"),
    _line("1B blocks, 4 x 1024", "predicted", 8, 2048, 8192, 1024, micro=4),
    _line("3B blocks, 8192", "predicted", 4, 3072, 8192, 8192),
)
_TINY = LlamaShape(64, 2, 64, 4, 2, 96, 16)
TINY_LINES = (
    Line("tiny", "fitted", _TINY),
    Line("tiny, recomputed", "predicted", _TINY, recompute="whole"),
)
SHARES = ("matmul", "attention", "stream")


def profile_of(device: torch.device) -> Hardware:
    """The profile of this device; that of the nearest name for one that has none."""
    name = name_of(device).lower()
    return find_hardware(next((known for known in ("h100", "h200", "a100", "b200") if known in name), "h100"))


def measured_shares(device: torch.device, base: Hardware, *, tiny: bool) -> dict[str, float]:
    """What kernels reach, by the names of `Hardware`: shares of its peaks, and bytes/s (host)."""

    def seconds(call: Callable[[], object], repeats: int = 8) -> float:
        clock = Clock(device)
        for _ in range(repeats + 2):
            clock.mark()
            call()
            clock.mark()
        return statistics.median(clock.seconds()[2:])

    rows, width, hidden, heads = (64, 64, 128, 2) if tiny else (4096, 4096, 14336, 32)
    x = torch.randn(rows, width, device=device).to(BF16)
    weight = torch.randn(hidden, width, device=device).to(BF16)
    gradient = torch.randn(rows, hidden, device=device).to(BF16)
    taken = seconds(lambda: (x @ weight.t(), gradient @ weight, gradient.t() @ x))
    found = {"matmul": 3 * 2 * rows * width * hidden / taken / base.flops2}
    q = torch.randn(1, heads, rows, width // heads, device=device).to(BF16).requires_grad_()
    taken = seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    # Two products forward and five backward, as a tape counts them, of half of the square.
    found["attention"] = 7 * 2 * rows**2 * width / 2 / taken / base.flops2
    source = torch.randn((1 << 12) if tiny else (1 << 28), device=device)
    out = torch.empty_like(source)
    found["stream"] = 2 * source.nbytes / seconds(lambda: torch.neg(source, out=out)) / base.bandwidth
    host = torch.empty((1 << 12) if tiny else (1 << 26), pin_memory=True)
    found["host"] = host.nbytes / seconds(lambda: out[: host.numel()].copy_(host, non_blocking=True))
    return found


class Truth(NamedTuple):
    """What a line took. `seconds`: of a step; `host_seconds`: of the host alone; `peak_nbytes`: of the allocator."""

    seconds: float
    host_seconds: float
    peak_nbytes: float


def measured(line: Line, link: gpu_messages.Link, rounds: int) -> Truth:
    """Steps of the model on the device, made there."""
    import fullshard
    from fullshard.program import blocks_of
    from fullshard.train.model import Attention

    device = link.device
    gc.collect()
    module_of(device).empty_cache()
    before = module_of(device).memory_allocated()
    program = shapes.language_model(line.shape, line.shape.context)
    with torch.device("meta"):
        model: Any = program.model()
    if line.recompute == "whole":
        fullshard.checkpoint_activations(model, "classes", classes=["Block"])
    policy = fullshard.MixedPrecisionPolicy(BF16, FP32)
    for block in blocks_of(model):
        fullshard.fully_shard(block, mesh=link.mesh, mp_policy=policy)
    fullshard.fully_shard(model, mesh=link.mesh, mp_policy=policy)
    model.to_empty(device=device)
    for parameter in model.parameters():
        local = parameter.detach().to_local()
        if parameter.ndim > 1:
            local.normal_(std=0.02)
        else:
            local.fill_(1.0)
    for module in model.modules():
        if isinstance(module, Attention):
            module.init_rope()
    tokens = torch.randint(line.shape.vocab, (line.micro, line.shape.context)).to(device)
    end = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        program.loss(model, (tokens, tokens)).backward()
        for parameter in model.parameters():
            parameter.grad = None
        end.step()

    clock = Clock(device)
    for current in range(3 + rounds):
        if current == 2:
            synchronize(device)
            module_of(device).reset_peak_memory_stats()
        if current >= 3:
            clock.mark()
        step()
        if current >= 3:
            clock.mark()
    seconds, peak_nbytes = statistics.median(clock.seconds()), module_of(device).max_memory_allocated() - before
    return Truth(seconds, host_seconds(step, device, min(rounds, 3)), peak_nbytes)


class Predictor:
    """Plans of one line, on any hardware; the model is described once."""

    def __init__(self, line: Line, hardware: Hardware) -> None:
        program = shapes.language_model(line.shape, line.shape.context)
        self._planner = Planner(
            lambda samples, sequence, compute, alone, recompute: describe(  # noqa: ARG005
                program, line.name, samples=samples, compute=compute, alone=alone, recompute=recompute
            ),
            hardware,
        )
        self._strategy = Strategy(
            WORLD,
            compute="bfloat16",
            reduce="float32",
            micro=line.micro,
            recompute=line.recompute,
            optimizer="none",
            backend="nccl",
        )

    def plan(self, hardware: Hardware) -> Any:
        self._planner.hardware = hardware
        return self._planner.plan(self._strategy)

    def operations(self, hardware: Hardware) -> float:
        """How many a step launches: what it takes, in seconds, if the host takes one for each."""
        return float(round(self.plan(replace(hardware, launch=1.0)).seconds))


def fitted(found: list[tuple[Predictor, Truth]], hardware: Hardware, limit_s: float = 8.0) -> Hardware:
    """`hardware` with its shares times one factor, and the host's time of an operation times another, for which the
    lines are least wrong, the worst of them counting. One factor for all shares: lines of one kind do not tell products
    from memory, and each would be fitted to the other's error."""
    end = time.monotonic() + limit_s

    def error(tried: Hardware) -> float:
        return max(abs(one.plan(tried).seconds / truth.seconds - 1) for one, truth in found)

    best, least = hardware, error(hardware)
    # Rough at first, then around what was best.
    for width in (0.4, 0.16, 0.06, 0.02):
        start = best
        for a, b in itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), repeat=2):
            shares = {name: getattr(start, name) * (1 + a * width) for name in SHARES}
            tried = replace(start, **shares, launch=start.launch * (1 + b * width))
            if (found_error := error(tried)) < least:
                best, least = tried, found_error
            if time.monotonic() > end:
                return best
    return best


def plans(device: torch.device, base: Hardware, shares: dict[str, float], *, tiny: bool, rounds: int) -> None:
    """The lines, measured and predicted."""
    link = gpu_messages.start(device, WORLD)
    link.bandwidth, link.group.latency = base.intra_node, base.latency
    known: dict[str, tuple[Line, Predictor, Truth]] = {}
    for line in TINY_LINES if tiny else LINES:
        with attempted("plan", line=line.name):
            truth = measured(line, link, rounds)
            known[line.name] = line, Predictor(line, base), truth
            times = (truth.seconds, truth.host_seconds) if has_times(device) else None
            ms, host_ms = (1e3 * one for one in times) if times else (None, None)
            row("measured", line=line.name, ms=ms, host_ms=host_ms, operations=known[line.name][1].operations(base))
    if known:
        # Of a whole step: what a loop of one operation takes leaves out modules, autograd, and fullshard.
        shares["launch"] = statistics.median(t.host_seconds / p.operations(base) for _, p, t in known.values())
        row("share", of="launch", profile=base.launch, measured=shares["launch"] if has_times(device) else None)
    here = replace(base, **shares)
    used = [(predictor, truth) for line, predictor, truth in known.values() if line.used == "fitted"]
    after = fitted(used, here) if used else here
    changed = {name: float(f"{getattr(after, name):.4g}") for name in (*SHARES, "launch", "host")}
    row("fit", base=base.name, **(changed if has_times(device) else dict.fromkeys(changed)))
    for line, predictor, truth in known.values():
        with attempted("plan", line=line.name):
            times: dict[str, float | None] = {}
            for name, hardware in (("profile", base), ("measured", here), ("fitted", after)):
                seconds = predictor.plan(hardware).seconds
                times[f"{name}_ms"] = 1e3 * seconds
                times[f"{name}_error"] = seconds / truth.seconds - 1
            if not has_times(device):
                times = dict.fromkeys(times)
            counted = predictor.plan(base).simulated.peak.total
            row(
                "plan",
                line=line.name,
                used=line.used,
                ms=1e3 * truth.seconds if has_times(device) else None,
                **times,
                peak_mib=truth.peak_nbytes / 2**20,
                counted_mib=counted / 2**20,
                peak_over_counted=truth.peak_nbytes / counted,
            )
    link.close()


def command(what: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """What a command of fullshard answers with --json. Its exit status may be a verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", what, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-300:]}")
    return {"status": done.returncode, **json.loads(lines[-1])}


def commands(device: torch.device) -> None:
    """`verify` on one process, and `doctor`."""
    # The simulated device is known in this process alone.
    kind = "cpu" if device.type == SIMULATED else device.type
    with attempted("verify"):
        strategy = "zero3+bf16+offload+recompute"
        found = command("verify", ["--device", kind, "--nproc", "1", "--strategies", strategy], 40)
        for one in found["results"]:
            figures = {key: one[key] for key in ("strategy", "device", "verdict", "same_bits")}
            failed = {} if one["verdict"] == "equal" else {"could_not": str(one["failure"] or one["difference"])[:300]}
            row("verify", **figures, **failed)
    with attempted("doctor"):
        found = command("doctor", ["--nproc", "1"], 40)
        said = [" ".join(str(value) for value in one.values())[:160] for one in found["findings"]]
        row("doctor", status=found["status"], findings=len(said), said=said[:6])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each line (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script itself")
    options = parser.parse_args()
    shows_stacks()
    warnings.filterwarnings("ignore", module="torch")
    device = device_of(options.device)
    row("machine", **machine(device))
    base, shares = profile_of(device), {}
    with attempted("share"):
        shares = measured_shares(device, base, tiny=options.tiny)
        for name, value in shares.items():
            shown = value if has_times(device) else None
            row("share", of=name, profile=getattr(base, name), measured=shown)
    with attempted("plan"):
        plans(device, base, shares, tiny=options.tiny, rounds=options.rounds)
    gc.collect()
    module_of(device).empty_cache()
    commands(device)


if __name__ == "__main__":
    main()
