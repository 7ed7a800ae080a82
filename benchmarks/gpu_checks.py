"""What ranks with real messages check and measure (gpu_ranks.py runs it): each check yields rows, or raises.

A check is a function of a `Rank`. All ranks of the kind run it; the rows of rank 0 are printed. Ranks are compared with
plain training on the batches of all ranks: `apart` is the largest difference of a parameter or of a momentum, over the
largest element of that tensor, after three steps of SGD with momentum.
"""

from __future__ import annotations

import functools
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.common import paired_ratio
from benchmarks.device import Clock, has_times, module_of, synchronize, waits_noted
from benchmarks.gpu_names import names, other_class
from benchmarks.gpu_step import BF16, FP32, TINY, BlockShape, Stepper, build, loss_of

# Numbers are compared in float32, where both sides fit.
SMALL = BlockShape(width=512, hidden=1024, heads=8, kv_heads=4, blocks=3, length=64)
# For bytes, where parameters are to dominate; and for time.
LARGE = BlockShape(width=4096, hidden=14336, heads=32, kv_heads=8, blocks=4, length=4096)
# Optimizers of the host take 20 s for three steps of LARGE.
MIDDLE = BlockShape(width=2048, hidden=8192, heads=16, kv_heads=8, blocks=4, length=4096)
TINY_BYTES = BlockShape(width=256, hidden=512, heads=4, kv_heads=2, blocks=3)
FEW_TOKENS = 4
WARMUP = 3


# What a check may take.
CHECK_SECONDS = 20.0


