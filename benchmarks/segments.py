"""What torch's caching allocator of 2023 reserves in steps of FSDP1, by a replay of a model's tape.

Without `expandable_segments`, which came later, each request that no free block holds is a segment of its own: of 2 MiB
for at most 1 MiB, of 20 MiB for less than 10 MiB, else of its size in whole 2 MiB. A request gets the smallest free
block of its stream that is large enough; the rest is free if it has 512 bytes, of large ones more than 1 MiB
(c10/cuda/CUDACachingAllocator.cpp of torch 2.0).

FSDP1 has streams for casts of shards, for all-gathers and for what follows the backward of a unit. It gathers a unit
before its forward and its backward, and the one before it beside that; autograd puts the gradients of a unit together
into one; it is cast to the dtype of the reduction on the stream of reduce-scatters, and its sum is added to that of
earlier micro-batches (torch/distributed/fsdp/_runtime_utils.py). Two steps of two micro-batches reserve all that later
ones do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import product

from benchmarks.allocator import lines_of
from fullshard.plan import Plan
from fullshard.plan.description import Kind, Model

_MIB = 1 << 20
COMPUTE, CAST, GATHER, REDUCE = "compute", "cast", "gather", "reduce"


class Block:
    def __init__(self, size: int, segment: list[Block]) -> None:
        self.size, self.free, self.segment = size, True, segment


class Segments:
    """The segments of all streams."""

    def __init__(self) -> None:
        self.reserved = 0
        self._pools: defaultdict[tuple[str, bool], list[list[Block]]] = defaultdict(list)
        self._of: dict[Hashable, Block] = {}

    def allocate(self, key: Hashable, nbytes: float, stream: str = COMPUTE) -> None:
        if not nbytes:
            return
        size = -(-int(nbytes) // 512) * 512
        small = size <= _MIB
        pool = self._pools[stream, small]
        free = [block for segment in pool for block in segment if block.free and block.size >= size]
        block = min(free, key=lambda block: block.size) if free else self._segment(pool, size)
        rest = block.size - size
        if rest >= 512 if small else rest > _MIB:
            block.segment.insert(block.segment.index(block) + 1, Block(rest, block.segment))
            block.size = size
        block.free = False
        self._of[key] = block

    def _segment(self, pool: list[list[Block]], size: int) -> Block:
        segment: list[Block] = []
        whole = 2 * _MIB if size <= _MIB else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        segment.append(Block(whole, segment))
        pool.append(segment)
        self.reserved += whole
        return segment[0]

    def free(self, keys: Iterable[Hashable]) -> None:
        """Free the blocks of `keys`, as far as they are here, and join each with free ones beside it."""
        for key in keys:
            block = self._of.pop(key, None)
            if block is None:
                continue
            block.free = True
            place = block.segment.index(block)
            if place + 1 < len(block.segment) and block.segment[place + 1].free:
                block.size += block.segment.pop(place + 1).size
            if place and block.segment[place - 1].free:
                block.segment[place - 1].size += block.segment.pop(place).size

    def rename(self, key: Hashable, new: Hashable) -> None:
        """The block of `key` is that of `new` if this has none, else it is freed: its sum was added there."""
        if new in self._of:
            self.free([key])
        elif key in self._of:
            self._of[new] = self._of.pop(key)


class _Replay:
    def __init__(self, plan: Plan, model: Model) -> None:
        self.plan, self.model, self.memory = plan, model, Segments()
        self.units = range(len(plan.units))
        groups = [[(group.memory, p) for group in unit.groups for p in group.parameters] for unit in plan.units]
        self.full = [sum(p.numel * own.compute_itemsize for own, p in each) for each in groups]
        self.shards = [sum(p.numel * own.storage_itemsize / own.pack.world for own, p in each) for each in groups]
        self.sent = [
            [g.sent.pack.numel * g.sent.wire_itemsize for g in unit.groups if g.sent is not None] for unit in plan.units
        ]
        self.casts = plan.strategy.storage != plan.strategy.compute
        self.lines = lines_of(plan, model)
        self.gathered: set[int] = set()

    def gather(self, unit: int) -> None:
        if unit in self.gathered:
            return
        self.gathered.add(unit)
        if self.casts:
            self.memory.allocate(("cast", unit), self.full[unit] / self.plan.strategy.shard, CAST)
        self.memory.allocate(("full", unit), self.full[unit], GATHER)
        self.memory.free([("cast", unit)])

    def reshard(self, unit: int) -> None:
        self.gathered.discard(unit)
        self.memory.free([("full", unit)])

    def take(self, kind: str) -> None:
        for unit in self.units:
            self.memory.allocate((kind, unit), self.shards[unit])

    def micro_batch(self) -> None:
        memory, gradient_of = self.memory, self.model.tape.gradients
        unit_of: dict[int, int] = {}
        gradients: defaultdict[int, list[int]] = defaultdict(list)
        leaving: list[Hashable] = []
        there: set[int] = set()
        for line in self.lines:
            if line.kind is Kind.ENTER:
                unit_of[line.use] = line.a
                self.gather(line.a)
            elif line.kind is Kind.EXIT and unit_of[line.use]:
                self.reshard(unit_of[line.use])
            elif line.kind in (Kind.BACKWARD, Kind.REACHED) and line.use in unit_of:
                self.gather(unit_of[line.use])
                self.gather(max(unit_of[line.use] - 1, 0))
            elif line.kind is Kind.ALLOCATE:
                memory.allocate(line.a, line.b)
                there.add(line.a)
                if line.a in gradient_of:
                    gradients[gradient_of[line.a]].append(line.a)
            elif line.kind is Kind.FREE and line.a not in gradient_of:
                memory.free([line.a])
                there.discard(line.a)
            elif line.kind is Kind.GRADS_READY:
                memory.allocate(("together", line.a), self.full[line.a])
                memory.free(gradients[line.a])
                there.difference_update(gradients.pop(line.a))
                memory.free(leaving)
                wide = sum(self.sent[line.a])
                if self.casts:
                    memory.allocate(("wide", line.a), wide, REDUCE)
                memory.allocate(("new", line.a), wide / self.plan.strategy.shard, REDUCE)
                leaving = [("together", line.a), ("wide", line.a)]
                memory.rename(("new", line.a), ("sum", line.a))
                self.reshard(line.a)
        memory.free([*leaving, *there])
        for unit in self.units:
            self.reshard(unit)


def reserved_by_fsdp1(plan: Plan, model: Model) -> int:
    """Returns the bytes that are reserved in a steady step of `plan`, on a device that has them. `model`: that of the
    plan, with the tape of its micro-batch."""
    replay = _Replay(plan, model)
    replay.take("parameter")
    for step, again in product(range(2), range(2)):
        replay.micro_batch()
        if again:
            if not step:
                replay.take("first moment")
                replay.take("second moment")
            replay.memory.free(("sum", unit) for unit in replay.units)
    return replay.memory.reserved
