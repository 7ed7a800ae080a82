"""A tape as spans: what is computed, and what autograd holds, between two events of the schedule.

Recomputation is a change of the tape. Without it, storages that a unit's forward made live until its backward read
them. With it, they go when the forward ends, but for its outputs (and, selectively, what matrix products made), its
inputs stay until its backward is over, and that backward begins with the operations of the forward once more.

    span     event before it, operations, bytes that autograd holds at most and at its end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .description import OUTSIDE, Kind, Line, Model, Tape

# Ways to recompute: nothing; each unit but the root whole; all but matrix products and attention.
NONE, WHOLE, SELECTIVE = "none", "whole", "selective"
RECOMPUTATIONS = (NONE, SELECTIVE, WHOLE)


class Work(NamedTuple):
    """What a span computes. `matmul`: operations of matrix products and convolutions; `attention`: of attention;
    `matmul_nbytes`: bytes that these read and write; `nbytes`: bytes of all others; `kernels`: how many operations."""

    matmul: float = 0.0
    matmul_nbytes: float = 0.0
    nbytes: float = 0.0
    kernels: float = 0.0
    attention: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(a + b * times for a, b in zip(self, other, strict=True)))


class Event(NamedTuple):
    """What happened before a span: a kind of `schedule.EVENTS`, the number of the unit, and whether the unit's forward
    had inputs that require a gradient."""

    kind: str
    unit: int


@dataclass(frozen=True, slots=True)
class Span:
    """What is computed after `event`, until the next one. `peak`, `end`: bytes of activations when there is most of
    them and of new gradients, and at the end; `loss`: the part of `peak` that the loss made. `gradients`: (unit,
    bytes) of gradients of parameters that came, of which the share `ready` was there at the peak."""

    event: Event | None
    work: Work
    peak: float
    end: float
    loss: float = 0.0
    gradients: tuple[tuple[int, float], ...] = ()
    ready: float = 0.0
    recomputes: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The spans of a forward and backward. `held`: by unit, bytes of activations at the end of the forward."""

    spans: tuple[Span, ...]
    held: tuple[tuple[int, float], ...]
    batch_nbytes: float
    samples: float

    @property
    def work(self) -> Work:
        found = Work()
        for span in self.spans:
            found = found.plus(span.work)
        return found

    @property
    def held_nbytes(self) -> float:
        return sum(nbytes for _, nbytes in self.held)


def steps_of(model: Model, recompute: str | Sequence[str] = NONE) -> Step:
    """The step of `model`. `recompute`: one of `RECOMPUTATIONS`, or one for each unit."""
    ways = [recompute] * len(model.units) if isinstance(recompute, str) else list(recompute)
    for way in ways:
        if way not in RECOMPUTATIONS:
            raise ValueError(f"recompute: expected one of {', '.join(RECOMPUTATIONS)}, found {way!r}")
    if not isinstance(recompute, str) or recompute == NONE:
        pass
    else:
        # The loss follows the root: nothing would be freed.
        ways[0] = NONE
    tape = model.tape
    lines = tape.lines if all(way == NONE for way in ways) else _recomputed(tape, ways)
    return _spans(tape, lines, model.samples)


def scaled(one: Step, two: Step, samples: int) -> Step:
    """The step at another size of the micro-batch, from those at two sizes: every figure is linear in it."""
    if len(one.spans) != len(two.spans) or one.samples == two.samples:
        raise ValueError("steps: expected those of one model at two sizes")
    share = (samples - one.samples) / (two.samples - one.samples)

    def at(a: float, b: float) -> float:
        return a + share * (b - a)

    spans = [
        replace(
            a,
            work=Work(*(at(x, y) for x, y in zip(a.work, b.work, strict=True))),
            peak=at(a.peak, b.peak),
            end=at(a.end, b.end),
            loss=at(a.loss, b.loss),
            ready=b.ready,
        )
        for a, b in zip(one.spans, two.spans, strict=True)
    ]
    other = dict(two.held)
    held = tuple((unit, at(nbytes, other.get(unit, nbytes))) for unit, nbytes in one.held)
    return Step(tuple(spans), held, at(one.batch_nbytes, two.batch_nbytes), samples)


