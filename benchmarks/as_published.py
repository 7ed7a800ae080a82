"""What published programs do otherwise than this library, for plans that are compared with their figures.

reserved    FSDP2 allocates the output of an all-gather and that of a reduce-scatter each on a stream of its own, and
            the allocator gives no memory of one stream to another (torch/distributed/fsdp/_fully_shard,
            pytorch#129721): those bytes stay reserved while others of the stream of compute are in use. What that
            reserves is replayed (`allocator`). This library has all of them on the stream of compute
hidden      asynchronous TP cuts a message along `tp` into as many parts as there are ranks, and has each but one beside
            a part of the product that makes or reads it (torch.distributed._symmetric_memory). This library waits
in place    FSDP1 and FSDP2 add the gradients of a micro-batch to those of earlier ones as they come, sharded ones too.
            This library keeps both until the backward is over: if it fails, the earlier ones are unchanged
"""

from __future__ import annotations

from itertools import pairwise

from benchmarks.allocator import replayed
from fullshard.layout import UnitMemory
from fullshard.plan import Plan
from fullshard.plan.account import KINDS
from fullshard.plan.description import Model
from fullshard.plan.result import Limited, planned
from fullshard.plan.simulation import Simulation
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


def hidden_seconds(plan: Plan) -> float:
    """The seconds of a step of one micro-batch that asynchronous TP would not wait, if products take longer."""
    waits = sum(wait.seconds for wait in plan.simulated.exposed if wait.what == "messages along tp")
    return waits * (1 - 1 / plan.strategy.tensor)


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
