"""Host time that sharding adds: fake process group, tiny tensors, so that what is left is Python and dispatch.

    python -m benchmarks.host                     fp32 and mixed precision, world 8; about a minute
    python -m benchmarks.host --profile "+ shards"  where the time of one way goes (cProfile)
    python -m benchmarks.host --where             where the time that the engine adds to a block goes, for FSDP2 and
                                                  ours: torch's own calls, rooms of the package, Python's built-ins

A step is forward, backward, optimizer.step() and zero_grad() of a chain of blocks with nine parameters each, as in
Llama. The figure is (step - step of the bare model) / blocks, in milliseconds of CPU time (which is time, on a machine
that does nothing else), medians over interleaved rounds. First comes the engine alone: forward and backward, without
the optimizer, most of whose time is DTensor's dispatch of its operations, for FSDP2 as for ours.

The fake group writes each rank's part of what is gathered, instead of a network: world copies for each gather,
which no backend's host does. That time is measured in the same rounds, by the same messages over a group of one and
over all, and is not part of the figure; "with copies" is the ratio where it is.

    ops          operations that torch dispatches, per block and step beyond the bare model's, collectives among them
    calls        Python functions that are called, likewise. Both are the same on any machine, however busy

    bare         the same blocks, not sharded, torch's optimizer on plain tensors
    fsdp2        torch's fully_shard on every block and on the model
    fullshard    ours, the same optimizer on DTensors
    + shards     ours, with `fullshard.step_on_shards(optimizer)`
    direct       `+ shards`, with the plan that a block of an 8B model gets on NCCL: seven parameters are gathered
                 straight into place in one launch, and two are packed; the gradients of the seven leave from where they
                 are, each in a message of its own; buffers are not kept; gradients and messages have their limit
    least        one gather, one reduction, one copy each, and the fewest hooks that these blocks need: written for
                 this model, it decides, compares and refuses nothing. What Python and torch take at least; fp32 alone

The last lines of a table say what it costs that ranks compare what they do (agree/ledger.py): FULLSHARD_GUARD=full
above off. One model of each will not do: two of the same kind differ by some percent, by where their tensors lie. So
there are several of each, in turns, and how far two halves of those that are `off` are apart is shown beside it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Block, ModelShape, paired_ratio, print_json
from benchmarks.counting import nccl_plan

SHAPE = ModelShape(vocabulary=64, width=16, hidden=24, heads=2, depth=8)
WORLD = 8
WAYS = ("bare", "fsdp2", "fullshard", "+ shards", "direct")
# Of each kind, for what the guard costs.
MODELS = 6


class Chain(nn.Module):
    """Blocks and nothing else, so that the difference divides by their number."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(way: str, shape: ModelShape, mixed: bool, guard: str = "full") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    torch.manual_seed(0)
    model: Any = Chain(shape)
    if way != "bare":
        library: Any = torch_fsdp if way == "fsdp2" else fullshard
        policy = library.MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if mixed else (None, None)))

        # The matrices are large, the norms are not.
        setting = mock.patch.dict(os.environ, {"FULLSHARD_GUARD": guard})
        with nccl_plan(shape.width**2 * 2) if way == "direct" else nullcontext(), setting:
            for block in model.blocks:
                library.fully_shard(block, mp_policy=policy)
            library.fully_shard(model, mp_policy=policy)
            # The first step makes the messages.
            model(torch.ones(1, 4, shape.width)).sum().backward()
            model.zero_grad()
    elif mixed:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way in ("+ shards", "direct"):
        fullshard.step_on_shards(optimizer)
    return model, optimizer


