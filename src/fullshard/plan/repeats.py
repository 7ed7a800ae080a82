"""A model of many equal blocks from the same model with a few of them: its units, and its step.

    short   P  F0 F1 F2 F3 F4 F5 M  B5 B4 B3 B2 B1 B0 E      forwards and backwards of six blocks, and what is around
    whole   P  F0 F1 F2 F2 F2 F3 F4 F5 M  B5 B4 B3 B2 B2 B2 B1 B0 E

The two blocks at each end may differ from those between them. What each block leaves for its backward adds up. A stage
of a pipeline may have fewer blocks, too, if but the first and the last one are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .description import OUTSIDE, WAIT, Model, Sent, Stage, Tape, UnitShape
from .spans import Event, Span, Step

# Blocks at each end, blocks of a model that is described by a few of them; of fewer than `WORTH` all are described.
_EDGE = 2
KEPT, WORTH = 2 * _EDGE + 2, 10
# The two blocks that have to be alike.
_ONE, _TWO = _EDGE, _EDGE + 1


class Blocks(NamedTuple):
    """Blocks of a list of modules. `first`: the number of the first unit in them; `units`: of each block; `uses`: of
    units in each; `parameters`: of each; `total`: blocks of the whole model, `KEPT` of which the short one has."""

    name: str
    first: int
    units: int
    parameters: int
    total: int

    @property
    def more(self) -> int:
        """How many are left out."""
        return self.total - KEPT

    def of(self, unit: int) -> int | None:
        """The block that a unit of the short model is in; None outside of blocks."""
        block = (unit - self.first) // self.units
        return block if 0 <= block < KEPT else None

    def moved(self, unit: int, by: int) -> int:
        """The number of a unit of the short model in the whole one. `by`: how many blocks its block moves."""
        if unit < self.first:
            return unit
        return unit + self.units * (self.more if self.of(unit) is None else by)

    def template(self, block: int) -> int:
        """The block of the short model that stands for one of the whole model."""
        ends = _TWO if self.more >= 0 else 1
        return block - self.more if block >= self.total - ends else min(block, _ONE)


def blocks_of(model: Model, cut: tuple[str, int] | None = None) -> Blocks | None:
    """The blocks of a short model; None if it is whole, or if its blocks are not alike. `cut`: instead of the
    model's."""
    if (cut := cut or model.cut) is None:
        return None
    name, count = cut
    owners = [_block(unit, name) for unit in model.units]
    first = next((i for i, owner in enumerate(owners) if owner is not None), 0)
    units = sum(owner == 0 for owner in owners)
    if not units or owners[first : first + KEPT * units] != [k for k in range(KEPT) for _ in range(units)]:
        return None
    if sum(owner is not None for owner in owners) != KEPT * units:
        return None
    places = [[p.place for u in model.units[first + k * units :][:units] for p in u.parameters] for k in range(KEPT)]
    steps = {after - before for one, two in zip(places, places[1:], strict=False) for before, after in _pairs(one, two)}
    if len(steps) != 1:
        return None
    found = Blocks(name, first, units, steps.pop(), count)
    alike = range(1, KEPT - 1) if found.more < 0 else (_ONE, _TWO)
    one, *others = ([_unit(model.units[first + k * units + i], found, k, 0) for i in range(units)] for k in alike)
    return found if all(one == other for other in others) else None


