"""A plan: what one rank holds, sends and waits for in a step, as values, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..layout import ONE_LEVEL, TWO_LEVELS, Rates, Ways, itemsize
from .account import KINDS, Simulated
from .checkpoints import Checkpoints, checkpoints_of
from .description import OUTSIDE, Model, Sent
from .machine import COMMUNICATOR_NBYTES, Hardware
from .padding import Padding, padding_of
from .recomputation import without_host
from .simulation import simulate
from .spans import Step
from .strategy import OPTIMIZERS, Strategy, Unit, units_of

# 419 unexpected interruptions in 54 days on 16,384 devices (Llama 3).
FAILURE_HOURS = 54 * 24 * 16384 / 419


@dataclass(frozen=True)
class Plan:
    """One strategy on one hardware. `terms`: bytes at the peak by name, allowances included; their sum is
    `peak_nbytes`. `host_terms`: bytes of the rank in host memory when there is most of it; their sum is
    `host_peak_nbytes`. `budget`, `host_budget`: bytes of a device, and of the host for a rank; 0: not known."""

    model: Model
    strategy: Strategy
    hardware: Hardware
    budget: float
    units: tuple[Unit, ...]
    step: Step
    simulated: Simulated
    terms: tuple[tuple[str, float], ...]
    padding: tuple[Padding, ...]
    checkpoints: Checkpoints
    host_terms: tuple[tuple[str, float], ...] = ()
    host_budget: float = 0.0
    # The same step with its messages in other ways between the hosts, if they have a choice.
    other_ways: tuple[tuple[Ways, Simulated], ...] = ()
    # The stages of a rank of a pipeline, and what it sends to others in a step. Where it stands for all: plans of all
    # ranks, and the plan on other hardware.
    here: tuple[int, ...] = ()
    given: tuple[Sent, ...] = ()
    ranks: tuple[Plan, ...] = ()
    again: Callable[[Hardware], Plan] | None = None

    @property
    def sent_by_host(self) -> dict[str, float]:
        """Bytes that the interface of the busiest host sends in a step, first in the way of the plan. Empty on one."""
        placed = self.strategy.placed
        # Without levels there is one way: the backend's, or from rank to rank.
        found = {str(ONE_LEVEL if placed.levels is None else placed.ways): self.simulated}
        found |= {str(ways): simulated for ways, simulated in self.other_ways}
        sums = {way: sum(t.leaving for t in one.traffic.values()) for way, one in found.items()}
        return sums if self.strategy.hosts > 1 else {}

    @property
    def peak_nbytes(self) -> float:
        return sum(nbytes for _, nbytes in self.terms)

    @property
    def allocator_nbytes(self) -> float:
        """Bytes that the allocator reserves at the peak, if the device has room: all are of the stream of compute."""
        used = self.simulated.peak.total
        return max(used, min(used * (1 + self.hardware.fragmentation), self.budget - self.hardware.reserved))

    @property
    def margin_nbytes(self) -> float:
        """The bytes that have to be left: a plan fits if it does with these, too."""
        return self.hardware.margin * self.peak_nbytes

    @property
    def spare_nbytes(self) -> float:
        """The bytes of the budget beside the peak."""
        return self.budget - self.peak_nbytes

    @property
    def fits(self) -> bool:
        """Whether the plan fits on the device with its margin, and on the host as far as its memory is known."""
        own = self.margin_nbytes <= self.spare_nbytes and self.fits_on_host
        return own and all(rank.fits for rank in self.ranks)

    @property
    def host_peak_nbytes(self) -> float:
        return sum(nbytes for _, nbytes in self.host_terms)

    @property
    def fits_on_host(self) -> bool:
        return not self.host_budget or self.host_peak_nbytes <= self.host_budget

    @property
    def curable(self) -> bool:
        """Whether another placement would save padding."""
        return any(padding.by_placement for padding in self.padding)

    @property
    def seconds(self) -> float:
        return self.simulated.seconds

    @property
    def divided_messages(self) -> tuple[Sent, ...]:
        """Messages of a step of one rank along `tp`, `cp` and `ep`: of the layers, of gradients that are sums over
        `tp`, and the two numbers by which `prepare_fully_shard` compares what each forward gets."""
        times = self.strategy.accumulate
        found = [each.times(times) for each in self.step.messages]
        dtypes = [p.dtype for unit in self.model.units for p in unit.parameters]
        computed = self.strategy.compute or next(iter(dtypes), "float32")
        wide = max(itemsize(computed), itemsize(self.strategy.reduce or computed))
        for operation in sorted({name for name, _ in self.model.tape.brought}):
            sizes = [numel * wide for name, numel in self.model.tape.brought if name == operation]
            found.append(Sent(f"{operation} of gradients", len(sizes) * times, float(sum(sizes) * times)))
        if self.strategy.tensor > 1:
            # Of a pipeline's step as a whole, with a number that says whether a rank cannot begin.
            times, nbytes = (1, 24.0) if self.strategy.pipeline > 1 else (times, 16.0 * times)
            found.append(Sent("all_reduce of inputs' digests", times, nbytes))
        if self.strategy.context > 1:
            # Of what is attended to first; and at the end of the context, which the tape does not have.
            found.append(Sent("all_reduce at the end", times, 16.0 * times, "cp"))
        return (*found, *self.given)

    @property
    def tokens(self) -> float:
        """Tokens of a step of one rank."""
        return self.model.tokens / self.model.samples * self.strategy.micro * self.strategy.accumulate

    @property
    def tokens_per_second(self) -> float:
        """The tokens in a second, divided by the ranks: those that share a layer, and those of a pipeline, have the
        same ones."""
        alike = self.strategy.tensor * self.strategy.pipeline
        return self.tokens / alike / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """Share of the device's peak that the operations which the model requires take (PaLM's MFU)."""
        peak = self.hardware.flops2 if self.narrow else self.hardware.flops4
        # The operations are those of one rank of `tp`, which has all of the tokens; of all ranks of a pipeline.
        done = self.model.flop_per_token(self.strategy.context) * self.tokens / self.seconds if self.seconds else 0.0
        return done / peak / self.strategy.pipeline

    @property
    def narrow(self) -> bool:
        dtypes = {p.dtype for unit in self.model.units for p in unit.parameters}
        return (self.strategy.computed or next(iter(dtypes), "float32")) in ("bfloat16", "float16")

    @property
    def largest(self) -> list[tuple[str, float]]:
        """The five largest things of the peak, by what and unit."""
        others = [term for term in self.terms if term[0] not in KINDS]
        return sorted([*self.simulated.terms, *others], key=lambda term: -term[1])[:5]

    def as_json(self) -> dict[str, Any]:
        """Returns what `fullshard plan --json` prints; documented in docs/plan.md."""
        found = self.simulated
        return {
            "model": self.model.name,
            "parameters": self.model.undivided_numel or self.model.numel,
            "parameters_of_rank": self.model.numel,
            "hardware": self.hardware.name,
            "strategy": _strategy(self.strategy),
            "fits": self.fits,
            "budget_bytes": int(self.budget),
            "peak_bytes": int(self.peak_nbytes),
            "spare_bytes": int(self.spare_nbytes),
            "margin_bytes": int(self.margin_nbytes),
            "reserved_bytes": int(self.allocator_nbytes),
            "time_error": self.hardware.time_error,
            "memory_error": self.hardware.memory_error,
            "peak_moment": found.peak.phase,
            "terms": {name: int(nbytes) for name, nbytes in self.terms},
            "host_bytes": {name: int(nbytes) for name, nbytes in self.host_terms},
            "host_peak_bytes": int(self.host_peak_nbytes),
            "host_budget_bytes": int(self.host_budget) or None,
            "largest": [{"name": name, "bytes": int(nbytes)} for name, nbytes in self.largest],
            "phases": {phase: dict(zip(KINDS, map(int, row), strict=True)) for phase, row in self.phases().items()},
            "units": [_unit_row(unit, self.held(i)) for i, unit in enumerate(self.units)],
            "bytes_sent": {axis: int(t.nbytes) for axis, t in found.traffic.items() if t.calls},
            "bytes_sent_by_host": self.sent_by_host,
            "messages": {axis: t.calls for axis, t in found.traffic.items() if t.calls},
            "tensor_messages": [
                {"operation": each.operation, "messages": each.count, "bytes": int(each.nbytes)}
                for each in self.divided_messages
                if each.axis == "tp"
            ],
            "axis_messages": [
                {"axis": each.axis, "operation": each.operation, "messages": each.count, "bytes": int(each.nbytes)}
                for each in self.divided_messages
                if each.axis != "tp"
            ],
            "padding": [{"parameter": p.parameter, "bytes": p.nbytes, "cure": p.cure} for p in self.padding],
            "step_seconds": found.seconds,
            "compute_seconds": found.compute,
            "exposed_seconds": found.exposed_seconds,
            "optimizer_seconds": found.optimizer_seconds,
            "owners": None if found.owners is None else found.owners._asdict(),
            "host_bound_seconds": found.host_bound,
            "axis_seconds": found.along,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "checkpoint": {
                "save_seconds": self.checkpoints.save,
                "load_seconds": self.checkpoints.load,
                "young_seconds": self.checkpoints.young,
                "daly_seconds": self.checkpoints.daly,
                "between_failures_seconds": self.checkpoints.between_failures,
            },
            "assumptions": list(assumptions(self)),
        }

    def held(self, unit: int) -> float:
        """Activations that the unit's forward leaves for its backward."""
        return dict(self.step.held).get(unit, 0.0)

    def phases(self) -> dict[str, tuple[float, ...]]:
        """The largest moment of forward, loss, backward and optimizer, by kind."""
        found: dict[str, tuple[float, ...]] = {}
        for moment in self.simulated.moments:
            phase = moment.phase.split()[0].replace("end", "backward")
            if phase not in found or sum(found[phase]) < moment.total:
                found[phase] = moment.nbytes
        return found


