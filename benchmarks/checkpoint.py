"""Saving and loading a sharded state: fullshard.checkpoint beside DCP, torch.save and safetensors, in one run.

    python -m benchmarks.checkpoint                    2 ranks, 512 MiB in all, 5 rounds; two minutes on two cores
    python -m benchmarks.checkpoint --folder /dev/shm  without a disk: what the code itself costs

    fullshard      save, async_save and load of fullshard.checkpoint
    no checksums   the same with CRC-32 left out: what they cost. For the benchmark alone, there is no such setting.
                   The output says whose CRC-32 it was: that of isal (the extra `checkpoint`) or of zlib
    dcp            torch.distributed.checkpoint, with its defaults
    torch.save     each rank its own shards to its own file, synced: no resharding, no commit, no checks
    safetensors    the same with save_file of the safetensors package

Every way writes through to the disk (fsync) and is loaded from the page cache. `blocked` is how long async_save keeps
the caller; `memory` is what the resident memory of a rank rises to above what it was before, at most. MiB/s are those
of all ranks together; cpu_s are CPU seconds of the first rank, which a busy machine changes least. Medians over
interleaved rounds. What is loaded is compared with what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import TINY, ModelShape, on_ranks, paired_ratio, print_json
from fullshard.checkpoint import files

WAYS = ("fullshard", "no checksums", "dcp", "torch.save", "safetensors")
PARTS = ("save", "load", "blocked")
# Of one tensor: (rows, columns), 4 MiB in float32, sharded along rows; and every fourth a vector.
ROWS, COLUMNS = 1024, 1024


def state_of(world: int, rank: int, mebibytes: int) -> dict[str, Any]:
    """Sharded float32 tensors of `mebibytes` in all, as a model and two moments of an optimizer have them."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(rank)
    made: dict[str, Any] = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for index in range(max(mebibytes // 4, 3)):
        local = torch.randn(ROWS // world, COLUMNS, generator=generator)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        made[("model", "exp_avg", "exp_avg_sq")[index % 3]][f"layers.{index // 3}.weight"] = tensor
    return made


def locals_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor.to_local() for part, tensors in state.items() for name, tensor in tensors.items()}


# ---- ways ------------------------------------------------------------------------------------------------------


class Way:
    """`save` and `load` are calls of all ranks."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.file = f"{folder}/rank{rank}"

    def save(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def async_save(self, state: dict[str, Any]) -> Any:
        """A future, or None where there is no such thing."""
        return None


class Fullshard(Way):
    def save(self, state: dict[str, Any]) -> None:
        from fullshard import checkpoint

        checkpoint.save(state, checkpoint_id=self.folder)

    def load(self, state: dict[str, Any]) -> None:
        from fullshard import checkpoint

        checkpoint.load(state, checkpoint_id=self.folder)

    def async_save(self, state: dict[str, Any]) -> Any:
        from fullshard import checkpoint

        return checkpoint.async_save(state, checkpoint_id=self.folder)


class NoChecksums(Fullshard):
    def save(self, state: dict[str, Any]) -> None:
        with without_checksums():
            super().save(state)

    def load(self, state: dict[str, Any]) -> None:
        with without_checksums():
            super().load(state)

    def async_save(self, state: dict[str, Any]) -> Any:
        return None


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Every checksum is 0, in files and in what they are compared with."""
    original = files.crc32
    files.crc32 = lambda _: 0
    try:
        yield
    finally:
        files.crc32 = original


class Dcp(Way):
    def __init__(self, folder: str, rank: int) -> None:
        super().__init__(folder, rank)
        # Its thread sends messages while the caller does: over one group the two would take each other's, and wait for
        # ever.
        self.group = dist.new_group()

    def save(self, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=self.folder)

    def load(self, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(state, checkpoint_id=self.folder)

    def async_save(self, state: dict[str, Any]) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, checkpoint_id=self.folder, process_group=self.group)


class TorchSave(Way):
    def save(self, state: dict[str, Any]) -> None:
        with open(self.file, "wb") as file:
            torch.save({name: local.clone() for name, local in locals_of(state).items()}, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def load(self, state: dict[str, Any]) -> None:
        copy_to(state, torch.load(self.file, weights_only=True))
        dist.barrier()


class Safetensors(Way):
    def save(self, state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file(locals_of(state), self.file)
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())
        dist.barrier()

    def load(self, state: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        copy_to(state, load_file(self.file))
        dist.barrier()


def copy_to(state: dict[str, Any], found: dict[str, Tensor]) -> None:
    for name, local in locals_of(state).items():
        local.copy_(found[name])


CLASSES: dict[str, Callable[[str, int], Way]] = {
    "fullshard": Fullshard,
    "no checksums": NoChecksums,
    "dcp": Dcp,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
}


# ---- measuring -------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the slowest rank is through, and the result."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds), result


class Peak:
    """How far resident memory rose within the block, in bytes, and the CPU seconds of all threads of this process."""

    def __enter__(self) -> Peak:
        # What was freed goes back first, or it would hide what is taken now.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark begins anew
        self._before = _status("VmRSS")
        self._cpu = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = time.process_time() - self._cpu
        self.nbytes = max(_status("VmHWM") - self._before, 0)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def measure(rank: int, world: int, parent: str, mebibytes: int, rounds: int) -> dict[str, Any]:
    """Seconds by way and part, memory in bytes by way and part; of the slowest and largest rank."""
    warnings.simplefilter("ignore")  # DCP warns of its own calls
    state, other = state_of(world, rank, mebibytes), state_of(world, rank + world, mebibytes)
    seconds: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in WAYS}
    memory: dict[str, dict[str, list[int]]] = {way: {part: [] for part in PARTS} for way in WAYS}
    cpu: dict[str, dict[str, list[float]]] = {way: {"save": [], "load": []} for way in WAYS}
    for current in range(rounds + 1):
        for name, kind in CLASSES.items():
            folder = f"{parent}/{name.replace(' ', '-')}"
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.mkdir(folder)
            dist.barrier()
            way = kind(folder, rank)
            found: dict[str, tuple[float, int]] = {}
            with Peak() as peak:
                found["save"] = (timed(lambda way=way: way.save(state))[0], 0)
            cpu[name]["save"].append(peak.cpu)
            found["save"] = (found["save"][0], peak.nbytes)
            with Peak() as peak:
                taken = timed(lambda way=way: way.load(other))[0]
            cpu[name]["load"].append(peak.cpu)
            found["load"] = (taken, peak.nbytes)
            for key, local in locals_of(other).items():
                assert torch.equal(local, locals_of(state)[key]), f"{name}: {key} was loaded wrong"
                local.zero_()
            with Peak() as peak:
                taken, future = timed(lambda way=way: way.async_save(state))
                if future is not None:
                    future.result()
            if future is not None:
                found["blocked"] = (taken, peak.nbytes)
            if current:  # the first round makes buffers, groups and files
                for part, (one, nbytes) in found.items():
                    seconds[name][part].append(one)
                    memory[name][part].append(nbytes)
    return {"seconds": seconds, "memory": memory, "cpu": cpu}


def ratio(seconds: dict[str, dict[str, list[float]]], way: str, other: str, part: str) -> float:
    """Of the times of two ways, round by round."""
    return paired_ratio(seconds[way][part], seconds[other][part])


def report(mebibytes: int, world: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the table; return its figures."""
    print(f"\n{mebibytes} MiB over {world} ranks; medians")
    head = "save_s MiB/s to_dcp cpu_s load_s MiB/s to_dcp cpu_s blocked_s of_save mem_save load async".split()
    print(f"  {'':13}" + "".join(f"{name:>12}" for name in head))
    rows: dict[str, Any] = {}
    seconds = answers[0]["seconds"]
    for way in WAYS:
        middle = {part: statistics.median(found) for part, found in seconds[way].items() if found}
        ratios = {part: ratio(seconds, way, "dcp", part) for part in ("save", "load")}
        extra = {part: max(max(answer["memory"][way][part]) for answer in answers) for part in middle}
        cpu = {part: statistics.median(found[1:] or found) for part, found in answers[0]["cpu"][way].items()}
        row = {"cpu_seconds": cpu, "seconds": middle, "to_dcp": ratios, "extra_nbytes": extra}
        cells = []
        for part in ("save", "load"):
            speed = mebibytes / middle[part]
            cells += [f"{middle[part]:.3f}", f"{speed:.0f}", f"{ratios[part]:.2f}", f"{cpu[part]:.3f}"]
        if "blocked" in middle:
            row["blocked_of_save"] = middle["blocked"] / middle["save"]
            cells += [f"{middle['blocked']:.3f}", f"{row['blocked_of_save']:.2f}"]
        else:
            cells += ["", ""]
        cells += [f"{extra[part] / 2**20:.0f} MiB" if part in extra else "" for part in PARTS]
        print(f"  {way:13}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
        rows[way] = row
    cost = ratio(seconds, "fullshard", "no checksums", "save")
    by = "isal" if files.FAST else "zlib"
    print(f"\nchecksums, by {by}: a save takes {cost:.3f} of what it takes without")
    return {"mebibytes": mebibytes, "world": world, "ways": rows, "checksums_by": by, "checksums_cost": cost - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--mebibytes", type=int, default=512, help="of the state, over all ranks (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that is not (default: 5)")
    parser.add_argument("--folder", help="where to write (default: a temporary directory)")
    parser.add_argument("--tiny", action="store_true", help="12 MiB, one round, to try the script itself")
    options = parser.parse_args()
    mebibytes, rounds = (12, 1) if options.tiny else (options.mebibytes, options.rounds)
    with tempfile.TemporaryDirectory(prefix="fullshard-checkpoint-", dir=options.folder) as folder:
        answers = on_ranks(options.ranks, measure, folder, mebibytes, rounds)
    results = report(mebibytes, options.ranks, answers)
    print()
    print_json("checkpoint", TINY if options.tiny else ModelShape(), results)


if __name__ == "__main__":
    main()
