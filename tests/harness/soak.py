"""Training, evaluation, checkpoints, exceptions and retries in turns, for as long as wanted: does anything grow?

    python -m tests.harness.soak --seconds 60

Two processes over gloo do one turn after the other. A turn is: steps with accumulation and clipping, an evaluation, a
checkpoint (beside the training, and old ones go), full parameters for a look, an exception in forward and one in
backward that are caught, a window of micro-batches of which the first size does not fit, and another model that is
made, trained and dropped in the middle of a step. Behind each turn, each rank counts what must not grow:

    resident KiB       of the process
    descriptors        open files and sockets
    threads            of the operating system
    tensors, bytes     alive, and the memory that they hold
    objects            that Python's collector tracks
    hooks              on modules and parameters
    groups             process groups that torch knows
    registries         entries of all dicts, lists, sets and weak tables at the top of fullshard's modules

The first third of the turns is warm-up. A count grows when its most in the last third is above its most in the middle
one by more than `ALLOWED` says. Exit code 1 when one did. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

import fullshard
from fullshard import checkpoint
from tests.harness.failing_places import PLACES, Fault
from tests.harness.pool import pool

Counts = dict[str, int]

# By how much a count may be larger in the last third than in the middle one. Resident memory: what the allocator of the
# host could not give back, because parts of its pages are in use. Objects: interned strings, caches of the interpreter
# that fill once.
ALLOWED: Counts = {
    "resident KiB": 6 << 10,
    "descriptors": 0,
    "threads": 0,
    "tensors": 0,
    "bytes": 0,
    "objects": 20,
    "hooks": 0,
    "groups": 0,
    "registries": 0,
}
WIDTH, SAMPLES = 16, 8
LEAKS = ("memory", "descriptor", "thread", "tensor", "object", "hook", "group", "registry")


# ---- what is counted -------------------------------------------------------------------------------------------


def _give_back() -> None:
    """Free memory in the arenas of the host's allocator goes back to the system, where the C library can do that: how
    much it keeps depends on which threads happened to allocate at the same time, and not on the turns."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def counts(model: nn.Module) -> Counts:
    """Of this process, now. Collects garbage first: what waits for that is none."""
    gc.collect()
    _give_back()
    tensors = [found for found in gc.get_objects() if _is_tensor(found)]
    storages = dict(memory for tensor in tensors if (memory := _memory(tensor)) is not None)
    return {
        "resident KiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "objects": len(gc.get_objects()),
        "hooks": _hooks(model),
        "groups": len(_world.pg_map),
        "registries": sum(_registries().values()),
    }


def _is_tensor(found: object) -> bool:
    # `isinstance` asks `__class__`, which lazy module attributes answer by importing something.
    return issubclass(type(found), Tensor)


