"""Saving and loading a sharded state: fullshard.checkpoint beside DCP, torch.save and safetensors, in one run.

    python -m benchmarks.checkpoint                    2 and 4 ranks, 512 MiB in all, 5 rounds; ten minutes on two cores
    python -m benchmarks.checkpoint --folder /dev/shm  without a disk: what the code itself costs
    python -m benchmarks.checkpoint --scale            4,096 and 10,000 ranks, counted (checkpoint_scale.py)

    fullshard      save, async_save and load of fullshard.checkpoint
    no checksums   the same with CRC-32 left out: what they cost. The output says whose CRC-32 it was: that of isal (the
                   extra `checkpoint`) or of zlib
    dcp            torch.distributed.checkpoint, with its defaults
    torch.save     each rank its own shards to its own file: no resharding, no commit, no checks
    safetensors    the same with save_file of the safetensors package

Two tables for each number of ranks. In the first every way writes through to the disk (fsync), in the second none does:
DCP with its own `sync_files=False`, the others with fsync left out. Ratios to DCP are those of the same table. The
price of durability, a line for each way, is a save of the first table over one of the second. Neither fullshard without
checksums nor without fsync is a setting; both are for this benchmark.

`warm` loads come from the page cache. Before `cold` ones its pages are given up (posix_fadvise), after a sync, and
`resident` is the share of the files' pages that were still there. `blocked` is how long async_save keeps the caller,
`saved` until the save has ended. `written` are the bytes of the files. `mem` is what resident memory of a rank rises
to above what it was before, at most, in any round: memory that is kept from one save to the next counts in the first.
The pages of files that a load maps count in it, though they are those of the page cache. MiB/s are those of all ranks
together; cpu_s are CPU seconds of the first rank, which a busy machine changes least, and `faults` its minor faults.
Medians over interleaved rounds. What is loaded is compared with what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import resource
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

from benchmarks import checkpoint_scale
from benchmarks.common import TINY, ModelShape, on_ranks, paired_ratio, print_json
from fullshard.checkpoint import files

WAYS = ("fullshard", "no checksums", "dcp", "torch.save", "safetensors")
PARTS = ("save", "warm", "cold", "blocked", "saved")
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
    """`save` and `load` are calls of all ranks. `synced`: whether it writes through to the disk."""

    def __init__(self, folder: str, rank: int, synced: bool) -> None:
        self.folder, self.rank, self.synced = folder, rank, synced
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
    def __init__(self, folder: str, rank: int, synced: bool) -> None:
        super().__init__(folder, rank, synced)
        # Its thread sends messages while the caller does: over one group the two would take each other's, and wait for
        # ever.
        self.group = dist.new_group()

    def _writer(self) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(self.folder, sync_files=self.synced)

    def save(self, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, storage_writer=self._writer())

    def load(self, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(state, checkpoint_id=self.folder)

    def async_save(self, state: dict[str, Any]) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, storage_writer=self._writer(), process_group=self.group)


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


CLASSES: dict[str, Callable[[str, int, bool], Way]] = {
    "fullshard": Fullshard,
    "no checksums": NoChecksums,
    "dcp": Dcp,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
}


@contextlib.contextmanager
def durability(synced: bool) -> Iterator[None]:
    """Without it, fsync does nothing in this process."""
    original = os.fsync
    if not synced:
        os.fsync = lambda _: None
    try:
        yield
    finally:
        os.fsync = original


# ---- the page cache --------------------------------------------------------------------------------------------


def files_of(folder: str) -> list[str]:
    return sorted(os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)


def written_nbytes(folder: str) -> int:
    return sum(os.path.getsize(path) for path in files_of(folder))


def give_up_pages(folder: str) -> None:
    """Write the pages of all files to the disk, and take them out of the page cache."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(folder: str) -> float:
    """The share of the files' pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = there = 0
    for path in files_of(folder):
        if nbytes := os.path.getsize(path):
            count = -(-nbytes // mmap.PAGESIZE)
            with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE) as mapped:
                buffer = ctypes.c_char.from_buffer(mapped)
                flags = (ctypes.c_ubyte * count)()
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(nbytes), flags):
                    raise OSError(ctypes.get_errno(), "mincore")
                del buffer
            pages += count
            there += sum(flag & 1 for flag in flags)
    return there / pages if pages else 0.0


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
    """How far resident memory rose within the block, in bytes, and the CPU seconds and minor faults of this process."""

    def __enter__(self) -> Peak:
        # What was freed goes back first, or it would hide what is taken now.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark begins anew
        self._before = _status("VmRSS")
        self._cpu, self._faults = time.process_time(), _faults()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu, self.faults = time.process_time() - self._cpu, _faults() - self._faults
        self.nbytes = max(_status("VmHWM") - self._before, 0)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


Found = dict[str, tuple[float, int, float, int]]


def once(way: Way, state: dict[str, Any], other: dict[str, Any]) -> tuple[Found, dict[str, float]]:
    """One save, loads from a warm and a cold page cache, and a save in the background: for each part seconds, bytes of
    memory, CPU seconds and minor faults; and the bytes of the files, and the share of pages that a cold load found."""
    found: Found = {}

    def note(part: str, call: Callable[[], Any]) -> Any:
        with Peak() as peak:
            taken, result = timed(call)
        found[part] = (taken, peak.nbytes, peak.cpu, peak.faults)
        return result

    note("save", lambda: way.save(state))
    facts = {"written": float(written_nbytes(way.folder))}
    for part in ("warm", "cold"):
        dist.barrier()
        if part == "cold" and way.rank == 0:
            give_up_pages(way.folder)
            facts["resident"] = resident(way.folder)
        note(part, lambda: way.load(other))
        for key, local in locals_of(other).items():
            assert torch.equal(local, locals_of(state)[key]), f"{way.folder}: {key} was loaded wrong"
            local.zero_()
    begun = time.perf_counter()
    with Peak() as peak:
        taken, future = timed(lambda: way.async_save(state))
        if future is not None:
            future.result()
    if future is not None:
        found["blocked"] = (taken, peak.nbytes, peak.cpu, peak.faults)
        found["saved"] = (time.perf_counter() - begun, peak.nbytes, peak.cpu, peak.faults)
    return found, facts


def measure(rank: int, world: int, parent: str, mebibytes: int, rounds: int) -> dict[str, Any]:
    """By durability, way and part: seconds of the slowest rank; memory and CPU seconds of this one; and facts."""
    warnings.simplefilter("ignore")  # DCP warns of its own calls
    state, other = state_of(world, rank, mebibytes), state_of(world, rank + world, mebibytes)
    made: dict[str, Any] = {}
    turns = [(name, kind, synced) for name, kind in CLASSES.items() for synced in (True, False)]
    for current in range(rounds + 1):
        # Each round begins with another way: the first one pays for what the last one left in page cache and memory.
        first = 3 * current % len(turns)
        for name, kind, synced in turns[first:] + turns[:first]:
            folder = f"{parent}/{world}-{name.replace(' ', '-')}-{synced}"
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.mkdir(folder)
            dist.barrier()
            way = kind(folder, rank, synced)
            with durability(synced):
                found, facts = once(way, state, other)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            table = made.setdefault("synced" if synced else "unsynced", {}).setdefault(name, {"facts": []})
            table["facts"].append(facts)
            for part, (seconds, nbytes, cpu, faults) in found.items():
                row = table.setdefault(part, {"seconds": [], "nbytes": [], "cpu": [], "faults": []})
                row["nbytes"].append(nbytes)
                if current:  # the first round makes buffers, groups and files
                    row["seconds"].append(seconds)
                    row["cpu"].append(cpu)
                    row["faults"].append(faults)
    return made


# ---- tables ----------------------------------------------------------------------------------------------------


def report(mebibytes: int, world: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the tables of one number of ranks; return their figures."""
    results: dict[str, Any] = {"mebibytes": mebibytes, "world": world}
    for durable, text in (("synced", "written through to the disk (fsync)"), ("unsynced", "without fsync")):
        print(f"\n{mebibytes} MiB over {world} ranks, {text}; medians")
        head = "save_s MiB/s to_dcp cpu_s warm_s to_dcp cpu_s faults cold_s to_dcp cpu_s faults resident"
        head += " blocked_s to_dcp saved_s written"
        head += " mem_save mem_warm mem_async"
        print(f"  {'':13}" + "".join(f"{name:>11}" for name in head.split()))
        results[durable] = {}
        for way in WAYS:
            row = figures(way, answers, durable)
            results[durable][way] = row
            print(f"  {way:13}" + "".join(f"{cell:>11}" for cell in _cells(row, mebibytes)), flush=True)
    print()
    for way in WAYS:
        times = [answers[0][durable][way]["save"]["seconds"] for durable in ("synced", "unsynced")]
        results.setdefault("price_of_durability", {})[way] = price = paired_ratio(*times)
        print(f"the price of durability, {way}: a save takes {price:.2f} of what it takes without fsync")
    seconds = [answers[0]["synced"][way]["save"]["seconds"] for way in ("fullshard", "no checksums")]
    results["checksums_by"], results["checksums_cost"] = "isal" if files.FAST else "zlib", paired_ratio(*seconds) - 1
    cost = results["checksums_cost"] + 1
    print(f"checksums, by {results['checksums_by']}: a save takes {cost:.3f} of what it takes without")
    return results


