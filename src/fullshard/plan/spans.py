"""A tape as spans: what is computed, and what autograd holds, between two events of the schedule.

span     event before it, operations, bytes that autograd holds at most and at its end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .compiled import with_compiled_loss
from .description import MESSAGE, OUTSIDE, WAIT, Kind, Line, Model, Sent, Tape
from .recomputation import AGAIN, ALL_ON_HOST, FROM_HOST, NONE, RECOMPUTATIONS, TO_HOST, is_matmul, is_way, recomputed


class Work(NamedTuple):
    """The work that a span computes. `matmul`: operations of matrix products and convolutions; `attention`: of
    attention; `matmul_nbytes`: bytes that these read and write; `nbytes`: bytes of all others; `kernels`: how many
    operations; `copied`: bytes that go to the host or come from there, in `copies`."""

    matmul: float = 0.0
    matmul_nbytes: float = 0.0
    nbytes: float = 0.0
    kernels: float = 0.0
    attention: float = 0.0
    copied: float = 0.0
    copies: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(a + b * times for a, b in zip(self, other, strict=True)))


class Message(NamedTuple):
    """A message of layers that are divided over ranks, and the work of the span between the message before it and this
    one. `nbytes`: as in `Sent`. The operation `WAIT` waits for an earlier message of the axis: `nbytes` came after
    it. Others are waited for at once, unless they overlap (`OVERLAPS`)."""

    before: Work
    axis: str
    operation: str
    nbytes: float


class Event(NamedTuple):
    """The event before a span: a kind of `schedule.EVENTS`, the number of the unit, and of its use on the tape."""

    kind: str
    unit: int
    use: int = OUTSIDE


@dataclass(frozen=True, slots=True)
class Span:
    """The computation after `event`, until the next one. `peak`, `end`: bytes of activations when there is most of
    them and of new gradients, and at the end; `loss`: the part of `peak` that the loss made. `gradients`: (unit,
    bytes) of gradients of parameters that came, of which the share `ready` was there at the peak. `hosted`: bytes of
    activations on the host at the end. `messages`: of divided layers, with the part of `work` before each."""

    event: Event | None
    work: Work
    peak: float
    end: float
    loss: float = 0.0
    gradients: tuple[tuple[int, float], ...] = ()
    ready: float = 0.0
    recomputes: bool = False
    hosted: float = 0.0
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The spans of a forward and backward. `held`: by unit, bytes of activations at the end of the forward; `hosted`:
    bytes of activations on the host at most; `messages`: of divided layers; `brought`: as in `Tape`."""

    spans: tuple[Span, ...]
    held: tuple[tuple[int, float], ...]
    batch_nbytes: float
    samples: float
    hosted: float = 0.0
    messages: tuple[Sent, ...] = ()
    brought: tuple[tuple[str, int], ...] = ()

    @property
    def work(self) -> Work:
        found = Work()
        for span in self.spans:
            found = found.plus(span.work)
        return found

    @property
    def held_nbytes(self) -> float:
        return sum(nbytes for _, nbytes in self.held)

    def parts(self) -> tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]]:
        """The spans of the forward, of the backward, and of its gradients of weights, where these are apart."""
        places = {span.event.kind: place for place, span in enumerate(self.spans) if span.event and span.event.unit < 0}
        loss = places["loss"]
        weights = places.get("weights", len(self.spans))
        return self.spans[:loss], self.spans[loss:weights], self.spans[weights:]


def steps_of(model: Model, recompute: str | Sequence[str] = NONE, *, compiled_loss: bool = False) -> Step:
    """The step of `model`. `recompute`: a way (`recomputation`) for all units but the root, or one for each unit.
    `compiled_loss`: as in `Strategy`."""
    ways = [recompute] * len(model.units) if isinstance(recompute, str) else list(recompute)
    for way in ways:
        if not is_way(way):
            raise ValueError(f"recompute: expected one of {', '.join(RECOMPUTATIONS)}, found {way!r}")
    if isinstance(recompute, str):
        # The loss follows the root: nothing would be freed.
        ways[0] = NONE
    tape = model.tape
    lines = tape.lines if all(way in (NONE, ALL_ON_HOST) for way in ways) else recomputed(tape, ways)
    if compiled_loss:
        return _spans(tape, with_compiled_loss(tape, lines), model.samples)
    return _spans(tape, lines, model.samples)


def scaled(one: Step, two: Step, samples: int) -> Step:
    """The step at another size of the micro-batch, from those at two sizes: every figure is linear in it."""
    if len(one.spans) != len(two.spans) or one.samples == two.samples:
        raise ValueError("steps: expected those of one model at two sizes")
    share = (samples - one.samples) / (two.samples - one.samples)

    def at(a: float, b: float) -> float:
        return a + share * (b - a)

    def work(a: Work, b: Work) -> Work:
        return Work(*map(at, a, b))

    spans = [
        replace(
            a,
            work=work(a.work, b.work),
            peak=at(a.peak, b.peak),
            end=at(a.end, b.end),
            loss=at(a.loss, b.loss),
            ready=b.ready,
            hosted=at(a.hosted, b.hosted),
            messages=tuple(
                x._replace(before=work(x.before, y.before), nbytes=at(x.nbytes, y.nbytes))
                for x, y in zip(a.messages, b.messages, strict=True)
            ),
        )
        for a, b in zip(one.spans, two.spans, strict=True)
    ]
    other = dict(two.held)
    held = tuple((unit, at(nbytes, other.get(unit, nbytes))) for unit, nbytes in one.held)
    messages = tuple(replace(a, nbytes=at(a.nbytes, b.nbytes)) for a, b in zip(one.messages, two.messages, strict=True))
    batch = at(one.batch_nbytes, two.batch_nbytes)
    return Step(tuple(spans), held, batch, samples, at(one.hosted, two.hosted), messages, one.brought)


