"""What an operation on a sharded parameter costs, and which operators a step runs, beside FSDP2's.

    python -m benchmarks.operations            half a minute
    python -m benchmarks.operations --steps    a minute: what a step runs, without hardware

Two models of the same linear layers over a fake process group, one sharded by torch's fully_shard and one by ours. A
round times `mul_`, `add`, `detach` on a weight and a step of AdamW (for each of its ways: a loop over parameters, and
`foreach`) on each model, in turns, by CPU time; `same` are FSDP2's figures of a second series over the first, which is
what a ratio may be off by. The ratio is the median over rounds.

`--steps` counts the kernels that CUDA runs in a steady step beyond those of the model (benchmarks/counting.py says
how), on the device "simulated" (tests/harness/simulated.py), as rank 0 of 8 with a fake group and the plan of NCCL:
matrices travel by themselves, norms are packed. The model is a chain of blocks of Llama. "waits": how often the host
waits for the device.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from benchmarks.common import TINY, paired_ratio, print_json
from benchmarks.counting import KernelCounter, nccl_plan
from benchmarks.device import SIMULATED, device_of, start_fake
from benchmarks.gpu_step import BlockShape, Chain

WORLD = 8
# As many parameters as sixteen blocks of Llama have.
WIDTH, LAYERS = 16, 72
TURNS = ("fsdp2", "fullshard", "fsdp2 again")


def operations(library: Any) -> dict[str, Callable[[], object]]:
    """By name, on a model that `library` shards and that took a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        library.fully_shard(layer)
    library.fully_shard(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    weight: Any = model[0].weight
    steps = {
        f"AdamW step{', foreach' if foreach else ''}": torch.optim.AdamW(model.parameters(), foreach=foreach).step
        for foreach in (False, True)
    }
    return {"mul_": lambda: weight.mul_(1.0), "add": lambda: weight + 1.0, "detach": weight.detach, **steps}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Of each operation: microseconds of FSDP2's, ours over it, and FSDP2's over itself."""
    sharded = {"fsdp2": operations(torch_fsdp), "fullshard": operations(fullshard)}
    sharded["fsdp2 again"] = sharded["fsdp2"]
    results = {}
    with torch.no_grad():
        for name in sharded["fsdp2"]:
            times: dict[str, list[float]] = {turn: [] for turn in TURNS}
            repeats = 1 if "step" in name else 100
            for number in range(rounds + 1):
                for turn in TURNS if number % 2 else TURNS[::-1]:
                    does = sharded[turn][name]
                    begun = time.process_time_ns()
                    for _ in range(repeats):
                        does()
                    if number:  # the first round is for caches
                        times[turn].append((time.process_time_ns() - begun) / repeats / 1000)
            base = times["fsdp2"]
            results[name] = {
                "fsdp2_us": round(sorted(base)[len(base) // 2], 2),
                "of_fsdp2": round(paired_ratio(times["fullshard"], base), 3),
                "same": round(paired_ratio(times["fsdp2 again"], base), 3),
            }
    return results


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSetting:
    """How the blocks are sharded and trained; parameters are float32, computed in bfloat16 and reduced in float32."""

    name: str
    mesh: tuple[int, ...] = (WORLD,)
    offload: bool = False
    micro_batches: int = 1
    # Of the micro-batches before the last, replicas do not sum.
    partial: bool = False
    reshard: bool | int = True
    dtype: torch.dtype = torch.float32


STEPS = (
    StepSetting("mixed precision"),
    StepSetting("bfloat16 throughout", dtype=torch.bfloat16),
    StepSetting("HSDP, 2 x 4", mesh=(2, 4)),
    StepSetting("one rank", mesh=(1,)),
    StepSetting("one rank, bfloat16", mesh=(1,), dtype=torch.bfloat16),
    StepSetting("offload", offload=True),
    StepSetting("offload, one rank", mesh=(1,), offload=True),
    StepSetting("two micro-batches", micro_batches=2),
    StepSetting("two micro-batches, HSDP", mesh=(2, 4), micro_batches=2),
    StepSetting("two micro-batches, HSDP, partial sums", mesh=(2, 4), micro_batches=2, partial=True),
    StepSetting("reshard_after_forward=False", reshard=False),
    StepSetting("reshard_after_forward=4", reshard=4),
)
KINDS = ("copies", "casts", "fills", "arithmetic", "host", "messages")
PHASES = ("step", "clip", "AdamW")


class Steps:
    """Counts steps. The process is rank 0 of `WORLD` on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shape = BlockShape(width=128, hidden=256, heads=4, kv_heads=2, blocks=3, length=4)
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._bare = self._count("bare", STEPS[0]), self._count("bare", StepSetting("", micro_batches=2))

    def count(self, library: str, setting: StepSetting) -> dict[str, Counter[str]]:
        """By phase: kernels by kind beyond those of the model, "waits", and "kernels", the sum without messages."""
        found = self._count(library, setting)
        found["step"].subtract(self._bare[setting.micro_batches - 1]["step"])
        for kinds in found.values():
            kinds["kernels"] = sum(kinds[kind] for kind in KINDS if kind != "messages")
        return found

    def _mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        found = self._meshes.get(shape)
        if found is None:
            names = ("replicate", "shard")[-len(shape) :]
            ranks = torch.arange(math.prod(shape)).view(shape)
            found = self._meshes[shape] = DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
        return found

    def _count(self, library: str, setting: StepSetting) -> dict[str, Counter[str]]:
        from tests.harness import simulated

        with nccl_plan(2 * self.shape.width + 1):
            model, optimizer = self._build(library, setting)
            x = torch.ones(1, self.shape.length, self.shape.width, dtype=torch.bfloat16).to(self.device)
            for _ in range(3):
                self._step(model, optimizer, x, setting, {})
            gc.collect()
            found: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
            with simulated.watched() as seen:
                self._step(model, optimizer, x, setting, found)
        found["step"]["waits"] = seen.waits.total()
        return found

    def _build(self, library: str, setting: StepSetting) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        made: Any = torch_fsdp if library == "fsdp2" else fullshard
        model: Any = Chain(self.shape).to(torch.bfloat16 if library == "bare" else setting.dtype).to(self.device)
        if library != "bare":
            options: dict[str, Any] = {"mesh": self._mesh(setting.mesh), "reshard_after_forward": setting.reshard}
            options["mp_policy"] = made.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if setting.offload:
                options["offload_policy"] = made.CPUOffloadPolicy()
            for module in (*model.blocks, model):
                made.fully_shard(module, **options)
        return model, torch.optim.AdamW(model.parameters(), foreach=True)

    def _step(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        x: torch.Tensor,
        setting: StepSetting,
        found: dict[str, Counter[str]],
    ) -> None:
        clip = fullshard.clip_grad_norm_ if isinstance(model, fullshard.FSDPModule) else nn.utils.clip_grad_norm_
        for phase in PHASES:
            with KernelCounter(self.device) as counter:
                if phase == "step":
                    for micro in range(setting.micro_batches):
                        if isinstance(model, torch_fsdp.FSDPModule) and setting.micro_batches > 1:
                            syncs = (
                                model.set_requires_all_reduce if setting.partial else model.set_requires_gradient_sync
                            )
                            syncs(micro == setting.micro_batches - 1)
                        model(x).float().square().mean().backward()
                elif phase == "clip":
                    clip(model.parameters(), 1.0)
                else:
                    optimizer.step()
            if found:
                found[phase] = counter.kinds
        optimizer.zero_grad()


def steps() -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    device = device_of(SIMULATED)
    start_fake(device, WORLD)
    counts, rows = Steps(device), []
    print(
        "| a step of three blocks of nine parameters | | kernels | " + " | ".join(KINDS) + " | clip | AdamW | waits |"
    )
    print("|---|---|" + "---|" * (len(KINDS) + 4))
    for setting in STEPS:
        for library in ("fsdp2", "fullshard"):
            found = counts.count(library, setting)
            cells = [found["step"][kind] for kind in ("kernels", *KINDS)]
            cells += [found[phase]["kernels"] for phase in PHASES[1:]] + [found["step"]["waits"]]
            print(f"| {setting.name} | {library} | " + " | ".join(map(str, cells)) + " |", flush=True)
            rows.append({"setting": setting.name, "library": library, **{k: dict(v) for k, v in found.items()}})
    return rows


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument("--steps", action="store_true", help="count what a step runs, on a simulated device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.steps:
        warnings.filterwarnings("ignore", module="torch")
        print_json("operations of steps", TINY, steps())
        dist.destroy_process_group()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    gc.disable()
    results = measure(4 if options.tiny else options.rounds)
    print(f"{'operation':22} {'FSDP2, us':>10} {'ours / FSDP2':>13} {'FSDP2 / FSDP2':>14}")
    for name, row in results.items():
        print(f"{name:22} {row['fsdp2_us']:10.2f} {row['of_fsdp2']:13.3f} {row['same']:14.3f}")
    dist.destroy_process_group()
    print_json("operations", TINY, results)


if __name__ == "__main__":
    main()
