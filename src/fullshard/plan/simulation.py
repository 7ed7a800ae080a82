"""A step in time and bytes: the rules of `schedule` run with clocks and a byte counter, as the engine's executor runs
them.

Two steps are taken: the first records the order, the second is measured, as in a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from ..layout import UnitMemory, itemsize
from ..schedule import Command, RunRecord, UnitRecord, Use, rules
from .account import KINDS, Bytes, Exposed, Moment, Pool, Simulated, Traffic
from .clock import AXES, Clock
from .description import OUTSIDE, Parameter
from .machine import Hardware
from .owners import owners_step
from .reductions import Reductions
from .spans import Message, Span, Step, Work
from .strategy import OPTIMIZERS, Group, Limits, Optimizer, Strategy, Unit

# Send buffers at once on a device (policy/options.py).
SEND_BUFFERS = 1


def simulate(
    units: Sequence[Unit],
    step: Step,
    strategy: Strategy,
    hardware: Hardware,
    buffer_nbytes: float = 0.0,
    *,
    brief: bool = False,
) -> Simulated:
    """One steady step of one rank: `accumulate` forwards and backwards of `step`, and the optimizer's.
    `buffer_nbytes`: of the model's buffers. `brief`: no commands, and of all moments the peak alone."""
    return Simulation(units, strategy, hardware, buffer_nbytes, brief=brief).run(step)