# ---- spans -----------------------------------------------------------------------------------------------------------

_EVENTS = {
    Kind.ENTER: "pre_forward",
    Kind.EXIT: "post_forward",
    Kind.BACKWARD: "pre_backward",
    Kind.REACHED: "pre_backward",
    Kind.INPUTS_REACHED: "inputs_reached",
    Kind.BACKWARD_END: "backward_over",
    Kind.GRADS_READY: "grads_ready",
    Kind.LOSS: "loss",
    Kind.WEIGHTS: "weights",
}


class _Running:
    """The span that is being made."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.event: Event | None = None
        self.work = Work()
        self.now = self.peak = 0.0
        self.loss_now = self.loss_at_peak = 0.0
        self.gradients: Counter[int] = Counter()
        self.came = self.came_at_peak = 0
        self.recomputes = False
        self.hosted = self.most_hosted = 0.0
        self.messages: list[Message] = []

    def close(self, event: Event | None) -> None:
        empty = self.work == Work() and self.peak == self.now and not self.gradients and self.event is None
        if not (empty and self.spans):
            end = self.now
            made = tuple((unit, float(nbytes)) for unit, nbytes in self.gradients.items())
            ready = self.came_at_peak / self.came if self.came else 0.0
            self.spans.append(
                Span(
                    self.event,
                    self.work,
                    self.peak,
                    end,
                    self.loss_at_peak,
                    made,
                    ready,
                    self.recomputes,
                    self.hosted,
                    tuple(self.messages),
                )
            )
        self.event, self.work, self.recomputes, self.messages = event, Work(), False, []
        self.peak, self.loss_at_peak = self.now, self.loss_now
        self.gradients = Counter()
        self.came = self.came_at_peak = 0

    def look(self) -> None:
        """Note the peak, if this is one."""
        if self.now + self.came > self.peak + self.came_at_peak:
            self.peak, self.came_at_peak, self.loss_at_peak = self.now, self.came, self.loss_now


def _spans(tape: Tape, lines: Iterable[Line], samples: int) -> Step:
    running = _Running()
    units: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}  # storage -> bytes, use
    held: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    matmul, matmul_nbytes, nbytes, kernels, attention, copied, copies = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    before = Work()  # what the span did before its last message

    def flush() -> None:
        nonlocal matmul, matmul_nbytes, nbytes, kernels, attention, copied, copies, before
        running.work = Work(matmul, matmul_nbytes, nbytes, kernels, attention, copied, copies)
        before = Work()
        matmul = matmul_nbytes = nbytes = kernels = attention = copied = copies = 0.0

    for line in lines:
        kind = line.kind
        if kind is Kind.OP and MESSAGE in line.name:
            found = Sent.named(line.name.rpartition(MESSAGE)[2], 1, float(line.a))
            if found.operation != WAIT:
                # The host launches it as it does a kernel.
                kernels += 1
                counts[line.name.rpartition(MESSAGE)[2]] += 1
                sent[line.name.rpartition(MESSAGE)[2]] += line.a
            done = Work(matmul, matmul_nbytes, nbytes, kernels, attention)
            running.messages.append(Message(done.plus(before, -1.0), found.axis, found.operation, found.nbytes))
            before = done
            running.recomputes = running.recomputes or line.name.startswith(AGAIN)
        elif kind is Kind.OP:
            kernels += 1
            if is_matmul(line.name):
                if "attention" in line.name:
                    attention += line.a
                else:
                    matmul += line.a
                matmul_nbytes += line.b
            elif line.name in (TO_HOST, FROM_HOST):
                copied += line.b
                copies += 1
                running.hosted += line.b if line.name == TO_HOST else -line.b
                running.most_hosted = max(running.most_hosted, running.hosted)
            else:
                nbytes += line.b
            if line.name.startswith(AGAIN):
                running.recomputes = True
        elif kind is Kind.ALLOCATE:
            unit = tape.gradients.get(line.a)
            if unit is not None:
                running.gradients[unit] += line.b
                running.came += line.b
                running.look()
                continue
            sizes[line.a] = (line.b, line.use)
            running.now += line.b
            if line.use == OUTSIDE:
                running.loss_now += line.b
            running.look()
        elif kind is Kind.FREE:
            size, use = sizes.pop(line.a, (0, 0))
            running.now -= size
            if use == OUTSIDE:
                running.loss_now -= size
        else:
            flush()
            if kind is Kind.ENTER:
                units[line.use] = line.a
            if kind is Kind.LOSS:
                for size, use in sizes.values():
                    held[units.get(use, OUTSIDE)] += size
            unit_number = line.a if kind is Kind.GRADS_READY else units.get(line.use, OUTSIDE)
            running.close(Event(_EVENTS[kind], unit_number, line.use))
    flush()
    running.close(None)
    by_unit = tuple(sorted((unit, float(size)) for unit, size in held.items()))
    messages = tuple(Sent.named(name, counts[name], float(sent[name])) for name in sorted(counts))
    return Step(
        tuple(running.spans),
        by_unit,
        float(tape.batch_nbytes),
        float(samples),
        running.most_hosted,
        messages,
        tape.brought,
    )