@dataclass(frozen=True)
class Rank:
    """This process. `folder`: shared by the ranks, empty at first."""

    rank: int
    world: int
    device: torch.device
    backend: str
    folder: Path
    tiny: bool
    rounds: int

    @property
    def small(self) -> BlockShape:
        return TINY if self.tiny else SMALL

    @property
    def large(self) -> BlockShape:
        return TINY if self.tiny else LARGE

    def mesh(self, *sizes: int) -> DeviceMesh:
        names = ("replicate", "shard")[-len(sizes or (1,)) :]
        return init_device_mesh(self.device.type, sizes or (self.world,), mesh_dim_names=names)

    def batch(self, shape: BlockShape, step: int, rank: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(2, shape.length, shape.width, generator=generator).to(self.device, dtype)

    def sequence(self, shape: BlockShape) -> torch.Tensor:
        """One sequence, for bytes and times."""
        return self.batch(shape, 0, self.rank, BF16)[:1]

    def meet(self, what: str, seconds: float = CHECK_SECONDS) -> None:
        """Wait until all ranks are here, without a message."""
        (self.folder / f"{what} {self.rank}").touch()
        end = time.monotonic() + seconds
        while not all((self.folder / f"{what} {rank}").exists() for rank in range(self.world)):
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: other ranks did not come within {seconds:.0f} s")
            time.sleep(0.01)


Rows = Iterator[dict[str, Any]]
Check = Callable[[Rank], Rows]


def message(at: Rank) -> Rows:
    """One all-reduce: makes the communicator."""
    begun = time.perf_counter()
    tensor = torch.full((1024,), at.rank + 1.0, device=at.device)
    dist.all_reduce(tensor)
    _expect(tensor.tolist(), [at.world * (at.world + 1) / 2] * 1024)
    seconds = time.perf_counter() - begun
    yield {"backend": at.backend, "ranks": at.world, "first_s": seconds if has_times(at.device) else None}


class _Counting(dist.Store):
    """Passes calls on, and counts them."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls += 1
        found: bytes = self.inner.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.calls += 1
        self.inner.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        return bool(self.inner.delete_key(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self.inner.compare_set(key, expected, desired)
        return found


def laziness(at: Rank) -> Rows:
    """When a group of this backend calls the store through which it finds its peers: as it is made, or at its first
    message, from C++. A store that Python has given up by then ends the process. With one rank too."""
    from fullshard._torch import default_store, same_group

    origin, ranks = dist.group.WORLD, tuple(range(at.world))
    assert origin is not None

    def plain(store: dist.Store) -> Any:
        """As torch makes them."""
        limit = timedelta(seconds=60)
        if at.backend != "nccl":
            return dist.Backend._plugins[at.backend.upper()].creator_fn(store, at.rank, at.world, limit)
        kind: Any = dist.ProcessGroupNCCL
        return kind(store, at.rank, at.world, kind.Options())

    def private(store: dist.Store) -> Any:
        """As fullshard makes its own."""
        return same_group(origin, ranks, at.device, at.backend, store, "private", 60.0)

    for name, make in (("plain", plain), ("fullshard's", private)):
        store = _Counting(dist.PrefixStore(f"laziness {name}", default_store()))
        group = make(store)
        made = store.calls
        tensor = torch.full((4,), at.rank + 1.0, device=at.device)
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        _expect(tensor.tolist(), [at.world * (at.world + 1) / 2] * 4, name)
        yield {"group": name, "calls_as_it_is_made": made, "at_first_message": store.calls - made}
        # The groups outlive the check, as they would in a program.
        _kept.extend([store, group])


_kept: list[Any] = []


def data_groups(at: Rank) -> Rows:
    """fullshard's own groups (comm/data_group.py): connected, all that Python holds collected, and then used; a second
    one, because a communicator may be made at the first message of each."""
    from fullshard.comm.data_group import can_cut, open_data_group
    from fullshard.peers import scope_of

    origin, scope = dist.group.WORLD, scope_of(range(at.world))
    assert origin is not None and scope is not None and can_cut(at.backend)
    for purpose in ("first", "second"):
        data = open_data_group(scope, origin, at.device, at.backend, purpose)
        assert data is not None
        begun = time.perf_counter()
        data.connect()
        connected = time.perf_counter() - begun
        gc.collect()
        for number in range(2):
            tensor = torch.full((1024,), at.rank + 1.0, device=at.device)
            data.issue("allreduce", [tensor]).wait()
            gc.collect()
            _expect(tensor.tolist(), [at.world * (at.world + 1) / 2] * 1024, f"message {number + 1}")
        seconds = (connected, time.perf_counter() - begun)
        shown = seconds if has_times(at.device) else (None, None)
        yield {"group": purpose, "connect_s": shown[0], "with_two_messages_s": shown[1]}


def coalesced(at: Rank) -> Rows:
    """Several gathers and reductions as one group of messages, of unlike sizes."""
    from fullshard.comm import ShardGroup

    assert dist.group.WORLD is not None
    group = ShardGroup(dist.group.WORLD, at.device, at.backend)
    sizes = (3, 1 << 14, 257)
    pieces = [torch.arange(n, dtype=FP32, device=at.device) + 1000 * at.rank for n in sizes]
    outs = [torch.empty(n * at.world, device=at.device) for n in sizes]
    works = group.gather_each(outs, pieces)
    for work in works:
        work.wait()
    for n, out in zip(sizes, outs, strict=True):
        _expect(out.tolist(), [i + 1000.0 * rank for rank in range(at.world) for i in range(n)], f"gather of {n}")
    sums = [torch.empty(n, device=at.device) for n in sizes]
    reductions = group.reduce_scatter_each(sums, outs, dist.ReduceOp.SUM)
    for work in reductions:
        work.wait()
    for n, total in zip(sizes, sums, strict=True):
        _expect(total.tolist(), [at.world * (i + 1000.0 * at.rank) for i in range(n)], f"reduction of {n}")
    yield {"one_launch": group.one_launch, "gathers": len(works), "reductions": len(reductions)}


def _expect(found: list[float], expected: list[float], what: str = "the sum") -> None:
    wrong = [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    if wrong:
        place = wrong[0]
        raise ValueError(f"{what}: {len(wrong)} wrong values, first {found[place]} instead of {expected[place]}")


def training(setting: str) -> Check:
    """Three steps of each way, beside plain training; in mixed precision fullshard beside FSDP2."""

    def check(at: Rank) -> Rows:
        base = _trained(at, "fsdp2" if setting == "mixed" else "bare", setting)
        # Roundings of float32 in another order, of bfloat16 once each step.
        most = 3e-2 if setting == "mixed" else 1e-4
        for way in ("fullshard",) if setting == "mixed" else ("fsdp2", "fullshard"):
            found = _trained(at, way, setting)
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, base, strict=True))
            if not apart <= most:
                raise ValueError(f"{way}: {apart:.2e} apart, expected at most {most:.0e}")
            yield {"way": way, "apart": apart}

    return check


def _trained(at: Rank, way: str, setting: str) -> list[torch.Tensor]:
    """Parameters and momenta after three steps, whole, on the host."""
    import fullshard

    shape, bare = at.small, way == "bare"
    mesh = at.mesh(at.world, 1) if setting == "HSDP" else at.mesh()
    options: dict[str, Any] = {"recompute": setting == "recompute", "offload": setting == "offload"}
    options["precision"] = "mixed" if setting == "mixed" else "fp32"
    model = build(way, shape, at.device, mesh, same=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = 2 if setting == "micro-batches" else 1
    for step in range(3):
        for part in range(parts):
            if not bare and parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)
            for rank in range(at.world) if bare else [at.rank]:
                x = at.batch(shape, step, rank, BF16 if setting == "mixed" else FP32).chunk(parts)[part]
                (loss_of(model, x) / (parts * (at.world if bare else 1))).backward()
        if setting == "clip":
            clip = fullshard.clip_grad_norm_ if way == "fullshard" else torch.nn.utils.clip_grad_norm_
            # Below the norm: it takes effect.
            clip(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    state = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [whole(tensor, at.device) for tensor in (*model.parameters(), *state)]


def whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the host. Shards there go over the device; with gloo those of the device go over the host, because torch 2.11
    ends with a segmentation fault in `full_tensor` of a DTensor of CUDA over gloo."""
    found: Any = tensor.detach()
    if isinstance(found, DTensor):
        mesh = found.device_mesh
        if mesh.device_type == "cuda" and dist.get_backend(mesh.get_group(0)) == "gloo":
            pieces = found.to_local().cpu()
            hosts = _mesh_of_hosts(mesh)
            shape, stride = found.shape, found.stride()
            found = DTensor.from_local(pieces, hosts, found.placements, run_check=False, shape=shape, stride=stride)
        else:
            found = found.to(device)
        found = found.full_tensor()
    return found.float().cpu()  # type: ignore[no-any-return]


@functools.cache
def _mesh_of_hosts(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, for tensors of the host."""
    return DeviceMesh("cpu", mesh.mesh.cpu(), mesh_dim_names=mesh.mesh_dim_names)


def checkpoint(at: Rank) -> Rows:
    """fullshard's format and DCP's, saved by fullshard, loaded into fullshard and FSDP2: bitwise."""
    import torch.distributed.checkpoint as dcp

    import fullshard

    model = build("fullshard", at.small, at.device, at.mesh(), same=True)
    expected = [whole(p, at.device) for p in model.parameters()]
    folder, alone = at.folder / "checkpoint", at.world == 1
    fullshard.checkpoint.save({"model": model.state_dict()}, checkpoint_id=str(folder / "own"))
    found = [("own", "fullshard")]
    # DCP gathers objects, which a backend of tests may be without.
    if alone or at.backend in ("nccl", "gloo"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder / "dcp"), no_dist=alone)
        found += [("dcp", "fullshard"), ("dcp", "fsdp2")]
    for kind, way in found:
        other = build(way, at.small, at.device, at.mesh())
        state = {"model": other.state_dict()}
        if kind == "own":
            fullshard.checkpoint.load(state, checkpoint_id=str(folder / "own"))
        else:
            dcp.load(state, checkpoint_id=str(folder / "dcp"), no_dist=alone)
            other.load_state_dict(state["model"])
        if not all(torch.equal(whole(p, at.device), e) for p, e in zip(other.parameters(), expected, strict=True)):
            raise ValueError(f"{kind} into {way}: other values than were saved")
        yield {"format": kind, "into": way, "equal": True}


def waits(at: Rank) -> Rows:
    """Where the host waits for the device in a steady step with AdamW."""
    for way, offload in (("bare", False), ("fsdp2", False), ("fullshard", False), ("fullshard", True)):
        model = build(way, at.small, at.device, at.mesh(), precision="mixed", offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = at.sequence(at.small)

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARMUP):
            step()
        synchronize(at.device)
        with waits_noted(at.device) as seen:
            step()
        counts = {place: seen.count(place) for place in dict.fromkeys(seen)}
        yield {"way": f"{way}, offload" if offload else way, "waits": len(seen), "where": counts}


def copies(at: Rank) -> Rows:
    """Bytes per second between host and device of a block's shards, page-locked and not."""
    shape = at.large
    numel = 4 * shape.width**2 + 3 * shape.width * shape.hidden
    there = torch.zeros(numel, device=at.device)
    for pinned in (True, False):
        host = torch.zeros(numel, pin_memory=pinned)
        for name, (out, source) in {"up": (there, host), "down": (host, there)}.items():
            clock = Clock(at.device)
            for _ in range(2 + at.rounds):
                clock.mark()
                out.copy_(source, non_blocking=True)
                clock.mark()
            rate = host.nbytes / statistics.median(clock.seconds()[2:]) / 1e9
            yield {
                "copy": name,
                "pinned": pinned,
                "mib": host.nbytes / 2**20,
                "gb_per_s": rate if has_times(at.device) else None,
            }


def peak(at: Rank) -> Rows:
    """Bytes of a steady step on the device beyond the optimizer, and what `fullshard.report` says of it. Few tokens, so
    that parameters dominate."""
    shape = replace(TINY_BYTES if at.tiny else MIDDLE, length=FEW_TOKENS)
    held = _memory_of(at, "bare", shape, False, 0)["held"]
    for way, offload in (("fsdp2", False), ("fullshard", False), ("fullshard", True)):
        found = _memory_of(at, way, shape, offload, held)
        gc.collect()
        module_of(at.device).empty_cache()
        expected = found.get("report")
        yield {
            "way": f"{way}, offload" if offload else way,
            "peak_mib": found["peak"] / 2**20,
            "report_mib": expected / 2**20 if expected else None,
            "peak_over_report": found["peak"] / expected if expected else None,
        }


def _memory_of(at: Rank, way: str, shape: BlockShape, offload: bool, bare_nbytes: int) -> dict[str, int]:
    import fullshard
    from fullshard.param.initial import table_nbytes

    memory, device = module_of(at.device), at.device
    gc.collect()
    # Earlier models of fullshard left a table, which is theirs alone.
    begun = memory.memory_allocated() - (table_nbytes(device) if way == "fullshard" else 0)
    model = build(way, shape, device, at.mesh(), precision="mixed", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    x = at.sequence(shape)
    found: dict[str, int] = {}
    for _ in range(1 if way == "bare" else WARMUP):
        synchronize(device)
        memory.reset_peak_memory_stats()
        loss = loss_of(model, x)
        if way == "bare":
            found["held"] = memory.memory_allocated() - begun - sum(p.nbytes for p in model.parameters())
        loss.backward()
        synchronize(device)
        tensors = [_local(t) for values in optimizer.state.values() for t in values.values()]
        found["peak"] = memory.max_memory_allocated() - begun - bare_nbytes
        found["peak"] -= sum(t.nbytes for t in tensors if t.device.type == device.type)
        if way != "bare":
            optimizer.step()
            optimizer.zero_grad()
    if way == "fullshard":
        found["report"] = fullshard.report(model).peak_nbytes
    return found


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def steps(at: Rank) -> Rows:
    """A step of mixed precision with AdamW, ways in turn; and the messages of a step without compute.

    `exposed`: ms more than the bare blocks; `hidden`: 1 - exposed / messages alone; `none ahead`: gathers when needed.
    """
    shape, device = at.large, at.device
    ways = ("bare", "fsdp2", "fullshard", "none ahead")
    found, clocks = {}, {way: Clock(device) for way in ways}
    x = at.sequence(shape)
    for way in ways:
        model = build(way, shape, device, at.mesh(), precision="mixed")
        found[way] = model, torch.optim.AdamW(model.parameters(), foreach=True)
    for current in range(WARMUP + at.rounds):
        for way, (model, optimizer) in found.items():
            if current >= WARMUP:
                clocks[way].mark()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if current >= WARMUP:
                clocks[way].mark()
    taken = {way: clock.seconds() for way, clock in clocks.items()}
    alone = _messages_alone(at, shape) if at.world > 1 else None
    for way, times in taken.items():
        figures: dict[str, float | None] = dict.fromkeys(("ms", "over_bare", "over_fsdp2", "exposed_ms", "hidden"))
        if has_times(device):
            exposed = statistics.median(a - b for a, b in zip(times, taken["bare"], strict=True))
            figures |= {
                "ms": 1e3 * statistics.median(times),
                "over_bare": paired_ratio(times, taken["bare"]),
                "over_fsdp2": paired_ratio(times, taken["fsdp2"]),
                "exposed_ms": 1e3 * exposed,
                "hidden": 1 - exposed / alone if alone else None,
            }
        yield {"way": way, **figures, "messages_ms": 1e3 * alone if alone and has_times(device) else None}


def bandwidth(at: Rank) -> Rows:
    """Bytes per second of each link, as nccl-tests count them: (n-1)/n of the whole over the time."""
    share = (at.world - 1) / at.world
    for mib in (1,) if at.tiny else (1, 16, 256, 1024):
        numel = mib * 2**20 // BF16.itemsize // at.world * at.world
        whole = torch.zeros(numel, dtype=BF16, device=at.device)
        part = torch.zeros(numel // at.world, dtype=BF16, device=at.device)
        sends = {
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
        }
        for name, send in sends.items():
            clock = Clock(at.device)
            for _ in range(WARMUP + at.rounds):
                clock.mark()
                send()
                clock.mark()
            rate = share * whole.nbytes / statistics.median(clock.seconds()[WARMUP:]) / 1e9
            yield {"message": name, "mib": mib, "bus_gb_per_s": rate if has_times(at.device) else None}


def _messages_alone(at: Rank, shape: BlockShape) -> float:
    """Seconds of the gathers of forward and backward and of the reductions of one step."""
    numel = 4 * shape.width**2 + 3 * shape.width * shape.hidden
    numel = -(-numel // at.world) * at.world
    full, gradient = (torch.zeros(numel, dtype=dtype, device=at.device) for dtype in (BF16, FP32))
    shard, reduced = (torch.zeros(numel // at.world, dtype=dtype, device=at.device) for dtype in (BF16, FP32))
    clock = Clock(at.device)
    for _ in range(WARMUP + at.rounds):
        clock.mark()
        for _ in range(shape.blocks):
            dist.all_gather_into_tensor(full, shard)
            dist.all_gather_into_tensor(full, shard)
            dist.reduce_scatter_tensor(reduced, gradient)
        clock.mark()
    return statistics.median(clock.seconds()[WARMUP:])


def abort(at: Rank) -> Rows:
    """Rank 0 sends a message that rank 1 never joins, and cuts its data group: is its stream released, and does torch's
    watchdog leave the process alone? The last check: it breaks a group."""
    from fullshard.comm.data_group import open_data_group
    from fullshard.peers import scope_of

    origin, scope = dist.group.WORLD, scope_of(range(at.world))
    assert origin is not None and scope is not None
    data = open_data_group(scope, origin, at.device, at.backend, "abort")
    assert data is not None
    data.issue("allreduce", [torch.ones(1024, device=at.device)]).wait()
    synchronize(at.device)
    at.meet("abort begins")
    if at.rank == 0:
        sent = data.issue("allreduce", [torch.ones(1024, device=at.device)])
        time.sleep(0.5)
        waits_still = not sent.is_completed
        begun, released = time.perf_counter(), threading.Event()
        data.cut()
        cut = time.perf_counter() - begun
        # A wait that does not end must not keep the row.
        thread = threading.Thread(target=lambda: (synchronize(at.device), released.set()), daemon=True)
        thread.start()
        came = released.wait(8)
        seconds = time.perf_counter() - begun
        times = has_times(at.device)
        yield {
            "was_under_way": waits_still,
            "stream_released": came,
            "cut_s": cut if times else None,
            "released_s": seconds if times and came else None,
        }
        # Torch's watchdog looks every 0.1 s or so, and ends the process if it takes this for an error.
        time.sleep(1.0 if at.tiny else 4.0)
        yield {"alive_after_s": 1.0 if at.tiny else 4.0}
    at.meet("abort ends")


def short_steps(at: Rank) -> Rows:
    """Two steps of tiny blocks, for a sanitizer."""
    for offload in (False, True):
        model = build("fullshard", TINY, at.device, at.mesh(), precision="mixed", offload=offload)
        step = Stepper(model, at.sequence(TINY))
        losses = [float(step()) for _ in range(2)]
        synchronize(at.device)
        yield {"offload": offload, "losses": losses}


TRAINING = ("plain", "clip", "micro-batches", "recompute", "HSDP", "mixed", "offload")
CHECKS: dict[str, Check] = {
    "message": message,
    "laziness": laziness,
    "data groups": data_groups,
    "coalesced": coalesced,
    **{setting: training(setting) for setting in TRAINING},
    "checkpoint": checkpoint,
    "waits": waits,
    "copies": copies,
    "peak": peak,
    "steps": steps,
    "bandwidth": bandwidth,
    "abort": abort,
    "short steps": short_steps,
    "names": names,
    "other class": other_class,
}