def _pairs(one: Sequence[int], two: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(one, two, strict=True) if len(one) == len(two) else [(0, 0), (0, 1)]


def _block(unit: UnitShape, name: str) -> int | None:
    """The block that a unit is, or is in."""
    head, _, rest = unit.name.partition(f"{name}.") if name else ("", "", unit.name)
    index = rest.partition(".")[0]
    return int(index) if not head and index.isdigit() else None


def _unit(unit: UnitShape, blocks: Blocks, before: int, after: int) -> UnitShape:
    """A unit of block `before` as that of block `after`."""
    old, new = (f"{blocks.name}.{k}" if blocks.name else str(k) for k in (before, after))
    by = (after - before) * blocks.parameters

    def renamed(text: str) -> str:
        return "+".join(new + part.removeprefix(old) for part in text.split("+"))

    parameters = tuple(replace(p, name=renamed(p.name), place=p.place + by) for p in unit.parameters)
    return replace(unit, name=renamed(unit.name), parameters=parameters)


def whole_model(short: Model, blocks: Blocks, step: Step) -> Model:
    """The whole model; without the lines of its tape. `step`: the short model's, without recomputation."""
    first, width = blocks.first, blocks.units
    kept = short.units[first : first + KEPT * width]
    last = max(p.place for unit in kept for p in unit.parameters)
    moved = blocks.more * blocks.parameters

    def around(unit: UnitShape) -> UnitShape:
        found = (replace(p, place=p.place + moved * (p.place > last)) for p in unit.parameters)
        return replace(unit, parameters=tuple(found))

    units = [around(unit) for unit in short.units[:first]]
    for block in range(blocks.total):
        own = blocks.template(block)
        units += [_unit(unit, blocks, own, block) for unit in kept[own * width : (own + 1) * width]]
    units += [around(unit) for unit in short.units[first + KEPT * width :]]
    parts = _parts(step, blocks)
    products = 0.0 if parts is None else sum(span.work.matmul for span in parts.forward[_ONE])
    multiplied = (round(short.multiplied * 2 * short.tokens) + blocks.more * products) / 2 / short.tokens
    tape = replace(
        short.tape,
        lines=(),
        gradients={},
        inputs=(),
        outputs=(),
        last_read={},
        brought=_brought(short.tape, blocks),
        brought_in=(),
    )
    return replace(short, units=tuple(units), tape=tape, multiplied=multiplied, cut=None)


def stage_model(stage: Stage, step: Step) -> tuple[Model, Blocks | None] | None:
    """The model of a stage from that of another one (`Stage.few`), and its blocks, None where it has as many; None if
    the blocks are not alike. `step`: the other one's, without recomputation."""
    model, few = stage.model, stage.few
    assert few is not None
    # They are numbered from 0 on.
    model = replace(model, buffer_nbytes=model.buffer_nbytes + few.buffer_nbytes)
    owners = [block for unit in model.units if (block := _block(unit, few.name)) is not None]
    if bool(owners) is not bool(few.number):
        return None
    model = _numbered(model, few.name, -min(owners, default=0))
    if few.number < 2:
        return _numbered(model, few.name, few.first), None
    blocks = blocks_of(model, (few.name, few.number))
    if blocks is None:
        return None
    return _numbered(whole_model(model, blocks, step), few.name, few.first), blocks


def _numbered(model: Model, name: str, by: int) -> Model:
    """`model` with other numbers of its blocks."""
    blocks = Blocks(name, 0, 0, 0, 0)
    owners = [_block(unit, name) for unit in model.units]
    units = (
        unit if block is None else _unit(unit, blocks, block, block + by)
        for unit, block in zip(model.units, owners, strict=True)
    )
    return replace(model, units=tuple(units))


def pipeline_model(stages: tuple[Stage, ...], batch_nbytes: int) -> Model:
    """The model of a pipeline with these stages. `batch_nbytes`: of a micro-batch."""
    first = stages[0].model
    units = tuple(unit for stage in stages for unit in stage.model.units)
    return replace(
        first,
        units=units,
        tape=Tape((), {}, (), (), batch_nbytes),
        buffer_nbytes=sum(stage.model.buffer_nbytes for stage in stages),
        multiplied=sum(stage.model.multiplied for stage in stages),
        undivided_numel=first.undivided_numel or sum(unit.numel for unit in units),
        stages=stages,
    )


# More than there are parameters in a stage.
_PLACES = 1 << 20


def as_stage(model: Model, number: int) -> Model:
    """`model` as the stage of that number: its parameters come after those of the stages before it."""
    units = tuple(
        replace(
            unit,
            stage=number,
            parameters=tuple(replace(p, place=p.place + number * _PLACES) for p in unit.parameters),
        )
        for unit in model.units
    )
    return replace(model, units=units)


def _brought(tape: Tape, blocks: Blocks) -> tuple[tuple[str, int], ...]:
    """Gradients that are sums over `tp`, in the order of the whole model's parameters."""
    of = [blocks.of(unit) for unit in tape.brought_in]
    inside = [number for number, block in enumerate(of) if block is not None]
    if not inside:
        return tape.brought
    each = [[message for own, message in zip(of, tape.brought, strict=True) if own == k] for k in range(KEPT)]
    within = (message for block in range(blocks.total) for message in each[blocks.template(block)])
    return (*tape.brought[: inside[0]], *within, *tape.brought[inside[-1] + 1 :])


class _Parts(NamedTuple):
    """The spans before the blocks, of each block forward, and of each backward; what is between and after is with the
    last forward and with the backward of block 0. `uses`: of units in a block."""

    before: tuple[Span, ...]
    forward: tuple[tuple[Span, ...], ...]
    backward: tuple[tuple[Span, ...], ...]
    first_use: int
    uses: int


def _parts(step: Step, blocks: Blocks) -> _Parts | None:
    starts: dict[tuple[bool, int], int] = {}
    first_uses: dict[int, int] = {}
    for number, span in enumerate(step.spans):
        event = span.event
        if event is None or event.unit < 0 or (block := blocks.of(event.unit)) is None:
            continue
        if event.kind in ("pre_forward", "pre_backward"):
            starts.setdefault((event.kind == "pre_backward", block), number)
            if event.kind == "pre_forward":
                first_uses.setdefault(block, event.use)
    order = [(False, k) for k in range(KEPT)] + [(True, k) for k in reversed(range(KEPT))]
    places = [starts.get(each, -1) for each in order]
    if -1 in places or places != sorted(places):
        return None
    uses = {first_uses[k + 1] - first_uses[k] for k in range(KEPT - 1)}
    if len(uses) != 1:
        return None
    cuts = [*places, len(step.spans)]
    found = [step.spans[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return _Parts(step.spans[: places[0]], tuple(found[:KEPT]), tuple(found[KEPT:][::-1]), first_uses[0], uses.pop())


class _Level(NamedTuple):
    """Bytes of activations on the device and on the host that further blocks add."""

    there: float = 0.0
    hosted: float = 0.0

    def times(self, count: int) -> _Level:
        return _Level(self.there * count, self.hosted * count)

    def plus(self, other: _Level) -> _Level:
        return _Level(self.there + other.there, self.hosted + other.hosted)


def whole_step(short: Step, blocks: Blocks, brought: tuple[tuple[str, int], ...]) -> Step | None:
    """The step of the whole model, of whose tape `brought` is; None if the inner blocks of the short one are not
    alike."""
    parts = _parts(short, blocks)
    if parts is None:
        return None
    more = blocks.more

    def moved(spans: Iterable[Span], by: int, level: _Level) -> list[Span]:
        return [_moved(span, blocks, parts, by, level) for span in spans]

    def between(one: Sequence[Span], two: Sequence[Span]) -> _Level:
        return _Level(two[0].end - one[0].end, two[0].hosted - one[0].hosted) if one and two else _Level()

    forward, backward = parts.forward, parts.backward
    up, down = between(forward[_ONE], forward[_TWO]), between(backward[_TWO], backward[_ONE])
    for k in range(1, KEPT - 2) if more < 0 else (_ONE,):
        if moved(forward[k], 1, up) != list(forward[k + 1]) or moved(backward[k + 1], -1, down) != list(backward[k]):
            return None
    top = up.times(more)
    spans = list(parts.before)
    for block in range(blocks.total):
        by = block - blocks.template(block)
        spans += moved(forward[block - by], by, up.times(by))
    for block in reversed(range(blocks.total)):
        by = block - blocks.template(block)
        spans += moved(backward[block - by], by, top.plus(down.times(more - by)))
    return replace(
        short,
        spans=tuple(spans),
        held=_held(short, blocks),
        hosted=short.hosted + top.hosted,
        messages=_messages(short, [*forward[_ONE], *backward[_TWO]], more),
        brought=brought,
    )


def _moved(span: Span, blocks: Blocks, parts: _Parts, by: int, level: _Level) -> Span:
    event = span.event
    if event is not None:
        unit = event.unit if event.unit < 0 else blocks.moved(event.unit, by)
        event = Event(event.kind, unit, _use(event.use, parts, blocks, by))
    return Span(
        event,
        span.work,
        span.peak + level.there,
        span.end + level.there,
        span.loss,
        tuple((blocks.moved(unit, by), nbytes) for unit, nbytes in span.gradients),
        span.ready,
        span.recomputes,
        span.hosted + level.hosted,
        span.messages,
    )


def _use(use: int, parts: _Parts, blocks: Blocks, by: int) -> int:
    if use == OUTSIDE or use < parts.first_use:
        return use
    inside = use < parts.first_use + KEPT * parts.uses
    return use + parts.uses * (by if inside else blocks.more)


def _held(short: Step, blocks: Blocks) -> tuple[tuple[int, float], ...]:
    there = dict(short.held)
    found = {blocks.moved(unit, 0): nbytes for unit, nbytes in short.held if unit < 0 or blocks.of(unit) is None}
    for block in range(blocks.total):
        own = blocks.template(block)
        for inner in range(blocks.units):
            unit = blocks.first + own * blocks.units + inner
            if unit in there:
                found[unit + (block - own) * blocks.units] = there[unit]
    return tuple(sorted(found.items()))


def _messages(short: Step, repeated: Iterable[Span], more: int) -> tuple[Sent, ...]:
    again: dict[tuple[str, str], list[float]] = {}
    for message in (message for span in repeated for message in span.messages if message.operation != WAIT):
        again.setdefault((message.axis, message.operation), []).append(message.nbytes)
    found = ((each, again.get((each.axis, each.operation), [])) for each in short.messages)
    return tuple(
        replace(each, count=each.count + more * len(sizes), nbytes=each.nbytes + more * sum(sizes))
        for each, sizes in found
    )