class Simulation:
    """One rank. Each command has a method of its name, as in the executor."""

    def __init__(
        self,
        units: Sequence[Unit],
        strategy: Strategy,
        hardware: Hardware,
        buffer_nbytes: float = 0.0,
        *,
        limits: Limits | None = None,
        records: Sequence[UnitRecord] | None = None,
        brief: bool = False,
        beside: Simulation | None = None,
    ) -> None:
        """`limits`: None for those that the engine has on such hardware. `records`: of `units`, with what the rules
        read about them. `brief`: as of `simulate`. `beside`: another model of the same rank, with whose bytes and clock
        this one counts."""
        if limits is None:
            limits = Limits(strategy.prefetch_depth, send_buffers=None if hardware.blocking else SEND_BUFFERS)
        self.units, self.strategy, self.brief = units, strategy, brief
        self.schedule = RunRecord(list(records or map(record_of, units, range(len(units)))))
        self.schedule.prefetch_depth = limits.prefetch_depth
        self.schedule.prefetch_nbytes = limits.prefetch_nbytes
        # The bytes on the device.
        self.bytes: Bytes = Bytes() if beside is None else beside.bytes
        host = Bytes() if beside is None else beside.host
        self.pool = Pool(self.bytes, keep=hardware.blocking)
        dials = {"compiled": strategy.compiled, "float8": strategy.float8}
        itemsize = itemsize_of(units, strategy)
        self.clock: Clock = Clock(hardware, itemsize, **dials) if beside is None else beside.clock
        self.reductions = Reductions(strategy, limits, self.bytes, host, self.pool, self.clock)
        self.measured = False
        self.phase = ""
        # The times at which gathers arrive, and the bytes of gradients that no command took yet; by index of the unit.
        self.arrivals: dict[int, float] = {}
        self.gradients: dict[int, float] = dict.fromkeys(range(len(units)), 0.0)
        # The uses of this pass as the rules number them, by their numbers on the tape.
        self.uses: dict[int, Use] = {}
        # The units whose held gradients go with this backward, and units whose gradients stay here.
        self.touched: list[str] = []
        self.staying: list[Unit] = []
        for unit in units:
            for group in unit.groups:
                there = self.host if group.memory.offloaded else self.bytes
                there.add("parameters", unit.shape.title, group.memory.shard_nbytes)
                there.add("optimizer", unit.shape.title, group.state_nbytes)
            self.bytes.add("full parameters", unit.shape.title, unit.staying_nbytes)
        self.bytes.add("buffers", self.key, buffer_nbytes)

    @property
    def host(self) -> Bytes:
        """The bytes in host memory."""
        return self.reductions.host

    @property
    def key(self) -> str:
        """The name of its activations."""
        return ""

    @property
    def turn(self) -> str:
        """The phase between forward and backward."""
        return "loss"

    @property
    def elsewhere(self) -> float:
        """Bytes of the activations on the tape that are counted elsewhere."""
        return 0.0

    @property
    def found(self) -> Simulated:
        return self.clock.found

    # ---- the step --------------------------------------------------------------------------------------------

    def run(self, step: Step) -> Simulated:
        self.bytes.add("batch", "", step.batch_nbytes)
        windows = self.strategy.accumulate
        for measured in (False, True):
            self.measured, self.clock.still = measured, not measured
            self.bytes.forget()
            self.host.forget()
            self.clock.begin(Simulated(traffic={axis: Traffic() for axis in AXES}))
            for window in range(windows):
                # Between the first and the last of a window all are alike: one stands for the others.
                if 1 < window < windows - 1:
                    continue
                for unit, record in zip(self.units, self.schedule.units, strict=True):
                    record.plan.sync = window == windows - 1 or not unit.holds_gradients
                before = self._figures()
                begun = self.found.phases.copy()
                self._pass(step)
                if window == 1 and windows > 3:
                    self._repeat(windows - 3, before)
                    for phase, seconds in self.found.phases.items():
                        self.found.phases[phase] += (windows - 3) * (seconds - begun[phase])
                    self.found.passed = self.clock.now
            self._optimize()
        found = self.found
        found.seconds = self.clock.now
        at_most = ((f"{kind} {name}".strip(), nbytes) for kind, name, nbytes in self.bytes.at_most)
        found.terms = sorted(at_most, key=lambda term: -term[1])
        on_host = zip(KINDS, self.host.peak, strict=True)
        found.on_host = tuple((kind, nbytes) for kind, nbytes in on_host if nbytes)
        return found

    def _figures(self) -> tuple[float, float, float, dict[str, Traffic]]:
        traffic = {axis: Traffic(t.calls, t.nbytes, t.seconds, t.leaving) for axis, t in self.found.traffic.items()}
        traffic |= {axis: Traffic(seconds=seconds) for axis, seconds in self.found.along.items()}
        return self.clock.now, self.found.compute, self.found.exposed_seconds, traffic

    def _repeat(self, times: int, before: tuple[float, float, float, dict[str, Traffic]]) -> None:
        """Repeats what happened since `before` so many times."""
        now, compute, exposed, traffic = self._figures()
        self.clock.skip(times * (now - before[0]), times * (compute - before[1]))
        if waited := times * (exposed - before[2]):
            self.found.exposed.append(Exposed("further micro-batches", "messages", waited))
        for axis, t in self.found.traffic.items():
            t.calls += times * (traffic[axis].calls - before[3][axis].calls)
            t.nbytes += times * (traffic[axis].nbytes - before[3][axis].nbytes)
            t.seconds += times * (traffic[axis].seconds - before[3][axis].seconds)
            t.leaving += times * (traffic[axis].leaving - before[3][axis].leaving)
        for axis in self.found.along:
            self.found.along[axis] += times * (traffic[axis].seconds - before[3][axis].seconds)

    def _pass(self, step: Step) -> None:
        """One forward and backward."""
        self._play(step.spans)
        self._bring(step.brought)
        self._pass_on("tp", "all_reduce of inputs' digests", 16.0)
        self._end_backward()

    def _play(self, spans: Sequence[Span]) -> None:
        """Spans of a forward or a backward, each after its event."""
        for span in spans:
            event = span.event
            if event is not None and event.kind == "loss":
                self.phase = self.turn
            elif event is not None and event.unit >= 0:
                self._event(event.kind, self.schedule.units[event.unit], event.use)
            self._span(span)

    def _end_backward(self) -> None:
        run, records = self.schedule, self.schedule.units
        present = [self.gradients[record.index] > 0 for record in records]
        self.phase = "end of backward"
        self._do(rules.backward_end(run, records[0], present))
        self.bytes.set("activations", self.key, 0.0)
        self.bytes.set("loss", self.key, 0.0)
        self.host.set("activations", self.key, 0.0)
        self._note()

    def _bring(self, brought: Sequence[tuple[str, int]]) -> None:
        """Gradients that are sums over `tp`; one message for each."""
        wide = max(self.clock.itemsize, itemsize(self.strategy.reduce) if self.strategy.reduce else 0)
        for operation, numel in brought:
            self._pass_on("tp", operation, float(numel * wide))

    def _pass_on(self, axis: str, operation: str, nbytes: float) -> None:
        ranks, stride = self.strategy.group(axis)
        self.clock.pass_on(Message(Work(), axis, operation, nbytes), ranks, stride, "root")

    def _event(self, kind: str, record: UnitRecord, use: int) -> None:
        """Report to the rules what the engine's hooks report."""
        run, name = self.schedule, record.name
        if kind == "pre_forward":
            self.phase = f"forward {name}"
            self._do(rules.pre_forward(run, record))
        elif kind == "post_forward":
            self._do(rules.post_forward(run, record))
            if use != OUTSIDE and record.sending.open and not record.sending.begins:
                self.uses[use] = record.sending.open[-1]
            if run.forward_root is not None:
                self.phase = f"forward {run.forward_root.name}"
        elif kind == "pre_backward":
            self.phase = f"backward {name}"
            self._do(rules.pre_backward(run, record, use=self.uses.get(use)))
        elif kind == "gradients":
            # Gradients of its own parameters come, after the backward of units inside it. The rules are not asked.
            self.phase = f"backward {name}"
        elif kind == "grads_ready":
            self._do(rules.grads_ready(run, record))
        elif kind == "inputs_reached":
            self._do(rules.inputs_reached(run, record, present=self.gradients[record.index] > 0))
        self._note()

    def _span(self, span: Span) -> None:
        """Compute until the next event. From its begin on the picture has the most that it holds."""
        if self.clock.still:
            for index, nbytes in span.gradients:
                self._come(self.units[index], self.schedule.units[index], nbytes)
            return
        begun = self.clock.now
        name = self.phase.partition(" ")[2] or self.phase
        left = span.work
        for message in span.messages:
            self.clock.compute(message.before)
            left = left.plus(message.before, -1.0)
            self.clock.pass_on(message, *self.strategy.group(message.axis), name)
        self.clock.compute(left)
        if span.work.copied:
            # On the stream of compute: nothing runs beside them.
            arrives = self.clock.upload(span.work.copied, round(span.work.copies))
            self.clock.wait(arrives, name, "copies of activations")
        self.host.set("activations", self.key, span.hosted)
        for there, share, when in ((span.peak, span.ready, begun), (span.end, 1.0 - span.ready, self.clock.now)):
            there = max(there - self.elsewhere, 0.0)
            if not span.gradients and not span.loss and not self.bytes.kinds["loss"]:
                self.bytes.set("activations", self.key, there)
                self._note(when)
                continue
            # What goes first makes room for what comes.
            self.bytes.set("loss", self.key, 0.0)
            self.bytes.set("activations", self.key, min(there, self.bytes.nbytes("activations", self.key)))
            for index, nbytes in span.gradients:
                if share:
                    self._come(self.units[index], self.schedule.units[index], nbytes * share)
            loss = min(span.loss, there)
            self.bytes.set("activations", self.key, there - loss)
            self.bytes.set("loss", self.key, loss)
            self._note(when)

    def _come(self, unit: Unit, record: UnitRecord, nbytes: float) -> None:
        """Gradients of `unit`, one after the other where they are limited."""
        for part in self.reductions.limited(unit, nbytes) if record.plan.sync else (nbytes,):
            self.gradients[record.index] += part
            self.bytes.add("gradients", record.name, part)

    def _note(self, when: float | None = None) -> None:
        """A moment for the picture, `when` or now; and the peak, if it came since the last one."""
        if self.measured and (self.bytes.is_new_peak or not self.brief):
            when = self.clock.now if when is None else when
            if not self.brief:
                self.found.phases[self.phase.partition(" ")[0]] += when - self.found.passed
                self.found.passed = when
                self.found.moments.append(Moment(when, self.phase, tuple(self.bytes.kinds.values())))
            if self.bytes.is_new_peak:
                self.found.peak = Moment(when, self.phase, self.bytes.peak)
        self.bytes.is_new_peak = False

    # ---- full parameters -------------------------------------------------------------------------------------

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if self.measured and not self.brief:
                self.found.commands.append(str(command))
            getattr(self, f"_{command.kind}")(self.units[command.unit.index], command.unit)

    def _unshard(self, unit: Unit, record: UnitRecord) -> None:
        name, arrives = unit.shape.title, self.clock.now
        for group in unit.groups:
            memory = group.memory
            if memory.offloaded:
                self.bytes.add("staging", name, memory.uploaded_nbytes)
                arrives = max(arrives, self.clock.upload(memory.shard_nbytes))
            self.bytes.add("full parameters", name, memory.arriving_nbytes)
            self.pool.take("staging", name, _staging_key(group), memory.staging_nbytes)
            ranks, nbytes, calls = memory.pack.world, group.gathered_nbytes, group.gather_calls
            leaving = (group.placed or self.strategy.placed).gathered(*group.gathered_parts)
            sent = self.clock.send("shard", ranks, self.strategy.stride(ranks), nbytes, calls, leaving=leaving)
            arrives = max(arrives, sent)
        self.arrivals[record.index] = arrives

    def _unshard_secondary(self, unit: Unit, record: UnitRecord) -> None:
        name, arrives = unit.shape.title, self.clock.now
        for group in unit.groups:
            memory = group.memory
            self.bytes.add("full parameters", name, memory.arriving_nbytes)
            self.pool.take("staging", name, _staging_key(group, kept=True), memory.secondary_staging_nbytes)
            stride = self.strategy.stride(memory.pack.world)
            leaving = (group.placed or self.strategy.placed).gathered(*group.kept_gathered_parts, unit.part)
            nbytes, calls = group.kept_gathered_nbytes, group.gather_calls
            sent = self.clock.send("block", unit.part, stride, nbytes, calls, leaving=leaving)
            arrives = max(arrives, sent)
        self.arrivals[record.index] = arrives

    def _wait(self, unit: Unit, record: UnitRecord) -> None:
        name = unit.shape.title
        self.clock.wait(self.arrivals.pop(record.index, 0.0), name, "all-gather")
        kept = self.bytes.nbytes("kept parts", name) > 0
        for group in unit.groups:
            memory = group.memory
            self.bytes.add("full parameters", name, memory.transient_nbytes - memory.arriving_nbytes)
            staging = memory.secondary_staging_nbytes if kept else memory.staging_nbytes
            if memory.full_nbytes:
                # Packed parameters are copied out; one rank casts.
                self.clock.copy(2 * staging if memory.pack.world > 1 else memory.full_nbytes + memory.shard_nbytes)
            self.pool.give("staging", name, _staging_key(group, kept=kept), staging)
            if memory.offloaded and not kept:
                self.bytes.add("staging", name, -memory.uploaded_nbytes)
        self.bytes.clear("kept parts", name)

    def _reshard(self, unit: Unit, record: UnitRecord) -> None:
        self.bytes.set("full parameters", unit.shape.title, unit.staying_nbytes)
        self.bytes.clear("kept parts", unit.shape.title)

    def _cancel(self, unit: Unit, record: UnitRecord) -> None:
        self._wait(unit, record)
        self._reshard(unit, record)

    def _shelve(self, unit: Unit, record: UnitRecord) -> None:
        """The memory stays."""

    _expose = _shelve

    def _reshard_secondary(self, unit: Unit, record: UnitRecord) -> None:
        kept = sum(group.memory.kept_nbytes for group in unit.groups)
        self.bytes.add("kept parts", unit.shape.title, kept)
        self.clock.copy(2 * kept)
        self.bytes.set("full parameters", unit.shape.title, unit.staying_nbytes)

    # ---- gradients -------------------------------------------------------------------------------------------

    def _accumulate(self, unit: Unit, record: UnitRecord) -> None:
        """Gradients stay here until the backward is over."""
        self.staying.append(unit)
        self.gradients[record.index] = 0.0

    def _reduce(self, unit: Unit, record: UnitRecord) -> None:
        name = unit.shape.title
        self.gradients[record.index] = 0.0
        self.reductions.take(unit)
        held = self.bytes.nbytes("held gradients", name) > 0
        if held:
            self.touched.append(name)
        whole = self.bytes.nbytes("gradients", name)
        # Without new ones the message is made of those that are held, which stay until all are handed over.
        alone = held and not whole
        groups = [(group, group.sent) for group in unit.groups if group.sent is not None]
        made = sum(sent.gradient_nbytes for _, sent in groups)
        copied = 0.0
        for group, sent in groups:
            self.reductions.make_room()
            own = whole * sent.gradient_nbytes / max(made, 1)
            if held and not alone:
                own = self._sum_with_held(name, sent, own)
            # The executor has the gradients of a group until it takes those of the next one.
            self.bytes.add("gradients", name, -copied)
            if alone:
                self.reductions.issue(unit, group, 0.0, held=True)
            else:
                copied = self.reductions.issue(unit, group, own, held=held)
        self.reductions.limit()
        self.bytes.clear("gradients", name)

    def _sum_with_held(self, name: str, sent: UnitMemory, own: float) -> float:
        """Bytes of the sums with the gradients of earlier backwards. They are new: if this backward fails, those must
        be unchanged."""
        casts = sent.held_itemsize != sent.compute_itemsize
        if not self.clock.hardware.blocking:
            # A kernel copies all of them into one buffer of the sums, a second one adds.
            self.bytes.add("gradients", name, float(sent.held_nbytes))
            self.bytes.add("gradients", name, -own)
            return float(sent.held_nbytes)
        for segment in sent.pack.segments:
            numel = segment.layout.numel
            summed = float(numel * sent.held_itemsize)
            cast = summed if casts else 0.0
            self.bytes.add("gradients", name, summed + cast)
            self.bytes.add("gradients", name, -cast - own * numel / sent.pack.numel)
        return float(sent.held_nbytes)

    def _finish(self, unit: Unit, record: UnitRecord) -> None:
        self.reductions.finish()
        for name in self.touched:
            self.bytes.clear("held gradients", name)
        for kept in self.staying:
            name = kept.shape.title
            if not self.bytes.nbytes("held gradients", name):
                self._hold(kept)
            # Else they were added to those that are there.
            self.bytes.clear("gradients", name)
            self.clock.copy(2 * self.bytes.nbytes("held gradients", name))
        self._add_sums()
        self.touched.clear()
        self.staying.clear()

    def _add_sums(self) -> None:
        """Gradients of shards are added to those of earlier backwards, of which there are as many bytes."""
        for each in self.units:
            reduced = sum(group.sent.reduced_nbytes for group in each.groups if group.sent is not None)
            for there in (self.bytes, self.host):
                if there.nbytes("gradients of shards", each.shape.title) > reduced:
                    there.set("gradients of shards", each.shape.title, reduced)

    def _hold(self, unit: Unit) -> None:
        """The first gradients of a window, in the reduce dtype: cast one after the other."""
        name = unit.shape.title
        for sent in (group.sent for group in unit.groups if group.sent is not None):
            for segment in sent.pack.segments:
                numel = segment.layout.numel
                if sent.held_itemsize == sent.compute_itemsize:
                    self.bytes.add("gradients", name, -float(numel * sent.compute_itemsize))
                    self.bytes.add("held gradients", name, numel * sent.held_itemsize)
                else:
                    self.bytes.add("held gradients", name, numel * sent.held_itemsize)
                    self.bytes.add("gradients", name, -float(numel * sent.compute_itemsize))

    # ---- optimizer -------------------------------------------------------------------------------------------

    def _optimize(self, units: Sequence[Unit] | None = None) -> None:
        """Elementwise: parameters and state are read and written, gradients read. Then gradients are freed. `units`:
        of all models of this rank."""
        self.phase = "optimizer"
        units = self.units if units is None else units
        hardware, offload = self.clock.hardware, self.strategy.offload
        groups = [group for unit in units for group in unit.groups if group.sent is not None]
        if self.strategy.optimizer != "none" and groups and self.measured:
            written = sum(group.sent.reduced_nbytes + group.state_nbytes for group in groups if group.sent is not None)
            read = sum(group.sent.reduced_nbytes for group in groups if group.sent is not None)
            rate = hardware.host if offload else hardware.step_rate
            there = self.host if offload else self.bytes
            begun = self.clock.now
            there.add("optimizer step", "", self._made_in_step(units, groups))
            self._note()
            there.clear("optimizer step", "")
            launching = hardware.step_launch * sum(len(group.stepped) for group in groups)
            self.clock.now += (2 * written + read) / rate + launching
            self.found.optimizer_seconds = self.clock.now - begun
        for unit in units:
            self.bytes.clear("gradients of shards", unit.shape.title)
            self.host.clear("gradients of shards", unit.shape.title)
        self._note()

    def _made_in_step(self, units: Sequence[Unit], groups: Sequence[Group]) -> float:
        """The bytes that a step makes. Muon's also sends, and computes products."""
        if self.strategy.optimizer != "muon":
            return _step_nbytes(groups, OPTIMIZERS[self.strategy.optimizer])
        ranks, stride = self.strategy.shard, self.strategy.tensor
        step = self.found.owners = owners_step(units, ranks)
        hardware = self.clock.hardware
        # The products are in bfloat16, whatever the model computes in.
        flops = step.flops * hardware.peak_flops(self.clock.itemsize) / hardware.peak_flops(2)
        share = step.sent_nbytes / max(step.messages, 1)
        for chunk in range(step.chunks):
            # A message is hidden by the products of the chunk before it.
            there = self.clock.send("shard", ranks, stride, share * ranks / (ranks - 1), 1, "all-to-all")
            if chunk == 0:
                self.clock.wait(there, "optimizer", "all-to-all to owners")
            self.clock.compute(Work(matmul=flops / step.chunks))
            back = self.clock.send("shard", ranks, stride, share * ranks / (ranks - 1), 1, "all-to-all")
            if chunk == step.chunks - 1:
                self.clock.wait(back, "optimizer", "all-to-all from owners")
        if not step.chunks:
            self.clock.compute(Work(matmul=flops))
        rest = _step_nbytes(groups, OPTIMIZERS["adamw"], lambda parameter: not parameter.is_matrix)
        return max(rest, step.nbytes)