def plan_of(
    model: Model,
    step: Step,
    strategy: Strategy,
    hardware: Hardware,
    *,
    budget: float | None = None,
    host_budget: float | None = None,
    failure_hours: float = FAILURE_HOURS,
    units: tuple[Unit, ...] | None = None,
    brief: bool = False,
) -> Plan:
    """The plan of one strategy. `step`: of its size of the micro-batch and its recomputation; `budget`, `host_budget`:
    bytes of a device and of the host for a rank, None for all that the hardware has; `failure_hours`: between two
    failures of one device; `units`: of the strategy, if they are there already; `brief`: as of `simulate`."""
    if strategy.float8 and not hardware.float8:
        raise ValueError(f"float8: expected a device with products in float8, found {hardware.name}")
    hardware = hardware if strategy.hosts == 1 else replace(hardware, node=strategy.ranks // strategy.hosts)
    others: list[Ways] = []
    if strategy.placed.levels is not None:
        if strategy.ways is None:
            rates = Rates(hardware.node * hardware.inter_node, hardware.node * hardware.intra_node)
            strategy, units = replace(strategy, ways=strategy.placed.fastest(rates)), None
        others = [ways for ways in (TWO_LEVELS, ONE_LEVEL) if ways != strategy.ways]
    units = units_of(model, strategy) if units is None else units
    simulated = simulate(units, step, strategy, hardware, model.buffer_nbytes, brief=brief)
    other_ways = tuple(
        (ways, simulate(units, step, replace(strategy, ways=ways), hardware, model.buffer_nbytes, brief=brief))
        for ways in others
    )
    limits = Limited(budget, host_budget, failure_hours)
    return replace(planned(model, step, strategy, hardware, units, simulated, limits), other_ways=other_ways)


class Limited(NamedTuple):
    """The last arguments of `plan_of`."""

    budget: float | None = None
    host_budget: float | None = None
    failure_hours: float = FAILURE_HOURS


def planned(
    model: Model,
    step: Step,
    strategy: Strategy,
    hardware: Hardware,
    units: tuple[Unit, ...],
    simulated: Simulated,
    limits: Limited,
) -> Plan:
    """The plan of a rank whose step was simulated."""
    budget, host_budget, failure_hours = limits
    by_kind = list(zip(KINDS, simulated.peak.nbytes, strict=True))
    blocks = max(unit.part for unit in units)
    experts = max((p.shards for unit in units for p in unit.shape.parameters), default=0)
    counted = simulated.peak.total
    terms = [
        *by_kind,
        ("communicators", hardware.communicators_nbytes(*strategy.axes, blocks, experts)),
        ("reserved by the device", hardware.reserved),
        ("allowance for fragmentation", hardware.fragmentation * counted),
    ]
    return Plan(
        model,
        strategy,
        hardware,
        hardware.memory if budget is None else budget,
        units,
        step,
        simulated,
        tuple((name, float(nbytes)) for name, nbytes in terms if nbytes),
        padding_of(units),
        checkpoints_of(units, strategy, hardware, failure_hours),
        simulated.on_host,
        hardware.host_memory if host_budget is None else host_budget,
    )


def _strategy(strategy: Strategy) -> dict[str, Any]:
    ways = strategy.recompute
    return {
        "ranks": strategy.ranks,
        "hosts": strategy.hosts,
        "replicas": strategy.replicas,
        "shard": strategy.shard,
        "tensor": strategy.tensor,
        "context": strategy.context,
        "experts": strategy.experts,
        "pipeline": strategy.pipeline,
        "schedule": strategy.schedule if strategy.pipeline > 1 else None,
        "reshard_after_forward": strategy.reshard,
        "param_dtype": strategy.compute or None,
        "storage_dtype": strategy.storage or None,
        "even": strategy.even,
        "compiled": strategy.compiled,
        "compiled_loss": strategy.compiled_loss,
        "float8": strategy.float8,
        "reduce_dtype": strategy.reduce or None,
        "micro_batch": strategy.micro,
        "accumulate": strategy.accumulate,
        "recompute": without_host(ways) if isinstance(ways, str) else [without_host(way) for way in ways],
        "offload_activations": strategy.hosts_activations,
        "offload": strategy.offload,
        "optimizer": strategy.optimizer,
    }


def _unit_row(unit: Unit, held: float) -> dict[str, Any]:
    return {
        "name": unit.shape.title,
        "class": unit.shape.module_class,
        "parameters": unit.shape.numel,
        "shard_bytes": sum(g.memory.shard_nbytes for g in unit.groups),
        "optimizer_bytes": sum(g.state_nbytes for g in unit.groups),
        "full_bytes": sum(g.memory.full_nbytes for g in unit.groups),
        "gradient_bytes": sum(g.sent.gradient_nbytes for g in unit.groups if g.sent is not None),
        "gathered_bytes": sum(g.gathered_nbytes for g in unit.groups),
        "activation_bytes": int(held),
    }


# ---- text ------------------------------------------------------------------------------------------------------------


def gigabytes(nbytes: float) -> str:
    """Bytes in powers of 1000, as devices are sold.

    >>> gigabytes(79.5e9), gigabytes(2.5e6), gigabytes(812)
    ('79.50 GB', '2.50 MB', '812 B')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(90), duration(7200)
    ('12.3 ms', '90.0 s', '2.0 h')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


def _computed(plan: Plan) -> str:
    compute = plan.strategy.compute
    kept = [p for unit in plan.model.units for p in unit.parameters if p.kept and p.dtype != compute]
    if not compute or not kept:
        return compute or "parameters as stored"
    return f"{compute}, {len(kept)} parameters ({sum(p.numel for p in kept):,} elements) in their own dtype"


def table(plan: Plan) -> str:
    """Returns the plan as text."""
    model, found, strategy = plan.model, plan.simulated, plan.strategy
    reduced = f"reduced in {strategy.reduce or 'their own dtype'}"
    part = f" ({model.numel:,} of each part)" * (model.undivided_numel > 0)
    numel = f"{model.undivided_numel or model.numel:,} parameters{part}"
    lines = [
        f"{model.name}: {numel} in {len(plan.units)} units, {strategy.ranks} x {plan.hardware.name}",
        f"{strategy}; {_computed(plan)}, {reduced}; {strategy.optimizer}; {plan.tokens:,.0f} tokens per rank and step",
        "",
    ]
    host = f"; on the host {gigabytes(plan.host_peak_nbytes)} of {gigabytes(plan.host_budget)}"
    peak = f"{_verdict(plan)}: peak {gigabytes(plan.peak_nbytes)} of {gigabytes(plan.budget)}, in {found.peak.phase}"
    lines.append(peak + host * (not plan.fits_on_host))
    lines += [f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in sorted(plan.terms, key=lambda t: -t[1])]
    if plan.host_terms:
        share = f"of {gigabytes(plan.host_budget)}" if plan.host_budget else "(how much it has is not known)"
        lines.append(f"on the host, of this rank: peak {gigabytes(plan.host_peak_nbytes)} {share}")
        lines += [f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in plan.host_terms]
    lines += ["", "the five largest of these, by unit"]
    lines += [f"  {gigabytes(nbytes):>10}  {name}" for name, nbytes in plan.largest]
    lines += ["", *_phase_lines(plan), "", *_unit_lines(plan), ""]
    for axis, traffic in found.traffic.items():
        if traffic.calls:
            lines.append(
                f"messages, axis {axis}: {traffic.calls} calls, {gigabytes(traffic.nbytes)} of each rank, "
                f"{duration(traffic.seconds)} on the wire"
            )
    if plan.sent_by_host:
        ways = " or ".join(f"{gigabytes(nbytes)} in {way}" for way, nbytes in plan.sent_by_host.items())
        lines.append(f"between {strategy.hosts} hosts: each sends {ways}")
    lines += [
        f"messages, axis {each.axis}: {each.count} x {each.operation}, {gigabytes(each.nbytes)} "
        + ("of whole tensors" if each.axis == "tp" else "that leave a rank")
        for each in plan.divided_messages
    ]
    for axis, seconds in found.along.items():
        ranks, stride = strategy.group(axis)
        nodes = -(-ranks * stride // plan.hardware.node)
        where = "inside of a node" if nodes == 1 else f"over {nodes} nodes"
        lines.append(f"axis {axis}: {ranks} ranks, {stride} apart, {where}; {duration(seconds)} on the wire")
    if found.owners is not None:
        lines.append(
            f"owners of matrices: {found.owners.flops / 1e12:.3g} TFLOP of Newton-Schulz iterations on one rank, "
            f"{found.owners.messages} all-to-alls, {gigabytes(found.owners.sent_nbytes)} sent by a rank, "
            f"{gigabytes(found.owners.nbytes)} of whole matrices and messages on one"
        )
    for padding in plan.padding[:3]:
        lines.append(
            f"padding: {padding.parameter} sends {gigabytes(padding.nbytes)} of padding ({padding.share:.0%}); "
            f"{padding.cure}"
        )
    lines += [
        f"step {duration(found.seconds)}: compute {duration(found.compute)}, waiting for messages "
        f"{duration(found.exposed_seconds)}, for the host {duration(found.host_bound)}, "
        f"optimizer {duration(found.optimizer_seconds)}",
        _speed(plan),
        f"a checkpoint takes about {duration(plan.checkpoints.save)}; best every {duration(plan.checkpoints.daly)} "
        f"(Daly; Young {duration(plan.checkpoints.young)}), with a failure about every "
        f"{duration(plan.checkpoints.between_failures)}",
        "times come from a model of the hardware, not from a run: --assumptions",
    ]
    return "\n".join(lines)


def _speed(plan: Plan) -> str:
    """Says how fast it is, and how sure that is."""
    said = f"{plan.tokens_per_second:,.0f} tokens per second and rank, MFU {plan.mfu:.1%}"
    error = plan.hardware.time_error
    if plan.spare_nbytes < plan.margin_nbytes:
        return f"at most {said}: short of memory, the allocator gives blocks back and asks again, which is not counted"
    return said + f"; error of such plans {error:.0%}" * (error > 0)


def _verdict(plan: Plan) -> str:
    """Says whether it fits, and how sure that is."""
    hardware, spare = plan.hardware, gigabytes(plan.spare_nbytes)
    if plan.fits:
        sure = f", margin {hardware.margin:.0%}; error of such plans {hardware.memory_error:.0%}"
        return f"fits, with {spare} to spare" + sure * (hardware.margin > 0)
    if plan.spare_nbytes >= 0 and plan.fits_on_host:
        return f"does not fit: {spare} to spare are less than the margin of {hardware.margin:.0%}"
    return "does not fit"


def _phase_lines(plan: Plan) -> list[str]:
    """Bytes by kind in the largest moment of each phase, a column each."""
    phases = plan.phases()
    lines = [f"{'most in':<20}" + "".join(f"{phase:>12}" for phase in phases)]
    for kind, row in zip(KINDS, zip(*phases.values(), strict=True), strict=True):
        if any(row):
            lines.append(f"{kind:<20}" + "".join(f"{gigabytes(nbytes) if nbytes else '-':>12}" for nbytes in row))
    return [*lines, f"{'together':<20}" + "".join(f"{gigabytes(sum(row)):>12}" for row in phases.values())]


def _unit_lines(plan: Plan) -> list[str]:
    """Units with equal figures in one line."""
    rows: list[tuple[list[str], tuple[str, ...]]] = []
    for i, unit in enumerate(plan.units):
        row = _unit_row(unit, plan.held(i))
        figures = tuple(
            gigabytes(row[key])
            for key in ("shard_bytes", "optimizer_bytes", "full_bytes", "gradient_bytes", "activation_bytes")
        )
        cells = (unit.shape.module_class, f"{unit.shape.numel:,}", *figures)
        if rows and rows[-1][1] == cells:
            rows[-1][0].append(unit.shape.title)
        else:
            rows.append(([unit.shape.title], cells))
    header = ("unit", "class", "parameters", "shards", "optimizer", "full", "gradients", "activations held")
    body = [
        (names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})", *cells) for names, cells in rows
    ]
    body.append(("outside of units", "", "", "", "", "", "", gigabytes(plan.held(OUTSIDE))))
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *body)
    ]


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Everything that was assumed and not counted."""
    hw = plan.hardware
    return (
        f"hardware {hw.name}: {hw.flops2 / 1e12:.0f} TFLOP/s in 16 bits and {hw.flops4 / 1e12:.3g} in float32, "
        f"of which matrix products reach {hw.matmul:.0%} and attention {hw.attention:.0%}; "
        f"{hw.bandwidth / 1e9:.0f} GB/s of memory, of which other kernels reach {hw.stream:.0%}",
        "every operation outside of matrix products reads its inputs from and writes its results to device memory "
        "once: eager kernels, nothing is fused",
        "attention is a fused kernel, which holds no scores; other operations hold what they hold on a CPU, workspaces "
        "of libraries are not counted",
        f"messages: {hw.intra_node / 1e9:.0f} GB/s inside of a node of {hw.node}, {hw.inter_node / 1e9:.0f} GB/s per "
        f"device between nodes, of which a ring has all, {hw.latency * 1e6:.0f} us each and {hw.hop * 1e6:.0f} "
        f"us more for each node; one at a time on each axis; compute is {hw.contention:.0%} slower beside them",
        *_assumed_along(plan.strategy),
        f"the host takes {hw.launch * 1e6:.0f} us for an operation",
        f"{gigabytes(hw.reserved)} are taken by driver and libraries; {hw.fragmentation:.0%} of what is counted "
        f"is allowed for fragmentation; a communicator takes {gigabytes(COMMUNICATOR_NBYTES)} (NCCL's defaults)",
        "ranks are alike: no stragglers, no time for data, logging or checkpoints in a step",
        "a steady step: the order is known and the optimizer has its state, which it reads and writes once",
        f"storage {gigabytes(hw.storage)}/s for each rank; a device fails about every "
        f"{plan.checkpoints.between_failures * plan.strategy.ranks / 3600:,.0f} h (Llama 3: 419 in 54 days on 16,384)",
        f"MFU counts {plan.model.flop_per_token(plan.strategy.context) * plan.strategy.tensor:.4g} operations per "
        "token: 6 for each element that multiplies and, where known, causal attention; recomputation does not count",
        "the forward of a recomputed unit holds what it does not keep until its last read, not as long as its local "
        "variables",
        "figures of another micro-batch in a search are linear in its size",
        *_assumed_of_optimizer(plan.strategy),
        *_assumed_of_state(plan.model),
        *plan.model.tape.assumed,
        *_assumed_of_host(plan),
    )


def _assumed_of_state(model: Model) -> list[str]:
    left = [p for unit in model.units for p in unit.parameters if p.trainable and not p.reached]
    said = f"{len(left)} trainable parameters, {left[0].name} first, get no gradient from" if left else ""
    return [f"{said} the batch that was recorded: the optimizer has no state for them"] if left else []


def _assumed_along(strategy: Strategy) -> list[str]:
    if strategy.tensor == strategy.context == strategy.experts == 1:
        return []
    return [
        "messages of divided layers are waited for where they are sent, as torch runs them; only those of a ring run "
        "beside attention; each expert gets as many tokens; axes do not take bandwidth from each other"
    ]


def _assumed_of_optimizer(strategy: Strategy) -> list[str]:
    optimizer = OPTIMIZERS[strategy.optimizer]
    if optimizer.counted:
        return [f"the optimizer is torch's, as for DTensors by default: {_SAYS[strategy.optimizer]}"]
    if strategy.optimizer == "muon":
        return [
            "muon was not run here: matrices have torch's Muon by fullshard.step_on_owners, whole on one rank each, "
            "with five Newton-Schulz iterations in bfloat16; what is no matrix has AdamW; messages are hidden by the "
            "chunks before them, but for the first one there and the last one back"
        ]
    return [
        f"{strategy.optimizer} was not run here: its state is taken to be 2 bytes for each element and 8 for each "
        f"block of 256, and its step to make what Adam's makes"
    ]


_SAYS = {
    "adamw": "one parameter after the other, without amsgrad",
    "adam": "one parameter after the other, without amsgrad and weight_decay",
    "adamw-foreach": "foreach=True, all parameters in one call, without amsgrad",
    "sgd": "without momentum and weight_decay",
    "sgd-momentum": "with momentum, without weight_decay",
    "none": "there is none",
}


def _assumed_of_host(plan: Plan) -> list[str]:
    if plan.hardware.blocking:
        return []
    found = [
        f"each rank may use {gigabytes(plan.host_budget)} of the host's memory, an equal share for each device of a "
        f"node; what system, data loaders and libraries take of it is not counted"
        if plan.host_budget
        else "the host's memory is not known: what goes there is taken to fit (--host-budget, or host_memory in a TOML)"
    ]
    if not plan.host_terms:
        return found
    return [
        *found,
        f"copies between host and device move {gigabytes(plan.hardware.host)}/s for each rank, those of activations "
        f"on the stream of compute; what the allocator of page-locked memory rounds up is not counted",
    ]
