"""What published programs do otherwise than this library, for plans that are compared with their figures.

reserved    FSDP2 allocates the output of an all-gather and that of a reduce-scatter each on a stream of its own, and
            the allocator gives no memory of one stream to another (torch/distributed/fsdp/_fully_shard,
            pytorch#129721): those bytes stay reserved while others of the stream of compute are in use. What that
            reserves is replayed (`allocator`). This library has all of them on the stream of compute
hidden      asynchronous TP cuts a message along `tp` into as many parts as there are ranks, beside as many parts of the
            product that reads or makes it (`hidden_seconds`). This library waits
in place    FSDP1 and FSDP2 add the gradients of a micro-batch to those of earlier ones as they come, sharded ones too.
            This library keeps both until the backward is over: if it fails, the earlier ones are unchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.allocator import lines_of, replayed
from fullshard.layout import UnitMemory
from fullshard.plan import Plan
from fullshard.plan.account import KINDS
from fullshard.plan.clock import Clock
from fullshard.plan.description import MESSAGE, Kind, Line, Model, Sent
from fullshard.plan.recomputation import AGAIN, is_matmul
from fullshard.plan.result import Limited, planned
from fullshard.plan.simulation import Simulation
from fullshard.plan.spans import Work
from fullshard.plan.strategy import Unit
from fullshard.schedule import UnitRecord


def beside_compute_nbytes(plan: Plan) -> float:
    """The bytes that pools of other streams than that of compute have at most, and that are not in use at the peak."""
    at_peak = dict(zip(KINDS, plan.simulated.peak.nbytes, strict=True))
    reduced = sum(g.sent.reduced_nbytes for unit in plan.units for g in unit.groups if g.sent is not None)
    gathered = [sum(group.gathered_nbytes for group in unit.groups) for unit in plan.units]
    # The output of one all-gather is freed when the next one is waited for.
    both = max((a + b for a, b in pairwise(gathered)), default=sum(gathered))
    return max(reduced - at_peak["gradients of shards"], 0.0) + max(both - at_peak["staging"], 0.0)


def reserved_nbytes(plan: Plan, model: Model | None = None) -> float:
    """What the allocator reserves in a step of FSDP2. `model`: that of the plan, with the tape of its micro-batch, to
    be replayed; None: what is in use at the peak, with the profile's allowance."""
    own = plan.simulated.peak.total * (1 + plan.hardware.fragmentation) if model is None else replayed(plan, model)
    return min(own + beside_compute_nbytes(plan), plan.budget - plan.hardware.reserved)


def hidden_seconds(plan: Plan, model: Model) -> float:
    """The seconds of a step of one micro-batch that asynchronous TP does not wait. `model`: as in `allocator.replayed`.

    Inductor pairs an all-gather with the products that read it, in backward with that of the gradient of an input, and
    a reduce-scatter with the product that makes its input, not with a sum of several: in compiled units, which the root
    is not (torch/_inductor/fx_passes/micro_pipeline_tp.py). Each rank copies the parts of others one after the other,
    each beside the product of the part before it. Before a gather it copies its own part, and it adds what was
    scattered (torch/distributed/_symmetric_memory)."""
    unit_of: dict[int, int] = {}
    hidden = 0.0
    lines = [line for line in lines_of(plan, model) if line.kind is not Kind.ALLOCATE and line.kind is not Kind.FREE]
    begins = next(place for place, line in enumerate(lines) if line.kind is Kind.LOSS)
    for place, line in enumerate(lines):
        if line.kind is Kind.ENTER:
            unit_of[line.use] = line.a
        if line.kind is not Kind.OP or MESSAGE not in line.name or not unit_of.get(line.use):
            continue
        message = Sent.named(line.name.rpartition(MESSAGE)[2], 1, float(line.a))
        if message.axis != "tp":
            continue
        if message.operation.startswith("all_gather"):
            backward = place > begins and not line.name.startswith(AGAIN)
            products = _reading(lines, place)[: 1 if backward else None]
        else:
            products = _making(lines, place)
        if products:
            hidden += _hidden(plan, message.operation, message.nbytes, products)
    return hidden


def _reading(lines: Sequence[Line], place: int) -> list[Line]:
    """The products between a message and the next one, or attention."""
    found = []
    for line in lines[place + 1 :]:
        if line.kind is not Kind.OP or MESSAGE in line.name or "attention" in line.name:
            break
        if is_matmul(line.name):
            found.append(line)
    return found


def _making(lines: Sequence[Line], place: int) -> list[Line]:
    """The product whose result a message sends, if it sends that of one."""
    before = next(line for line in reversed(lines[:place]) if not line.name.endswith(".cat"))
    return [before] if is_matmul(before.name) else []


def _hidden(plan: Plan, operation: str, nbytes: float, products: Sequence[Line]) -> float:
    """Seconds of one message that are not waited for; less than 0 if it takes longer so."""
    strategy, hardware = plan.strategy, plan.hardware
    ranks, stride = strategy.group("tp")
    clock = Clock(hardware, 2, compiled=strategy.compiled, float8=strategy.float8)
    product = sum(clock.seconds(Work(matmul=line.a, matmul_nbytes=line.b)) for line in products)
    copies = nbytes * (ranks - 1) / ranks / hardware.intra_node
    gathers = operation.startswith("all_gather")
    moved = 2 * nbytes / ranks if gathers else nbytes * (1 + 1 / ranks)
    waits = max(copies + product / ranks - product, 0.0)
    waits += hardware.latency + moved / (hardware.bandwidth * hardware.stream)
    return hardware.collective("all-gather" if gathers else "reduce-scatter", ranks, stride, nbytes) - waits


def with_sums_in_place(plan: Plan) -> Plan:
    """The same plan if gradients of micro-batches are added as they come."""
    model, strategy, hardware, units = plan.model, plan.strategy, plan.hardware, plan.units
    simulated = _InPlace(units, strategy, hardware, model.buffer_nbytes, brief=True).run(plan.step)
    return planned(model, plan.step, strategy, hardware, units, simulated, Limited(plan.budget, plan.host_budget))


class _InPlace(Simulation):
    def _accumulate(self, unit: Unit, record: UnitRecord) -> None:
        name = unit.shape.title
        self.gradients[record.index] = 0.0
        if not self.bytes.nbytes("held gradients", name):
            self._hold(unit)
        self.bytes.clear("gradients", name)
        self.clock.copy(2 * self.bytes.nbytes("held gradients", name))

    def _reduce(self, unit: Unit, record: UnitRecord) -> None:
        super()._reduce(unit, record)
        self._add_sums()

    def _sum_with_held(self, name: str, sent: UnitMemory, own: float) -> float:
        held = float(sent.held_nbytes)
        self.bytes.add("held gradients", name, -held)
        self.bytes.add("gradients", name, held - own)
        return held