class Step:
    """A training step of one way; `engine` is its forward and backward alone."""

    def __init__(self, way: str, shape: ModelShape, mixed: bool, guard: str = "full") -> None:
        self._model, self._optimizer = build(way, shape, mixed, guard)
        dtype = torch.bfloat16 if mixed and way == "bare" else torch.float32
        self._input = torch.randn(1, 4, shape.width, dtype=dtype)

    def __call__(self) -> None:
        self.engine()
        self.update()

    def engine(self) -> None:
        self._model(self._input).sum().backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class _LeastBlock:
    """Shards one block in code of its own, for `LeastStep`."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh, open_: list[_LeastBlock]) -> None:
        slots = [
            (m._parameters, name, p) for m in block.modules() for name, p in m._parameters.items() if p is not None
        ]
        self._slots = [(there, name) for there, name, _ in slots]
        numels = [p.numel() for _, _, p in slots]
        rows = [numel // WORLD for numel in numels]
        self._memory, self._gathered = torch.empty(sum(numels)), torch.empty(WORLD, sum(rows))
        self._shard, self._sent, self._received = (torch.zeros(n) for n in (sum(rows), sum(numels), sum(rows)))
        self._pieces = list(self._gathered.split(rows, dim=1))
        self._packed = list(self._sent.view(WORLD, -1).split(rows, dim=1))
        self._full, self._views, self.sharded = [], [], []
        for (_, _, p), start, local in zip(slots, accumulate([0, *numels]), self._shard.split(rows), strict=False):
            # Version counters apart: the memory is written again while graphs hold the parameters.
            storage = self._memory.untyped_storage()
            self._full.append(nn.Parameter(torch.empty(0).set_(storage, start, p.shape)))
            self._views.append(torch.empty(0).set_(storage, start, (WORLD, p.numel() // WORLD)))
            shape = (p.shape[0] // WORLD, *p.shape[1:])
            self.sharded.append(nn.Parameter(DTensor.from_local(local.view(shape), mesh, [Shard(0)], run_check=False)))
        self._group: Any = mesh.get_group()
        self._options = AllgatherOptions()
        self._options.asyncOp = True
        self._nbytes, self._came, self._open = self._memory.untyped_storage().nbytes(), 0, open_
        self._show(self.sharded)
        block.register_forward_pre_hook(lambda *_: self._gather())
        block.register_forward_hook(self._forward_ends)
        for full in self._full:
            full.register_post_accumulate_grad_hook(self._arrived)

    def _show(self, params: Sequence[nn.Parameter]) -> None:
        for (there, name), param in zip(self._slots, params, strict=True):
            there[name] = param

    def _gather(self) -> None:
        self._memory.untyped_storage().resize_(self._nbytes)
        with torch.no_grad():
            self._group._allgather_base(self._gathered, self._shard, self._options).wait()
            torch._foreach_copy_(self._views, self._pieces)
        self._show(self._full)

    def _free(self) -> None:
        self._show(self.sharded)
        self._memory.untyped_storage().resize_(0)

    def _forward_ends(self, _: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._free()
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda _: self._gather())

    def _arrived(self, _: torch.Tensor) -> None:
        self._came += 1
        if self._came < len(self._full):
            return
        self._came = 0
        with torch.no_grad():
            torch._foreach_copy_(
                self._packed, [full.grad.view(WORLD, -1) for full in self._full if full.grad is not None]
            )
            for full in self._full:
                full.grad = None
            self._work = self._group._reduce_scatter_base(self._received, self._sent)
        self._free()
        self._open.append(self)

    def finish(self) -> None:
        """Put the reduced gradients on the sharded parameters."""
        self._work.wait()
        received = self._received.div(WORLD)
        start = 0
        for param in self.sharded:
            local: Any = param._local_tensor  # type: ignore[attr-defined]
            part = received.as_strided(local.shape, local.stride(), start)
            start += part.numel()
            param.grad = DTensor(part, param._spec, requires_grad=False)  # type: ignore[attr-defined]


class LeastStep(Step):
    """The least that sharding these blocks takes, written for them alone: no decisions, no comparisons, no errors."""

    def __init__(self, shape: ModelShape) -> None:
        torch.manual_seed(0)
        self._model: Any = Chain(shape)
        mesh = init_device_mesh("cpu", (WORLD,))
        self._open: list[_LeastBlock] = []
        blocks = [_LeastBlock(block, mesh, self._open) for block in self._model.blocks]
        self._optimizer = torch.optim.AdamW([param for block in blocks for param in block.sharded], lr=1e-4)
        self._input = torch.randn(1, 4, shape.width)

    def engine(self) -> None:
        super().engine()
        for block in self._open:
            block.finish()
        self._open.clear()


class _Counts(TorchDispatchMode):
    """Operations that are dispatched while it is entered, and the gathers among them: (outputs, inputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.gathers: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.gathers.append(([args[0]], [args[1]]))
        elif name == "c10d::allgather_into_tensor_coalesced_":
            self.gathers.append((list(args[0]), list(args[1])))
        return func(*args, **(kwargs or {}))


class Messages:
    """The gathers of a step once more, with tensors of their own: over all ranks, and over a group of one."""

    def __init__(self, gathers: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]], alone: Any) -> None:
        self._gathers = [([torch.empty_like(t) for t in o], [torch.empty_like(t) for t in i]) for o, i in gathers]
        self._alone = alone
        self._options = AllgatherOptions()
        self._options.asyncOp = True

    def copies_s(self) -> float:
        """Seconds that the fake group spends on copies in a step."""
        world: Any = dist.group.WORLD
        start = time.process_time()
        self._send(world, [(outs, pieces) for outs, pieces in self._gathers])
        between = time.process_time()
        self._send(self._alone, [(pieces, pieces) for _, pieces in self._gathers])
        more = (between - start) - (time.process_time() - between)
        return more * WORLD / (WORLD - 1)

    def _send(self, group: Any, gathers: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        for outs, pieces in gathers:
            if len(outs) == 1:
                group._allgather_base(outs[0], pieces[0], self._options)
            else:
                group.allgather_into_tensor_coalesced(outs, pieces, self._options)


def count_ops(step: Callable[[], None]) -> _Counts:
    with _Counts() as counts:
        step()
    return counts


def count_calls(step: Callable[[], None]) -> int:
    """Python functions that a step calls."""
    calls = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    # The engine runs the backward of a CPU in the thread that asks for it.
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


class Measured(NamedTuple):
    """Of one way: seconds per step and round, of the engine alone too, seconds of the fake group's copies in them; what
    a step counts, and the engine alone."""

    step_s: list[float]
    engine_s: list[float]
    copies_s: list[float]
    ops: int
    calls: int
    engine_calls: int


def measure(shape: ModelShape, mixed: bool, rounds: int) -> dict[str, Measured]:
    """By way; a round takes a few steps of each way in turn."""
    steps = {way: Step(way, shape, mixed) for way in WAYS}
    if not mixed:
        steps["least"] = LeastStep(shape)
    for step in steps.values():
        for _ in range(4):
            step()
    alone = dist.new_group([0])
    counts = {way: count_ops(step) for way, step in steps.items()}
    messages = {way: Messages(counts[way].gathers, alone) for way in steps}
    found = {}
    for way, step in steps.items():
        engine_calls = count_calls(step.engine)
        step.update()
        found[way] = Measured([], [], [], counts[way].ops, count_calls(step), engine_calls)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for way, step in steps.items():
                engine_s = step_s = 0.0
                for _ in range(3):
                    start = time.process_time()
                    step.engine()
                    engine_s += time.process_time() - start
                    step.update()
                    step_s += time.process_time() - start
                found[way].engine_s.append(engine_s / 3)
                found[way].step_s.append(step_s / 3)
                found[way].copies_s.append(statistics.median(messages[way].copies_s() for _ in range(3)))
            gc.collect()
    finally:
        gc.enable()
    return found


def guard_cost(way: str, shape: ModelShape, mixed: bool, rounds: int) -> tuple[float, float]:
    """What `full` costs above `off`, as a part of what `off` adds to the bare model; and the same of one half of the
    models that are `off` above the other half."""
    steps = [
        (kind, Step("bare" if kind == "bare" else way, shape, mixed, "full" if kind == "full" else "off"))
        for _ in range(MODELS)
        for kind in ("full", "off", "bare")
    ]
    for _, step in steps:
        for _ in range(4):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for place, (_, step) in enumerate(steps):
                start = time.process_time()
                step()
                step()
                seconds[place].append((time.process_time() - start) / 2)
            gc.collect()
    finally:
        gc.enable()
    usual: dict[str, list[float]] = {"full": [], "off": [], "bare": []}
    for (kind, _), measured in zip(steps, seconds, strict=True):
        usual[kind].append(statistics.median(measured))
    full, off, bare = (statistics.median(usual[kind]) for kind in ("full", "off", "bare"))
    halves = [statistics.median(usual["off"][half::2]) for half in (0, 1)]
    return (full - off) / (off - bare), abs(halves[1] - halves[0]) / (off - bare)


def report(mixed: bool, shape: ModelShape, found: dict[str, Measured], rounds: int) -> dict[str, Any]:
    """Print one table; return its figures."""
    bare = found["bare"]
    with_copies = {
        way: [(mine - base) / shape.depth for mine, base in zip(found[way].step_s, bare.step_s, strict=True)]
        for way in found
        if way != "bare"
    }
    added = {
        way: [mine - copies / shape.depth for mine, copies in zip(with_copies[way], found[way].copies_s, strict=True)]
        for way in with_copies
    }
    precision = "mixed precision" if mixed else "fp32"
    print(f"\n{precision}: {shape.depth} blocks of 9 parameters, world {WORLD}, fake group")
    engine = {
        way: [
            (mine - base - copies) / shape.depth
            for mine, base, copies in zip(found[way].engine_s, bare.engine_s, found[way].copies_s, strict=True)
        ]
        for way in with_copies
    }
    heads = f"{'engine ms per block':>20} {'/ fsdp2':>9} {'calls':>6} | {'step':>6} {'/ fsdp2':>8} {'with copies':>12}"
    print(f"  {'':12} {heads} {'ops':>6} {'calls':>6}")
    rows: dict[str, Any] = {}
    for way in found:
        row: dict[str, Any] = {"step_ms": round(statistics.median(found[way].step_s) * 1e3, 4)}
        if way in added:
            row["added_ms"] = round(statistics.median(added[way]) * 1e3, 4)
            row["engine_ms"] = round(statistics.median(engine[way]) * 1e3, 4)
            row["engine_ratio"] = round(paired_ratio(engine[way], engine["fsdp2"]), 4)
            row["engine_calls"] = round((found[way].engine_calls - bare.engine_calls) / shape.depth, 1)
            row["copies_ms"] = round(statistics.median(found[way].copies_s) / shape.depth * 1e3, 4)
            row["ratio"] = round(paired_ratio(added[way], added["fsdp2"]), 4)
            row["ratio_with_copies"] = round(paired_ratio(with_copies[way], with_copies["fsdp2"]), 4)
            row["ops"] = round((found[way].ops - bare.ops) / shape.depth, 1)
            row["calls"] = round((found[way].calls - bare.calls) / shape.depth, 1)
        if way in added:
            shown = f"{row['engine_ms']:20.3f} {row['engine_ratio']:9.3f} {row['engine_calls']:6.0f} |"
            shown += f" {row['added_ms']:6.3f} {row['ratio']:8.3f} {row['ratio_with_copies']:12.3f}"
            print(f"  {way:12} {shown} {row['ops']:6.0f} {row['calls']:6.0f}", flush=True)
        rows[way] = row
    guard = {way: guard_cost(way, shape, mixed, rounds) for way in ("fullshard", "+ shards")}
    for way, (cost, noise) in guard.items():
        print(f"  {way}: FULLSHARD_GUARD=full adds {cost:+.1%} to what `off` adds (two halves of off: {noise:.1%})")
    return {"mixed": mixed, "world": WORLD, "rounds": len(bare.step_s), "ways": rows, "guard": guard}


def profile(shape: ModelShape, way: str) -> None:
    """Where the time of one way goes."""
    step = Step(way, shape, mixed=False)
    for _ in range(4):
        step()
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    for _ in range(50):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


# C functions of torch, by what calls for them; all others of torch are "other operations".
_CALLS = {
    "the autograd engine": ("run_backward",),
    "messages": ("allgather", "alltoall", "reduce_scatter", "allreduce", "wait", "_allgather_base", "recv", "send"),
    "autograd functions, hooks and graph": ("apply", "register", "_register_hook", "queue_callback", "save_on"),
    "memory, views and copies": (
        *("empty", "view", "split", "copy_", "narrow", "as_strided", "new_", "set_", "resize_", "chunk", "unbind"),
        *("reshape", "detach", "contiguous", "storage", "zeros", "cat", "_foreach_copy_", "flatten"),
    ),
}


def where(shape: ModelShape, way: str) -> Counter[str]:
    """Microseconds of processor time of a forward and backward of `way`, by what spends them."""
    step = Step(way, shape, mixed=False)
    for _ in range(4):
        step()
    profiler = cProfile.Profile(time.process_time)
    for _ in range(_PROFILED):
        profiler.enable()
        step.engine()
        profiler.disable()
        step.update()
    found: Counter[str] = Counter()
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        found[_spender(file, name)] += own * 1e6 / _PROFILED
    return found


def _spender(file: str, name: str) -> str:
    """What a function of a profile belongs to."""
    if file == "~":
        called = name.split("'")[1] if "'" in name else name.rpartition(" ")[2].rpartition(".")[2].rstrip(">}")
        if "torch" not in name and "Tensor" not in name:
            return "built-in functions of Python"
        kinds = (kind for kind, starts in _CALLS.items() if called.startswith(starts))
        return f"torch, C: {next(kinds, 'other operations')}"
    if "/fsdp/_fully_shard/" in file:
        return "FSDP2, Python"
    if "/fullshard/" in file:
        room, _, module = file.rpartition("/fullshard/")[2].removesuffix(".py").partition("/")
        return f"ours, Python: {f'{room}/{module}' if room == 'engine' else room}"
    if "/torch/" in file:
        what = (kind for part, kind in _PARTS.items() if part in file)
        return f"torch, Python: {next(what, 'other')}"
    return "other Python"


# Files of torch, by what calls them.
_PARTS = {
    "/_dynamo/": "torch.compiler.disable around hooks",
    "/nn/modules/": "calls of modules and their hooks",
    "/autograd/": "autograd functions, saved tensors",
    "/utils/hooks": "handles of hooks",
    "/_tensor.py": "methods of tensors",
    "/distributed/": "collectives, DTensor",
}
_PROFILED = 100


def report_where(shape: ModelShape) -> None:
    """Print the table for FSDP2 and ours, beyond the bare model, in microseconds a block."""
    bare, *found = (where(shape, way) for way in ("bare", "fsdp2", "fullshard"))
    for one in found:
        one.subtract(bare)
    rows = sorted({place for one in found for place in one}, key=lambda place: -max(one[place] for one in found))
    print("| us a block, under a profiler | FSDP2 | fullshard |\n|---|---|---|")
    shown = [(place, *(one[place] / shape.depth for one in found)) for place in rows]
    for place, *values in [*shown, ("all", *(sum(one.values()) / shape.depth for one in found))]:
        if max(map(abs, values)) >= 0.5:
            print(f"| {place} | {' | '.join(f'{value:.0f}' for value in values)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="measured rounds of three steps each (default: 40)")
    parser.add_argument("--profile", choices=WAYS, help="print where the time of one way goes, and measure nothing")
    parser.add_argument("--where", action="store_true", help="print what spends the engine's time of a block")
    parser.add_argument("--tiny", action="store_true", help="two blocks, to try the script itself")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    shape = ModelShape(64, 16, 24, 2, 2) if options.tiny else SHAPE
    if options.profile:
        profile(shape, options.profile)
        return
    if options.where:
        report_where(shape)
        return
    print("What ranks compare in a step, and when: the table of docs/adr/0009-ranks-agree-before-they-send.md")
    results = [report(mixed, shape, measure(shape, mixed, options.rounds), options.rounds) for mixed in (False, True)]
    print()
    print_json("host", shape, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