# ---- recomputation ---------------------------------------------------------------------------------------------------

_AGAIN = "again"  # name of operations that recomputation adds, before their own


def _recomputed(tape: Tape, ways: Sequence[str]) -> tuple[Line, ...]:
    """The lines of the tape with recomputation of the units that `ways` says."""
    chosen, units = _chosen_uses(tape, ways)
    segments = _segments(tape, chosen)
    born = {line.a: line.use for line in tape.lines if line.kind is Kind.ALLOCATE}
    until = _stay_until(tape, chosen)
    dropped: dict[int, list[Line]] = {}  # by use: what goes at the end of its forward, and comes again
    gone: dict[int, int] = {}
    for use, segment in segments.items():
        there: dict[int, Line] = {}
        for line in segment:
            if line.kind is Kind.ALLOCATE:
                there[line.a] = line
            elif line.kind is Kind.FREE:
                there.pop(line.a, None)
        keeps = tape.outputs[use] | (tape.matmuls if ways[units[use]] == SELECTIVE else frozenset())
        # What is an input of a use inside, and recomputed with it, is dropped as well.
        dropped[use] = [line for sid, line in there.items() if sid not in keeps]
        gone |= {line.a: use for line in dropped[use]}
    out: list[Line] = []
    late: dict[int, list[Line]] = {}
    for line in tape.lines:
        if line.kind is Kind.FREE and line.a in until:
            late.setdefault(until[line.a], []).append(line)
            continue
        out.append(line)
        if line.kind is Kind.EXIT and line.use in dropped:
            out += [Line(Kind.FREE, born[gone_line.a], gone_line.a) for gone_line in dropped[line.use]]
        elif line.kind is Kind.BACKWARD and line.use in segments:
            out += _run_again(segments[line.use], dropped[line.use], tape, selective=ways[units[line.use]] == SELECTIVE)
        elif line.kind is Kind.BACKWARD_END:
            out += late.pop(line.use, [])
    for rest in late.values():
        out += rest
    return tuple(out)


def _chosen_uses(tape: Tape, ways: Sequence[str]) -> tuple[set[int], dict[int, int]]:
    """The uses that are recomputed, the outermost of those inside each other, and the unit of each use. A use without a
    backward has nothing to recompute for."""
    units = {line.use: line.a for line in tape.lines if line.kind is Kind.ENTER}
    backwards = {line.use for line in tape.lines if line.kind is Kind.BACKWARD}
    chosen: set[int] = set()
    open_ = 0
    for line in tape.lines:
        if line.kind is Kind.ENTER and ways[line.a] != NONE and line.use in backwards:
            if not open_:
                chosen.add(line.use)
            open_ += 1
        elif line.kind is Kind.EXIT and ways[units[line.use]] != NONE and line.use in backwards:
            open_ -= 1
    return chosen, units


def _segments(tape: Tape, chosen: set[int]) -> dict[int, list[Line]]:
    """What happens inside of the forward of each chosen use; uses inside of it included."""
    found: dict[int, list[Line]] = {use: [] for use in chosen}
    current = OUTSIDE
    for line in tape.lines:
        if line.kind is Kind.ENTER and line.use in chosen:
            current = line.use
        elif line.kind is Kind.EXIT and line.use == current:
            current = OUTSIDE
        elif current != OUTSIDE and line.kind in (Kind.OP, Kind.ALLOCATE, Kind.FREE):
            found[current].append(line)
    return found


def _stay_until(tape: Tape, chosen: set[int]) -> dict[int, int]:
    """The inputs that a recomputed use keeps alive, with the use whose backward ends last."""
    ends = {line.use: i for i, line in enumerate(tape.lines) if line.kind is Kind.BACKWARD_END}
    freed = {line.a: i for i, line in enumerate(tape.lines) if line.kind is Kind.FREE}
    until: dict[int, int] = {}
    for use in chosen:
        for sid in tape.inputs[use]:
            if sid in freed and freed[sid] < ends.get(use, -1):
                if sid not in until or ends[until[sid]] < ends[use]:
                    until[sid] = use
    return until