def _memory(tensor: Tensor) -> tuple[int, int] | None:
    """(address, bytes) of what it stands on; None for a wrapper without memory of its own, such as a DTensor."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if not tensor.is_meta and storage.nbytes() else None
    except (NotImplementedError, RuntimeError):
        return None


def _hooks(model: nn.Module) -> int:
    """Entries of all dicts of hooks, of modules and parameters."""
    total = 0
    for module in model.modules():
        total += sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))
    for parameter in model.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            total += len(getattr(parameter, name, None) or ())
    return total


def _registries() -> dict[str, int]:
    """Entries of what stands at the top of fullshard's modules and can grow."""
    kinds = (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fullshard":
            for key, value in vars(module).items():
                if isinstance(value, kinds) and not key.startswith("__"):
                    found[f"{name}.{key}"] = len(value)
    return found


def growth(history: list[Counts]) -> dict[str, tuple[int, int]]:
    """What grew: its most in the middle third of the turns and in the last. The first is warm-up."""
    third = len(history) // 3
    if third < 2:
        raise ValueError(f"history: expected at least 6 turns, found {len(history)}; let it run longer")
    middle, last = history[third : 2 * third], history[-third:]
    most = {key: (max(turn[key] for turn in middle), max(turn[key] for turn in last)) for key in ALLOWED}
    return {key: both for key, both in most.items() if both[1] - both[0] > ALLOWED[key]}


# ---- what is done ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Soak:
    """One rank's model and optimizer, and a turn with them."""

    def __init__(self, rank: int, folder: str) -> None:
        torch.manual_seed(0)
        self.rank, self.folder = rank, Path(folder)
        self.model: Any = nn.Sequential(*(Block() for _ in range(3)))
        for block in self.model:
            fullshard.fully_shard(block)
        fullshard.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1
        for accumulate in (1, 3):
            self._step(accumulate)
        self._evaluate()
        self._save()
        with fullshard.full_params(self.model):
            assert all(p.isfinite().all() for p in self.model.parameters())
        for where in ("after", "gradient of the output"):
            self._fail(where)
            self._step(1)
        self._micro_batches()
        self._another_model()

    def _inputs(self, samples: int = SAMPLES) -> Tensor:
        generator = torch.Generator().manual_seed(self.turns * 100 + self.rank)
        return torch.randn(samples, WIDTH, generator=generator)

    def _loss(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs).pow(2).mean()
        return loss

    def _step(self, accumulate: int) -> None:
        for i in range(accumulate):
            self.model.set_requires_gradient_sync(i + 1 == accumulate)
            self._loss(self._inputs()).backward()
        fullshard.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        self._loss(self._inputs())
        self.model.train()

    def _save(self) -> None:
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "turn": self.turns}
        path = self.folder / f"step-{self.turns}"
        options: dict[str, Any] = {
            "checkpoint_id": path,
            "take_first": ["*.running_*"],
        }  # the statistics of a rank are its own
        if self.turns % 2:
            checkpoint.save(state, **options)
        else:
            checkpoint.async_save(state, **options).result()
        if self.rank == 0:
            checkpoint.retain(self.folder, keep_last=1)

    def _fail(self, where: str) -> None:
        """Caught, and nothing is cleaned up: the next step is on its own."""
        disarm = PLACES[where].arm(self.model[1], Fault)
        try:
            self._loss(self._inputs()).backward()
        except Fault:
            pass
        else:
            raise AssertionError("expected the step to fail")
        finally:
            disarm()

    def _micro_batches(self) -> None:
        inputs = self._inputs()

        def loss_of(piece: slice) -> Tensor:
            loss = self._loss(inputs[piece]) * (len(inputs[piece]) / len(inputs))
            if len(inputs[piece]) > 2:
                raise torch.OutOfMemoryError("out of memory, on purpose")
            return loss

        micro = fullshard.MicroBatches(self.model, search="halve")
        micro.backward(loss_of, len(inputs))
        assert micro.size == 2
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _another_model(self) -> None:
        """Made, trained, failed and dropped beside the one that stays: nothing of it is left behind a turn.
        Its class is its own, and its options are others in each of four turns."""
        options: dict[str, Any] = (
            {},
            {"mp_policy": fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
            {"reshard_after_forward": False},
            {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
        )[self.turns % 4]
        torch.manual_seed(self.turns)
        model: Any = type("Dropped", (nn.Sequential,), {})(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        for layer in (model[0], model[2], model):
            fullshard.fully_shard(layer, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        if self.turns % 2:
            fullshard.step_on_shards(optimizer)
        for _ in range(2):
            model(self._inputs()).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Dropped in the middle of a step.
        PLACES["gradient of the output" if self.turns % 3 else "after"].arm(model[2], Fault)
        with suppress(Fault):
            model(self._inputs()).float().pow(2).mean().backward()


def _resident(nbytes: int) -> mmap.mmap:
    """Memory that no allocator had before: one that has much to give out again would hide it."""
    pages = mmap.mmap(-1, nbytes)
    pages.write(bytes(nbytes))
    return pages


class Leak:
    """Lets something grow with every turn, on purpose: one of `LEAKS`, all of them, or nothing ("")."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self._model = model
        self._kept: list[Any] = []
        self._end = threading.Event()
        leaks: dict[str, Callable[[], object]] = {
            "memory": lambda: self._kept.append(_resident(4 << 20)),
            "descriptor": lambda: self._kept.append(open(os.devnull)),
            "thread": lambda: threading.Thread(target=self._end.wait, daemon=True).start(),
            "tensor": lambda: self._kept.append(torch.ones(3)),
            "object": lambda: self._kept.extend([i] for i in range(100)),
            "hook": lambda: model[0].register_forward_hook(_do_nothing),  # type: ignore[index]
            "group": lambda: self._kept.append(dist.new_group()),
            "registry": lambda: vars(checkpoint).setdefault("_leak", []).append(0),
        }
        assert tuple(leaks) == LEAKS
        self._leaks = [leak for name, leak in leaks.items() if kind in (name, "all")]

    def turn(self) -> None:
        for leak in self._leaks:
            leak()

    def end(self) -> None:
        """Nothing of it stays in the process."""
        self._end.set()
        vars(checkpoint).pop("_leak", None)
        for one in self._kept:
            if hasattr(one, "close"):
                one.close()
        self._kept.clear()


def _do_nothing(*_: object) -> None:
    pass


def _settled(model: nn.Module, history: list[Counts]) -> Counts:
    """`counts`, again if there is more than before: on a busy machine the thread that looks after messages (twice a
    second) holds those of the model that was dropped a moment ago. What does not go within ten seconds stays."""
    found = counts(model)
    deadline = time.monotonic() + 10
    before = {key: max((turn[key] for turn in history), default=found[key]) for key in ALLOWED}
    while any(found[key] > before[key] for key in ("tensors", "threads", "descriptors")):
        if time.monotonic() > deadline:
            break
        time.sleep(0.6)
        found = counts(model)
    return found


def soaked(rank: int, folder: str, seconds: float, turns: int, leak: str = "") -> list[Counts]:
    """At least `turns` turns and `seconds` seconds on this rank: the counts behind each turn."""
    # Running statistics are of each rank's own batches.
    warnings.filterwarnings("ignore", message="buffers differ between ranks")
    soak = Soak(rank, folder)
    leaking = Leak(leak, soak.model)
    history: list[Counts] = []
    begun = time.monotonic()
    try:
        while True:
            soak.turn()
            leaking.turn()
            # Rank 0 says when it is enough.
            more = torch.tensor(int(len(history) + 1 < turns or time.monotonic() - begun < seconds))
            dist.broadcast(more, 0)
            dist.barrier()
            # What was planted does not go.
            history.append(counts(soak.model) if leak else _settled(soak.model, history))
            if not more:
                return history
    finally:
        leaking.end()


def soak_on(world: int, seconds: float, turns: int, leak: str = "") -> list[list[Counts]]:
    """`soaked` on `world` processes of the pool."""
    with tempfile.TemporaryDirectory(prefix="fullshard-soak-") as folder:
        results: list[list[Counts]] = pool(world).run(soaked, folder, seconds, turns, leak, timeout=seconds + 120)
    return results


def table(histories: list[list[Counts]]) -> str:
    lines = [f"{'':<14}{'rank':>5}{'first':>12}{'middle':>12}{'last':>12}{'allowed':>9}"]
    for key, allowed in ALLOWED.items():
        for rank, history in enumerate(histories):
            third = len(history) // 3
            middle, last = (max(t[key] for t in part) for part in (history[third : 2 * third], history[-third:]))
            grew = "  GREW" if last - middle > allowed else ""
            lines.append(f"{key:<14}{rank:>5}{history[0][key]:>12,}{middle:>12,}{last:>12,}{allowed:>+9,}{grew}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60); at least nine turns")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--leak", choices=("", *LEAKS, "all"), default="", help="let something grow, to see that it is seen"
    )
    parsed = parser.parse_args(arguments)
    histories = soak_on(parsed.ranks, parsed.seconds, 9, parsed.leak)
    print(table(histories))
    grew = [growth(history) for history in histories]
    turns = len(histories[0])
    print(json.dumps({"turns": turns, "seconds": parsed.seconds, "grew": grew, "last": [h[-1] for h in histories]}))
    return int(any(grew))


if __name__ == "__main__":
    # The ranks import this file by its name, and so find what they are to run.
    from tests.harness import soak as module

    sys.exit(module.main())