def record_of(unit: Unit, index: int) -> UnitRecord:
    """Returns what the rules know about `unit`."""
    record = UnitRecord(unit.shape.title, index, reshard_after_forward=not unit.keeps)
    record.empty = not unit.groups
    record.plan.keeps_secondary = bool(unit.part)
    record.plan.trainable, record.plan.frees_late = unit.trainable, unit.some_frozen
    record.plan.gather_nbytes = unit.gather_nbytes
    return record


def itemsize_of(units: Sequence[Unit], strategy: Strategy) -> int:
    """Returns the itemsize of the dtype that most of the computation has."""
    sizes = Counter[int]()
    for unit in units:
        for group in unit.groups:
            sizes[group.memory.compute_itemsize] += group.memory.pack.numel
    return max(sizes, key=lambda size: sizes[size], default=4)


def _staging_key(group: Group, *, kept: bool = False) -> Hashable:
    memory = group.memory
    return "staging", group.names, memory.kept if kept else memory.pack, memory.plan, memory.compute_itemsize


def _step_nbytes(
    groups: Iterable[Group], optimizer: Optimizer, steps: Callable[[Parameter], bool] = lambda _: True
) -> int:
    """Returns the most bytes that an optimizer's step has for its results. By default torch steps DTensors one after
    the other, in the order of the model. The results of each have the size of its shard, and the last one of the
    parameter before it is not freed yet."""
    stepped = (each for group in groups for each in group.stepped)
    shards = [(parameter.place, nbytes) for parameter, nbytes in stepped if steps(parameter)]
    sizes = [nbytes for _, nbytes in sorted(shards)]
    if optimizer.lists or not optimizer.results:
        return optimizer.results * sum(sizes)
    pairs = zip([0, *sizes], sizes, strict=False)
    return max((optimizer.results * now + before for before, now in pairs), default=0)