def _run_again(segment: list[Line], dropped: list[Line], tape: Tape, *, selective: bool) -> list[Line]:
    """The lines of a forward that runs again: what it frees is its own, and what stays is what was dropped. With
    `selective`, what matrix products made is there, so that they do not run."""
    lasting = {line.a for line in dropped}
    # Numbers of storages that come and go inside are used a second time: they are free again by then.
    inside = {line.a for line in segment if line.kind is Kind.FREE}
    kept = tape.matmuls if selective else frozenset()
    again: list[Line] = []
    for line in segment:
        if line.kind is Kind.OP:
            if not (selective and is_matmul(line.name)):
                again.append(line._replace(name=f"{_AGAIN} {line.name}"))
        elif line.a in lasting or (line.a in inside and line.a not in kept):
            again.append(line)
    return _until_all_are_there(_balanced(again), lasting)


def _until_all_are_there(lines: list[Line], lasting: set[int]) -> list[Line]:
    """The run ends with the operation that makes the last of what backward reads; what else is there then goes."""
    there: dict[int, Line] = {}
    last = max((i for i, line in enumerate(lines) if line.kind is Kind.ALLOCATE and line.a in lasting), default=-1)
    stop = next((i + 1 for i in range(last, len(lines)) if lines[i].kind is Kind.OP), last + 1)
    for line in lines[:stop]:
        if line.kind is Kind.ALLOCATE and line.a not in lasting:
            there[line.a] = line
        elif line.kind is Kind.FREE:
            there.pop(line.a, None)
    return [*lines[:stop], *(Line(Kind.FREE, line.use, sid) for sid, line in there.items())]


def _balanced(lines: list[Line]) -> list[Line]:
    """Without the frees of storages that did not come inside."""
    there: set[int] = set()
    out = []
    for line in lines:
        if line.kind is Kind.ALLOCATE:
            there.add(line.a)
        elif line.kind is Kind.FREE and line.a not in there:
            continue
        out.append(line)
    return out


# ---- spans -----------------------------------------------------------------------------------------------------------

_MATMULS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "conv")
_EVENTS = {
    Kind.ENTER: "pre_forward",
    Kind.EXIT: "post_forward",
    Kind.BACKWARD: "pre_backward",
    Kind.BACKWARD_END: "inputs_reached",
    Kind.GRADS_READY: "grads_ready",
    Kind.LOSS: "loss",
}


def is_matmul(name: str) -> bool:
    """Whether an operation is a matrix product, a convolution or attention.

    >>> [is_matmul(name) for name in ("aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu", "aten.mul")]
    [True, True, False]
    """
    own = name.rpartition(".")[2]
    return own in _MATMULS or "attention" in own or own.startswith(("convolution", "_grouped_mm", "_scaled_mm"))


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

    def close(self, event: Event | None) -> None:
        empty = self.work == Work() and self.peak == self.now and not self.gradients and self.event is None
        if not (empty and self.spans):
            end = self.now
            made = tuple((unit, float(nbytes)) for unit, nbytes in self.gradients.items())
            ready = self.came_at_peak / self.came if self.came else 0.0
            self.spans.append(
                Span(self.event, self.work, self.peak, end, self.loss_at_peak, made, ready, self.recomputes)
            )
        self.event, self.work, self.recomputes = event, Work(), False
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
    matmul, matmul_nbytes, nbytes, kernels, attention = 0.0, 0.0, 0.0, 0.0, 0.0

    def flush() -> None:
        nonlocal matmul, matmul_nbytes, nbytes, kernels, attention
        running.work = Work(matmul, matmul_nbytes, nbytes, kernels, attention)
        matmul = matmul_nbytes = nbytes = kernels = attention = 0.0

    for line in lines:
        kind = line.kind
        if kind is Kind.OP:
            kernels += 1
            if is_matmul(line.name):
                if "attention" in line.name:
                    attention += line.a
                else:
                    matmul += line.a
                matmul_nbytes += line.b
            else:
                nbytes += line.b
            if line.name.startswith(_AGAIN):
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
            running.close(Event(_EVENTS[kind], unit_number))
    flush()
    running.close(None)
    by_unit = tuple(sorted((unit, float(size)) for unit, size in held.items()))
    return Step(tuple(running.spans), by_unit, float(tape.batch_nbytes), float(samples))
