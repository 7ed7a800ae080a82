"""What torch's caching allocator reserves on the stream of compute in steps of FSDP2, by a replay of a model's tape.

The setting is `expandable_segments:True`, which torchtitan's launcher has: blocks lie in one range of addresses, one
for those of at most 1 MiB and one for others. A request gets the smallest free block that is large enough, of which
the rest stays free if it has 512 bytes, of the others more than 1 MiB; else the range grows at its end
(c10/cuda/CUDACachingAllocator.cpp). What has once been reserved stays so.

One block for each shard, state, full parameter, gradient and storage of the tape, in the order of the tape. FSDP2
gathers a unit before its forward and its backward, and frees it after them, its root after its backward; a
reduce-scatter's input is freed when the next one is made. The state of the optimizer comes at the end of the first
step, among blocks of activations that are free then; the second step finds room beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from fullshard.plan import Plan
from fullshard.plan.compiled import with_compiled_loss
from fullshard.plan.description import OUTSIDE, Kind, Line, Model
from fullshard.plan.recomputation import NONE, is_matmul, recomputed

_MIB = 1 << 20


class Segment:
    """One range of addresses. `reserved`: its end; `least`: a smaller rest of a block is not split from it."""

    def __init__(self, least: int) -> None:
        self.reserved, self._least = 0, least
        self._blocks: list[_Block] = []  # in the order of addresses
        self._of: dict[Hashable, _Block] = {}

    def allocate(self, key: Hashable, nbytes: int) -> None:
        size = -(-nbytes // 512) * 512
        free = [block for block in self._blocks if block.free and block.size >= size]
        if free:
            block = min(free, key=lambda block: block.size)
            if block.size - size >= self._least:
                place = self._blocks.index(block)
                self._blocks.insert(place + 1, _Block(block.size - size))
                block.size = size
        elif self._blocks and self._blocks[-1].free:
            block = self._blocks[-1]
            self.reserved += size - block.size
            block.size = size
        else:
            block = _Block(size)
            self._blocks.append(block)
            self.reserved += size
        block.free = False
        self._of[key] = block

    def free(self, key: Hashable) -> None:
        """Free the block of `key`, if it is here, and join it with free ones beside it."""
        block = self._of.pop(key, None)
        if block is None:
            return
        block.free = True
        place = self._blocks.index(block)
        if place + 1 < len(self._blocks) and self._blocks[place + 1].free:
            block.size += self._blocks.pop(place + 1).size
        if place and self._blocks[place - 1].free:
            self._blocks[place - 1].size += self._blocks.pop(place).size


class _Block:
    def __init__(self, size: int) -> None:
        self.size, self.free = size, True


class Allocator:
    """Both ranges of a stream."""

    def __init__(self) -> None:
        self._small, self._large = Segment(512), Segment(_MIB + 512)

    @property
    def reserved(self) -> int:
        return self._small.reserved + self._large.reserved

    def allocate(self, key: Hashable, nbytes: float) -> None:
        if nbytes:
            (self._small if nbytes <= _MIB else self._large).allocate(key, int(nbytes))

    def free(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._small.free(key)
            self._large.free(key)


def replayed(plan: Plan, model: Model, *, steps: int = 2) -> int:
    """Returns the bytes that are reserved after `steps` of one micro-batch. `model`: that of the plan, with a tape of
    its micro-batch."""
    if plan.strategy.accumulate > 1:
        raise ValueError("replayed: expected a step of one micro-batch")
    memory, units = Allocator(), plan.units
    parameters = [
        [(group.memory, parameter) for group in unit.groups for parameter in group.parameters] for unit in units
    ]

    def take_shards(kind: str) -> None:
        for unit, found in enumerate(parameters):
            for place, (own, parameter) in enumerate(found):
                share = parameter.numel / own.pack.world
                memory.allocate((kind, unit, place), share * own.storage_itemsize)

    def gather(unit: int) -> None:
        for place, (own, parameter) in enumerate(parameters[unit]):
            if own.full_nbytes and (unit, place) not in gathered:
                gathered.add((unit, place))
                memory.allocate(("full", unit, place), float(parameter.numel * own.compute_itemsize))

    def reshard(unit: int) -> None:
        there = [key for key in gathered if key[0] == unit]
        gathered.difference_update(there)
        memory.free(("full", *key) for key in there)

    gathered: set[tuple[int, int]] = set()
    take_shards("parameter")
    memory.allocate("buffers", model.buffer_nbytes)
    lines = lines_of(plan, model)
    for step in range(steps):
        unit_of: dict[int, int] = {}
        gradients: defaultdict[int, list[Hashable]] = defaultdict(list)
        sent: list[Hashable] = []
        there: set[Hashable] = set()
        for line in lines:
            if line.kind is Kind.ENTER:
                unit_of[line.use] = line.a
                gather(line.a)
            elif line.kind is Kind.EXIT and unit_of[line.use]:
                reshard(unit_of[line.use])
            elif line.kind in (Kind.BACKWARD, Kind.REACHED) and line.use in unit_of:
                gather(unit_of[line.use])
            elif line.kind is Kind.ALLOCATE:
                memory.allocate(line.a, line.b)
                there.add(line.a)
                if (unit := model.tape.gradients.get(line.a)) is not None:
                    gradients[unit].append(line.a)
            elif line.kind is Kind.FREE and line.a not in model.tape.gradients:
                memory.free([line.a])
                there.discard(line.a)
            elif line.kind is Kind.GRADS_READY:
                memory.free(sent)
                groups = [group.sent for group in units[line.a].groups if group.sent is not None]
                sent = [("sent", line.a, place) for place in range(len(groups))]
                for key, group in zip(sent, groups, strict=True):
                    memory.allocate(key, float(group.pack.numel * group.wire_itemsize))
                memory.free(gradients[line.a])
                there.difference_update(gradients.pop(line.a))
                reshard(line.a)
        memory.free([*sent, *there])
        for unit in range(len(units)):
            reshard(unit)
        if not step:
            for kind in ("first moment", "second moment"):
                take_shards(kind)
    return memory.reserved


def lines_of(plan: Plan, model: Model) -> Sequence[Line]:
    """The lines of a step with the recomputation of the plan, and with what its compiled units do not make."""
    ways: list[str] = [NONE, *[str(plan.strategy.recompute)] * (len(model.units) - 1)]
    tape = model.tape
    lines: Sequence[Line] = tape.lines if set(ways) == {NONE} else recomputed(tape, ways)
    if plan.strategy.compiled_loss:
        lines = with_compiled_loss(tape, lines)
    return without_temporaries(lines) if plan.strategy.compiled else lines


def without_temporaries(lines: Sequence[Line]) -> list[Line]:
    """`lines` without storages of units that come and go between two products: fused kernels do not make them."""
    passed, gone, born = 0, set(), {}
    for place, line in enumerate(lines):
        if line.kind in (Kind.ENTER, Kind.EXIT, Kind.BACKWARD) or (line.kind is Kind.OP and is_matmul(line.name)):
            passed += 1
        elif line.kind is Kind.ALLOCATE and line.use != OUTSIDE:
            born[line.a] = (place, passed)
        elif line.kind is Kind.FREE and line.a in born:
            first, then = born.pop(line.a)
            if then == passed:
                gone |= {first, place}
    return [line for place, line in enumerate(lines) if place not in gone]