def figures(way: str, answers: list[dict[str, Any]], durable: str) -> dict[str, Any]:
    """Medians of one way: seconds, ratios to DCP at the same durability, CPU seconds, memory of the largest rank."""
    rows = [answer[durable][way] for answer in answers]
    theirs = answers[0][durable]["dcp"]
    row: dict[str, Any] = {"seconds": {}, "to_dcp": {}, "cpu_seconds": {}, "faults": {}, "extra_nbytes": {}}
    for part in PARTS:
        if part in rows[0]:
            row["seconds"][part] = statistics.median(rows[0][part]["seconds"])
            row["to_dcp"][part] = paired_ratio(rows[0][part]["seconds"], theirs[part]["seconds"])
            row["cpu_seconds"][part] = statistics.median(rows[0][part]["cpu"])
            row["faults"][part] = statistics.median(rows[0][part]["faults"])
            row["extra_nbytes"][part] = max(max(each[part]["nbytes"]) for each in rows)
    facts = rows[0]["facts"]
    row["written_nbytes"] = facts[-1]["written"]
    row["resident"] = max(each["resident"] for each in facts)
    return row


def _cells(row: dict[str, Any], mebibytes: int) -> list[str]:
    def shown(kind: str, part: str, form: str = ".3f") -> str:
        return format(row[kind][part], form) if part in row[kind] else ""

    def memory(part: str) -> str:
        return f"{row['extra_nbytes'][part] / 2**20:.0f}MiB" if part in row["extra_nbytes"] else ""

    cells = [shown("seconds", "save"), f"{mebibytes / row['seconds']['save']:.0f}", shown("to_dcp", "save", ".2f")]
    cells += [shown("cpu_seconds", "save"), shown("seconds", "warm"), shown("to_dcp", "warm", ".2f")]
    cells += [shown("cpu_seconds", "warm"), shown("faults", "warm", ".0f")]
    cells += [shown("seconds", "cold"), shown("to_dcp", "cold", ".2f")]
    cells += [shown("cpu_seconds", "cold"), shown("faults", "cold", ".0f")]
    cells += [f"{row['resident']:.0%}", shown("seconds", "blocked"), shown("to_dcp", "blocked", ".2f")]
    cells += [shown("seconds", "saved"), f"{row['written_nbytes'] / 2**20:.1f}MiB"]
    return [*cells, *(memory(part) for part in ("save", "warm", "blocked"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--mebibytes", type=int, default=512, help="of the state, over all ranks (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that is not (default: 5)")
    parser.add_argument("--folder", help="where to write (default: a temporary directory)")
    parser.add_argument("--tiny", action="store_true", help="12 MiB, 2 ranks, one round, to try the script itself")
    parser.add_argument("--scale", action="store_true", help="count what thousands of ranks cost, and nothing else")
    options = parser.parse_args()
    if options.scale:
        checkpoint_scale.main([])
        return
    mebibytes, rounds = (12, 1) if options.tiny else (options.mebibytes, options.rounds)
    results = []
    for world in [2] if options.tiny else options.ranks:
        with tempfile.TemporaryDirectory(prefix="fullshard-checkpoint-", dir=options.folder) as folder:
            results.append(report(mebibytes, world, on_ranks(world, measure, folder, mebibytes, rounds)))
    print()
    print_json("checkpoint", TINY if options.tiny else ModelShape(), results)


if __name__ == "__main__":
    main()
